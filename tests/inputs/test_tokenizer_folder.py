from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asyncllm.errors import TokenizerError
from asyncllm.inputs.tokenizer import Tokenizer, TokenizerData
from asyncllm.inputs.tokenizer_folder import read_tokenizer_folder
from tests.inputs import toy_tokenizers as toys


def folder_of(path: Path, **config: Any) -> Path:
    return toys.write_folder(path, toys.byte_level(), config)


def load(folder: Path) -> Tokenizer:
    return Tokenizer.load(TokenizerData(folder=folder))


def test_special_tokens_as_text_as_objects_and_in_their_own_file(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, eos_token={"content": "</s>", "lstrip": False}, model_max_length=12, pad_token=None)
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "<s>"}))
    tokenizer = load(folder)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer.eos_token_ids == {tokenizer.token_id("</s>")}
    assert tokenizer.bos_token_id == tokenizer.token_id("<s>")


@pytest.mark.parametrize(
    ("flags", "before", "after"),
    [
        ({"add_bos_token": True}, ["<s>"], []),
        ({"add_bos_token": True, "add_eos_token": True}, ["<s>"], ["</s>"]),
        ({"add_bos_token": False}, [], []),
        ({}, ["</s>"], []),  # what tokenizer.json itself says
    ],
)
def test_who_adds_bos_and_eos(tmp_path: Path, flags: dict[str, bool], before: list[str], after: list[str]) -> None:
    folder = folder_of(tmp_path, bos_token="<s>", eos_token="</s>", **flags)
    data = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    eos = next(token["id"] for token in data["added_tokens"] if token["content"] == "</s>")
    data["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "</s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"</s>": {"id": "</s>", "ids": [eos], "tokens": ["</s>"]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    tokenizer = load(folder)
    ids = tokenizer.encode("hi")
    assert ids == [*map(tokenizer.token_id, before), *b"hi", *map(tokenizer.token_id, after)]
    assert tokenizer.encode("hi", add_special_tokens=False) == list(b"hi")


def test_the_config_has_the_last_word_on_added_tokens(tmp_path: Path) -> None:
    plain = load(folder_of(tmp_path / "plain"))
    think = plain.token_id("<think>")
    assert think not in plain.special_ids
    entry = {"content": "<think>", "lstrip": False, "normalized": False, "rstrip": False, "special": True}
    changed = load(folder_of(tmp_path / "changed", added_tokens_decoder={str(think): entry}, eos_token="<|end|>"))
    assert changed.token_id("<think>") == think
    assert think in changed.special_ids
    end = changed.token_id("<|end|>")  # named, though the vocabulary did not have it
    assert changed.eos_token_ids == {end}
    assert end in changed.special_ids
    assert changed.encode("a<|end|>") == [97, end]


def test_chat_templates_from_every_place(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, chat_template="in the config")
    assert load(folder).chat_templates == {"default": "in the config"}
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "in a JSON file"}))
    assert load(folder).chat_templates == {"default": "in a JSON file"}
    (folder / "chat_template.jinja").write_text("é in a file", encoding="utf-8")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("for tools")
    assert load(folder).chat_templates == {"default": "é in a file", "tool_use": "for tools"}
    named = [{"name": "default", "template": "one"}, {"name": "rag", "template": "two"}]
    assert load(folder_of(tmp_path / "named", chat_template=named)).chat_templates == {"default": "one", "rag": "two"}
    assert load(folder_of(tmp_path / "none")).chat_templates == {}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", '{"version": "1.0"}'),
        ("tokenizer.json", "version https://git-lfs.github.com/spec/v1"),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[]"),
        ("special_tokens_map.json", "\x00"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, name: str, content: str) -> None:
    folder = folder_of(tmp_path)
    (folder / name).write_text(content)
    with pytest.raises(TokenizerError, match=name):
        load(folder)


def test_broken_templates_and_tokens_are_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="chat_template"):
        load(folder_of(tmp_path / "a", chat_template=[{"name": "default"}]))
    with pytest.raises(TokenizerError, match="cannot be read"):
        load(folder_of(tmp_path / "b", added_tokens_decoder={"x": {}}))
    folder = folder_of(tmp_path / "c")
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(TokenizerError, match=r"chat_template\.jinja"):
        load(folder)


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
        read_tokenizer_folder(tmp_path)


def test_a_slow_tokenizer_is_converted(tmp_path: Path) -> None:
    vocab, merges = toys.byte_level_vocabulary()
    (tmp_path / "vocab.json").write_text(json.dumps(vocab | {"<|endoftext|>": 301}), encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]
    (tmp_path / "merges.txt").write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"})
    )
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    tokenizer = load(tmp_path)
    assert tokenizer.encode("the é") == toys.byte_level().encode("the é")
    assert tokenizer.eos_token_ids == {301}


@pytest.mark.full
def test_a_slow_tokenizer_that_cannot_be_converted(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"not a model")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(TokenizerError, match="cannot convert"):
        load(tmp_path)
