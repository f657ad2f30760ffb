"""The check that every table carries: an engine's greedy tokens, teacher-forced through a float32 model."""

from __future__ import annotations

import torch

from benchmarks.figures import Check, PeerRun
from benchmarks.peer_transformers import load_transformers

BOUND = 1.0
"""Logits. A token this far under the reference's argmax is no rounding of bfloat16 or of packed weights any more: the
logits of one position spread over some 30."""


def check_runs(model: str, runs: list[PeerRun]) -> list[Check]:
    """How far each engine's tokens lie under the argmax of the float32 model."""
    reference = load_transformers(model, torch.float32)
    checks = []
    for run in runs:
        gaps: list[float] = []
        for sample in run.samples:
            token_ids = torch.tensor([[*sample.prompt, *sample.output]])
            with torch.inference_mode():
                # position i predicts token i + 1; [output, vocabulary]
                logits = reference(token_ids).logits[0, len(sample.prompt) - 1 : -1]
            chosen = logits.gather(1, torch.tensor(sample.output)[:, None])[:, 0]
            gaps += (logits.max(dim=1).values - chosen).tolist()
        checks.append(Check(engine=run.engine, tokens=len(gaps), equal=gaps.count(0.0), worst=max(gaps), bound=BOUND))
    return checks
