"""One engine in a process of its own: `python -m benchmarks.child '{"engine": …}'`. The harness starts it.

So no engine inherits another's threads, memory or compiled kernels, and start-up counts from exec.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from asyncllm.workloads import Measurement, Workload, make_requests
from benchmarks.figures import Figures, PeerRun, Sample
from benchmarks.peers import Limits, Peer, make_peer

FIRST = Workload(name="first token", requests=1, concurrency=1, prompt_tokens=(16, 16), output_tokens=(1, 1))
WARM_UP = Workload(name="warm-up", requests=16, concurrency=16, prompt_tokens=(8, 64), output_tokens=(8, 16))
CHECK = Workload(
    name="check", requests=4, concurrency=4, prompt_tokens=(16, 64), output_tokens=(32, 32), temperature=0.0
)


def settle_heap() -> None:
    """What an application does that cares about pauses, once it has started: what is loaded stays, so no collection
    need look through it. A full one takes 0.1 to 0.2 s of it, and with torch comes about every 1,000 requests."""
    gc.collect()
    gc.freeze()


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a child is to do."""

    engine: str
    model: str
    vocab_size: int
    workloads: list[Workload]
    passes: int
    started: float  # time.time() just before exec
    output: str  # the file for its PeerRun

    @property
    def limits(self) -> Limits:
        """Rows and lengths that fit every workload."""
        every = [*self.workloads, WARM_UP, CHECK]
        return Limits(
            max_num_seqs=min(256, max(workload.concurrency for workload in every)),
            max_model_len=-(-max(workload.longest for workload in every) // 256) * 256,
        )


def order_from_json(text: str) -> Order:
    """The order that the harness wrote."""
    plain = json.loads(text)
    for workload in plain["workloads"]:
        for name in ("prompt_tokens", "output_tokens"):  # JSON made lists of these pairs
            workload[name] = tuple(workload[name])
    plain["workloads"] = [Workload(**workload) for workload in plain["workloads"]]
    return Order(**plain)


async def carry_out(order: Order) -> PeerRun:
    """Start the engine, warm it up with tokens of its own, run each workload in each pass, and the check."""
    peer = make_peer(order.engine)
    description = await peer.start(order.model, order.limits)
    try:
        await peer.run(FIRST, make_requests(FIRST, order.vocab_size, seed=-1))
        start_seconds = time.time() - order.started
        await peer.run(WARM_UP, make_requests(WARM_UP, order.vocab_size, seed=-1))
        settle_heap()
        figures = [await _median_pass(peer, workload, order) for workload in order.workloads]
        requests = make_requests(CHECK, order.vocab_size, seed=0)
        outputs = (await peer.run(CHECK, requests)).outputs
    finally:
        await peer.aclose()
    return PeerRun(
        engine=order.engine,
        description=description,
        start_seconds=start_seconds,
        figures=figures,
        samples=[
            Sample(prompt=list(request.token_ids), output=list(output))
            for request, output in zip(requests, outputs, strict=True)
        ],
    )


async def _median_pass(peer: Peer, workload: Workload, order: Order) -> Figures:
    """Every pass has tokens of its own, so that the prefix cache is cold but for what a workload itself shares."""
    measurements: list[Measurement] = []
    for number in range(order.passes):
        print(f"{order.engine}: {workload.name}, pass {number + 1} of {order.passes}", file=sys.stderr, flush=True)
        measurements.append(await peer.run(workload, make_requests(workload, order.vocab_size, seed=number)))
    measurements.sort(key=lambda measurement: measurement.output_rate)
    return Figures.of(measurements[(len(measurements) - 1) // 2])


def main(arguments: Sequence[str]) -> None:
    """Carry out the one order in the arguments."""
    order = order_from_json(arguments[0])
    Path(order.output).write_text(json.dumps(asdict(asyncio.run(carry_out(order)))), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
