"""The plans of the CPU runner's tests through the GPU runner: a plan's driver takes the GPU where there is one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.execution.plan_driver import PlanDriver
from tests.engine.execution.test_cpu_runner import (
    expected_tokens,
    folder,
    test_a_late_row_without_a_word_to_say_is_like_any_other,
    test_a_resumed_request_goes_on_as_it_would_have,
    test_a_rope_that_depends_on_length_knows_the_prompt,
    test_a_step_without_samples,
    test_blocks_that_fell_out_of_the_window_are_not_read,
    test_chunks_make_no_difference,
    test_copy_on_write,
    test_forks_share_the_logits_of_the_prompt,
    test_greedy_is_that_of_transformers,
    test_rows_do_not_depend_on_their_mates,
    test_scripts_come_out_exactly,
    test_scripts_of_pieces,
    test_steps_may_be_launched_ahead,
    test_suppressed_ids_until_a_position,
    test_the_seed_alone_decides,
    test_ties_go_to_the_lowest_id,
    test_words_about_late_rows,
)

__all__ = [
    "expected_tokens",
    "folder",
    "test_a_late_row_without_a_word_to_say_is_like_any_other",
    "test_a_resumed_request_goes_on_as_it_would_have",
    "test_a_rope_that_depends_on_length_knows_the_prompt",
    "test_a_step_without_samples",
    "test_blocks_that_fell_out_of_the_window_are_not_read",
    "test_chunks_make_no_difference",
    "test_copy_on_write",
    "test_forks_share_the_logits_of_the_prompt",
    "test_greedy_is_that_of_transformers",
    "test_rows_do_not_depend_on_their_mates",
    "test_scripts_come_out_exactly",
    "test_scripts_of_pieces",
    "test_steps_may_be_launched_ahead",
    "test_suppressed_ids_until_a_position",
    "test_the_seed_alone_decides",
    "test_ties_go_to_the_lowest_id",
    "test_words_about_late_rows",
]

# a driver launches on the test's own loop, where the first step of a kind compiles kernels and captures graphs
pytestmark = pytest.mark.blocks_loop


async def test_the_driver_takes_the_gpu(folder: Path) -> None:
    async with await PlanDriver.load(folder) as driver:
        assert driver.facts.device == "cuda:0"
