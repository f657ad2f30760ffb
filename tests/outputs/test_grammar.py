from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as Backend

from asyncllm import StructuredOutput
from asyncllm.errors import GrammarError
from asyncllm.inputs.tokenizer import Tokenizer, TokenizerData
from asyncllm.outputs import grammar
from asyncllm.outputs.constraint import Constraint
from asyncllm.outputs.grammar import GrammarCompiler, GrammarConstraint
from tests.outputs.grammars import (
    EOS,
    SIZE,
    accepts,
    byte_ids,
    compiler,
    constraint,
    legal,
    outputs,
    random_output,
    tokenizer,
    vocabulary,
)

RECORD = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 8},
        "status": {"enum": ["active", "inactive", "actively pending", "naïve ☃"]},
        "born": {"type": "string", "format": "date"},
        "tags": {"type": "array", "items": {"enum": ["alpha", "beta"]}, "maxItems": 3},
    },
    "required": ["first_name", "status", "born", "tags"],
    "additionalProperties": False,
}
ARITHMETIC = """
start: sum
sum: product (("+" | "-") product)*
product: value ("*" value)*
value: NUMBER | "(" sum ")"
NUMBER: /[0-9]{1,3}/
"""
FORMS: dict[str, dict[str, Any]] = {
    "json_schema": {"json_schema": RECORD},
    "json_object": {"json_object": True},
    "regex": {"regex": "[a-z]{2,4}( [0-9]+)?|☃+"},
    "choice": {"choice": ["yes", "yes indeed", "no", "¿qué?\n"]},
    "lark": {"grammar": ARITHMETIC},
    "gbnf": {"grammar": 'root ::= "a" root "b" | "(" [0-9]+ ")"'},
}


