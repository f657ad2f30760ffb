"""Texts of each format by hand: what models write, and what only looks like it."""

from __future__ import annotations

import pytest

from tests.outputs.tool_calls import written_calls as wc

Outcome = tuple[str, list[tuple[str, str]]]

DS = {"[": "<｜tool▁calls▁begin｜>", "(": "<｜tool▁call▁begin｜>", "|": "<｜tool▁sep｜>", ")": "<｜tool▁call▁end｜>",
      "]": "<｜tool▁calls▁end｜>"}  # fmt: skip


def ds(text: str) -> str:
    """DeepSeek's tags, in short: [ ( | ) ]."""
    return "".join(DS.get(character, character) for character in text)


F = ("f", '{"a": 1}')

CALLS: dict[str, list[tuple[str, Outcome]]] = {
    "hermes": [
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', ("", [F])),
        ('<tool_call>\n{"arguments": {"a": 1}, "name": "f"}\n</tool_call>', ("", [F])),
        ('Sure.\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\nDone.', ("Sure.\n\nDone.", [F])),
        ('\n\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n', ("", [F])),
        ('<tool_call>{"name": "f"}</tool_call>', ("", [("f", "{}")])),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', ("", [("f", "{}")])),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', ("", [F])),
        ('<tool_call>{"id": [1], "name": "f", "parameters": {"a": 1}, "x": {}}</tool_call>', ("", [F])),
        ('<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>',
         ("", [("f", '{"a": "</tool_call>"}')])),
        # without a closing tag, or without a brace, or with one too many
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}', ("", [F])),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}', ("", [F])),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}}</tool_call>!', ("}!", [F])),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}\n{"name": "f", "arguments": {}}</tool_call>',
         ("", [F, ("f", "{}")])),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}} <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>',
         ("", [F, F])),
        # what does not belong there is shown
        ('<tool_call>{"name": "f", "arguments": {"a": 1}, oops}</tool_call>!', (", oops}!", [F])),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}} oops</tool_call>', (" oops", [F])),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}, "parameters": {"b": 2}}</tool_call>', ("", [F])),
        # the text ends inside, or the arguments are no JSON: what the model wrote
        ('<tool_call>{"name": "f", "arguments": {"a": "x', ("", [("f", '{"a": "x')])),
        ("<tool_call>{\"name\": \"f\", \"arguments\": {'a': [1}}</tool_call>", ("", [("f", "{'a': [1}")])),
    ],
    "qwen3_coder": [
        ("<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>", ("", [F])),
        ("<function=f><parameter=a>1</parameter></function>", ("", [F])),
        ("Hi <tool_call>\n<function=f>\n</function>\n</tool_call> ho", ("Hi  ho", [("f", "{}")])),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', ("", [F])),
        ("<function=f><parameter=s>\n 1 \"é\"\n<b>\n\n</parameter></function>",
         ("", [("f", '{"s": " 1 \\"é\\"\\n<b>\\n"}')])),
        ("<function=f><parameter=a>True</parameter></function>", ("", [("f", '{"a": true}')])),
        ("<function=f><parameter=a>[1, {\"b\": null}]</parameter></function>",
         ("", [("f", '{"a": [1, {"b": null}]}')])),
        ("<function=f><parameter=a>one</parameter></function>", ("", [("f", '{"a": "one"}')])),
        ("<function=f><parameter=s>x", ("", [("f", '{"s": "x')])),
        ("<function=f><parameter=s>x</parameter>\n<parameter=a>1</parameter></function>",
         ("", [("f", '{"s": "x", "a": 1}')])),
        ("<function=f>oops<parameter=a>1</parameter></function>", ("oops", [F])),
    ],
    "llama3_json": [
        ('{"name": "f", "parameters": {"a": 1}}', ("", [F])),
        (' {"type": "function", "name": "f", "arguments": {"a": 1}}\n', ("", [F])),
        ('<|python_tag|>{"name": "f", "parameters": {"a": 1}}<|python_tag|>{"name": "f", "parameters": {}}',
         ("", [F, ("f", "{}")])),
        ('{"name": "f", "parameters": {"a": 1}}; {"name": "f", "parameters": {"a": 1}}\n{"name": "f"}',
         ("", [F, F, ("f", "{}")])),
        ('I will.\n<|python_tag|>{"name": "f", "parameters": {"a": 1}} Done', ("I will.\n Done", [F])),
        ('<|python_start|>{"name": "f", "parameters": {"a": 1}}<|python_end|>', ("", [F])),
    ],
    "mistral": [
        ('[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]', ("", [F])),
        ('[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "D681PevKs"},\n{"name": "f", "arguments": {}}] ok',
         (" ok", [F, ("f", "{}")])),
        ('[TOOL_CALLS] {"name": "f", "arguments": {"a": 1}}', ("", [F])),
        ('Yes[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]f{"a": 1}', ("Yes", [F, F])),
        ('[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, oops]', (", oops]", [F])),
        ('[TOOL_CALLS]f[CALL_ID]D681PevKs[ARGS]{"a": 1}', ("", [F])),
    ],
    "pythonic": [
        ("[f(a=1)]", ("", [F])),
        (" [f(a=1), f()]\n", ("", [F, ("f", "{}")])),
        ("<|python_start|>[f(a=1)]<|python_end|>", ("", [F])),
        ("[f(a=1)] and more", (" and more", [F])),
        ("[f(a=1,)]", ("", [F])),
        ("[f(a=1))]", (")]", [F])),
        ("""[f(s='it\\'s "ü"\\n\\x41\\u00e9\\101\\d', t=(1,), u={'k': [None, True, -.5, 1_000, 1e5]})]""",
         ("", [("f", '{"s": "it\'s \\"ü\\"\\nAéA\\\\d", "t": [1], "u": {"k": [null, true, -0.5, 1000, 1e5]}}')])),
        ("[f(s='\\ud83d\\ude00)]')]", ("", [("f", '{"s": "😀)]"}')])),
        ("[f(a=1), f(a=open('x'))]", (", f(a=open('x'))]", [F])),
    ],
    "deepseek": [
        (ds('[(function|f\n```json\n{"a": 1}\n```)]'), ("", [F])),
        (ds('Hm.[(function|f\n```json\n{"a": 1}\n```)\n(function|f\n```json\n{}\n```)] ok'),
         ("Hm. ok", [F, ("f", "{}")])),
        (ds('[(f|{"a": 1})(f|{"a": 1})]'), ("", [F, F])),
        (ds('(f|{"a": 1})'), ("", [F])),
        (ds('[(f|{"a": 1}) oops'), (" oops", [F])),
    ],
}  # fmt: skip

