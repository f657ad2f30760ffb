"""Steps that follow one another in one call of the decoder's kernel (`source/further.h`).

What the interpreter does between two steps takes a tenth of a small model's step: it has left the processor's caches by
then. So the kernel goes on by itself, for as long as somebody asks for the next step in time.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncllm.kernels.cpu.build import Library

MOST_STEPS = 32
"""Of a call: whoever chooses the size of a team, or has something else to compute, does not wait for more."""
_ENDED = 1 << 63


@dataclass(frozen=True, slots=True)
class Advance:
    """What goes on from a step to the next: in place."""

    ids: Tensor  # [n] int64 of the step's tokens
    positions: Tensor  # [n] int64
    order: Tensor  # [n] int64: which of the drawn tokens is the next of each
    drawn: int  # how many tokens a step draws


class FurtherSteps:
    """The steps of one call, each of which computes one token of the same rows, and draws what follows it."""

    def __init__(self, library: Library, advance: Advance, told: int) -> None:
        """One step is asked for from the beginning. `told`: the address of a semaphore that is posted to for each step
        that is done, and outlives the call."""
        self._library = library
        self._advance = advance  # its memory is what the structure points to
        self.tokens = torch.empty(MOST_STEPS, advance.drawn, dtype=torch.int32)  # of each step that is done
        self._struct = _FurtherStruct(
            asked=1,
            most=MOST_STEPS,
            tokens=len(advance.ids),
            drawn=advance.drawn,
            order=advance.order.data_ptr(),
            ids=advance.ids.data_ptr(),
            positions=advance.positions.data_ptr(),
            kept=self.tokens.data_ptr(),
            told=told,
        )
        self.address = ctypes.addressof(self._struct)

    def limit(self, steps: int) -> int:
        """Let the call have no more than so many. Before it begins."""
        self._struct.most = steps
        return steps

    def ask(self) -> bool:
        """One more step. False where it is too late for that. From any thread."""
        return bool(self._library.short.asyncllm_ask(self.address))

    def end(self) -> None:
        """No more steps than the one that is computed, and none is asked for any more. From any thread."""
        self._library.short.asyncllm_end(self.address)

    @property
    def asked(self) -> int:
        """How many steps were asked for. Those that the ended call has not done are left."""
        return int(self._struct.asked) & ~_ENDED

    @property
    def done(self) -> int:
        """How many steps are done."""
        return int(self._struct.done)


class _FurtherStruct(ctypes.Structure):
    """`Further` of `source/further.h`."""

    _fields_ = (
        ("asked", ctypes.c_uint64),
        ("done", ctypes.c_uint64),
        *((name, ctypes.c_int64) for name in ("most", "tokens", "drawn")),
        *((name, ctypes.c_void_p) for name in ("order", "ids", "positions", "kept", "told")),
        ("owed", ctypes.c_int64),
    )
