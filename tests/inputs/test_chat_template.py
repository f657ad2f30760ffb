from __future__ import annotations

import datetime
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from asyncllm.errors import ChatTemplateError, InvalidPromptError
from asyncllm.inputs import chat_template
from asyncllm.inputs.chat_template import ChatTemplate
from tests.inputs import toy_tokenizers as toys

USER = {"role": "user", "content": "Hi"}
SIMPLE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
TRIMMING = SIMPLE.replace("m.content", "m.content | trim")
CALLS = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }}("
    "{% for k, v in c.function.arguments | items %}{{ k }}={{ v | tojson }}{% endfor %}){% endfor %}{% endfor %}"
)
CALLING = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Köln <b>"}'}}],
}


def smollm2_template() -> ChatTemplate:
    return ChatTemplate(toys.smollm2().chat_templates, toys.smollm2().special_tokens)


def simple(source: str = SIMPLE) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>"})


def test_smollm2() -> None:
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    text = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    template = smollm2_template()
    assert template.render([USER]) == text + "<|im_start|>assistant\n"
    assert template.render([USER], add_generation_prompt=False) == text
    parts = {"role": "user", "content": [{"type": "text", "text": "Hi"}]}
    assert template.render([parts]) == template.render([USER])
    assert template.render([USER, CALLING, {"role": "tool", "content": [{"type": "text", "text": "4"}]}]).endswith(
        "<|im_start|>assistant\n<|im_end|>\n<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = toys.smollm2().encode(template.render([USER]), add_special_tokens=False)
    assert ids[:2] == [1, 9690]
    assert toys.smollm2().decode(ids, skip_special_tokens=False) == template.render([USER])


def test_special_tokens_and_variables() -> None:
    assert simple().render([USER]) == "<s>[user]Hi[end]\n[assistant]"
    assert (
        simple("{{ bos_token }}{{ thinking }}{{ nothing }}|{{ tools }}").render([USER], thinking=True) == "<s>True|None"
    )
    for reserved, error in (({"messages": []}, "messages cannot"), ({"x": object()}, "holds a object")):
        with pytest.raises(InvalidPromptError, match=error):
            simple().render([USER], **reserved)


@pytest.mark.parametrize("text", ["Sure, ", "Sure,\n\n", " x", "", "CONTINUE_HERE CONTINUE_HERE"])
def test_the_final_message_is_left_open(text: str) -> None:
    chat = [USER, {"role": "assistant", "content": text}]
    start = "<s>[user]Hi[end]\n[assistant]"
    assert simple().render(chat, continue_final_message=True) == start + text
    trimmed = text.strip() if text.strip() else text
    assert simple(TRIMMING).render(chat, continue_final_message=True) == start + trimmed
    assert chat[1]["content"] == text


def test_a_final_message_that_cannot_be_continued() -> None:
    with pytest.raises(InvalidPromptError, match="of 'user'"):
        simple().render([USER], continue_final_message=True)
    with pytest.raises(ChatTemplateError, match="does not write its content"):
        simple("nothing").render([USER, {"role": "assistant", "content": "a"}], continue_final_message=True)


def test_named_templates() -> None:
    template = ChatTemplate({"default": "default", "tool_use": "tools", "rag": "rag"})
    assert template.render([USER]) == "default"
    assert template.render([USER], tools=[{"type": "function"}]) == "tools"
    assert template.render([USER], tools=[]) == "default"
    assert template.render([USER], template_name="rag") == "rag"
    with pytest.raises(ChatTemplateError, match="no chat template 'x'; it has default, rag, tool_use"):
        template.render([USER], template_name="x")


def test_without_a_template() -> None:
    with pytest.raises(ChatTemplateError, match=r"no chat template; give one with EngineConfig\(chat_template="):
        ChatTemplate({}).render([USER])


def test_arguments_as_mapping_or_where_the_template_joins_text_as_text() -> None:
    assert simple(CALLS).render([CALLING]) == 'f(city="Köln <b>")'
    joining = (
        "{% for m in messages %}{{ m.tool_calls[0].function.name + m.tool_calls[0].function.arguments }}{% endfor %}"
    )
    assert simple(joining).render([CALLING]) == 'f{"city": "Köln <b>"}'


def test_what_templates_expect_of_their_environment() -> None:
    source = """
    {%- for m in messages %}
        {%- if loop.index > 1 %}{% break %}{% endif %}
        {% generation %}{{ m.content }}{% endgeneration %}
    {%- endfor %}
    {%- set ns = namespace(n=1) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}
    {{- {"b": "é<", "a": 1} | tojson }}{{ {"b": 1, "a": 2} | tojson(indent=1, sort_keys=true) }}
    {{- strftime_now("%Y") | int >= 2024 }}"""
    assert simple(source).render([USER, USER]) == 'Hi2{"b": "é<", "a": 1}{\n "a": 2,\n "b": 1\n}True'
    assert simple("{{ strftime_now('%Y') }}").render([USER]) in {
        str(datetime.datetime.now(tz=zone).year) for zone in (datetime.UTC, None)
    }


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refused the messages: roles must alternate"),
        ("{{ messages[3].content }}", "refused the messages: .* has no element 3"),
        ("{{ 1 + 'a' }}", "failed on the messages: unsupported operand"),
        ("{{ 1 // 0 }}", "refused the messages: .*zero"),
        ("{% if", "cannot be compiled"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages[0].update(a=1) }}", "unsafe"),
        ("{% set ns = namespace() %}{% set ns._x = 1 %}", "cannot set the attribute '_x'"),
        ("{% set ns = namespace(_x=1) %}", "cannot set the attribute '_x'"),
        ("{{ range(1000000000) | list }}", "Range too big"),
        ("{% include 'other' %}", "failed on the messages: no loader"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "refused the messages: maximum recursion"),
    ],
)
def test_a_template_that_fails_or_does_what_it_must_not(source: str, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        simple(source).render([USER])


def test_a_template_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    endless = simple("{% for i in range(99999) %}{% for j in range(99999) %}{{ 'x' * n }}{% endfor %}{% endfor %}")
    with pytest.raises(ChatTemplateError, match="wrote over"):
        endless.render([USER], n=1000)
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.05)
    with pytest.raises(ChatTemplateError, match=r"took over 0\.05 s"):
        endless.render([USER], n=0)


