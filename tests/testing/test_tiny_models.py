from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from asyncllm.testing.tiny_models import (
    CHAT_TEMPLATE,
    tiny_config,
    tiny_weights,
    write_byte_tokenizer,
    write_piece_model,
    write_script_model,
    write_tiny_model,
)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_same_arguments_same_bytes(tmp_path: Path) -> None:
    for writer in (write_tiny_model, lambda folder: write_script_model(folder, [[5, 6, 2]])):
        first, second = writer(tmp_path / f"{id(writer)}a"), writer(tmp_path / f"{id(writer)}b")
        assert files(first) == files(second)
    assert files(write_tiny_model(tmp_path / "seed", seed=1)) != files(write_tiny_model(tmp_path / "other"))


@pytest.mark.parametrize("text", ["The capital of France is", "ď 你 🌶\n\n", "", " \x04"])
def test_byte_tokenizer_takes_any_text(text: str, tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path, chat_template=CHAT_TEMPLATE)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 512
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["chat_template"] == CHAT_TEMPLATE


def test_shards_hold_the_whole_model(tmp_path: Path) -> None:
    whole = load_file(write_tiny_model(tmp_path / "whole") / "model.safetensors")
    folder = write_tiny_model(tmp_path / "shards", shards=3)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shards = {name: load_file(folder / name) for name in set(index["weight_map"].values())}
    assert len(shards) == 3
    assert {name: shards[file][name].tobytes() for name, file in index["weight_map"].items()} == {
        name: tensor.tobytes() for name, tensor in whole.items()
    }


def test_a_script_takes_the_vocabulary_of_its_tokenizer(tmp_path: Path) -> None:
    pieces = write_piece_model(tmp_path / "pieces", ["a", "b"], chat_template=CHAT_TEMPLATE)
    folder = write_script_model(tmp_path / "script", [[3, 4, 0]], tokenizer=pieces.folder, eos_token_ids=(0, 2))
    config = json.loads((folder / "config.json").read_text())
    assert (config["vocab_size"], config["eos_token_id"]) == (5, [0, 2])
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [0, 2]
    assert (folder / "tokenizer_config.json").read_bytes() == (pieces.folder / "tokenizer_config.json").read_bytes()


def test_an_id_has_one_successor(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="5 is followed by both 6 and 7"):
        write_script_model(tmp_path, [[5, 6], [5, 7]])


def test_pieces_may_repeat(tmp_path: Path) -> None:
    model = write_piece_model(tmp_path, ["Say:", "{", '"', "a", '"', "}"])
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.decode(list(model.token_ids)) == model.text == '{"a"}'
    assert tokenizer.encode(model.prompt).ids == [3]
    assert model.token_ids == (4, 5, 6, 7, 8, 2)


def test_weights_follow_the_family() -> None:
    biased = tiny_weights(tiny_config(model_type="qwen2"))
    assert "model.layers.0.self_attn.q_proj.bias" in biased
    assert "model.layers.0.self_attn.o_proj.bias" not in biased
    assert "model.layers.0.self_attn.q_norm.weight" in tiny_weights(tiny_config(model_type="qwen3"))
    assert "lm_head.weight" not in tiny_weights(tiny_config(tie_word_embeddings=True))
