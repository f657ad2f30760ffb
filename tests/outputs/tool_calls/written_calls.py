"""Random messages with tool calls, written as models of each format write them; and what must be read of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from asyncllm.outputs.tool_calls.definitions import ToolDefinition
from asyncllm.outputs.tool_calls.deltas import ToolDelta, ToolMessage, join_deltas
from asyncllm.outputs.tool_calls.tool_parser import make_tool_parser

NAMES = ("f", "get_weather", "ns.tool-2", "function")


def tools(*names: str, parameters: dict[str, Any] | None = None) -> tuple[ToolDefinition, ...]:
    return tuple(ToolDefinition(name, parameters or {"type": "object"}) for name in names)


def parse(name: str, pieces: Sequence[str], known: Sequence[ToolDefinition] | None) -> ToolMessage:
    return join_deltas(parse_deltas(name, pieces, known))


def parse_deltas(name: str, pieces: Sequence[str], known: Sequence[ToolDefinition] | None) -> list[ToolDelta]:
    parser = make_tool_parser(name, known)
    deltas = [delta for piece in pieces for delta in parser.push(piece)]
    return deltas + parser.flush()


def outcome(message: ToolMessage) -> tuple[str, list[tuple[str, str]]]:
    """All but the ids, which are random."""
    return message.content, [(call.name, call.arguments) for call in message.calls]


def cut(text: str, places: Sequence[int]) -> list[str]:
    """The text in pieces, some of them empty."""
    ends = sorted(place % (len(text) + 1) for place in places)
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


@dataclass(frozen=True)
class Call:
    name: str
    arguments: dict[str, Any]
    separators: tuple[str, str]

    @property
    def text(self) -> str:
        return json.dumps(self.arguments, ensure_ascii=False, separators=self.separators)

    def wrapped(self, key: str) -> str:
        comma, colon = self.separators
        return f'{{"name"{colon}{json.dumps(self.name)}{comma}"{key}"{colon}{self.text}}}'


def hermes(calls: Sequence[Call]) -> str:
    return "\n".join(f"<tool_call>\n{call.wrapped('arguments')}\n</tool_call>" for call in calls)


def qwen3_coder(calls: Sequence[Call]) -> str:
    written = []
    for call in calls:
        values = "".join(
            f"<parameter={name}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
            for name, value in call.arguments.items()
        )
        written.append(f"<tool_call>\n<function={call.name}>\n{values}</function>\n</tool_call>")
    return "\n".join(written)


def llama3(calls: Sequence[Call]) -> str:
    return "; ".join(call.wrapped("parameters") for call in calls)


def mistral(calls: Sequence[Call]) -> str:
    return f"[TOOL_CALLS] [{', '.join(call.wrapped('arguments') for call in calls)}]"


def pythonic(calls: Sequence[Call]) -> str:
    written = [f"{c.name}({', '.join(f'{key}={value!r}' for key, value in c.arguments.items())})" for c in calls]
    return f"[{', '.join(written)}]"


def deepseek_v3(calls: Sequence[Call]) -> str:
    each = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{c.name}\n```json\n{c.text}\n```<｜tool▁call▁end｜>" for c in calls
    ]
    joined = "\n".join(each)
    return f"<｜tool▁calls▁begin｜>{joined}<｜tool▁calls▁end｜>"


def deepseek_v31(calls: Sequence[Call]) -> str:
    each = [f"<｜tool▁call▁begin｜>{c.name}<｜tool▁sep｜>{c.text}<｜tool▁call▁end｜>" for c in calls]
    return f"<｜tool▁calls▁begin｜>{''.join(each)}<｜tool▁calls▁end｜>"


@dataclass(frozen=True)
class Written:
    """One way to write calls."""

    format: str
    write: Callable[[Sequence[Call]], str]
    before: bool = True  # text may stand before
    keywords: bool = False  # arguments are named as in Python
    exact: bool = True  # the arguments are JSON as they stand
    text_values: bool = False  # a value is not quoted, so some texts cannot be one


WRITTEN = {
    "hermes": Written("hermes", hermes),
    "hermes for qwen3-coder": Written("qwen3_coder", hermes),
    "qwen3_coder": Written("qwen3_coder", qwen3_coder, keywords=True, exact=False, text_values=True),
    "llama3": Written("llama3_json", llama3, before=False),
    "llama3, tagged": Written("llama3_json", lambda calls: "<|python_tag|>" + llama3(calls)),
    "mistral": Written("mistral", mistral),
    "mistral, named": Written("mistral", lambda calls: "".join(f"[TOOL_CALLS]{c.name}[ARGS]{c.text}" for c in calls)),
    "mistral, bare": Written("mistral", lambda calls: "".join(f"[TOOL_CALLS]{c.name}{c.text}" for c in calls)),
    "pythonic": Written("pythonic", pythonic, before=False, keywords=True, exact=False),
    "deepseek v3": Written("deepseek", deepseek_v3),
    "deepseek v3.1": Written("deepseek", deepseek_v31),
}

_KEYWORDS = st.from_regex(re.compile(r"[a-zA-Z_äß][a-zA-Z0-9_]{0,5}"), fullmatch=True)
_NASTY = st.text(st.sampled_from("\"\\{}[]()<>|,:='\n </_｜▁é😀"), max_size=6)
_TEXT = st.one_of(_NASTY, st.text(st.characters(exclude_categories=["Cs"]), max_size=6))
_SCALARS = st.one_of(_TEXT, st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False))
_VALUES = st.recursive(
    _SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3), max_leaves=6
)


def calls(written: Written) -> st.SearchStrategy[list[Call]]:
    keys = _KEYWORDS if written.keywords else _TEXT
    names = st.sampled_from([name for name in NAMES if not (written.keywords and not name.isidentifier())])
    values = _VALUES if not written.text_values else st.one_of(_SCALARS, st.lists(_SCALARS, max_size=2))
    arguments = st.dictionaries(keys, values, max_size=3)
    separators = st.sampled_from([(", ", ": "), (",", ":"), (" ,\n", " :  ")])
    # unique names: then the schema of a parameter follows from its value
    unique = (lambda call: call.name) if written.text_values else None
    return st.lists(st.builds(Call, names, arguments, separators), min_size=1, max_size=3, unique_by=unique)


prose = st.builds("{}.".format, st.text(st.sampled_from("ab \n.,<t[T{"), max_size=8))
places = st.lists(st.integers(0, 10_000), max_size=12)
