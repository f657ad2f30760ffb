"""Flags of commands, from the fields of settings: their names, types and docstrings. Text becomes values here."""

from __future__ import annotations

import argparse
import ast
import inspect
import textwrap
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from itertools import pairwise
from typing import Any, Literal

from asyncllm.errors import ConfigError


def add_fields(group: argparse._ArgumentGroup, settings: type[Any], own: Mapping[str, Any] | None = None) -> None:
    """One flag for each field that a text can be. An absent flag leaves no attribute, so the field's own default
    holds, or the command's `own`, which is only told here."""
    hints, helps = typing.get_type_hints(settings), field_docstrings(settings)
    for field in fields(settings):
        options = _flag_options(hints[field.name])
        if options is None:
            continue
        text = helps.get(field.name, "")
        default = (own or {}).get(field.name, field.default)
        if default is not MISSING and default not in (None, ()):
            text = f"{text} (default: {default})"
        group.add_argument(
            "--" + field.name.replace("_", "-"), default=argparse.SUPPRESS, help=text.replace("%", "%%"), **options
        )


def _flag_options(hint: Any) -> dict[str, Any] | None:
    """What argparse needs to know of a field's type: `int | None`, a Literal, a bool, `str | Sequence[str]`, …

    None for what has no form as a text: functions, and settings that are objects.
    """
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    kinds = [kind for kind in (typing.get_args(hint) if is_union else (hint,)) if kind is not types.NoneType]
    for kind in kinds:
        origin, items = typing.get_origin(kind), typing.get_args(kind)
        if origin is Literal:
            return (
                {"choices": items}
                if kinds == [kind]
                else {"type": _number_or(items), "metavar": "N|" + "|".join(items)}
            )
        if origin is Mapping:
            return {"action": "append", "type": _pair, "metavar": "ID=X"}
        if origin is Sequence and items[0] in _METAVARS:
            return {"action": "append", "type": items[0], "metavar": _METAVARS[items[0]]}
    if kinds == [bool]:
        return {"action": argparse.BooleanOptionalAction}
    return {"type": kinds[0], "metavar": _METAVARS[kinds[0]]} if kinds[0] in _METAVARS else None


def _number_or(words: Sequence[str]) -> Callable[[str], int | str]:
    def number(text: str) -> int | str:
        return text if text in words else int(text)

    return number


def _pair(text: str) -> tuple[int, float]:
    """An id and its number, of "id=number"."""
    token_id, _, number = text.partition("=")
    return int(token_id), float(number)


_METAVARS = {int: "N", float: "X", str: "TEXT"}


def field_docstrings(settings: type[Any]) -> dict[str, str]:
    """The string that stands under each field in the class's source; none where the source is not at hand."""
    try:
        source = textwrap.dedent(inspect.getsource(settings))
    except OSError:
        return {}
    body = typing.cast(ast.ClassDef, ast.parse(source).body[0]).body
    found = {}
    for field, text in pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            found[field.target.id] = " ".join(str(ast.literal_eval(text.value)).split())
    return found


def chosen_fields(settings: type[Any], chosen: argparse.Namespace) -> dict[str, Any]:
    """The fields of these settings that flags name."""
    return {field.name: getattr(chosen, field.name) for field in fields(settings) if hasattr(chosen, field.name)}


def text_fields(settings: type[Any], given: Mapping[str, str]) -> dict[str, Any]:
    """The fields of these settings among texts by name, as environment variables are. Raises `ConfigError`."""
    hints = typing.get_type_hints(settings)
    found = {}
    for field in fields(settings):
        options = _flag_options(hints[field.name])
        if field.name in given and options is not None:
            try:
                found[field.name] = _value(options, given[field.name])
            except ValueError as error:
                raise ConfigError(f"{field.name} of the environment: {error}") from error
    return found


def _value(options: Mapping[str, Any], text: str) -> Any:
    if "choices" in options:
        if text not in options["choices"]:
            raise ValueError(f"must be one of {', '.join(options['choices'])}")
        return text
    if options.get("action") is argparse.BooleanOptionalAction:
        words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
        if text.lower() not in words:
            raise ValueError("must be true or false")
        return words[text.lower()]
    convert = options["type"]
    if options.get("action") == "append":
        return [convert(part.strip()) for part in text.split(",") if part.strip()]
    return convert(text)
