"""Requests for which there is no token to sample, through the GPU runner."""

from __future__ import annotations

import pytest

from tests.engine.test_unsampled import (
    folder,
    test_a_processor_is_not_blamed_for_it,
    test_no_block_of_it_is_found_later,
    test_only_who_has_no_numbers_fails,
    test_what_came_before_is_told,
)

__all__ = [
    "folder",
    "test_a_processor_is_not_blamed_for_it",
    "test_no_block_of_it_is_found_later",
    "test_only_who_has_no_numbers_fails",
    "test_what_came_before_is_told",
]


@pytest.fixture
def device() -> str:
    return "cuda"
