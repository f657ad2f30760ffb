from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from asyncllm.engine.plan import CacheGroup, Chunk, RowJoin, RowSampling, StepPlan, TableEdits
from asyncllm.engine.scheduling.scheduler import SchedulerConfig
from asyncllm.testing.shadow import ShadowDevice, ShadowFault
from asyncllm.testing.shadow_tokens import reference_output, shadow_token

GREEDY = RowSampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
VOCAB_SIZE = 50


def make_device(run_ahead: int = 2, windows: Sequence[int | None] = (None,)) -> ShadowDevice:
    config = SchedulerConfig(
        max_num_seqs=4,
        max_batched_tokens=16,
        mixed_chunk_tokens=16,
        full_step_tokens=16,
        block_size=4,
        num_blocks=12,
        groups=tuple(CacheGroup(window) for window in windows),
        max_model_len=32,
        run_ahead=run_ahead,
    )
    return ShadowDevice(config, VOCAB_SIZE)


Edit = tuple[int, int, int, int]  # group, row, index, block


def make_plan(
    step: int,
    *,
    joins: Sequence[int] = (),
    edits: Sequence[Edit] = (),
    chunks: Sequence[Chunk] = (),
    decode: Sequence[int] = (),
    copies: Sequence[tuple[int, int]] = (),
    changed: bool = True,
) -> StepPlan:
    """`joins` are rows; their requests have ids of 10 times the step and the row."""
    columns = np.array(edits, dtype=np.int32).reshape(-1, 4).T
    return StepPlan(
        step=step,
        joins=tuple(RowJoin(row, 10 * step + row, GREEDY) for row in joins),
        tables=TableEdits(*columns),
        copies=np.array(copies, dtype=np.int32).reshape(-1, 2),
        chunks=tuple(chunks),
        decode_rows=np.array(decode, dtype=np.int32),
        decode_changed=changed,
    )


def chunk(row: int, start: int, token_ids: Sequence[int], samples: bool = True) -> Chunk:
    return Chunk(row, start, np.array(token_ids, dtype=np.int32), samples)


FIRST = make_plan(0, joins=[0], edits=[(0, 0, 0, 1)], chunks=[chunk(0, 0, (1, 2, 3))])
DECODE = make_plan(1, decode=[0])


def started() -> ShadowDevice:
    """Row 0 has computed 1, 2, 3 in block 1, and sampled."""
    device = make_device()
    device.launch(FIRST)
    return device


def shared() -> ShadowDevice:
    """Row 0 has computed 1 to 5 in blocks 1 and 2."""
    device = make_device()
    device.launch(make_plan(0, joins=[0], edits=[(0, 0, 0, 1), (0, 0, 1, 2)], chunks=[chunk(0, 0, (1, 2, 3, 4, 5))]))
    return device


def test_tokens_are_those_of_the_reference() -> None:
    device = started()
    tokens = [int(device.complete().token_ids[0])]
    for step in range(1, 6):
        edits = [(0, 0, 1, 2)] if step == 2 else []  # the 5th position
        device.launch(make_plan(step, decode=[0], edits=edits, changed=step == 1))
        tokens.append(int(device.complete().token_ids[0]))
    assert tokens == reference_output((1, 2, 3), GREEDY, VOCAB_SIZE, 6)


def test_hit_and_copy_give_the_same_tokens() -> None:
    device = shared()
    expected = device.complete().token_ids.tolist()
    device.launch(make_plan(1, joins=[1], edits=[(0, 1, 0, 1), (0, 1, 1, 3)], chunks=[chunk(1, 4, (5,))]))
    assert device.complete().token_ids.tolist() == expected
    plan = make_plan(
        2, joins=[2], edits=[(0, 2, 0, 1), (0, 2, 1, 4)], copies=[(3, 4)], chunks=[chunk(2, 5, (9,))], decode=[1]
    )
    device.launch(plan)
    expected = reference_output((1, 2, 3, 4, 5, 9), GREEDY, VOCAB_SIZE, 1)
    assert device.complete().token_ids.tolist()[1:] == expected


