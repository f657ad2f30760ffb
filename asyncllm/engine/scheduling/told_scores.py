"""Whose log-probabilities, and whose kept logits, are whose in the result of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asyncllm.engine.plan import Float32Array, StepLogprobs, TokenScores
from asyncllm.engine.scheduling.reports import KeptLogits, PromptScores
from asyncllm.engine.scheduling.request import Phase, Request
from asyncllm.engine.scheduling.step_draft import LaunchedStep


@dataclass(frozen=True, slots=True)
class ToldScores:
    """Those of live requests."""

    sampled: Sequence[tuple[int, TokenScores]]  # (request, of the token that it sampled)
    prompts: Sequence[PromptScores]


NO_SCORES = ToldScores((), ())


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


def kept_logits(step: LaunchedStep, logits: Float32Array) -> Sequence[KeptLogits]:
    """Those of live requests that read them."""
    decoding = step.late[: step.late_decoding]
    kept = [(sample.request, sample.end) for sample in decoding]
    chunks = zip(step.chunks, step.chunk_requests, strict=True)
    kept += [(request, chunk.start + len(chunk.token_ids)) for chunk, request in chunks if chunk.keeps]
    kept += [(request, request.forked_at) for request in step.forks if request.late]
    readers = [(request, position) for request, position in kept if request.spec.sampling.reads_logits]
    return [
        KeptLogits(request.id, position, values)
        for (request, position), values in zip(readers, logits, strict=True)
        if request.phase is not Phase.ENDED
    ]


def _sampled(requests: Sequence[Request], logprobs: StepLogprobs) -> Sequence[tuple[int, TokenScores]]:
    return [
        (requests[sample].id, logprobs.sampled.at(place))
        for place, sample in enumerate(logprobs.samples.tolist())
        if requests[sample].phase is not Phase.ENDED
    ]
