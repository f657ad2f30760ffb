"""Engines whose rows share prefixes that are too short to be worth it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from asyncllm.engine.execution import step_program
from asyncllm.kernels import attention_plan
from asyncllm.kernels.attention_plan import Tiling


def share_short_prefixes(patch: pytest.MonkeyPatch) -> None:
    """From one block of 16 tokens on."""
    default = attention_plan.default_tilings

    def short(*arguments: Any, **named: Any) -> tuple[Tiling, Tiling]:
        small, large = default(*arguments, **named)
        return replace(small, keys=16, descriptors=False, many=None), large

    patch.setattr(attention_plan, "default_tilings", short)
    patch.setattr(step_program, "LEAST_SHARED", 1)
