"""The end of a step: its tokens go to where the host reads them, and the turn goes on (see `step_layout`)."""

from __future__ import annotations

import torch

from asyncllm.kernels.language import jit, tl

_BLOCK = 256


@jit
def _token_output_kernel(
    output: tl.tensor,
    turn: tl.tensor,
    token_ids: tl.tensor,
    num_sampled: tl.tensor,
    STEPS: tl.constexpr,
    rows: tl.int32,
    BLOCK: tl.constexpr,
) -> None:
    step = tl.load(turn)
    count = tl.load(num_sampled)
    for first in range(0, count, BLOCK):
        i = first + tl.arange(0, BLOCK)
        tl.store(output + step * rows + i, tl.load(token_ids + i, mask=i < count, other=0), mask=i < count)
    tl.debug_barrier()  # every thread has read the turn
    tl.store(turn, (step + 1) % STEPS)


def put_out_tokens(
    output: torch.Tensor, turn: torch.Tensor, token_ids: torch.Tensor, num_sampled: torch.Tensor
) -> None:
    """Copy the first num_sampled [1] of token_ids [rows] to output[turn], and set turn [1] to the next line.

    All int32; output [steps, rows] may lie in pinned memory of the host.
    """
    _token_output_kernel[(1,)](
        output,
        turn,
        token_ids,
        num_sampled,
        STEPS=output.shape[0],
        rows=output.shape[1],
        BLOCK=_BLOCK,
        num_warps=2,
    )


def put_out_tokens_reference(
    output: torch.Tensor, turn: torch.Tensor, token_ids: torch.Tensor, num_sampled: torch.Tensor
) -> None:
    """`put_out_tokens` in plain torch."""
    count = int(num_sampled)
    output[int(turn), :count] = token_ids[:count].to(output.device)
    turn.copy_((turn + 1) % output.shape[0])
