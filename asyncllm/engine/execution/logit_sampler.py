"""LogitSampler: from logits on the GPU to tokens, for the rows of a step, for late rows and for further choices.

Launches alone, in the order of operations; each depends on nothing but sizes and on what the rows may ask for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncllm.engine.execution.device_adjustments import SamplerUse
from asyncllm.engine.execution.device_rows import DeviceRows
from asyncllm.engine.execution.step_ring import host_words
from asyncllm.engine.execution.told_logits import StepTold
from asyncllm.engine.plan import LateSamples, RowBias, RowLogits
from asyncllm.kernels.late_logits import mask_logits
from asyncllm.kernels.logit_adjustment import adjust_logits, count_tokens
from asyncllm.kernels.rare_filters import filter_rare_rows
from asyncllm.kernels.sampled_rows import LATE, AdjustedLogits, LogitRows
from asyncllm.kernels.sampling import make_sampling_workspace, sample
from asyncllm.kernels.token_scores import ScoreRing


@dataclass(frozen=True, slots=True)
class Told:
    """Where log-probabilities of some samples go."""

    turn: Tensor  # [1] the line
    ring: ScoreRing | None
    step: StepTold | None = None  # launched by hand: whole rows may be told too


class HostWords:
    """What the host has to say about late rows, on its way to the device."""

    def __init__(self, late: LateSamples, device: torch.device) -> None:
        self.kept: list[Tensor] = []  # pinned memory
        self._device = device
        self._masks = None if late.masks is None else self._pinned(late.masks.view("int32"))
        self._biases: list[tuple[int, Tensor, Tensor]] = []
        self._logits: list[tuple[int, Tensor]] = []
        for place, bias in enumerate(late.biases):
            if isinstance(bias, RowBias):
                self._biases.append((place, self._pinned(bias.token_ids), self._pinned(bias.values)))
            elif isinstance(bias, RowLogits):
                self._logits.append((place, self._pinned(bias.values)))

    def apply(self, adjusted: Tensor, vocabulary: int) -> None:
        """To adjusted logits [n, at least vocabulary], whose bans, bias and penalties are in them already."""
        if self._masks is not None:
            mask_logits(adjusted, self._masks, vocabulary=vocabulary)
        for place, token_ids, values in self._biases:
            ids = token_ids.to(self._device, non_blocking=True)
            adjusted[place].index_add_(0, ids, values.to(self._device, non_blocking=True))
        for place, values in self._logits:
            adjusted[place, : len(values)].copy_(values, non_blocking=True)

    def _pinned(self, array: object) -> Tensor:
        words = host_words(array, self._device)  # type: ignore[arg-type]  # an array of numbers
        self.kept.append(words)
        return words


class LogitSampler:
    """Works on memory of its own, so on one stream."""

    def __init__(self, rows: DeviceRows, num_rows: int, vocabulary: int, device: torch.device) -> None:
        self._rows = rows
        self._workspace = make_sampling_workspace(num_rows, vocabulary, device)

    def sample(  # noqa: PLR0913 (whose logits, what they ask for, and where it goes)
        self,
        logits: Tensor,
        where: LogitRows,
        use: SamplerUse,
        told: Told,
        *,
        token_ids: Tensor,
        words: HostWords | None = None,
    ) -> None:
        """A token for each row of logits [n, at least vocabulary] that counts, to token_ids [at least n] and to the
        row.

        `words`: the rows are late ones. Without them late rows draw too, for nothing: their turn is to come.
        """
        rows, special = self._rows, self._rows.adjustments
        skip, adjusted = LATE if words is None else 0, None
        if use >= SamplerUse.ADJUSTED and special.rows is not None and special.logits is not None:
            some = special.logits[: len(logits)]
            adjust_logits(some, logits, where, rows.settings, special.rows, skip=skip)
            if words is not None:
                words.apply(some, where.vocabulary)
            filter_rare_rows(some, where, rows.settings, special.rows, self._workspace)
            adjusted = AdjustedLogits(special.rows.integers("duties"), some)
        source, heat = logits, None
        if special.processed_logprobs and adjusted is not None:
            source, heat = adjusted.logits, rows.settings.temperature
        scorer = None
        if use >= SamplerUse.SCORED and told.ring is not None:
            scorer = rows.scores.scorer(told.ring, told.turn, where)
        if scorer is not None:
            scorer.score_most_likely(source, heat)
        if told.step is not None and (places := told.step.whole_places()):
            told.step.tell_whole(source[:, : where.vocabulary], places, where.rows, heat)
        sample(
            logits,
            where,
            rows.settings,
            self._workspace,
            token_ids=token_ids,
            row_token_ids=rows.last_tokens,
            adjusted=adjusted,
            filters=use > SamplerUse.PLAIN,
        )
        if adjusted is not None and special.rows is not None:
            count_tokens(special.rows, token_ids[: len(logits)], where, skip=skip)
        if scorer is not None:
            scorer.score_named(source, heat, token_ids[: len(logits)])


def places_on(device: torch.device, places: Sequence[int], kept: list[Tensor]) -> Tensor:
    """[n] int32 on the device; what is added to `kept` must be kept until the device has passed this."""
    words = host_words(torch.tensor(places, dtype=torch.int32).numpy(), device)
    kept.append(words)
    return words.to(device, non_blocking=True)