def test_chunk_reads_what_an_earlier_chunk_of_its_step_writes() -> None:
    device = make_device()
    chunks = [chunk(0, 0, (1, 2, 3, 4)), chunk(1, 4, (5,))]
    edits = [(0, 0, 0, 1), (0, 1, 0, 1), (0, 1, 1, 2)]
    device.launch(make_plan(0, joins=[0, 1], edits=edits, chunks=chunks))
    with pytest.raises(ShadowFault, match="cached prefix"):
        make_device().launch(make_plan(0, joins=[0, 1], edits=edits, chunks=chunks[::-1]))


FAULTS: dict[str, tuple[Callable[[], ShadowDevice], StepPlan, str]] = {
    "step left out": (started, make_plan(2, decode=[0]), "where 1 was due"),
    "nothing to do": (started, make_plan(1), "does nothing"),
    "budget overrun": (started, make_plan(1, joins=[1], chunks=[chunk(1, 0, range(17))]), "budget"),
    "row twice": (started, make_plan(1, decode=[0, 0]), "row twice"),
    "row of nobody": (started, make_plan(1, decode=[3]), "nobody has"),
    "table of nobody": (started, make_plan(1, decode=[0], edits=[(0, 3, 0, 2)]), "nobody has"),
    "row out of range": (started, make_plan(1, joins=[4], chunks=[chunk(4, 0, (1,))]), "joins row 4"),
    "null block handed out": (started, make_plan(1, decode=[0], edits=[(0, 0, 1, 0)]), "hands out block 0"),
    "block out of range": (started, make_plan(1, decode=[0], edits=[(0, 0, 1, 13)]), "hands out block 13"),
    "entry edited twice": (started, make_plan(1, decode=[0], edits=[(0, 0, 1, 2), (0, 0, 1, 3)]), "twice"),
    "decode without a token": (started, make_plan(1, joins=[0], decode=[0]), "no sampled token"),
    "position left out": (started, make_plan(1, chunks=[chunk(0, 4, (1,))]), "starts at 4, not 3"),
    "position computed again": (started, make_plan(1, chunks=[chunk(0, 2, (1,))]), "starts at 2, not 3"),
    "no block to write": (started, make_plan(1, joins=[1], chunks=[chunk(1, 0, (1,))]), "null block"),
    "decode rows changed silently": (started, make_plan(1, decode=[0], changed=False), "without saying so"),
    "block of another in flight": (
        started,
        make_plan(1, joins=[1], edits=[(0, 1, 0, 1)], chunks=[chunk(1, 0, (7,))]),
        "uses it for another",
    ),
    "copy to a block in flight": (started, make_plan(1, decode=[0], copies=[(2, 1)]), "which is in use"),
    "prefix of another": (
        shared,
        make_plan(1, joins=[1], edits=[(0, 1, 0, 2), (0, 1, 1, 3)], chunks=[chunk(1, 4, (1,))]),
        "cached prefix",
    ),
    "prefix that is not there": (
        shared,
        make_plan(1, joins=[1], edits=[(0, 1, 0, 5), (0, 1, 1, 3)], chunks=[chunk(1, 4, (1,))]),
        "cached prefix",
    ),
    "table entry changed": (started, make_plan(1, decode=[0], edits=[(0, 0, 0, 2)]), "holds nothing"),
    "beyond the context": (
        started,
        make_plan(1, joins=[1], edits=[(0, 1, i, i + 2) for i in range(8)], chunks=[chunk(1, 32, (1,))]),
        "cached prefix|computes 32 to 33",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_found(name: str) -> None:
    make, plan, message = FAULTS[name]
    with pytest.raises(ShadowFault, match=message):
        make().launch(plan)


def test_running_too_far_ahead_is_found() -> None:
    device = make_device(run_ahead=0)
    device.launch(FIRST)
    with pytest.raises(ShadowFault, match="too far ahead"):
        device.launch(DECODE)
    device = make_device(run_ahead=0)
    device.launch(FIRST)
    device.complete()
    device.launch(DECODE)


def test_writing_a_shared_block_is_found_when_the_other_reads_it() -> None:
    device = shared()
    device.complete()
    # row 1 takes blocks 1 and 2 over, and writes the fifth position into the shared one
    device.launch(make_plan(1, joins=[1], edits=[(0, 1, 0, 1), (0, 1, 1, 2)], chunks=[chunk(1, 4, (5,))]))
    device.complete()
    with pytest.raises(ShadowFault, match="written by another"):
        device.launch(make_plan(2, decode=[0]))


def test_overwriting_in_the_same_step_is_found() -> None:
    device = shared()
    device.complete()
    with pytest.raises(ShadowFault, match="block 2"):
        device.launch(make_plan(1, joins=[1], edits=[(0, 1, 0, 2)], chunks=[chunk(1, 0, (7, 8))], decode=[0]))


def test_window_reads_only_its_part() -> None:
    device = make_device(windows=[3])
    device.launch(make_plan(0, joins=[0], edits=[(0, 0, 0, 1), (0, 0, 1, 2)], chunks=[chunk(0, 0, range(6))]))
    device.complete()
    # position 6 reads 4 to 6: the first block may go to another
    device.launch(make_plan(1, joins=[1], edits=[(0, 1, 0, 1)], chunks=[chunk(1, 0, (9,))], decode=[0]))
    device.complete()
    device = make_device(windows=[4])
    device.launch(make_plan(0, joins=[0], edits=[(0, 0, 0, 1), (0, 0, 1, 2)], chunks=[chunk(0, 0, range(6))]))
    device.complete()
    with pytest.raises(ShadowFault, match="position 3"):
        device.launch(make_plan(1, joins=[1], edits=[(0, 1, 0, 1)], chunks=[chunk(1, 0, (9, 9, 9, 9))], decode=[0]))


def test_what_a_failed_step_wrote_is_no_prefix() -> None:
    device = shared()
    device.fail(0)
    assert device.in_flight == 0
    with pytest.raises(ShadowFault, match="cached prefix"):
        device.launch(make_plan(1, joins=[1], edits=[(0, 1, 0, 1), (0, 1, 1, 3)], chunks=[chunk(1, 4, (5,))]))


def test_rows_of_a_failed_step_are_lost() -> None:
    device = started()
    device.complete()
    device.launch(DECODE)
    device.fail(1)
    with pytest.raises(ShadowFault, match="nobody has"):
        device.launch(make_plan(2, decode=[0]))


def test_blocks_in_flight() -> None:
    device = shared()
    assert device.blocks_in_flight() == {1, 2}
    device.launch(make_plan(1, decode=[0]))
    device.complete()
    assert device.blocks_in_flight() == {1, 2}
    device.complete()
    assert device.blocks_in_flight() == set()


@pytest.mark.parametrize(
    ("changes", "differs"),
    [
        ({"seed": 1}, False),
        ({"temperature": 1.0}, True),
        ({"temperature": 1.0, "seed": 1}, True),
        ({"temperature": 1.0, "choice": 1}, True),
    ],
)
def test_sampling_depends_on_what_it_should(changes: dict[str, Any], differs: bool) -> None:
    one = reference_output((1, 2), GREEDY, 10_000, 5)
    assert (reference_output((1, 2), replace(GREEDY, **changes), 10_000, 5) != one) is differs


def test_suppressed_ids_are_not_sampled_before_their_position() -> None:
    sampling = replace(GREEDY, suppress_before=10, suppressed=(0, 1, 2))
    assert {shadow_token(history, 9, sampling, 4) for history in range(0, 2**24, 2**16)} == {3}
    assert {shadow_token(history, 10, sampling, 4) for history in range(0, 2**24, 2**16)} == {0, 1, 2, 3}
