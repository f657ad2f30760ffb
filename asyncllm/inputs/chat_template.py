"""Chat templates: messages to the text that a model was trained on.

A template is a Jinja program from the model's repository. It runs in Jinja's sandbox, on plain data, with the
environment that transformers gives it (`transformers.utils.chat_template_utils`), so it writes the same text.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from asyncllm.errors import ChatTemplateError, InvalidPromptError
from asyncllm.inputs.chat_messages import Message, normalise_messages, normalise_tools, plain, with_short_ids

MAX_GROWTH = 16 * 1024 * 1024
"""Characters that a template may write beyond 4 times what it was given."""
MAX_SECONDS = 60.0
"""That a template may take; looked at whenever it writes."""

_WIDE_PERCENT = re.compile(r"%[^a-zA-Z%]*(\d{6,}|\*)")
_WIDE_BRACES = re.compile(r"\{[^{}]*:[^{}]*\d{6,}")
"""Formats with a width that is large, or (of the first kind) is itself a value."""

_NINE_CHARACTERS = re.compile(r"length\s*!=\s*9")
"""How Mistral's templates refuse other ids of tool calls."""

_MARK = "CONTINUE_HERE "
"""Stands at the end of a message that is left open. Its space shows whether the template trims."""

_NO_TEMPLATE = (
    "this model has no chat template; give one with EngineConfig(chat_template=...), or put a chat_template.jinja into "
    "the model's folder, or send the prompt as text"
)


