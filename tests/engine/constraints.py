"""Constraints for tests: no grammar, only rules about how many tokens came."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import Self

from asyncllm.config import EngineConfig
from asyncllm.engine.model import ModelLoader, ServedModel
from asyncllm.outputs.constraint import Constraint
from asyncllm.outputs.token_mask import Mask, token_mask
from asyncllm.params import SamplingParams


@dataclass
class Rounds(Constraint):
    """The nth token must be one of `legal[n % len(legal)]`; from some counts on, some tokens are forced.

    Checks that it is told every token once, in order, by one thread at a time.
    """

    vocab_size: int
    legal: Sequence[Sequence[int] | None]  # None: all are legal
    forces: Mapping[int, tuple[int, ...]] = field(default_factory=dict)  # count: the tokens that come then
    ends: int | None = None  # after so many tokens there are no more
    delay: float = 0.0  # seconds for each mask
    breaks: int | None = None  # the mask after so many tokens cannot be computed
    seen: list[int] = field(default_factory=list)
    _busy: bool = False

    def accept(self, token_ids: Sequence[int]) -> None:
        assert not self._busy, "two threads at once"
        for token_id in token_ids:
            legal = self._legal()
            assert legal is None or token_id in legal, f"token {len(self.seen)}: {token_id} is not legal"
            self.seen.append(token_id)

    def mask(self) -> Mask | None:
        assert not self._busy, "two threads at once"
        self._busy = True
        time.sleep(self.delay)
        if len(self.seen) == self.breaks:
            raise ZeroDivisionError("no mask today")
        self._busy = False
        legal = self._legal()
        if legal is None:
            return None
        return token_mask(legal, self.vocab_size)

    def forced(self) -> tuple[int, ...]:
        return self.forces.get(len(self.seen), ())

    @property
    def finished(self) -> bool:
        return self.ends is not None and len(self.seen) >= self.ends

    def copy(self) -> Self:
        return replace(self, seen=[*self.seen])

    def _legal(self) -> Sequence[int] | None:
        for start, tokens in self.forces.items():
            if start <= len(self.seen) < start + len(tokens):
                return (tokens[len(self.seen) - start],)
        return self.legal[len(self.seen) % len(self.legal)]


def constrained(load: ModelLoader, constrain: Callable[[SamplingParams], Constraint | None]) -> ModelLoader:
    """The same model, and these constraints on its requests."""

    async def constrained_load(config: EngineConfig, workers: Executor) -> ServedModel:
        return replace(await load(config, workers), constrain=constrain)

    return constrained_load
