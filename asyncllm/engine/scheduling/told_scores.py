"""Whose log-probabilities are whose, in the result of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asyncllm.engine.plan import StepLogprobs, TokenScores
from asyncllm.engine.scheduling.reports import PromptScores
from asyncllm.engine.scheduling.request import Phase
from asyncllm.engine.scheduling.step_draft import LaunchedStep


@dataclass(frozen=True, slots=True)
class ToldScores:
    """Those of live requests."""

    sampled: Sequence[tuple[int, TokenScores]]  # (request, of the token that it sampled)
    prompts: Sequence[PromptScores]


def told_scores(step: LaunchedStep, logprobs: StepLogprobs) -> ToldScores:
    """By request, before the step's tokens end any."""
    requests = step.row_map.requests
    sampled = [
        (requests[sample].id, logprobs.sampled.at(place))
        for place, sample in enumerate(logprobs.samples.tolist())
        if requests[sample].phase is not Phase.ENDED
    ]
    prompts = [
        PromptScores(request.id, part.start, part.scores)
        for part in logprobs.prompts
        if (request := step.chunk_requests[part.chunk]).phase is not Phase.ENDED
    ]
    return ToldScores(sampled, prompts)
