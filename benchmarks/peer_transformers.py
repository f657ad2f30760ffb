"""transformers in the comparison."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig, GgufConfig, StoppingCriteriaList

from asyncllm.workloads import Arrivals, Measurement, Workload, WorkloadRequest, summarise
from benchmarks.peers import Limits


class TransformersPeer:
    """`model.generate` on padded batches: as many requests as the workload has at once, each batch until its longest
    request is done. A row's tokens after its own end are not counted, and are not delivered."""

    async def start(self, model: str, limits: Limits) -> str:
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._limits = limits
        self._model = load_transformers(model, torch.bfloat16).to(self._device)
        return (
            f"transformers {transformers.__version__} on torch {torch.__version__}, bfloat16, "
            f"attention: {self._model.config._attn_implementation}, {torch.get_num_threads()} threads"
        )

    async def run(self, workload: Workload, requests: Sequence[WorkloadRequest]) -> Measurement:
        arrivals = [Arrivals() for _ in requests]
        at_once = min(workload.concurrency, self._limits.max_num_seqs)
        start = time.perf_counter()
        if workload.concurrency == workload.requests:  # all are submitted now, those of later batches too
            for own in arrivals:
                own.start = start
        for first in range(0, len(requests), at_once):
            batch = slice(first, first + at_once)
            self._generate(requests[batch], arrivals[batch])
        return summarise(workload, requests, arrivals, time.perf_counter() - start)

    async def aclose(self) -> None:
        del self._model

    def _generate(self, requests: Sequence[WorkloadRequest], arrivals: Sequence[Arrivals]) -> None:
        width = max(len(request.token_ids) for request in requests)
        token_ids = torch.zeros(len(requests), width, dtype=torch.int64)
        mask = torch.zeros_like(token_ids)
        for row, request in enumerate(requests):
            token_ids[row, width - len(request.token_ids) :] = torch.tensor(request.token_ids)
            mask[row, width - len(request.token_ids) :] = 1
        for own in arrivals:
            own.start = own.start or time.perf_counter()
        sampled = requests[0].temperature > 0
        config = GenerationConfig(  # type: ignore[no-untyped-call]  # transformers leaves it untyped
            do_sample=sampled,
            **({"temperature": requests[0].temperature, "top_k": 0, "top_p": 1.0} if sampled else {}),
            max_new_tokens=max(request.max_tokens for request in requests),
            pad_token_id=0,
        )
        torch.manual_seed(requests[0].seed)
        with torch.inference_mode():
            self._model.generate(
                token_ids.to(self._device),
                attention_mask=mask.to(self._device),
                generation_config=config,
                stopping_criteria=StoppingCriteriaList([_deliver(requests, arrivals)]),
            )


def _deliver(requests: Sequence[WorkloadRequest], arrivals: Sequence[Arrivals]) -> Callable[..., Any]:
    """A stopping criterion: sees each step's tokens, hands them over, and says which rows are done."""

    def criterion(token_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        done = []
        for request, own, token in zip(requests, arrivals, token_ids[:, -1].tolist(), strict=True):
            if len(own.tokens) < request.max_tokens:
                own.mark((token,))
            done.append(len(own.tokens) >= request.max_tokens)
        return torch.tensor(done, device=token_ids.device)

    return criterion


def load_transformers(model: str, dtype: Any) -> Any:
    """The model as transformers loads it, from a Hub id, a folder or a .gguf file; never ends by itself."""
    path = Path(model)
    if path.suffix == ".gguf":
        # unpacked: the products of transformers' packed GGUF weights are slower on a CPU, by far
        unpacked = GgufConfig(dequantize=True)
        loaded = AutoModelForCausalLM.from_pretrained(
            str(path.parent), gguf_file=path.name, dtype=dtype, quantization_config=unpacked
        )
    else:
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    loaded.generation_config.eos_token_id = None
    loaded.eval()  # type: ignore[no-untyped-call]  # likewise
    return loaded
