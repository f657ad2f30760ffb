"""Token embeddings."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from asyncllm.kernels.embedding import embedding
from asyncllm.layers.parameter import Placement, Slot


class Embedding:
    """A table with one row per token id."""

    def __init__(self, vocab_size: int, size: int, placement: Placement) -> None:
        self.weight = placement.empty(vocab_size, size)

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[n] → [n, size], freshly allocated."""
        return functional.embedding(token_ids, self.weight)

    def slot(self) -> Slot:
        """The checkpoint tensor of this layer."""
        return Slot(self.weight)


class KernelEmbedding(Embedding):
    """The same, by our kernel."""

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[n] → [n, size], freshly allocated."""
        return embedding(self.weight, token_ids)


def make_embedding(vocab_size: int, size: int, placement: Placement) -> Embedding:
    """The table in the form that suits `placement`."""
    return (KernelEmbedding if placement.kernels else Embedding)(vocab_size, size, placement)