def test_a_message_of_five_megabytes() -> None:
    content = "word " * 1_000_000
    text = smollm2_template().render([{"role": "user", "content": [{"type": "text", "text": content}]}])
    assert text.count("word ") == 1_000_000


def test_many_threads_at_once() -> None:
    template = simple()
    chats = [[{"role": "user", "content": str(n)}] * n for n in range(1, 40)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(template.render, chats)) == [simple().render(chat) for chat in chats]


@pytest.mark.parametrize("source", [SIMPLE, TRIMMING, CALLS])
def test_transformers_writes_the_same(source: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    chats: list[list[dict[str, Any]]] = [
        [USER],
        [{"role": "system", "content": " s "}, USER, {"role": "assistant", "content": " a "}, USER],
        [USER, {"role": "assistant", "content": "Sure, "}],
    ]
    if source == CALLS:
        arguments = json.loads(CALLING["tool_calls"][0]["function"]["arguments"])  # type: ignore[index]
        plain = [{"function": {"name": "f", "arguments": arguments}}]
        chats.append([USER, {"role": "assistant", "content": "", "tool_calls": plain}])
    for chat in chats:
        for options in ({"add_generation_prompt": True}, {"add_generation_prompt": False}):
            (theirs,), _ = render_jinja_template([chat], chat_template=source, bos_token="<s>", **options)
            assert simple(source).render(chat, **options) == theirs
    if source != CALLS:
        (theirs,), _ = render_jinja_template(
            [chats[2]], chat_template=source, bos_token="<s>", continue_final_message=True
        )
        assert simple(source).render(chats[2], continue_final_message=True) == theirs


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 10000000000 }}",
        "{{ 10000000000 * [1] }}",
        "{{ (9 ** 99999999) }}",
        "{{ 'x'.ljust(10000000000) }}",
        "{{ '%10000000000d' % 1 }}",
        "{{ '%*d' % (10000000000, 1) }}",
        "{{ '{:10000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 10000000000) }}",
    ],
)
def test_no_expression_makes_a_huge_value(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        ChatTemplate(source).render([{"role": "user", "content": "x"}])


def test_ordinary_expressions_are_left_alone() -> None:
    source = "{{ '-' * 3 }}{{ 2 ** 8 }}{{ '%5.1f|' % 2 }}{{ '{:>4}|{{}}'.format(7) }}{{ [0] * 2 }}"
    assert ChatTemplate(source).render([{"role": "user", "content": "x"}]) == "---256  2.0|   7|{}[0, 0]"
