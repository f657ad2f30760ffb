"""Fills a model from a stream of tensors, or with random stand-ins."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch
from torch import Tensor

from asyncllm.errors import CheckpointError
from asyncllm.layers.parameter import CheckpointTensor, dense
from asyncllm.models.llama import Llama

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_COMPUTED = ".rotary_emb.inv_freq"
"""Old checkpoints store what the config says already."""


def load_weights(model: Llama, tensors: Iterable[tuple[str, CheckpointTensor]]) -> None:
    """Copy every tensor into its place, one at a time.

    Raises `CheckpointError` where a tensor has no place or a place gets no tensor. As in transformers, a config that
    ties the head to the embedding is believed unless the checkpoint holds a head of other values, and a tied model may
    store its one table under either name.
    """
    slots = dict(model.slots())
    missing = set(slots)
    spare_head: Tensor | None = None
    for name, tensor in tensors:
        if name.endswith(_COMPUTED):
            continue
        if name == HEAD and model.config.tied_head:
            spare_head = dense(tensor).clone()
        elif name not in slots:
            raise CheckpointError(f"the checkpoint holds {name!r}, for which this model has no place")
        else:
            try:
                slots[name].load(tensor)
            except CheckpointError as error:
                raise CheckpointError(f"{name!r} {error}") from None
            missing.discard(name)
    if spare_head is not None:
        if EMBEDDING in missing:
            slots[EMBEDDING].load(spare_head)
            missing.discard(EMBEDDING)
        elif not torch.equal(spare_head.to(model.embedding.weight), model.embedding.weight):
            model.untie_head(spare_head)
    if missing:
        names = sorted(missing)
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise CheckpointError(f"the checkpoint lacks {', '.join(names[:3])}{more}")


def fill_weights(model: Llama) -> None:
    """Random weights, the same in every run: each tensor's seed comes from its name."""
    for name, slot in model.slots():
        slot.fill(zlib.crc32(name.encode()))
