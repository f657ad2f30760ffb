"""Whose the logits of a step are: which of them are sampled, and which are kept for late rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncllm.engine.plan import Int32Array, StepPlan


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """A step has logits for its decoding rows, the late ones after the others, and then for each chunk that samples or
    keeps. A *place* is one of them, counted in this order."""

    rows: Int32Array  # [s] that sample, in the plan's order
    places: NDArray[np.int64]  # [s] whose logits they sample from
    kept: tuple[tuple[int, int], ...]  # (late row, place of the logits that are kept for it)


def lay_out_outputs(plan: StepPlan) -> StepOutputs:
    """The outputs of this plan."""
    decoding = len(plan.decode_rows)
    if not plan.chunks and plan.late is None and not plan.forks:
        return StepOutputs(plan.decode_rows, np.arange(decoding), ())
    rows, places = plan.decode_rows.tolist(), list(range(decoding))
    kept: list[tuple[int, int]] = []
    if plan.late is not None:
        late = plan.late.rows[: plan.late.decoding].tolist()
        kept += [(row, decoding + i) for i, row in enumerate(late)]
        decoding += len(late)
    by_chunk: dict[int, int] = {}
    for index, chunk in enumerate(plan.chunks):
        if chunk.samples or chunk.keeps:
            place = by_chunk[index] = decoding + len(by_chunk)
            if chunk.samples:
                rows.append(chunk.row)
                places.append(place)
            else:
                kept.append((chunk.row, place))
    for fork in plan.forks:
        place = by_chunk[fork.chunk]
        if plan.chunks[fork.chunk].samples:
            rows.append(fork.row)
            places.append(place)
        else:
            kept.append((fork.row, place))
    return StepOutputs(np.array(rows, np.int32), np.array(places, np.int64), tuple(kept))
