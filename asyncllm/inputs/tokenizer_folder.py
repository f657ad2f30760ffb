"""Reads a tokenizer from a model's folder, as transformers saves it.

tokenizer.json is the tokenizer; tokenizer_config.json and special_tokens_map.json name its special tokens and may
change its added tokens and whether BOS and EOS are added (the rules are those of transformers'
`TokenizersBackend`); chat templates are in files of their own or in tokenizer_config.json. Where there is only a slow
tokenizer (tokenizer.model, vocab.json with merges.txt), transformers converts it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, processors

from asyncllm.errors import DependencyError, TokenizerError
from asyncllm.inputs.tokenizer_parts import TokenizerParts

_SLOW_FILES = ("tokenizer.model", "vocab.json", "vocab.txt", "tiktoken.model", "spiece.model")


def holds_tokenizer(folder: Path) -> bool:
    """Whether a folder has a tokenizer of any form."""
    return any((folder / name).is_file() for name in ("tokenizer.json", *_SLOW_FILES))


def read_tokenizer_folder(folder: Path) -> TokenizerParts:
    """Reads the tokenizer and the chat templates of a folder. Raises `TokenizerError` for what is missing or broken."""
    config = _read_json(folder / "tokenizer_config.json")
    special_tokens = _special_tokens(_read_json(folder / "special_tokens_map.json")) | _special_tokens(config)
    path = folder / "tokenizer.json"
    if path.is_file():
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
            _apply_added_tokens(backend, config, special_tokens)
            _apply_bos_and_eos(backend, config, special_tokens)
        except Exception as error:  # the package raises bare Exception for a broken file
            raise TokenizerError(f"{path} cannot be read: {error}") from error
    elif holds_tokenizer(folder):
        backend = _convert_slow(folder)
    else:
        raise TokenizerError(f"{folder} has no tokenizer: there is no tokenizer.json (nor {', '.join(_SLOW_FILES)})")
    eos = special_tokens.get("eos_token")
    eos_id = None if eos is None else backend.token_to_id(eos)
    return TokenizerParts(
        backend=backend,
        eos_token_ids=frozenset() if eos_id is None else frozenset({eos_id}),
        special_tokens=special_tokens,
        chat_templates=_chat_templates(folder, config),
    )


def _read_json(path: Path) -> Mapping[str, Any]:
    """The object in a JSON file; empty where there is no such file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise TokenizerError(f"{path} must hold a JSON object, got {type(data).__name__}")
    return data


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The named special tokens; each is a text, or an object whose "content" is the text."""
    found = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _apply_added_tokens(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> None:
    """tokenizer_config.json has the last word on added tokens, and every named special token is one."""
    present = {repr(token) for token in backend.get_added_tokens_decoder().values()}
    entries = config.get("added_tokens_decoder") or {}
    fields = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
    for _, entry in sorted(entries.items(), key=lambda item: int(item[0])):
        token = AddedToken(**{name: entry[name] for name in fields if name in entry})
        if repr(token) not in present:
            backend.add_tokens([token])
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    named = [text for text in dict.fromkeys(special_tokens.values()) if text not in known]
    backend.add_tokens([AddedToken(text, special=True) for text in named])


def _apply_bos_and_eos(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> None:
    """Where the config says whether BOS and EOS are added, that replaces tokenizer.json's own rule."""
    if "add_bos_token" not in config and "add_eos_token" not in config:
        return
    bos = special_tokens.get("bos_token") if config.get("add_bos_token") else None
    eos = special_tokens.get("eos_token") if config.get("add_eos_token") else None
    set_bos_and_eos(backend, bos, eos)


def set_bos_and_eos(backend: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> None:
    """Makes encoding with special tokens put these around the text."""
    around = [token for token in (bos, eos) if token is not None]
    pieces = [*([bos] if bos is not None else []), "$A", *([eos] if eos is not None else [])]
    backend.post_processor = processors.TemplateProcessing(
        single=pieces, special_tokens=[(token, backend.token_to_id(token)) for token in dict.fromkeys(around)]
    )


def _convert_slow(folder: Path) -> tokenizers.Tokenizer:
    try:
        from transformers import AutoTokenizer  # noqa: PLC0415  slow to import, and only needed here
    except ImportError as error:
        raise DependencyError(f"{folder} has no tokenizer.json; converting it needs transformers: {error}") from error
    try:
        converted = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        backend = converted.backend_tokenizer
    except Exception as error:  # transformers raises many kinds; all mean that there is no tokenizer
        raise TokenizerError(
            f"{folder} has no tokenizer.json, and transformers cannot convert the files there: {error}"
        ) from error
    if not isinstance(backend, tokenizers.Tokenizer):
        raise TokenizerError(f"{folder} has no tokenizer.json, and its tokenizer has no fast form")
    return backend


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Name to source. Files of their own win over chat_template.json, which wins over tokenizer_config.json."""
    templates = named_templates(config.get("chat_template"))
    templates |= named_templates(_read_json(folder / "chat_template.json").get("chat_template"))
    files = {"default": folder / "chat_template.jinja"}
    files |= {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    for name, path in files.items():
        try:
            templates[name] = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise TokenizerError(f"{path} cannot be read: {error}") from error
    return templates


def named_templates(value: Any) -> dict[str, str]:
    """Templates as configs write them: one source, or a list of names and sources."""
    if isinstance(value, str):
        return {"default": value}
    if not value:
        return {}
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in value}
    except (TypeError, KeyError) as error:
        raise TokenizerError(f"chat_template must be a text or a list of named ones, got {value!r:.200}") from error
