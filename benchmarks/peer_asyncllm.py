"""asyncllm in the comparison."""

from __future__ import annotations

from collections.abc import Sequence

import asyncllm
from asyncllm import AsyncEngine
from asyncllm.workloads import Measurement, Workload, WorkloadRequest, measure_engine
from benchmarks.peers import Limits


class AsyncLLMPeer:
    """asyncllm as an application uses it."""

    async def start(self, model: str, limits: Limits) -> str:
        self._engine = AsyncEngine(model, max_num_seqs=limits.max_num_seqs, max_model_len=limits.max_model_len)
        await self._engine.start()
        return f"asyncllm {asyncllm.__version__}, default settings"

    async def run(self, workload: Workload, requests: Sequence[WorkloadRequest]) -> Measurement:
        return await measure_engine(self._engine, workload, requests)

    async def aclose(self) -> None:
        await self._engine.aclose()