def ids_of(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


@pytest.mark.parametrize("name", FORMS)
def test_every_form_gives_what_it_says(name: str) -> None:
    start = constraint(**FORMS[name])
    expected: dict[str, tuple[Sequence[str], Sequence[str]]] = {
        "json_schema": (
            ['{"first_name":"Ada", "status": "naïve ☃","born":"2024-02-29","tags":["beta"]}'],
            ['{"first_name":"Ada"}'],
        ),
        "json_object": (['{"a": [1, null, {"b":"c"}]}', "{}"], ["[]", "1", "{'a':1}"]),
        "regex": (["ab", "abcd 17", "☃☃"], ["a", "ab ", "ab 1x", "☃a"]),
        "choice": (["yes", "yes indeed", "no", "¿qué?\n"], ["y", "yes ", "maybe", ""]),
        "lark": (["1+2*(3-4)", "777"], ["1+", "(1", "1234"]),
        "gbnf": (["(1)", "aa(12)bb"], ["ab", "a(1)"]),
    }
    good, bad = expected[name]
    assert [text for text in good if not accepts(start, text)] == []
    assert [text for text in bad if accepts(start, text)] == []
    assert all(accepts(start, text) for text in outputs(start, seeds=20))


@pytest.mark.parametrize("name", FORMS)
def test_an_end_is_legal_exactly_where_the_output_is_complete(name: str) -> None:
    rng = random.Random(3)
    for _ in range(15):
        state = constraint(**FORMS[name])
        ids: list[int] = []
        while not state.finished and len(ids) < 60:
            choices = legal(state.mask())
            assert choices.max() < 512  # the padded tail of the vocabulary is never legal
            assert (EOS in choices) == accepts(constraint(**FORMS[name]), tokenizer().decode(ids))
            assert not {0, 1} & set(choices.tolist())  # other special tokens neither
            token_id = int(rng.choice(choices))
            state.accept([token_id])
            if token_id != EOS:
                ids.append(token_id)
        if state.finished:
            assert accepts(constraint(**FORMS[name]), tokenizer().decode(ids))


@pytest.mark.parametrize("name", FORMS)
def test_forced_tokens_are_what_the_masks_leave(name: str) -> None:
    """Jumping over forced tokens and sampling each of them come to the same."""
    jumped = 0
    for seed in range(15):
        rng = random.Random(seed)
        state = constraint(**FORMS[name])
        expected: tuple[int, ...] = ()
        for _ in range(80):
            if state.finished:
                break
            forced = state.forced()
            assert forced[: len(expected)] == expected  # what was forced before is forced still
            choices = legal(state.mask())
            if forced:
                jumped += 1
                assert choices.tolist() == [forced[0]]
            token_id = int(rng.choice(choices))
            state.accept([token_id])
            expected = forced[1:]
    assert jumped or name in ("regex", "lark", "gbnf")


def test_jumps_do_not_change_an_output() -> None:
    def run(jumps: bool, seed: int) -> list[int]:
        """Greedy under weights of its own for each position: whatever is skipped does not matter."""
        state = constraint(json_schema=RECORD)
        ids: list[int] = []
        while not state.finished and len(ids) < 120:
            forced = state.forced() if jumps else ()
            if not forced:
                weights = np.random.default_rng([seed, len(ids)]).random(SIZE)
                choices = legal(state.mask())
                forced = (int(choices[np.argmax(weights[choices])]),)
            state.accept(forced)
            ids += forced
        return ids

    for seed in range(10):
        assert run(True, seed) == run(False, seed)


def test_copies_go_on_by_themselves() -> None:
    state = constraint(choice=["ab", "ac"])
    state.accept([byte_ids()[ord("a")]])
    other: Constraint = state.copy()
    state.accept([byte_ids()[ord("b")]])
    assert state.finished
    assert not other.finished
    other.accept([byte_ids()[ord("c")]])
    assert other.finished


def test_an_illegal_token_is_an_error_for_good() -> None:
    state = constraint(regex="ab+")
    with pytest.raises(GrammarError, match="cannot go on"):
        state.accept(ids_of("x"))
    assert not state.finished
    with pytest.raises(GrammarError):
        state.mask()  # not the mask of a failed matcher, which allows the end
    with pytest.raises(GrammarError):
        state.forced()


def test_a_finished_output_takes_an_end() -> None:
    state = constraint(regex="ab")
    state.accept(ids_of("ab"))
    assert state.finished
    state.accept([EOS])
    assert state.finished
    assert state.forced() == ()


def test_structural_tags() -> None:
    tag = {
        "structures": [
            {"begin": "<f=a>", "schema": {"type": "object", "required": ["x"]}, "end": "</f>"},
            {"begin": "<f=b>", "schema": {"type": "integer"}, "end": "</f>"},
        ],
        "triggers": ["<f="],
    }
    start = constraint(structural_tag=tag)
    for text in ("", "free text { <", 'hm <f=a>{"x":1}</f> and <f=b>5</f>.', "<f=b>5</f><f=b>6</f>"):
        assert accepts(start, text), text
    for text in ("<f=c>", "<f=a>{}</f>", "<f=b>x</f>", "<f=b>5", "a<f="):
        assert not accepts(start, text), text


def test_structural_tags_with_special_tokens() -> None:
    tag = {
        "structures": [{"begin": "<|im_start|>", "schema": {"const": 1}, "end": "<|im_end|>"}],
        "triggers": ["<|im_start|>"],
    }
    state = constraint(structural_tag=tag)
    state.accept([*ids_of("hm "), 1])
    state.accept(ids_of("1"))
    assert tokenizer().token_id("<|im_end|>") == EOS
    assert legal(state.mask()).tolist() == [EOS]


@pytest.mark.parametrize(
    ("form", "named"),
    [
        ({"regex": "("}, "unclosed group"),
        ({"regex": "a(?=b)"}, "look-around"),
        ({"regex": r"(a)\1"}, "backreferences"),
        ({"regex": "[^\\s\\S]"}, "no output can satisfy"),
        ({"regex": "(" * 5000 + "a" + ")" * 5000}, "nest"),
        ({"regex": "a{1000000}{1000}"}, "regex: no output can satisfy it: lexer error"),
        ({"grammar": "start: foo"}, "foo"),
        ({"grammar": "root ::= foo"}, "foo"),
        ({"grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000}, "recursion"),
        ({"grammar": "start: " + "(" * 100_000 + '"a"' + ")" * 100_000}, "nested"),
        ({"grammar": "hello"}, "grammar"),
        ({"grammar": "start: start"}, "no output can satisfy"),
        ({"grammar": "start: <|nothing|>"}, "nothing"),
        ({"grammar": "start: <[99999]>"}, "99999"),
        ({"grammar": 'start: %json {"not":{}}'}, "not cannot be enforced"),
        ({"grammar": 'start: %json {"x-guidance":{"lenient":true}}'}, "x-guidance"),
        ({"grammar": "start: %json nothing"}, "%json"),
        ({"grammar": 'start: "%json {}"'}, "%json"),
        ({"grammar": "start: x\nx[temperature=0.5]: /a+/"}, "temperature"),
        ({"structural_tag": {}}, "structures"),
        ({"structural_tag": {"structures": [{"begin": "<a>"}], "triggers": []}}, "triggers"),
        ({"structural_tag": {"structures": [{"begin": "<a>"}], "triggers": ["<b>"]}}, "<a>"),
        ({"structural_tag": {"structures": [{"begin": "<a>"}], "triggers": ["<a>", "<b>"]}}, "<b>"),
        ({"structural_tag": {"structures": [{"begin": "<a>", "grammar": "x"}], "triggers": ["<a>"]}}, "begin, schema"),
        ({"structural_tag": {"structures": [{"begin": "<a>"}], "triggers": ["<a>"], "at_least": 1}}, "at_least"),
    ],
)
def test_bad_grammars_are_refused_by_name(form: dict[str, Any], named: str) -> None:
    for _ in range(2):  # nothing is left behind by the first time
        with pytest.raises(GrammarError, match=named):
            constraint(**form)


@pytest.mark.parametrize(
    "form",
    [
        {"json_schema": {"properties": {f"property_{i}": {"type": "integer"} for i in range(1_000)}}},
        {"json_schema": {"allOf": [{"anyOf": [{"required": [f"{i}{j}"]} for j in range(10)]} for i in range(9)]}},
        {"json_schema": {"allOf": [{"pattern": f"(a|b)*a(a|b){{{i}}}"} for i in range(10, 20)]}},
        {"json_schema": {"type": "array", "items": {"type": "array", "maxItems": 10**9}, "minItems": 10**6}},
        {"json_schema": {"type": "string", "minLength": 10**7, "maxLength": 10**9}},
        {
            "json_schema": {
                "$defs": {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(9_000)},
                "$ref": "#/$defs/a0",
            }
        },
        {"json_schema": {"oneOf": [{"const": i} for i in range(64)], "anyOf": [{"minimum": i} for i in range(500)]}},
        {"json_schema": {"enum": [f"value {i}" for i in range(20_000)]}},
        {"regex": "((a{1,1000}){1,1000}){1,1000}"},
        {"regex": "(a|b)*a(a|b){25}"},
        {"regex": "((a+)+)+b"},
        {"regex": "a{1000000}"},
        {"regex": "|".join(f"w{i}" for i in range(20_000))},
        {"grammar": "start: s\ns: s s s | s s | " + '"a" | "aa" | '},
        {"grammar": "start: a{1000}\na: b{1000}\nb: c{1000}\n" + 'c: "x" | d\nd: "y"'},
        {"grammar": "start: A\nA: ~(~(~/(a|b)*a(a|b){12}/) & /(.*b.*a){10}/)"},
        {"choice": [f"choice {i}" for i in range(10_000)]},
    ],
)
def test_explosive_grammars_take_bounded_time(form: dict[str, Any]) -> None:
    """They are refused, or go on in steps of bounded time, or end with a named error on the way."""
    longest = 0.0
    started = time.thread_time()
    try:
        state = constraint(**form)
        compiled = time.thread_time()
        rng = random.Random(0)
        for _ in range(40):
            before = time.thread_time()
            if state.finished:
                break
            token_id = int(rng.choice(legal(state.mask())))
            state.accept([token_id])
            longest = max(longest, time.thread_time() - before)
    except GrammarError:
        compiled = time.thread_time()
    assert compiled - started < 2.0
    assert longest < 1.0


def test_equal_requests_share_one_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = GrammarCompiler(vocabulary(tokenizer(), SIZE))
    mine.build()
    compiled: list[str] = []
    begun = threading.Event()

    def compile_slowly(self: GrammarCompiler, structured: StructuredOutput) -> Any:
        compiled.append(structured.source)
        begun.set()
        time.sleep(0.1)
        return original(self, structured)

    original = GrammarCompiler._compile
    monkeypatch.setattr(GrammarCompiler, "_compile", compile_slowly)
    good, bad = StructuredOutput(regex="a+"), StructuredOutput(regex="(")
    with ThreadPoolExecutor(8) as pool:
        states = [*pool.map(lambda _: mine.constraint(good), range(8))]
        errors = [future.exception() for future in [pool.submit(mine.constraint, bad) for _ in range(8)]]
    assert compiled.count("a+") == 1
    states[0].accept(ids_of("a"))
    assert EOS not in legal(states[1].mask())  # each has a state of its own
    assert all(isinstance(error, GrammarError) for error in errors)
    assert len({id(error) for error in errors}) == 8
    count = len(compiled)
    with pytest.raises(GrammarError):
        mine.constraint(bad)
    assert len(compiled) == count + 1  # an error is not kept


def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = GrammarCompiler(vocabulary(tokenizer(), SIZE))
    monkeypatch.setattr(grammar, "MAX_GRAMMARS", 3)
    for i in range(10):
        mine.constraint(StructuredOutput(regex=f"a{i}"))
    assert [key[1] for key in mine._compiled] == ["a7", "a8", "a9"]
    mine.constraint(StructuredOutput(regex="a7"))
    mine.constraint(StructuredOutput(regex="b"))
    assert [key[1] for key in mine._compiled] == ["a9", "a7", "b"]  # the one used longest ago went
    monkeypatch.setattr(grammar, "MAX_CACHED_CHARACTERS", 100)
    mine.constraint(StructuredOutput(choice=["x" * 120]))
    assert len(mine._compiled) == 1
    assert mine._characters == sum(len(key[1]) for key in mine._compiled)


def test_panics_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):
        pass

    def panic(*_: Any, **__: Any) -> None:
        raise PanicException("index out of range")

    mine = GrammarCompiler(vocabulary(tokenizer(), SIZE))
    mine.build()
    monkeypatch.setattr("llguidance.LLMatcher", panic)
    with pytest.raises(GrammarError, match="index out of range"):
        mine.constraint(StructuredOutput(regex="a"))


def sentencepiece(folder: Path) -> Tokenizer:
    """A tokenizer with bytes for what it does not know, which puts a space before each text."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *'{}":,abname1',
        "▁a",
        "na",
        "▁na",
    ]
    merges = [("▁", "a"), ("n", "a"), ("▁", "na")]
    backend = Backend(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(piece, special=True) for piece in pieces[:3]])
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer.load(TokenizerData(folder=folder))


def test_a_tokenizer_that_puts_a_space_before_each_text(tmp_path: Path) -> None:
    mine = GrammarCompiler(vocabulary(sentencepiece(tmp_path), 280))
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["ab", "a name ☃"]}},
        "required": ["name"],
        "additionalProperties": False,
    }
    start = mine.constraint(StructuredOutput(json_schema=schema))
    table = mine._vocabulary.tokens
    texts = set()
    for seed in range(20):
        for jumps in (True, False):
            ids, complete = random_output(start, random.Random(seed), jumps=jumps)
            assert complete
            texts.add(b"".join(table[i] for i in ids).decode())
    assert {text.replace(": ", ":") for text in texts} == {'{"name":"ab"}', '{"name":"a name ☃"}'}


@pytest.mark.parametrize("size", [512, 513, 544])
def test_a_model_without_an_end(size: int) -> None:
    """What can be told to be complete ends by itself; nothing past the vocabulary is legal."""
    mine = GrammarCompiler(vocabulary(tokenizer(), size, frozenset()))
    state = mine.constraint(StructuredOutput(regex="a[bc]?"))
    state.accept(ids_of("a"))
    assert not state.finished
    mask = state.mask()
    assert mask.shape == (-(-size // 32),)
    assert {tokenizer().token_bytes(int(i)) for i in legal(mask)} == {b"b", b"c"}
    state.accept(ids_of("b"))
    assert state.finished


def test_an_end_that_is_also_a_text_is_no_text() -> None:
    """A model may name an ordinary token as its end: inside a string it would end the output."""
    end = byte_ids()[ord("x")]
    mine = GrammarCompiler(vocabulary(tokenizer(), SIZE, frozenset({end})))
    state = mine.constraint(StructuredOutput(regex='"[a-z]*"'))
    state.accept([byte_ids()[ord('"')]])
    assert end not in legal(state.mask())


def test_an_end_of_several_ids() -> None:
    mine = GrammarCompiler(vocabulary(tokenizer(), SIZE, frozenset({0, 2})))
    state = mine.constraint(StructuredOutput(regex="a*"))
    assert {0, 2} <= set(legal(state.mask()).tolist())
    state.accept([0])
    assert state.finished


def test_compiling_leaves_the_interpreter_to_others() -> None:
    """What takes long runs without the lock. Building the vocabulary's tables, once a model, does not."""
    compiler().build()
    gaps: list[float] = []
    done = threading.Event()

    def watch() -> None:
        last = time.perf_counter()
        while not done.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        started = time.perf_counter()
        constraint(choice=[f"one more choice {i}" for i in range(10_000)])
        took = time.perf_counter() - started
    finally:
        done.set()
        watcher.join()
    assert max(gaps) < max(0.05, took / 2)


def test_a_missing_extra_is_named() -> None:
    code = (
        "import sys; sys.modules['llguidance'] = None\n"
        "from asyncllm.errors import DependencyError\n"
        "from asyncllm.outputs.grammar import GrammarCompiler, GrammarVocabulary\n"
        "from asyncllm import StructuredOutput\n"
        "v = GrammarVocabulary([b'a'], frozenset(), frozenset({0}), 1, lambda text: [0])\n"
        "try: GrammarCompiler(v).constraint(StructuredOutput(regex='a'))\n"
        "except DependencyError as error: assert 'asyncllm[grammar]' in str(error)\n"
        "else: raise SystemExit('not raised')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_protocol_is_met() -> None:
    state: Constraint = constraint(regex="a")
    assert isinstance(state, GrammarConstraint)
