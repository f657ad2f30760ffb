"""SchedulerConfig: the sizes that bound every plan."""

from __future__ import annotations

from dataclasses import dataclass

from asyncllm.engine.plan import CacheGroup
from asyncllm.engine.scheduling.kv_cache import most_blocks, most_positions
from asyncllm.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Sizes and rules of a scheduler. Impossible ones raise `ConfigError`."""

    max_num_seqs: int  # rows; never more than max_batched_tokens are used
    max_batched_tokens: int  # positions in a step
    mixed_chunk_tokens: int  # so many known tokens may always be computed beside decoding rows
    full_step_tokens: int  # a step of so many tokens is worth the reading of weights
    block_size: int  # tokens in a block
    num_blocks: int  # allocatable blocks, ids 1 to num_blocks
    groups: tuple[CacheGroup, ...]
    max_model_len: int  # tokens of one request, prompt and output
    filled_steps: bool = False  # the device fills a step up to a `step_size` (`chunk_limit`), and computes that many
    run_ahead: int = 1  # steps launched before an earlier one's result is applied
    prefix_caching: bool = True
    ageing_seconds: float = 10.0  # having waited this long is worth one level of priority

    def __post_init__(self) -> None:
        tokens = ("max_batched_tokens", "mixed_chunk_tokens", "full_step_tokens", "max_model_len")
        for name in ("max_num_seqs", *tokens, "num_blocks"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.block_size < 2:
            raise ConfigError(f"block_size must be at least 2, got {self.block_size}")
        if self.run_ahead < 0:
            raise ConfigError(f"run_ahead must be at least 0, got {self.run_ahead}")
        if not self.ageing_seconds > 0:
            raise ConfigError(f"ageing_seconds must be above 0, got {self.ageing_seconds}")
        if not self.groups or any(group.window is not None and group.window < 1 for group in self.groups):
            raise ConfigError(f"groups must hold at least one cache group, and windows at least 1, got {self.groups}")
        least = most_blocks(self.groups, self.block_size, 1)
        if least > self.num_blocks:
            raise ConfigError(f"num_blocks is {self.num_blocks}, but a single token needs {least}")

    @property
    def capacity(self) -> int:
        """The most tokens that one request, alone, may come to."""
        return most_positions(self.groups, self.block_size, self.num_blocks, self.max_model_len)
