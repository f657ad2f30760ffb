"""ChatJob: a chat to be answered, whichever API it came by, made ready for the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from asyncllm.api.answers import AnswerFormat, MakeAnswer
from asyncllm.api.errors import InvalidRequest
from asyncllm.api.generation import Generation
from asyncllm.api.parameters import request_options, sampling_params, server_limits
from asyncllm.api.protocol.chat import ChatMessage, NamedTool
from asyncllm.api.protocol.fields import RequestFields, SamplingFields, Tool
from asyncllm.api.serving import Call, Serving
from asyncllm.engine.async_engine import RequestOptions
from asyncllm.outputs.reasoning import find_reasoning_format, opens_in_prompt
from asyncllm.outputs.tool_calls import TOOL_FORMATS, ToolDefinition, read_tools, tool_choice_grammar
from asyncllm.params import SamplingParams
from asyncllm.structured import StructuredOutput

PLAIN_TOOL_FORMAT = "hermes"
"""For a call that is enforced where the model's own format is not known."""

PROMPT_END = 16
"""Tokens at a prompt's end that are looked at for the tag that opens the reasoning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """The tools of a request, and what the answer may do with them."""

    tools: Sequence[Mapping[str, Any]] = ()  # as templates want them
    definitions: tuple[ToolDefinition, ...] = ()  # the same, checked
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
    format: AnswerFormat
    server_limits: bool  # the deadline is the server's own

    def generation(self, serving: Serving, call: Call) -> Generation:
        """Not started. Raises 429 and 503."""
        ticket = serving.enter(self.params.n)
        stream = serving.engine.stream(list(self.messages), self.params, **self.options)
        limits = self.server_limits
        return Generation(serving, [stream], ticket, request_id=call.request_id, server_limits=limits)

    async def start(self, serving: Serving, generation: Generation) -> MakeAnswer:
        """Submit for a stream of events; says how the answers are taken apart."""
        await generation.start()
        try:
            return await self.answer_maker(serving, generation.streams[0].prompt_token_ids)
        except BaseException:
            await generation.abandon()
            raise

    async def answer_maker(self, serving: Serving, prompt_token_ids: Sequence[int]) -> MakeAnswer:
        """How the answers to this prompt are taken apart."""
        end = ""
        if self.format.reasoning is not None:
            end = await serving.engine.detokenize(prompt_token_ids[-PROMPT_END:], skip_special_tokens=False)
        return self.format.maker(end)


def make_tools(given: Sequence[Mapping[str, Any]], *, choice: str | None, name: str | None, parallel: bool) -> Tools:
    """Checked: a choice that needs a tool has one. `name` is the tool that must be called. Raises `InvalidRequest` and
    `InvalidParamsError`."""
    definitions = read_tools(given)
    if name is not None and all(each.name != name for each in definitions):
        raise InvalidRequest(f"tool_choice names {name!r:.100}, which is not among tools", param="tool_choice")
    if choice == "required" and not given:
        raise InvalidRequest("tool_choice needs tools", param="tool_choice")
    single = name is not None or not parallel
    return Tools(tools=given, definitions=definitions, choice=choice, name=name, parallel=not single)


def chat_tools(tools: Sequence[Tool] | None, choice: str | NamedTool | None, parallel: bool | None) -> Tools:
    """As `make_tools`, from a chat's fields."""
    given = [tool.model_dump(exclude_none=True) for tool in tools or ()]
    name = choice.function.name if isinstance(choice, NamedTool) else None
    kind = choice if isinstance(choice, str) else None
    return make_tools(given, choice=kind, name=name, parallel=parallel is not False)


async def chat_job(  # noqa: PLR0913  # all but the first three by keyword
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
    template_variables: Mapping[str, Any] | None = None,
    chat_template: str | None = None,
    continue_final_message: bool = False,
) -> ChatJob:
    """Raises `InvalidRequest`, and what `SamplingParams` raises."""
    settings = serving.settings
    if chat_template is not None and not settings.request_chat_templates:
        raise InvalidRequest("this server takes no chat templates from requests", param="chat_template")
    tool_format = serving.tool_format if tools.usable else None
    reasoning_format = serving.reasoning_format
    options = request_options(request, settings, call.salt)
    options["tools"] = list(tools.tools) if tools.usable else None
    options["chat_template_kwargs"] = dict(template_variables or {})
    options["continue_final_message"] = continue_final_message
    if chat_template is not None:
        options["chat_template"] = chat_template
    continued = _continued(messages[-1]) if continue_final_message else ""
    if structured is not None:
        if continued:  # it may be in the middle of anything: the form begins at once
            reasoning_format = None
        structured = replace(structured, after_reasoning=reasoning_format or False)
    if tools.usable and tools.forced:
        if structured is not None:
            raise InvalidRequest("an answer cannot be bound to a tool and to a response_format", param="tool_choice")
        tool_format = tool_format or PLAIN_TOOL_FORMAT
        opened = False
        if reasoning_format is not None:
            prompt = await serving.engine.apply_chat_template(
                list(messages),
                tools=options["tools"],
                chat_template_kwargs=options["chat_template_kwargs"],
                continue_final_message=continue_final_message,
            )
            opened = opens_in_prompt(reasoning_format, prompt, continued)
        structured = tool_choice_grammar(
            tool_format,
            tools.definitions,
            tools.name or "required",
            tools.parallel,
            reasoning=reasoning_format,
            opened=opened,
        )
    if (tool_format is not None and TOOL_FORMATS[tool_format].special_tokens) or (
        reasoning_format is not None and find_reasoning_format(reasoning_format).special_tokens
    ):
        sampling = sampling.model_copy(update={"skip_special_tokens": False})  # else its tags are not in the text
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
        format=AnswerFormat(
            reasoning=reasoning_format,
            tool_calls=tool_format,
            tools=tools.definitions,
            parallel=tools.parallel,
            continued=continued,
        ),
        server_limits=server_limits(request, settings),
    )


def _continued(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""


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
