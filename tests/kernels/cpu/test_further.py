"""Steps that follow one another in one call: as the same steps by a call each, to the bit."""

from __future__ import annotations

import ctypes
import threading
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from asyncllm.kernels.cpu.build import Library
from asyncllm.kernels.cpu.decoder import DecoderCall, TableLines
from asyncllm.kernels.cpu.further import MOST_STEPS, Advance, FurtherSteps
from tests.kernels.cpu.test_logits import VOCABULARY, Steps, some_draws

FIRST = 20


class Semaphore:
    """A semaphore of the system's, counted."""

    def __init__(self) -> None:
        self._memory = (ctypes.c_longlong * 8)()
        self.address = ctypes.addressof(self._memory)
        self._system = ctypes.CDLL(None)
        assert self._system.sem_init(ctypes.c_void_p(self.address), 0, 0) == 0

    @property
    def value(self) -> int:
        """How often it was posted to."""
        value = ctypes.c_int()
        assert self._system.sem_getvalue(ctypes.c_void_p(self.address), ctypes.byref(value)) == 0
        return value.value


class Decoding:
    """Rows that go on from position 20 with what they draw; tokens and rotations are looked up in tables."""

    def __init__(self, library: Library, rows: int, poison: int | None = None, length: int = 60) -> None:
        """`poison`: a token whose embedding is not a number. Rotations are known of so many positions."""
        torch.manual_seed(0)
        steps = Steps(library, rows, 4)
        model, hidden = steps.model, steps.model.case.hidden
        table = torch.randn(VOCABULARY, hidden).bfloat16()
        if poison is not None:
            table[poison] = float("nan")
        self.library, self.rows, self.draws = steps.library, rows, some_draws(rows)
        self.ids, self.positions, self.order = torch.arange(rows), steps.positions, torch.arange(rows)
        self.caches, self.told = model.caches, Semaphore()
        described = steps.describe(self.draws)
        self.residual = described.residual
        lines = [
            TableLines(table, self.ids, described.residual),
            TableLines(model.cosine[:length], self.positions, described.cosine),
            TableLines(model.sine[:length], self.positions, described.sine),
        ]
        self.call = DecoderCall(model.kernel, replace(described, lines=lines))

    def further(self, asked: int) -> FurtherSteps:
        advance = Advance(self.ids, self.positions, self.order, self.rows)
        further = FurtherSteps(self.library, advance, self.told.address)
        assert all(further.ask() for _ in range(asked - 1))
        return further

    def advance(self) -> None:
        self.ids.copy_(self.draws.token_ids[self.order])
        self.positions += 1

    def alone(self, count: int) -> list[list[int]]:
        """The tokens of so many steps with a call each."""
        tokens = []
        for step in range(count):
            if step:
                self.advance()
            self.call()
            tokens.append(self.draws.token_ids.tolist())
        return tokens


def tokens_of(further: FurtherSteps) -> list[list[int]]:
    tokens: list[list[int]] = further.tokens[: further.done].tolist()
    return tokens


def same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int16), other.view(torch.int16))


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("rows", [1, 3, 16])
def test_as_steps_by_themselves(library: Library, rows: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        expected, decoding = Decoding(library, rows), Decoding(library, rows)
        tokens = expected.alone(12)
        further = decoding.further(12)
        decoding.call(further)
    finally:
        torch.set_num_threads(before)
    assert tokens_of(further) == tokens
    assert same(decoding.residual, expected.residual)
    assert torch.equal(decoding.positions, expected.positions)
    assert all(same(one, other) for one, other in zip(decoding.caches, expected.caches, strict=True))
    assert decoding.told.value == 12
    assert not further.ask()


def test_rows_in_another_order(library: Library) -> None:
    expected, decoding = Decoding(library, 3), Decoding(library, 3)
    expected.order = decoding.order = torch.tensor([2, 0, 1])
    further = decoding.further(6)
    decoding.call(further)
    assert tokens_of(further) == expected.alone(6)


def test_steps_are_asked_for_meanwhile(library: Library) -> None:
    """By another thread, each as soon as the one before is done; and the call ends when nobody asks in time."""
    expected = Decoding(library, 1).alone(MOST_STEPS)
    for _ in range(20):
        decoding = Decoding(library, 1)
        further, asked = decoding.further(1), [1]

        def ask(further: FurtherSteps = further, asked: list[int] = asked) -> None:
            while further.ask():
                asked[0] += 1
                while further.done < asked[0] - 1:
                    pass

        asking = threading.Thread(target=ask)
        asking.start()
        decoding.call(further)
        asking.join()
        assert further.asked == asked[0]
        assert further.done <= min(further.asked, MOST_STEPS)
        assert tokens_of(further) == expected[: further.done]
        assert decoding.positions.tolist() == [FIRST + further.done - 1]


def test_no_more_than_the_most(library: Library) -> None:
    decoding = Decoding(library, 1)
    further = decoding.further(MOST_STEPS + 3)
    decoding.call(further)
    assert (further.done, further.asked) == (MOST_STEPS, MOST_STEPS + 3)
    further = decoding.further(2)
    further.end()
    decoding.advance()
    decoding.call(further)
    assert (further.done, further.asked) == (1, 2)
    assert not further.ask()


@pytest.mark.parametrize("rows", [1, 3])
def test_a_token_that_is_none_is_left(library: Library, rows: int) -> None:
    """The step that draws it is as if it had not begun, and fails alike by itself."""
    tokens = Decoding(library, rows).alone(4)
    decoding = Decoding(library, rows, poison=tokens[2][0])
    further = decoding.further(8)
    decoding.call(further)
    done = next(step for step, drawn in enumerate(tokens) if tokens[2][0] in drawn) + 1
    assert tokens_of(further) == tokens[:done]
    assert decoding.draws.token_ids.tolist() == tokens[done - 1]
    assert decoding.positions.tolist() == [FIRST + done - 1] * rows
    decoding.advance()
    further = decoding.further(1)
    decoding.call(further)
    assert further.done == 0
    assert -1 in decoding.draws.token_ids.tolist()


def test_a_line_that_is_missing(library: Library) -> None:
    expected, decoding = Decoding(library, 1), Decoding(library, 1, length=FIRST + 3)
    further = decoding.further(8)
    decoding.call(further)
    tokens = expected.alone(3)
    assert tokens_of(further) == tokens
    assert decoding.draws.token_ids.tolist() == tokens[-1]
    decoding.advance()
    further = decoding.further(1)
    with pytest.raises(IndexError):
        decoding.call(further)
    assert further.done == 0
