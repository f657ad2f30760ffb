"""Whose log-probabilities are whose, in the result of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asyncllm.engine.plan import StepLogprobs, TokenScores
from asyncllm.engine.scheduling.reports import PromptScores
from asyncllm.engine.scheduling.request import Phase, Request
from asyncllm.engine.scheduling.step_draft import LaunchedStep


@dataclass(frozen=True, slots=True)
class ToldScores:
    """Those of live requests."""

    sampled: Sequence[tuple[int, TokenScores]]  # (request, of the token that it sampled)
    prompts: Sequence[PromptScores]


def told_scores(step: LaunchedStep, logprobs: StepLogprobs) -> ToldScores:
    """By request, before the step's tokens end any."""
    sampled = _sampled(step.row_map.requests, logprobs)
    prompts = [
        PromptScores(request.id, part.start, part.scores)
        for part in logprobs.prompts
        if (request := step.chunk_requests[part.chunk]).phase is not Phase.ENDED
    ]
    return ToldScores(sampled, prompts)


def told_late_scores(step: LaunchedStep, logprobs: StepLogprobs) -> Sequence[tuple[int, TokenScores]]:
    """(request, of its late token) of live requests, before these tokens end any."""
    return _sampled([sample.request for sample in step.late], logprobs)


def _sampled(requests: Sequence[Request], logprobs: StepLogprobs) -> Sequence[tuple[int, TokenScores]]:
    return [
        (requests[sample].id, logprobs.sampled.at(place))
        for place, sample in enumerate(logprobs.samples.tolist())
        if requests[sample].phase is not Phase.ENDED
    ]