NO_CALLS: dict[str, list[str]] = {
    "hermes": [
        "",
        " \n",
        "no call < here",
        "<tool_call>",
        "<tool_call></tool_call>",
        "<tool_call>f(1)</tool_call>",
        '<tool_call>{"name": "g", "arguments": {"a": 1}}</tool_call>',  # a tool that was not offered
        '<tool_call>{"name": 1, "arguments": {"a": 1}}</tool_call>',
        '<tool_call>{"arguments": {"a": 1}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": 1}</tool_call>',
        '<tool_call>{"name": "f", "arguments": nothing}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "x"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "[1]"}</tool_call>',
        '<tool_call>{"name": "f" "arguments": {}}</tool_call>',
        "<tool_call>{'name': 'f'}</tool_call>",
        '<tool_call>[{"name": "f"}]</tool_call>',
        '<tool_call>{"name": "f", ',
        '<tool_call>{"name": "f\nx"}',
        '<tool_call>{}</tool_call>',
    ],
    "qwen3_coder": ["<function=f", "<function=g></function>", "<tool_call>\n<function>f</function>", "<function= f>"],
    "llama3_json": [
        '{"answer": 42}',
        '{"name": "Bob", "parameters": {}}',
        '{"name": "f", "age": 3}',
        'See {"name": "f", "parameters": {"a": 1}}',
        "<|python_tag|>print(1)",
        '[{"name": "f", "parameters": {}}]',
    ],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS] []", "[TOOL_CALLS]g[ARGS]{}", "[TOOL_CALLS]f[ARGS]", "[TOOL_CALLS]f [1]",
                '[{"name": "f", "arguments": {}}]', '[TOOL_CALLS] [{"name": "g", "arguments": {}}]'],
    "pythonic": [
        "[1, 2]",
        "[]",
        "[g(a=1)]",
        "[f(1)]",
        "[f(a=1",
        "f(a=1)",
        "[f(a=b)]",
        "[f(a=f(b=1))]",
        "[f(a=1+1)]",
        "[f(a='x' 'y')]",
        "[f(a=f'{x}')]",
        "[f(a=(1))]",
        "[f(a=1, a=2)]",
        "[f(a={1: 2})]",
        "[f(a={'x', 'y'})]",
        "[f(a='\\ud83d')]",
        "[f(a='\\x4')]",
        "[f(a=1__0)]",
        "[f(a=007)]",
        "[f(a=" + "[" * 100 + "]" * 100 + ")]",
        "[f(**{'a': 1})]",
        "[__import__('os').system(a='x')]",
    ],
    "deepseek": [ds("["), ds("[]"), ds("[("), ds('[(function|g\n```json\n{"a": 1}\n```)]'), ds("[(f|[1])]"), ds("[(f|"),
                 ds("[(f)]"), ds("[ x")],
}  # fmt: skip

TOOLS = wc.tools(
    "f", parameters={"type": "object", "properties": {"a": {"type": ["integer", "array"]}, "s": {"type": "string"}}}
)


@pytest.mark.parametrize(("name", "text", "expected"), [(n, *case) for n, cases in CALLS.items() for case in cases])
def test_calls(name: str, text: str, expected: Outcome) -> None:
    assert wc.outcome(wc.parse(name, [text], TOOLS)) == expected
    assert wc.outcome(wc.parse(name, list(text), TOOLS)) == expected


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in NO_CALLS.items() for text in texts])
def test_what_is_no_call_is_content(name: str, text: str) -> None:
    assert wc.outcome(wc.parse(name, list(text), TOOLS)) == (text, [])


def test_without_a_list_of_tools_any_sound_name_is_called() -> None:
    text = '<tool_call>{"name": "%s", "arguments": {}}</tool_call>'
    assert wc.parse("hermes", [text % "a.b-c"], None).calls[0].name == "a.b-c"
    for name in ("", "a b", "\\ud83d", "x" * 300):
        assert wc.outcome(wc.parse("hermes", [text % name], None)) == (text % name, [])
    assert wc.parse("hermes", [text % "f"], ()).calls == ()
