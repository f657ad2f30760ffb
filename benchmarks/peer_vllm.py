"""vLLM in the comparison."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import vllm
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from asyncllm.workloads import Arrivals, Measurement, Workload, WorkloadRequest, measure
from benchmarks.peers import Limits


class VLLMPeer:
    """vLLM's AsyncLLM in the process of the consumers, its engine core in a child, as it comes."""

    async def start(self, model: str, limits: Limits) -> str:
        self._ids = itertools.count()
        self._engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=model,
                skip_tokenizer_init=True,
                max_num_seqs=limits.max_num_seqs,
                max_model_len=limits.max_model_len,
                disable_log_stats=True,
            )
        )
        return f"vLLM {vllm.__version__}, default settings"

    async def run(self, workload: Workload, requests: Sequence[WorkloadRequest]) -> Measurement:
        async def consume(request: WorkloadRequest, arrivals: Arrivals) -> None:
            # without the seed and without text: either would cost vLLM time
            params = SamplingParams(
                temperature=request.temperature,
                max_tokens=request.max_tokens,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            prompt = TokensPrompt(prompt_token_ids=list(request.token_ids))
            async for output in self._engine.generate(prompt, params, request_id=str(next(self._ids))):
                arrivals.mark(output.outputs[0].token_ids)
                arrivals.cached = output.num_cached_tokens or 0

        return await measure(workload, requests, consume)

    async def aclose(self) -> None:
        self._engine.shutdown()
