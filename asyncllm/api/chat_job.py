"""ChatJob: a chat to be answered, whichever API it came by, made ready for the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncllm.api.answers import MakeAnswer, answer_maker
from asyncllm.api.errors import InvalidRequest
from asyncllm.api.parameters import request_options, sampling_params, server_limits
from asyncllm.api.protocol.chat import ChatMessage, NamedTool
from asyncllm.api.protocol.fields import RequestFields, SamplingFields, Tool
from asyncllm.api.serving import Call, Serving
from asyncllm.engine.async_engine import RequestOptions, TokenStream
from asyncllm.outputs.tool_calls import tool_choice_grammar
from asyncllm.params import SamplingParams
from asyncllm.structured import StructuredOutput

PLAIN_TOOL_FORMAT = "hermes"
"""For a call that is enforced where the model's own format is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """The tools of a request, and what the answer may do with them."""

    tools: Sequence[Mapping[str, Any]] = ()  # as templates want them
    choice: str | None = None  # "none", "auto", "required"; None: "auto" where there are tools
    name: str | None = None  # the one that must be called
    parallel: bool = True

    @property
    def usable(self) -> bool:
        """Whether the answer may call one."""
        return bool(self.tools) and self.choice != "none"

    @property
    def forced(self) -> bool:
        """Whether it must."""
        return self.choice == "required" or self.name is not None


@dataclass(frozen=True, slots=True)
class ChatJob:
    """All that the engine needs, and how the answer is taken apart."""

    messages: Sequence[Mapping[str, Any]]
    params: SamplingParams
    options: RequestOptions
    make_answer: MakeAnswer
    server_limits: bool  # the deadline is the server's own
    plain: bool  # all text is content

    def stream(self, serving: Serving) -> TokenStream:
        """Not started."""
        return serving.engine.stream(list(self.messages), self.params, **self.options)


def chat_tools(
    tools: Sequence[Tool] | None, choice: str | NamedTool | None, parallel: bool | None, *, param: str = "tool_choice"
) -> Tools:
    """Checked: a choice that needs a tool has one. Raises `InvalidRequest`."""
    given = [tool.model_dump(exclude_none=True) for tool in tools or ()]
    names = {tool["function"]["name"] for tool in given}
    if isinstance(choice, NamedTool):
        if choice.function.name not in names:
            raise InvalidRequest(f"tool_choice names {choice.function.name!r}, which is not among tools", param=param)
        return Tools(tools=given, name=choice.function.name, parallel=False)
    if choice == "required" and not given:
        raise InvalidRequest("tool_choice needs tools", param=param)
    return Tools(tools=given, choice=choice, parallel=parallel is not False)


def chat_job(  # noqa: PLR0913  # all but the first three by keyword
    serving: Serving,
    call: Call,
    messages: Sequence[Mapping[str, Any]],
    *,
    sampling: SamplingFields,
    request: RequestFields,
    n: int | None = None,
    max_tokens: int | None = None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    tools: Tools,
    structured: StructuredOutput | None = None,
    reasoning: bool = True,
    template_variables: Mapping[str, Any] | None = None,
    chat_template: str | None = None,
    continue_final_message: bool = False,
) -> ChatJob:
    """Raises `InvalidRequest`, and what `SamplingParams` raises."""
    settings = serving.settings
    if chat_template is not None and not settings.request_chat_templates:
        raise InvalidRequest("this server takes no chat templates from requests", param="chat_template")
    tool_format = serving.tool_format if tools.usable else None
    if tools.usable and tools.forced:
        if structured is not None:
            raise InvalidRequest("an answer cannot be bound to a tool and to a response_format", param="tool_choice")
        tool_format = tool_format or PLAIN_TOOL_FORMAT
        structured = tool_choice_grammar(tool_format, tools.tools, tools.name or "required", tools.parallel)
    reasoning_format = serving.reasoning_format if reasoning else None
    options = request_options(request, settings, call.salt)
    options["tools"] = list(tools.tools) if tools.usable else None
    options["chat_template_kwargs"] = dict(template_variables or {})
    options["continue_final_message"] = continue_final_message
    if request.request_id is not None:
        options["request_id"] = request.request_id
    if chat_template is not None:
        options["chat_template"] = chat_template
    params = sampling_params(
        sampling,
        settings,
        n=n,
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        structured_output=structured,
    )
    return ChatJob(
        messages=messages,
        params=params,
        options=options,
        make_answer=answer_maker(reasoning_format, tool_format, tools.tools, parallel=tools.parallel),
        server_limits=server_limits(request, settings),
        plain=reasoning_format is None and tool_format is None,
    )


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """As chat templates know them. Raises `InvalidRequest` for what is not text."""
    return [_template_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _template_message(message: ChatMessage, where: str) -> dict[str, Any]:
    given = message.model_dump(exclude_none=True)
    if message.role == "developer":
        given["role"] = "system"  # templates know no other name for it
    if isinstance(message.content, list):
        for index, part in enumerate(message.content):
            if part.type not in ("text", "refusal", "input_text", "output_text"):
                raise InvalidRequest(
                    f"{where}.content[{index}]: this model takes text, not {part.type!r:.40}", param="messages"
                )
        given["content"] = [{"type": "text", "text": part.text or part.refusal or ""} for part in message.content]
    return given
