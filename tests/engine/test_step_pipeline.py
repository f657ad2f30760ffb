from __future__ import annotations

import pytest

from asyncllm import SamplingParams
from asyncllm.engine.plan import StepPlan
from asyncllm.errors import RequestFailed
from asyncllm.inputs.tokenizer import Tokenizer
from tests.engine.hand_runner import HandDriven


def refuse(plan: StepPlan) -> None:
    raise MemoryError("no room for this step")


async def test_a_launch_that_raises_loses_no_token_that_came_before() -> None:
    hand = HandDriven(run_ahead=0)
    mailbox = await hand.open((5, 6), SamplingParams(max_tokens=9))
    await hand.runner.complete(2)
    hand.runner.on_launch = refuse
    await hand.runner.complete()
    assert mailbox.choices[0].ids == [7, 7, 7]
    assert isinstance(mailbox.failure, RequestFailed)
    assert mailbox.released


async def test_a_surplus_launch_that_raises_spares_a_request_whose_stop_string_has_come(tokenizer: Tokenizer) -> None:
    hand = HandDriven(tokenizer, run_ahead=0)
    stop = tokenizer.decode([hand.runner.token])
    mailbox = await hand.open((5, 6), SamplingParams(max_tokens=9, stop=[stop]))
    hand.runner.on_launch = refuse
    await hand.runner.complete()
    assert mailbox.failure is None
    assert mailbox.ending is not None
    assert mailbox.choices[0].end.stop_reason == stop


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
async def test_after_a_lost_step_the_engine_goes_on(run_ahead: int) -> None:
    hand = HandDriven(run_ahead=run_ahead)
    lost = await hand.open((5, 6), SamplingParams(max_tokens=9))
    await hand.runner.fail(RuntimeError("the device stumbled"))
    while hand.runner.waiting:
        await hand.runner.fail(RuntimeError("the device stumbled"))
    assert isinstance(lost.failure, RequestFailed)
    later = await hand.open((5, 6), SamplingParams(max_tokens=2))
    await hand.runner.complete(2)
    assert later.choices[0].ids == [7, 7]
    assert later.ending is not None
