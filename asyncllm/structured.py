"""StructuredOutput: the form that the output of one request must have.

Everything here can be judged without a tokenizer: that exactly one form is given, its type, its size. Whether it can be
compiled and enforced is found out at admission (`outputs.grammar`), off the event loop.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal

from asyncllm.errors import DependencyError, InvalidParamsError

MAX_CHARACTERS = 512 * 1024
"""Of a schema, a regex, a grammar or a structural tag; and of all choices together."""
MAX_DEPTH = 100
"""Objects and lists inside one another."""
MAX_CHOICES = 10_000

Kind = Literal["json_schema", "regex", "choice", "grammar", "json_object", "structural_tag"]
_KINDS: tuple[Kind, ...] = ("json_schema", "regex", "choice", "grammar", "json_object", "structural_tag")

_STRING = re.compile(r'"(?:[^"\\]|\\.)*+"')
_NO_BRACKET = re.compile(r"[^][{}]+")
_STEPS = {"[": 1, "{": 1, "]": -1, "}": -1}


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutput:
    """Exactly one of the first six. Frozen, and equal to another of the same content; what cannot be raises
    `InvalidParamsError` here, or `GrammarError` when the request is submitted.

    The output ends by `stop` only where it is complete. JSON is written with at most one space after a comma or a
    colon, and no other whitespace; properties come in the schema's order.
    """

    json_schema: Mapping[str, Any] | str | bool | None = None
    """A JSON Schema: a mapping, its text, or a Pydantic model. Kept as text, so that it can be compared and hashed."""
    regex: str | None = None
    """The whole output matches this regular expression (Rust's syntax: no look-around, no back-references)."""
    choice: Sequence[str] | None = None
    """The output is one of these texts."""
    grammar: str | None = None
    """A context-free grammar: Lark, as llguidance reads it, or GBNF (which has `::=`)."""
    json_object: bool | None = None
    """True: any JSON object."""
    structural_tag: Mapping[str, Any] | str | None = None
    """Free text in which structures may stand: `{"structures": [{"begin": ..., "schema": ..., "end": ...}], "triggers":
    [...]}`. Once a trigger is written, one of the structures that begin with it must follow."""
    after_reasoning: bool | str = False
    """A model that reasons may do so first, and the form is that of what follows. True: between the tags that its chat
    template knows; or the name of a reasoning format. Where there is none, and where the prompt has ended the
    reasoning, the form begins at once."""
    model: Any = field(default=None, compare=False)
    """The Pydantic model, or any type that Pydantic knows, that the output is validated to; see `from_model`."""

    def __post_init__(self) -> None:
        given = [kind for kind in _KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            raise InvalidParamsError(
                f"structured_output takes exactly one of {', '.join(_KINDS)}; got {', '.join(given) or 'none'}"
            )
        kind = given[0]
        if not isinstance(self.after_reasoning, bool | str):
            raise InvalidParamsError(
                f"structured_output.after_reasoning must be True, False or a name, got {self.after_reasoning!r:.80}"
            )
        if kind == "json_schema" and hasattr(self.json_schema, "model_json_schema"):
            object.__setattr__(self, "model", self.json_schema)
            object.__setattr__(self, "json_schema", _model_schema(self.json_schema))
        value = getattr(self, kind)
        if kind in ("json_schema", "structural_tag"):
            object.__setattr__(self, kind, _json_text(kind, value))
        elif kind == "choice":
            object.__setattr__(self, kind, _choices(value))
        elif kind == "json_object":
            if value is not True:
                raise InvalidParamsError(f"structured_output.json_object must be True or left out, got {value!r:.80}")
        else:
            _check_text(kind, value)
        if self.model is not None and kind != "json_schema":
            raise InvalidParamsError("structured_output.model goes with json_schema only")

    @classmethod
    def from_model(cls, model: Any, *, after_reasoning: bool | str = False) -> StructuredOutput:
        """The schema of a Pydantic model, or of any type that Pydantic knows; the completion's `parsed` is one.

        Where the model says nothing of further properties, there are none.
        """
        return cls(json_schema=_model_schema(model), model=model, after_reasoning=after_reasoning)

    @property
    def kind(self) -> Kind:
        """The name of the field that is given."""
        return next(kind for kind in _KINDS if getattr(self, kind) is not None)

    @property
    def source(self) -> str:
        """What is given, as text: with `kind` it says all that a grammar needs."""
        value = getattr(self, self.kind)
        return value if isinstance(value, str) else json.dumps(value)

    @property
    def characters(self) -> int:
        """About how much there is to compile."""
        value = getattr(self, self.kind)
        return len(value) if isinstance(value, str) else sum(map(len, self.choice or ()))

    def parse(self, text: str) -> Any:
        """What a complete output is: the model where there is one, the value of JSON, else the text.

        Raises `ValueError` for a text that is not JSON, or that the model's own validators refuse.
        """
        if self.model is not None:
            if hasattr(self.model, "model_validate_json"):
                return self.model.model_validate_json(text)
            return _type_adapter(self.model).validate_json(text)
        if self.kind not in ("json_schema", "json_object"):
            return text
        try:
            return json.loads(text)
        except RecursionError:
            raise ValueError("the output is nested too deeply to be read") from None


def _model_schema(model: Any) -> Any:
    if isinstance(model, Mapping | str | bool | None):
        raise InvalidParamsError(f"structured_output: {model!r:.80} is no Pydantic model; give it as json_schema")
    try:
        if hasattr(model, "model_json_schema"):
            return _closed(model.model_json_schema())
        return _closed(_type_adapter(model).json_schema())
    except (DependencyError, InvalidParamsError):
        raise
    except Exception as error:  # Pydantic has several for a type that has no schema
        raise InvalidParamsError(f"structured_output: {model!r:.80} has no JSON schema: {error}") from error


def _closed(schema: Any) -> Any:
    """Without room for properties that a model does not have: it would leave them out again (one that keeps them says
    so in its schema)."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed(item) for name, item in schema.items()}
    if schema.get("type") == "object" and isinstance(schema.get("properties"), dict):
        closed.setdefault("additionalProperties", False)
    return closed


def _type_adapter(model: Any) -> Any:
    try:
        from pydantic import TypeAdapter  # noqa: PLC0415  an extra; and slow to import
    except ImportError as error:
        raise DependencyError("a type as a schema needs pydantic: pip install 'asyncllm[grammar]'") from error
    return TypeAdapter(model)


def _check_text(kind: Kind, value: object) -> None:
    if not isinstance(value, str):
        raise InvalidParamsError(f"structured_output.{kind} must be a text, got {value!r:.80}")
    if len(value) > MAX_CHARACTERS:
        raise InvalidParamsError(
            f"structured_output.{kind} has {len(value):,} characters; at most {MAX_CHARACTERS:,} are taken"
        )
    if not value.strip() and kind != "regex":
        raise InvalidParamsError(f"structured_output.{kind} is empty")
    _check_unicode(kind, value)


def _check_unicode(kind: Kind, value: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidParamsError(f"structured_output.{kind} is not valid Unicode: {error}") from None


def _choices(value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise InvalidParamsError(f"structured_output.choice must be a list of texts, got {value!r:.80}")
    if not all(isinstance(text, str) for text in value):
        raise InvalidParamsError(f"structured_output.choice must hold texts only, got {value!r:.80}")
    if any(not text for text in value):
        raise InvalidParamsError("structured_output.choice holds an empty text")
    if len(value) > MAX_CHOICES or sum(map(len, value)) > MAX_CHARACTERS:
        raise InvalidParamsError(
            f"structured_output.choice may hold at most {MAX_CHOICES:,} texts of {MAX_CHARACTERS:,} characters in all"
        )
    for text in value:
        _check_unicode("choice", text)
    return tuple(dict.fromkeys(value))


def _json_text(kind: Kind, value: object) -> str:
    """Compact, with its keys in their order, which matters: properties are written in it."""
    name = f"structured_output.{kind}"
    try:
        if isinstance(value, str):
            _check_text(kind, value)
            value = json.loads(value)
        if not isinstance(value, Mapping | bool if kind == "json_schema" else Mapping):
            raise InvalidParamsError(f"{name} must be an object, got {value!r:.80}")
        # all of it in C: this may run on an event loop
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=_as_dict)
    except InvalidParamsError:
        raise
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidParamsError(f"{name} is not JSON: {error!s:.200}") from None
    _check_text(kind, text)
    if _depth(text) > MAX_DEPTH:
        raise InvalidParamsError(f"{name} is nested deeper than {MAX_DEPTH} levels")
    return text


def _as_dict(value: object) -> dict[Any, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{value!r:.80} is no JSON value")


def _depth(text: str) -> int:
    """Of a JSON text: brackets open at once."""
    brackets = _NO_BRACKET.sub("", _STRING.sub("", text))
    return max(accumulate(map(_STEPS.__getitem__, brackets)), default=0)
