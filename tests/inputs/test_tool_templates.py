"""Tools, calls and answers in the templates of known models: each is written as the model was trained on it, and what
was written is read back by the parser that is guessed from the template."""

from __future__ import annotations

import json
from typing import Any

import pytest

from asyncllm import AsyncEngine, SamplingParams
from asyncllm.errors import ChatTemplateError
from asyncllm.inputs.chat_template import ChatTemplate
from asyncllm.inputs.tokenizer import Tokenizer
from asyncllm.outputs.reasoning import guess_reasoning_format, opens_in_prompt
from asyncllm.outputs.tool_calls import guess_tool_format, join_deltas, make_tool_parser
from asyncllm.testing.shadow_engine import ShadowModel
from tests.inputs import tool_templates
from tests.inputs.toy_tokenizers import smollm2

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a <city>",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ARGUMENTS = '{"city":"Münster <1>"}'  # as a model wrote it, without the space of json.dumps


def call(call_id: str | None, arguments: Any = ARGUMENTS) -> dict[str, Any]:
    made = {"id": call_id, "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    return {key: value for key, value in made.items() if value is not None}


CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
    {"role": "assistant", "content": None, "tool_calls": [call("call_0123456789")]},
    {"role": "tool", "tool_call_id": "call_0123456789", "content": [{"type": "text", "text": '{"rain": true}'}]},
]
TEMPLATES = {name: getattr(tool_templates, name) for name in ("QWEN", "HERMES", "LLAMA3", "MISTRAL", "DEEPSEEK")}
SPACED = '{"city": "Münster <1>"}'
TAGGED = f'<tool_call>\n{{"name": "get_weather", "arguments": {SPACED}}}\n</tool_call>'
WRITTEN = {
    "QWEN": [
        f"<|im_start|>assistant\n{TAGGED}<|im_end|>\n",
        '<|im_start|>user\n<tool_response>\n{"rain": true}\n</tool_response><|im_end|>\n<|im_start|>assistant\n',
    ],
    "HERMES": [
        f"<|im_start|>assistant\n{TAGGED}<|im_end|>\n",
        '<tool_response>\n{"name": "get_weather", "content": "{\\"rain\\": true}"}\n</tool_response>',
    ],
    "LLAMA3": [
        f'<|start_header_id|>assistant<|end_header_id|>\n\n{{"name": "get_weather", "parameters": {SPACED}}}<|eot_id|>',
        '<|start_header_id|>ipython<|end_header_id|>\n\n{"rain": true}<|eot_id|>',
    ],
    "MISTRAL": [
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {SPACED}, "id": "',
        '[TOOL_RESULTS] {"content": {"rain": true}, "call_id": "',
    ],
    "DEEPSEEK": [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{ARGUMENTS}\n```<｜tool▁call▁end｜>",
        '<｜tool▁output▁begin｜>{"rain": true}<｜tool▁output▁end｜>',
    ],
}


def template(name: str) -> ChatTemplate:
    return ChatTemplate(TEMPLATES[name].strip(), {"bos_token": "<s>", "eos_token": "</s>"})


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_call_and_its_answer(name: str) -> None:
    text = template(name).render(CHAT, tools=[TOOL])
    for written in WRITTEN[name]:
        assert written in text
    if name != "DEEPSEEK":  # whose template has no place for them
        assert '"description": "Weather of a <city>"' in text
        assert template(name).render(CHAT, tools=[]) == template(name).render(CHAT) != text


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_was_written_is_read_back(name: str) -> None:
    format = guess_tool_format(TEMPLATES[name])
    assert format == {"QWEN": "hermes", "LLAMA3": "llama3_json"}.get(name, name.lower())
    prompt = template(name).render(CHAT[:1], tools=[TOOL])
    whole = template(name).render(CHAT[:2], tools=[TOOL], add_generation_prompt=False)
    # DeepSeek's prompt ends with the tag that opens the reasoning, which the template leaves out of the history
    answer = whole.removeprefix(prompt.removesuffix("<think>\n"))
    for end in ("<|im_end|>\n", "<|eot_id|>", "</s>", "<｜end▁of▁sentence｜>"):
        answer = answer.removesuffix(end)
    parser = make_tool_parser(format, [TOOL])
    message = join_deltas([delta for piece in answer for delta in parser.push(piece)] + parser.flush())
    assert message.content == ""
    assert [(c.name, json.loads(c.arguments)) for c in message.calls] == [("get_weather", json.loads(ARGUMENTS))]


def test_deepseeks_prompt_opens_the_reasoning() -> None:
    assert guess_reasoning_format(TEMPLATES["DEEPSEEK"]) == "deepseek_r1"
    assert opens_in_prompt("deepseek_r1", template("DEEPSEEK").render(CHAT[:1]))


def test_ids_that_a_template_refuses_are_shortened_and_equal_ones_stay_equal() -> None:
    text = template("MISTRAL").render(CHAT)
    called, answered = text.split('"id": "')[1][:9], text.split('"call_id": "')[1][:9]
    assert called == answered
    assert called.isalnum()
    kept = [CHAT[0], {**CHAT[1], "tool_calls": [call("D681PevKs")]}, {**CHAT[2], "tool_call_id": "D681PevKs"}]
    assert '"id": "D681PevKs"' in template("MISTRAL").render(kept)


def test_calls_without_ids_are_linked_in_order() -> None:
    two = [
        CHAT[0],
        {"role": "assistant", "tool_calls": [call(None), call(None, {"city": "Ulm"})]},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
    ]
    text = template("MISTRAL").render(two)
    assert text.index('"id": "call00000"') < text.index('"id": "call00001"')
    assert '{"content": 1, "call_id": "call00000"}' in text
    assert '{"content": 2, "call_id": "call00001"}' in text
    assert "tool_call_id" not in two[2]


def test_two_calls_where_a_template_knows_one() -> None:
    two = [CHAT[0], {"role": "assistant", "tool_calls": [call("a"), call("b")]}]
    with pytest.raises(ChatTemplateError, match="only supports single"):
        template("LLAMA3").render(two)
    assert template("QWEN").render(two).count("<tool_call>\n{") == 2


@pytest.mark.parametrize(("given", "written"), [(ARGUMENTS, ARGUMENTS), (json.loads(ARGUMENTS), SPACED), (None, "{}")])
def test_arguments_that_a_template_writes_as_they_are(given: Any, written: str) -> None:
    raw = ChatTemplate(tool_templates.RAW)
    assert raw.render([{"role": "assistant", "tool_calls": [call("a", given)]}]) == f"get_weather({written})"
    deepseek = template("DEEPSEEK").render([{"role": "assistant", "tool_calls": [call("a", given)]}])
    assert f"```json\n{written}\n```" in deepseek


def test_a_developer_speaks_as_the_system_where_the_template_knows_no_developer() -> None:
    chat = [{"role": "developer", "content": "Be brief."}, CHAT[0]]
    assert "<|im_start|>system\nBe brief.<|im_end|>" in template("QWEN").render(chat)
    knowing = ChatTemplate("{% for m in messages %}{{ m.role }} {% endfor %}{# developer #}")
    assert knowing.render(chat) == "developer user "


@pytest.fixture
def tokenizer() -> Tokenizer:
    return smollm2()  # not on the event loop: it takes long


async def test_tools_reach_the_template_of_a_stream(tokenizer: Tokenizer) -> None:
    model = ShadowModel(vocab_size=49152, tokenizer=tokenizer, chat_template=TEMPLATES["QWEN"].strip())
    async with AsyncEngine(model, max_model_len=2048, num_blocks=256) as engine:
        done = await engine.generate(CHAT, SamplingParams(max_tokens=1), tools=[TOOL])
        text = await engine.detokenize(done.prompt_token_ids, skip_special_tokens=False)
    assert text == template("QWEN").render(CHAT, tools=[TOOL])
