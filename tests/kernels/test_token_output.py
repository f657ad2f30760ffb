from __future__ import annotations

import pytest
import torch

from asyncllm.kernels.token_output import put_out_tokens, put_out_tokens_reference


@pytest.mark.parametrize("count", [0, 1, 256, 700])
@pytest.mark.parametrize("turn", [0, 2])
def test_equals_reference(count: int, turn: int, device: torch.device) -> None:
    token_ids = torch.arange(5, 705, dtype=torch.int32, device=device)
    number = torch.tensor([count], dtype=torch.int32, device=device)
    results = []
    for function in (put_out_tokens, put_out_tokens_reference):
        output = torch.full((3, 700), -1, dtype=torch.int32, device=device)
        at = torch.tensor([turn], dtype=torch.int32, device=device)
        function(output, at, token_ids, number)
        results.append((output, at))
    (mine, mine_at), (theirs, theirs_at) = results
    assert torch.equal(mine, theirs)
    assert torch.equal(mine_at, theirs_at)
    assert int(mine_at) == (turn + 1) % 3
