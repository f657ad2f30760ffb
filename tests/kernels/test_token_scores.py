from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

from asyncllm.kernels import token_scores
from asyncllm.kernels.sampled_rows import NO_TOKEN, LogitRows
from tests.kernels.mutants import mutant

VOCABULARY, WIDTH, ROWS, STEPS = 1300, 1340, 7, 3  # three tiles, and a tail that is no token
ASKED = [1, 4, 0, 21, 6, 2]  # 1 + the number of most likely tokens; 0 asks for nothing
NAMED = [(), (5, 1299), (), (), (700, 3, 9), (0,)]


def make_ring(device: torch.device) -> token_scores.ScoreRing:
    def full(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full(shape, 7, dtype=dtype, device=device)

    most = token_scores.MOST_LIKELY
    return token_scores.ScoreRing(
        top_ids=full(STEPS, ROWS, most, dtype=torch.int32),
        top_scores=full(STEPS, ROWS, most, dtype=torch.float32),
        named_scores=full(STEPS, ROWS, 4, dtype=torch.float32),
        named_ranks=full(STEPS, ROWS, 4, dtype=torch.int32),
    )


def run(
    module: ModuleType, logits: torch.Tensor, temperature: torch.Tensor | None = None
) -> tuple[token_scores.ScoreRing, token_scores.ScoreRing]:
    """By the kernels, and by the reference."""
    device = logits.device
    count = len(ASKED)
    tops, num_named = (torch.zeros(ROWS + 2, dtype=torch.int32) for _ in range(2))
    named = torch.zeros((ROWS + 2, 3), dtype=torch.int32)
    rows = [ROWS + 1 - i for i in range(count)]
    for row, asked, ids in zip(rows, ASKED, NAMED, strict=True):
        tops[row], num_named[row] = asked, len(ids)
        named[row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
    requests = module.ScoreRequests(*(each.to(device) for each in (tops, num_named, named)))
    tokens = torch.tensor([3, 1299, 5, 77, 600, NO_TOKEN, 1], dtype=torch.int32, device=device)
    belongs = torch.tensor([*rows, 0], dtype=torch.int32, device=device)
    where = LogitRows(belongs, belongs, torch.tensor([count], dtype=torch.int32, device=device), VOCABULARY)
    options = {"turn": torch.tensor([1], dtype=torch.int32, device=device), "temperature": temperature}
    rings = make_ring(device), make_ring(device)
    workspace = module.make_score_workspace(ROWS, VOCABULARY, device)
    module.score_most_likely(logits, where, requests, workspace, rings[0], **options)
    module.score_named(logits, where, requests, workspace, rings[0], tokens, **options)
    module.score_reference(logits, where, requests, rings[1], tokens, **options)
    return rings


def check(rings: tuple[token_scores.ScoreRing, token_scores.ScoreRing]) -> None:
    for name in ("top_ids", "named_ranks"):
        assert torch.equal(getattr(rings[0], name), getattr(rings[1], name)), name
    for name in ("top_scores", "named_scores"):
        torch.testing.assert_close(getattr(rings[0], name), getattr(rings[1], name), rtol=0, atol=1e-4)
    assert bool((rings[0].top_ids[[0, 2]] == 7).all())  # other steps' lines
    assert bool((rings[0].top_ids[1, 2] == 7).all())


def make_logits(dtype: torch.dtype, device: torch.device, seed: int = 0) -> torch.Tensor:
    logits = 3 * torch.randn((ROWS, WIDTH), generator=torch.Generator().manual_seed(seed))
    logits[:, VOCABULARY:] = 50.0
    return logits.to(dtype).to(device)


def test_scores(device: torch.device, dtype: torch.dtype) -> None:
    check(run(token_scores, make_logits(dtype, device)))


def test_scores_of_what_is_drawn_from(device: torch.device) -> None:
    logits = make_logits(torch.float32, device)
    logits[3, 20:] = -torch.inf  # as filters leave it
    logits[3, 77] = 1.0
    temperature = torch.tensor([0.5, 0.0, 0.7, 2.0, 1.5, 0.9, 1.0, 0.3, 0.1], device=device)
    rings = run(token_scores, logits, temperature)
    check(rings)
    assert rings[0].top_scores[1, 3].isfinite().sum() == 20


def test_fewer_tokens_than_asked_for(device: torch.device) -> None:
    logits = make_logits(torch.float32, device)
    logits[3] = -torch.inf
    logits[3, [77, 900]] = 1.0
    ring, _ = run(token_scores, logits)
    assert ring.top_ids[1, 3, :2].tolist() == [77, 900]
    assert ring.top_scores[1, 3].isfinite().sum() == 2


def test_equally_likely_tokens_come_by_id(device: torch.device) -> None:
    logits = make_logits(torch.float32, device)
    check(run(token_scores, (logits * 2).round() / 2))


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("(ids > last_id)", "(ids >= last_id)"),
        ("ids, VOCABULARY - 1)", "ids, 0)"),
        ("left &= ids != last_id", "left &= ids >= 0"),
        ("place - 1)", "place)"),
        ("+ index * MOST", "+ row * MOST"),
        ("> value)", ">= value)"),
        ("last - whole", "last - highest"),
    ],
)
def test_planted_fault_is_caught(right: str, wrong: str, tmp_path: Path, device: torch.device) -> None:
    logits = (make_logits(torch.float32, device) * 2).round() / 2
    with mutant(token_scores, tmp_path, right, wrong) as module, pytest.raises(AssertionError):
        check(run(module, logits))
