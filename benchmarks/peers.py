"""The engines that are measured, behind one small interface, and where each is found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, cast

from asyncllm.workloads import Measurement, Workload, WorkloadRequest

PEERS = {
    "asyncllm": "benchmarks.peer_asyncllm:AsyncLLMPeer",
    "transformers": "benchmarks.peer_transformers:TransformersPeer",
    "vllm": "benchmarks.peer_vllm:VLLMPeer",
}
"""By the name of the package that a machine must have; the module is imported only when its engine is measured."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What all engines are held to."""

    max_num_seqs: int
    max_model_len: int


class Peer(Protocol):
    """One engine."""

    async def start(self, model: str, limits: Limits) -> str:
        """Load the model; returns the versions and settings that a reader should know."""
        ...

    async def run(self, workload: Workload, requests: Sequence[WorkloadRequest]) -> Measurement:
        """Run the requests, each token delivered to its own consumer."""
        ...

    async def aclose(self) -> None:
        """Give everything back."""
        ...


def make_peer(name: str) -> Peer:
    """A peer that has not started."""
    module, kind = PEERS[name].split(":")
    return cast(Callable[[], Peer], getattr(import_module(module), kind))()
