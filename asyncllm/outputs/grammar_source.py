"""From a StructuredOutput to the grammar that llguidance compiles.

JSON is written with at most one space after a comma or a colon, and no other whitespace: a model cannot fill its tokens
with blanks. A string escapes only what must be, and in one way, so that no property can hide behind another spelling of
its name.

Does not belong here: what of a schema can be enforced (`json_schema`), compiling (`grammar`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher, grammar_from

from asyncllm.errors import GrammarError
from asyncllm.outputs.json_schema import enforceable_schema
from asyncllm.structured import StructuredOutput

JSON_FORM: Mapping[str, Any] = {
    "item_separator": ",[ ]?",
    "key_separator": ":[ ]?",
    "whitespace_flexible": False,
    "json_allowed_escapes": 'nrbtf\\"',
}
"""llguidance's options: how JSON is written."""

_TEXT = r"/(.|\n)*/"
_GBNF = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
_LARK_TOKEN = re.compile(
    r"""(?P<comment>//[^\n]*|\#[^\n]*)|(?P<text>"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/)"""
    r"""|(?P<json>%json\b)|(?P<option>\b(?:temperature|stop)\s*=)"""
)


def grammar_source(structured: StructuredOutput, specials: Mapping[str, int]) -> str:
    """The grammar, in llguidance's own form. `specials`: special tokens, text to id. Raises `GrammarError`."""
    source = structured.source
    try:
        match structured.kind:
            case "json_object":
                return _json_grammar({"type": "object"})
            case "json_schema":
                return _json_grammar(json.loads(source))
            case "regex":
                return LLMatcher.grammar_from_regex(source)
            case "choice":
                return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {_alternatives(json.loads(source))}")
            case "structural_tag":
                return LLMatcher.grammar_from_lark(_tag_grammar(json.loads(source), specials))
            case "grammar":
                if _GBNF.search(source):
                    return grammar_from("gbnf", source)
                return LLMatcher.grammar_from_lark(_checked_lark(source))
    except GrammarError:
        raise
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"{structured.kind}: {error!s:.300}") from None


def _json_grammar(schema: Any) -> str:
    return LLMatcher.grammar_from_json_schema(_json_text(schema))


def _json_text(schema: Any) -> str:
    schema = enforceable_schema(schema, _pattern_error)
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    return json.dumps({**schema, "x-guidance": JSON_FORM}, ensure_ascii=False)


def _pattern_error(pattern: str) -> str | None:
    message = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema({"type": "string", "pattern": pattern}))
    lines = message.splitlines()
    return lines[-1].strip()[:200] if lines else None  # a regular expression's error is named last


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _alternatives(texts: list[str]) -> str:
    return " | ".join(map(_literal, texts))


def _checked_lark(source: str) -> str:
    """The grammar with each schema in it made enforceable. llguidance reads `%json` as a schema of its own options."""
    parts: list[str] = []
    end = 0  # of what is in parts
    found = _LARK_TOKEN.search(source)
    while found is not None:
        position = found.end()
        if found["option"]:
            name = found["option"].rstrip("= \t\n")
            raise GrammarError(f"grammar: the attribute {name!r} cannot be enforced")
        if found["json"]:
            try:
                schema, position = json.JSONDecoder().raw_decode(source, _past_space(source, position))
            except ValueError as error:
                raise GrammarError(f"grammar: %json is not followed by a schema: {error}") from None
            parts += [source[end : found.end()], " ", _json_text(schema)]
            end = position
        elif "%json" in found[0]:
            raise GrammarError(f"grammar: {found[0]!r:.80} holds %json, which could be taken for the directive")
        found = _LARK_TOKEN.search(source, position)
    return "".join([*parts, source[end:]])


def _past_space(source: str, start: int) -> int:
    while start < len(source) and source[start].isspace():
        start += 1
    return start


@dataclass(frozen=True, slots=True)
class _Structure:
    begin: str
    schema: Any
    end: str


def _tag_grammar(tag: Mapping[str, Any], specials: Mapping[str, int]) -> str:
    """Free text up to a trigger, then what is left of a structure that begins with it, and so on."""
    unknown = tag.keys() - {"type", "structures", "triggers"}
    if unknown or tag.get("type", "structural_tag") != "structural_tag":
        raise GrammarError(f"structural_tag: {', '.join(sorted(unknown)) or tag['type']!r:.80} is not known")
    structures = [*_structures(tag.get("structures"))]
    triggers = tag.get("triggers")
    if not isinstance(triggers, list) or not triggers or not all(isinstance(t, str) and t for t in triggers):
        raise GrammarError("structural_tag: triggers must be a list of texts")
    for structure in structures:
        if not structure.begin.startswith(tuple(triggers)):
            raise GrammarError(f"structural_tag: {structure.begin!r:.80} begins with none of the triggers")
    rules = []
    tags = []
    for i, trigger in enumerate(dict.fromkeys(triggers)):
        bodies = [
            " ".join([*_parts(s.begin[len(trigger) :], specials), f"schema_{j}", *_parts(s.end, specials)])
            for j, s in enumerate(structures)
            if s.begin.startswith(trigger)
        ]
        if not bodies:
            raise GrammarError(f"structural_tag: no structure begins with the trigger {trigger!r:.80}")
        head = f"trigger_{i}"
        if trigger in specials:
            head = f"TEXT <[{specials[trigger]}]>"
        else:
            rules.append(f"trigger_{i}[lazy]: TEXT {_literal(trigger)}")
        rules.append(f"tag_{i}: {head} ({' | '.join(bodies)})")
        tags.append(f"tag_{i}")
    schemas = [f"schema_{j}: %json {_json_text(structure.schema)}" for j, structure in enumerate(structures)]
    return "\n".join([f"start: ({' | '.join(tags)})* rest", "rest: TEXT", f"TEXT: {_TEXT}", *rules, *schemas])


def _structures(value: Any) -> Iterator[_Structure]:
    if not isinstance(value, list) or not value:
        raise GrammarError("structural_tag: structures must be a list of objects")
    for item in value:
        if not isinstance(item, Mapping) or not item.keys() <= {"begin", "schema", "end"}:
            raise GrammarError(f"structural_tag: a structure has begin, schema and end, got {item!r:.80}")
        begin, end = item.get("begin"), item.get("end", "")
        if not isinstance(begin, str) or not begin or not isinstance(end, str):
            raise GrammarError(f"structural_tag: begin and end of a structure are texts, got {item!r:.80}")
        yield _Structure(begin, item.get("schema", True), end)


def _parts(text: str, specials: Mapping[str, int]) -> Iterator[str]:
    """The symbols of a text: special tokens in it are one each, the rest is literal."""
    if specials:
        pattern = "|".join(re.escape(name) for name in sorted(specials, key=len, reverse=True) if name)
        pieces = re.split(f"({pattern})", text) if pattern else [text]
    else:
        pieces = [text]
    for piece in pieces:
        if piece in specials:
            yield f"<[{specials[piece]}]>"
        elif piece:
            yield _literal(piece)