class ChatTemplate:
    """The chat templates of one model; may be used from any number of threads at once.

    `templates` maps names to Jinja sources ("default" is the main one; "tool_use" serves requests with tools), and
    may be empty; `special_tokens` ("bos_token", ...) are variables that templates see.
    """

    def __init__(self, templates: Mapping[str, str] | str, special_tokens: Mapping[str, str] | None = None) -> None:
        self._sources = {"default": templates} if isinstance(templates, str) else dict(templates)
        self._special_tokens = dict(special_tokens or {})
        self._compiled: dict[str, jinja2.Template] = {}

    @property
    def source(self) -> str | None:
        """The main template's Jinja source; the one for tools, where only that one is there; None without any."""
        return self._sources.get("default", next(iter(self._sources.values()), None))

    @property
    def tool_source(self) -> str | None:
        """The same of the template that serves requests with tools."""
        return self._sources.get("tool_use", self.source)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_name: str | None = None,
        **variables: Any,
    ) -> str:
        """The text of a chat, which holds its special tokens: encode it without adding any.

        `continue_final_message` leaves the last message, the assistant's, open, so that generation goes on with it.
        `variables` are passed to the template. Blocking: for a worker thread. Raises `InvalidPromptError` for
        messages of an unknown shape, and `ChatTemplateError` where there is no template or it refuses the messages.
        """
        if "messages" in variables:
            raise InvalidPromptError("messages cannot be given as a variable of the chat template")
        chat = normalise_messages(messages)
        tool_list = normalise_tools(tools)
        name = self._name(template_name, tool_list is not None)
        template = self._template(name)
        chat = _as_known(chat, self._sources[name])
        if continue_final_message:
            _leave_open(chat)
        context: dict[str, Any] = self._special_tokens | plain(variables, "a variable of the chat template")
        context |= {
            "tools": tool_list,
            "documents": context.get("documents"),
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        text = _run(template, chat, context)
        return _cut_open(text) if continue_final_message else text

    def _name(self, name: str | None, with_tools: bool) -> str:
        if name is None:
            if not self._sources:
                raise ChatTemplateError(_NO_TEMPLATE)
            name = "tool_use" if with_tools and "tool_use" in self._sources else "default"
        if name not in self._sources:
            known = ", ".join(sorted(self._sources)) or "none"
            raise ChatTemplateError(f"this model has no chat template {name!r}; it has {known}")
        return name

    def _template(self, name: str) -> jinja2.Template:
        compiled = self._compiled.get(name)
        if compiled is None:
            try:
                compiled = _environment().from_string(self._sources[name])
            except (jinja2.TemplateSyntaxError, RecursionError) as error:
                raise ChatTemplateError(f"the chat template {name!r} cannot be compiled: {error}") from error
            self._compiled[name] = compiled
        return compiled


def _as_known(chat: list[Message], source: str) -> list[Message]:
    """The messages with roles and ids that this template knows."""
    if "developer" not in source:
        chat = [message | {"role": "system"} if message["role"] == "developer" else message for message in chat]
    return with_short_ids(chat) if _NINE_CHARACTERS.search(source) else chat


def _run(template: jinja2.Template, chat: list[Message], context: Mapping[str, Any]) -> str:
    attempts = [chat]
    if any("tool_calls" in message for message in chat):
        # Some templates join a call's arguments to text as they are, so they need them as text.
        attempts.append([_with_text_arguments(message) for message in chat])
    failures = []
    for attempt in attempts:
        try:
            return _generate(template, attempt, context)
        except ChatTemplateError:
            raise
        except TypeError as error:
            failures.append(error)
        except Exception as error:  # a template is a program: it may raise anything
            raise ChatTemplateError(f"the chat template refused the messages: {error}") from error
    raise ChatTemplateError(f"the chat template failed on the messages: {failures[0]}") from failures[0]


def _generate(template: jinja2.Template, chat: list[Message], context: Mapping[str, Any]) -> str:
    limit = MAX_GROWTH + 4 * sum(len(message["content"]) for message in chat)
    deadline = time.monotonic() + MAX_SECONDS
    pieces, length = [], 0
    for piece in template.generate(messages=chat, **context):
        pieces.append(piece)
        length += len(piece)
        if length > limit:
            raise ChatTemplateError(f"the chat template wrote over {limit:,} characters")
        if time.monotonic() > deadline:
            raise ChatTemplateError(f"the chat template took over {MAX_SECONDS:g} s")
    return "".join(pieces)


def _with_text_arguments(message: Message) -> Message:
    if "tool_calls" not in message:
        return message
    calls = [
        call | {"function": call["function"] | {"arguments": str(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return message | {"tool_calls": calls}


def _leave_open(chat: list[Message]) -> None:
    last = chat[-1]
    if last["role"] != "assistant":
        raise InvalidPromptError(
            f"continue_final_message needs a last message of the assistant, got one of {last['role']!r}"
        )
    last["content"] += _MARK


def _cut_open(text: str) -> str:
    """Drops all that the template wrote after the last message's content."""
    at = text.rfind(_MARK.rstrip())
    if at < 0:
        raise ChatTemplateError("the final message cannot be continued: the chat template does not write its content")
    # Without the mark's space, the template trims what it writes, so the message's own last spaces go too.
    return text[:at] if text.startswith(_MARK, at) else text[:at].rstrip()


class _GenerationBlock(Extension):
    """`{% generation %}`, which marks the assistant's text for training: here just its body."""

    tags = {"generation"}  # noqa: RUF012  as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _PublicNamespace(Namespace):
    """Jinja's `namespace()` without attributes that begin with an underscore, which the sandbox does not guard."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        for name in dict(*args[1:], **kwargs):
            _check_public(name)
        Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)


def _check_public(name: str) -> None:
    if name.startswith("_"):
        raise SecurityError(f"a chat template cannot set the attribute {name!r} of a namespace")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox in which no single expression makes a value that is huge: `MAX_GROWTH` counts only what is written."""

    intercepted_binops = frozenset(("*", "**", "%"))

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for sequence, times in ((left, right), (right, left)):
                if isinstance(sequence, str | list | tuple) and isinstance(times, int):
                    _check_growth(len(sequence) * times)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_growth(left.bit_length() * right)
        elif operator == "%" and isinstance(left, str) and _WIDE_PERCENT.search(left):
            raise SecurityError("a format is too wide")
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        padding = isinstance(obj, str) and attr in ("center", "ljust", "rjust", "zfill", "expandtabs")
        return not padding and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        form: str = value.__self__

        def bounded(*args: Any, **kwargs: Any) -> str:
            wide = any(isinstance(each, int) and each > MAX_GROWTH for each in (*args, *kwargs.values()))
            if wide or _WIDE_BRACES.search(form):
                raise SecurityError("a format is too wide")
            return wrapped(*args, **kwargs)

        return bounded


def _check_growth(size: int) -> None:
    if size > MAX_GROWTH:
        raise SecurityError(f"a value of {size:,} items is too large")


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    environment = _BoundedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _PublicNamespace
    return environment
