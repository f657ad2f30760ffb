from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from asyncllm.errors import CheckpointError
from asyncllm.layers.attention import LayerCache
from asyncllm.layers.parameter import Placement
from asyncllm.models.checkpoint import fill_weights
from asyncllm.models.llama import Llama
from asyncllm.models.registry import read_model_config
from asyncllm.testing.tiny_models import tiny_config, write_tiny_model
from tests.models.single_model import SingleModel
from tests.models.test_llama import assert_close, prompt, reference_logits

TIED = {"tie_word_embeddings": True}
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def rewrite(folder: Path, changes: Mapping[str, np.ndarray | None]) -> Path:
    """Replace, add, or (None) remove tensors of a model."""
    tensors = {**load_file(folder / "model.safetensors"), **changes}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def assert_like_transformers(folder: Path) -> SingleModel:
    model = SingleModel(folder)
    assert_close(model.logits(prompt(24)), reference_logits(folder, prompt(24)))
    return model


def test_tied_without_a_head(tmp_path: Path) -> None:
    model = assert_like_transformers(write_tiny_model(tmp_path, config=TIED))
    assert model.model.head.weight is model.model.embedding.weight


def test_tied_with_an_equal_head(tmp_path: Path) -> None:
    model = assert_like_transformers(write_tiny_model(tmp_path, config=TIED, head=True))
    assert model.model.head.weight is model.model.embedding.weight


def test_untied(tmp_path: Path) -> None:
    assert_like_transformers(write_tiny_model(tmp_path))


def test_untied_without_a_head(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, head=False)
    with pytest.raises(CheckpointError, match=r"lacks lm_head\.weight"):
        SingleModel(tmp_path)


def test_tied_with_a_different_head(tmp_path: Path) -> None:
    """The checkpoint is believed, not the config."""
    write_tiny_model(tmp_path, config=TIED)
    head = np.random.default_rng(1).standard_normal((512, 64)).astype(np.float32)
    model = assert_like_transformers(rewrite(tmp_path, {HEAD: head}))
    embedding_only = sum(slot.target.nbytes for _, slot in model.model.slots())
    assert model.model.weight_bytes() == embedding_only + head.nbytes


def test_tied_with_the_table_under_the_name_of_the_head(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, config=TIED)
    table = load_file(tmp_path / "model.safetensors")[EMBEDDING]
    assert_like_transformers(rewrite(tmp_path, {HEAD: table, EMBEDDING: None}))


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    rewrite(write_tiny_model(tmp_path), {"model.layers.1.mlp.up_proj.weight": None})
    with pytest.raises(CheckpointError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight$"):
        SingleModel(tmp_path)


def test_a_tensor_without_a_place_is_named(tmp_path: Path) -> None:
    rewrite(write_tiny_model(tmp_path), {"model.layers.0.self_attn.q_proj.bias": np.zeros(64, np.float32)})
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.self_attn\.q_proj\.bias.*no place"):
        SingleModel(tmp_path)


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    rewrite(write_tiny_model(tmp_path), {"model.norm.weight": np.zeros(63, np.float32)})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight' has shape \(63,\), the model needs \(64,\)"):
        SingleModel(tmp_path)


def test_stored_rope_frequencies_are_ignored(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    expected = SingleModel(tmp_path).logits(prompt(24))
    rewrite(tmp_path, {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)})
    assert torch.equal(SingleModel(tmp_path).logits(prompt(24)), expected)


def test_stored_types_are_converted(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    rewrite(tmp_path, {name: tensor.astype(np.float16) for name, tensor in tensors.items()})
    assert_like_transformers(tmp_path)


def test_random_stand_ins_are_sane_and_always_the_same() -> None:
    config = read_model_config(tiny_config(attention_bias=True))
    models = []
    for _ in range(2):
        model = Llama(config, [LayerCache(0, 0)] * 2, 64, Placement(torch.float32, torch.device("cpu")))
        fill_weights(model)
        models.append(dict(model.slots()))
    for name, slot in models[0].items():
        assert torch.equal(slot.target, models[1][name].target)
        if name.endswith(".bias"):
            assert (slot.target == 0).all()
        elif "norm" in name:
            assert (slot.target == 1).all()
        else:
            columns = slot.target.shape[-1]
            assert abs(slot.target.std() * columns**0.5 - 1) < 0.05
    assert not torch.equal(
        models[0]["model.layers.0.mlp.up_proj.weight"].target, models[0]["model.layers.1.mlp.up_proj.weight"].target
    )
