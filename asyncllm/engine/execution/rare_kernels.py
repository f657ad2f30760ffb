"""The kernels that few requests ask for, compiled before the first of them comes.

No first step launches them, and they take seconds to compile: all that run would wait for so long.
"""

from __future__ import annotations

import numpy as np
import torch

from asyncllm.engine.execution.cuda_executor import CudaExecutor
from asyncllm.engine.execution.device_adjustments import SamplerUse
from asyncllm.engine.execution.device_rows import DeviceRows, RowSizes
from asyncllm.engine.execution.logit_sampler import HostWords, LogitSampler, Told
from asyncllm.engine.plan import Chunk, LateSamples, LogprobsRequest, RowJoin, RowSampling
from asyncllm.kernels.late_logits import keep_logits
from asyncllm.kernels.sampled_rows import LogitRows

_EVERYTHING = RowSampling(
    temperature=1.0,
    top_k=2,
    top_p=0.5,
    min_p=0.1,
    seed=0,
    suppressed=(0,),
    suppress_before=1,
    repetition_penalty=2.0,
    logit_bias=((0, 1.0),),
    banned=(0,),
    typical_p=0.5,
    logprobs=LogprobsRequest(1, (0,)),
    late=True,
)


def launch_rare_kernels(executor: CudaExecutor, sizes: RowSizes, *, processed_logprobs: bool) -> None:
    """Launch them as steps do, but on tensors without memory: only to be called where launches are not run
    (`Compilation.launches`). What belongs to no row's sampling is the executor's."""
    executor.copy_blocks(np.zeros((1, 2), np.int32))
    nowhere = torch.device("meta")
    rows = DeviceRows(sizes, nowhere, processed_logprobs=processed_logprobs)
    sampler = LogitSampler(rows, sizes.rows, sizes.vocabulary, nowhere)
    rows.join((RowJoin(0, 0, _EVERYTHING, 1, np.zeros(1, np.int32)),))
    special, scores = rows.adjustments, rows.scores
    special.take_chunks((Chunk(0, 1, np.zeros(1, np.int32), samples=True),))
    assert special.rows is not None
    assert special.kept is not None
    integers = torch.empty(sizes.rows, dtype=torch.int32, device=nowhere)
    where = LogitRows(integers, integers, integers, sizes.vocabulary)
    keep_logits(special.kept, special.kept, where, special.rows.integers("duties"))
    late = LateSamples(
        np.zeros(1, np.int32), 1, masks=np.zeros((1, -(-sizes.vocabulary // 32)), np.uint32), biases=(None,)
    )
    for ring, words in ((scores.ring, None), (scores.late_ring, HostWords(late, nowhere))):
        told = Told(integers, ring)
        sampler.sample(special.kept, where, SamplerUse.SCORED, told, token_ids=integers, words=words)
