"""Faults seen in engines of this kind, each as a test through the public API. The ids are those of the collection.

Most use the *script model*, whose greedy answer is a chosen list of ids, here over SmolLM2's own tokenizer.
"""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import AutoModelForCausalLM

from asyncllm import AsyncEngine, Completion, EngineConfig, SamplingParams
from asyncllm.cli import find_smollm2
from asyncllm.errors import (
    ChatTemplateError,
    CheckpointError,
    ContextLengthError,
    InvalidParamsError,
    InvalidPromptError,
    ModelLoadError,
    UnsupportedModelError,
)
from asyncllm.inputs.tokenizer import Tokenizer
from asyncllm.testing.tiny_models import CHAT_TEMPLATE, write_byte_tokenizer, write_script_model, write_tiny_model
from asyncllm.weights.source import resolve_source

START = 1000  # the prompt of every script: an ordinary id that no script uses
GREEDY = SamplingParams(temperature=0, max_tokens=40)
SMALL = {"dtype": "float32", "block_size": 16, "num_blocks": 64, "max_model_len": 512}


@pytest.fixture(scope="session")
def smollm2_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with SmolLM2's tokenizer as tokenizer.json."""
    folder = tmp_path_factory.mktemp("smollm2")
    tokenizer = Tokenizer.load(resolve_source(find_smollm2(), EngineConfig()).tokenizer)
    tokenizer._backend.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


async def say(
    folder: Path, tokenizer: Path, script: Sequence[int], params: SamplingParams = GREEDY
) -> tuple[Completion, list[str]]:
    """The completion of a script, and the texts of its deltas."""
    write_script_model(folder, [[START, *script]], tokenizer=tokenizer)
    async with AsyncEngine(str(folder), **SMALL) as engine:
        stream = engine.stream([START], params)
        texts = [delta.text async for delta in stream]
        completion = await stream.result()
        collected = await engine.generate([START], params)
    assert completion.text == collected.text == "".join(texts)
    assert completion.token_ids == collected.token_ids
    assert completion.finish_reason == collected.finish_reason
    return completion, texts


@pytest.mark.parametrize(
    ("script", "text"), [([10813, 230, 131, 57, 2], "🌶I"), ([143, 233, 2], "ď"), ([18645, 250, 2], "你")]
)
async def test_g01_characters_of_several_tokens(
    script: list[int], text: str, tmp_path: Path, smollm2_tokenizer: Path
) -> None:
    completion, texts = await say(tmp_path, smollm2_tokenizer, script)
    assert completion.text == text
    assert not any("\ufffd" in part for part in texts)
    assert completion.token_ids == tuple(script)
    assert all(sum(character in part for part in texts) == 1 for character in text)  # once, in one delta


async def test_g02_invalid_bytes_harm_nobody(tmp_path: Path, smollm2_tokenizer: Path) -> None:
    script = [230, 131, 10813, 242, 57, 143, 250, 46, 2]
    normal = [4000, 4001, 4002, 2]
    write_script_model(tmp_path, [[START, *script], [START + 1, *normal]], tokenizer=smollm2_tokenizer)
    backend = Backend.from_file(str(smollm2_tokenizer / "tokenizer.json"))
    async with AsyncEngine(str(tmp_path), **SMALL) as engine:
        odd, plain = await asyncio.gather(engine.generate([START], GREEDY), engine.generate([START + 1], GREEDY))
        assert odd.text == backend.decode(script)
        assert "\ufffd" in odd.text
        assert plain.text == backend.decode(normal)
        assert (await engine.generate([START + 1], GREEDY)).text == plain.text


async def test_g03_added_tokens_get_no_spaces(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=False)])
    backend.save(str(tmp_path / "tokenizer.json"))
    text = "<think>ok</think>1"
    script = backend.encode(text).ids
    write_script_model(tmp_path, [[400, *script, 2]], tokenizer=tmp_path)
    async with AsyncEngine(str(tmp_path), **SMALL) as engine:
        for skip in (True, False):
            params = SamplingParams(temperature=0, max_tokens=40, skip_special_tokens=skip)
            assert (await engine.generate([400], params)).text == text


async def test_g04_leading_spaces_survive(tmp_path: Path) -> None:
    pieces = ["<unk>", "<s>", "</s>", "▁Daenerys", "▁is", "▁the", "▁Kh", "aleesi", "▁"]
    backend = Backend(models.Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens([AddedToken(text, special=True) for text in pieces[:3]])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "bos_token": "<s>"}))
    write_script_model(tmp_path, [[3, 4, 5, 6, 7, 2], [1, 8, 4]], tokenizer=tmp_path)
    async with AsyncEngine(str(tmp_path), **SMALL) as engine:
        stream = engine.stream("Daenerys", GREEDY)
        texts = [delta.text async for delta in stream]
        assert "".join(texts) == (await stream.result()).text == " is the Khaleesi"


async def test_g05_a_beginning_stop_string_is_withheld(tmp_path: Path, smollm2_tokenizer: Path) -> None:
    script = [33203, 23960, 57, 58, 2]  # DEF GH I J
    matched = SamplingParams(temperature=0, max_tokens=40, stop=["DEFGHIJ"])
    completion, texts = await say(tmp_path, smollm2_tokenizer, script, matched)
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("", "stop", "DEFGHIJ")
    assert set(texts) == {""}
    missed = SamplingParams(temperature=0, max_tokens=40, stop=["DEFGHIK"])
    completion, _ = await say(tmp_path, smollm2_tokenizer, script, missed)
    assert (completion.text, completion.finish_reason) == ("DEFGHIJ", "stop")


@pytest.mark.parametrize(("limit", "finish"), [(40, "stop"), (6, "length")])
async def test_g06_withheld_text_is_flushed(limit: int, finish: str, tmp_path: Path, smollm2_tokenizer: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=limit, stop=["TRE\nAAAA"])
    completion, _ = await say(tmp_path, smollm2_tokenizer, [5633, 63, 422, 16049, 312, 3256, 2], params)
    assert (completion.text, completion.finish_reason) == ("UNO DUE TRE", finish)


async def test_g07_stop_strings_delay_nothing_else(tmp_path: Path, smollm2_tokenizer: Path) -> None:
    backend = Backend.from_file(str(smollm2_tokenizer / "tokenizer.json"))
    script = backend.encode("A B C D").ids
    assert len(script) == 4
    params = SamplingParams(temperature=0, max_tokens=40, stop=["✿RESULT✿"])
    write_script_model(tmp_path, [[START, *script, 2]], tokenizer=smollm2_tokenizer)
    async with AsyncEngine(str(tmp_path), **SMALL) as engine:
        # The engine may be ahead of this reader: then one delta holds several tokens, and still all of their text.
        seen = ""
        async for delta in engine.stream([START], params):
            seen += delta.text
            count = len(backend.encode(seen).ids)
            assert seen == "A B C D"[: 2 * count - 1]
        assert seen == "A B C D"


@pytest.mark.parametrize(
    ("script", "stop", "text"),
    [
        ([30, 1116, 57, 2], "\n\n", "."),
        ([30, 198, 198], "\n\n", "."),
        ([81, 82, 28, 83, 2], "b,c", "a"),
    ],
)
async def test_g08_stop_strings_match_text_not_tokens(
    script: list[int], stop: str, text: str, tmp_path: Path, smollm2_tokenizer: Path
) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, stop=[stop])
    completion, _ = await say(tmp_path, smollm2_tokenizer, script, params)
    assert (completion.text, completion.finish_reason, completion.stop_reason) == (text, "stop", stop)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), chat_template=CHAT_TEMPLATE)


async def test_g09_the_bytes_of_tokens_are_their_own(tmp_path: Path, smollm2_tokenizer: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, logprobs=3, logprob_token_ids=[230, 57])
    completion, _ = await say(tmp_path, smollm2_tokenizer, [10813, 230, 131, 57, 2], params)
    assert completion.logprobs is not None
    chosen = [position.chosen for position in completion.logprobs]
    assert [list(token.bytes) for token in chosen] == [[240, 159], [140], [182], [73], list(b"<|im_end|>")]
    assert b"".join(token.bytes for token in chosen[:-1]).decode() == completion.text == "\U0001f336I"
    assert [token.text for token in chosen[:2]] == ["bytes:\\xf0\\x9f", "bytes:\\x8c"]
    backend = Backend.from_file(str(smollm2_tokenizer / "tokenizer.json"))
    for position in completion.logprobs:
        assert position.top[0].token_id == position.chosen.token_id
        assert [token.token_id for token in position.top[3:]] == [230, 57]
        for token in position.top:
            text = backend.decode([token.token_id], skip_special_tokens=False)
            assert "\ufffd" in text or text.encode() == token.bytes


async def test_g13_a_seed_does_not_depend_on_batch_mates(tiny: Path) -> None:
    seeded = SamplingParams(temperature=0.8, seed=42, max_tokens=24, ignore_eos=True)
    unseeded = SamplingParams(temperature=0.8, max_tokens=24, ignore_eos=True)
    async with AsyncEngine(str(tiny), **SMALL) as engine:
        alone = (await engine.generate("The quick", seeded)).token_ids
        for _ in range(5):
            with_other, _ = await asyncio.gather(
                engine.generate("The quick", seeded), engine.generate("The quick", unseeded)
            )
            assert with_other.token_ids == alone
        mixed = [unseeded, GREEDY, unseeded, seeded, SamplingParams(seed=1, max_tokens=9), unseeded, GREEDY]
        completions = await asyncio.gather(*(engine.generate("The quick", params) for params in mixed))
        assert completions[3].token_ids == alone
        draws = {(await engine.generate("The quick", unseeded)).token_ids for _ in range(3)}
        assert len(draws) == 3  # a missing seed is drawn anew for each request


async def test_g15_ids_outside_the_vocabulary_are_refused(tiny: Path) -> None:
    async with AsyncEngine(str(tiny), **SMALL) as engine:
        for prompt in ([-1], [512], [3, 2**40], [2**70]):
            with pytest.raises(InvalidPromptError):
                await engine.generate(prompt, GREEDY)
        with pytest.raises(InvalidParamsError, match="1000000"):
            await engine.generate([3], SamplingParams(stop_token_ids=[10**6], min_tokens=1))
        for field in ({"logit_bias": {512: 5}}, {"allowed_token_ids": [512]}, {"logprob_token_ids": [600]}):
            with pytest.raises(InvalidParamsError, match=next(iter(field))):
                await engine.generate([3], SamplingParams(**field))
        assert (await engine.generate([3], GREEDY)).finish_reason in ("stop", "length")


async def test_g16_zero_tokens_no_limit_and_long_prompts(tiny: Path) -> None:
    async with AsyncEngine(str(tiny), dtype="float32", max_model_len=64, block_size=16) as engine:
        empty = await engine.generate([3, 4], SamplingParams(max_tokens=0))
        assert (empty.token_ids, empty.text, empty.finish_reason) == ((), "", "length")
        assert (empty.usage.prompt_tokens, empty.usage.completion_tokens) == (2, 0)
        unlimited = await engine.generate([3, 4, 5], SamplingParams(ignore_eos=True, seed=1))
        assert unlimited.usage.completion_tokens == 64 - 3
        assert unlimited.finish_reason == "length"
        for length in (64, 65, 1000):
            started = time.monotonic()
            with pytest.raises(ContextLengthError):
                await engine.generate([3] * length, GREEDY)
            assert time.monotonic() - started < 1
        assert (await engine.generate([3] * 63, GREEDY)).usage.completion_tokens == 1


async def test_g14_choices_are_independent_and_reproducible(tiny: Path) -> None:
    params = SamplingParams(n=4, seed=7, temperature=1.0, max_tokens=12, stop_token_ids=range(0, 512, 9))
    async with AsyncEngine(str(tiny), **SMALL) as engine:
        first, again = [await engine.generate("The quick", params) for _ in range(2)]
        assert [choice.index for choice in first.choices] == [0, 1, 2, 3]
        assert len({len(choice.token_ids) for choice in first.choices}) > 1
        assert len({choice.token_ids for choice in first.choices}) > 1
        assert again.choices == first.choices
        alone = await engine.generate("The quick", replace(params, n=1))
        assert alone.choices[0] == first.choices[0]
        deltas = [delta async for delta in engine.stream("The quick", params)]
    for choice in first.choices:
        own = [delta for delta in deltas if delta.index == choice.index]
        assert "".join(delta.text for delta in own) == choice.text
        assert tuple(i for delta in own for i in delta.token_ids) == choice.token_ids
        assert [delta.finish_reason for delta in own] == [None] * (len(own) - 1) + [choice.finish_reason]
    assert first.usage.prompt_tokens == len(first.prompt_token_ids)
    assert first.usage.completion_tokens == sum(len(choice.token_ids) for choice in first.choices)
    assert [delta.usage is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]


@pytest.mark.parametrize("length", [31, 32, 33])
async def test_g17_a_prompt_that_is_wholly_cached(length: int, tiny: Path) -> None:
    prompt = list(range(10, 10 + length))
    async with AsyncEngine(str(tiny), **SMALL) as engine:
        completions = [await engine.generate(prompt, GREEDY) for _ in range(3)]
    assert len({completion.token_ids for completion in completions}) == 1
    assert completions[0].usage.cached_tokens == 0
    for completion in completions[1:]:
        assert 16 <= completion.usage.cached_tokens < length


async def test_g19_salts_share_nothing(tiny: Path) -> None:
    prompt = list(range(10, 74))
    async with AsyncEngine(str(tiny), **SMALL) as engine:
        first = await engine.generate(prompt, GREEDY, cache_salt="x")
        other = await engine.generate(prompt, GREEDY, cache_salt="y")
        none = await engine.generate(prompt, GREEDY)
        again = await engine.generate(prompt, GREEDY, cache_salt="x")
    assert [c.usage.cached_tokens for c in (first, other, none)] == [0, 0, 0]
    assert again.usage.cached_tokens > 0
    assert len({c.token_ids for c in (first, other, none, again)}) == 1


async def test_g20_a_request_over_the_pool_blocks_nobody(tiny: Path) -> None:
    async with AsyncEngine(str(tiny), dtype="float32", block_size=16, num_blocks=8, max_model_len=512) as engine:
        started = time.monotonic()
        long = asyncio.ensure_future(engine.generate([3] * 200, GREEDY))
        short = asyncio.ensure_future(engine.generate([3] * 10, GREEDY))
        with pytest.raises(ContextLengthError):
            await long
        assert time.monotonic() - started < 1
        assert (await short).usage.completion_tokens > 0
        # One that outgrows the pool ends at its capacity.
        grown = await engine.generate([3] * 10, SamplingParams(ignore_eos=True, seed=1))
        assert grown.finish_reason == "length"
        assert 10 + grown.usage.completion_tokens == 8 * 16


async def idle(engine: AsyncEngine) -> bool:
    """Whether the engine is idle within a second."""
    for _ in range(100):
        statistics = engine.statistics()
        if statistics.requests_running == statistics.requests_waiting == statistics.blocks_used == 0:
            return True
        await asyncio.sleep(0.01)
    return False


async def test_g21_every_way_of_leaving_frees_the_request(tiny: Path) -> None:
    forever = SamplingParams(ignore_eos=True, seed=1)
    async with AsyncEngine(str(tiny), dtype="float32", block_size=16, max_model_len=2048) as engine:
        stream = engine.stream("One", forever)
        read = 0
        async for _ in stream:
            read += 1
            if read == 2:
                break
        del stream
        gc.collect()
        assert await idle(engine)

        stream = engine.stream("One", forever)
        await anext(stream)
        await stream.aclose()
        assert engine.statistics().blocks_used == 0

        async def sleepy() -> None:
            async for _ in engine.stream("One", forever):
                await asyncio.sleep(3600)

        task = asyncio.create_task(sleepy())
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        del task
        gc.collect()
        assert await idle(engine)

        dropped = engine.stream("One", forever)
        await anext(dropped)
        del dropped
        gc.collect()
        assert await idle(engine)


async def test_g22_leaving_a_collected_call_frees_the_request(tiny: Path) -> None:
    async with AsyncEngine(str(tiny), dtype="float32", block_size=16, max_model_len=2048) as engine:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await engine.generate("One", SamplingParams(ignore_eos=True, seed=1))
        assert await idle(engine)
        aborted = engine.statistics().requests_aborted
        assert aborted == 1
        await asyncio.gather(*(engine.generate("One", GREEDY) for _ in range(20)))
        assert engine.statistics().requests_aborted == aborted


async def test_g23_empty_prompts_harm_nobody(tmp_path: Path, tiny: Path, smollm2_tokenizer: Path) -> None:
    async with AsyncEngine(str(tiny), **SMALL) as engine:
        for prompt in ("", []):
            with pytest.raises(InvalidPromptError):
                await engine.generate(prompt, GREEDY)
        assert (await engine.generate("ok", GREEDY)).usage.completion_tokens > 0
    write_script_model(tmp_path, [[START, 2]], tokenizer=smollm2_tokenizer)
    async with AsyncEngine(str(tmp_path), **SMALL) as engine:
        with pytest.raises(InvalidPromptError):  # a byte for which SmolLM2 has no token
            await engine.generate("\x04", GREEDY)
        assert (await engine.generate([START], GREEDY)).finish_reason == "stop"


@pytest.mark.alone
async def test_g24_a_huge_prompt_freezes_nobody(tmp_path: Path) -> None:
    """A normalizer may drop text, so that no length tells how many tokens it has: the prompt must be tokenised."""
    write_tiny_model(tmp_path, chat_template=CHAT_TEMPLATE)
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.normalizer = normalizers.NFC()
    backend.save(str(tmp_path / "tokenizer.json"))
    lags: list[float] = []

    async def measure() -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + 0.005
            await asyncio.sleep(0.005)
            lags.append(loop.time() - due)

    async with AsyncEngine(str(tmp_path), dtype="float32", max_model_len=2048) as engine:
        await engine.generate("warm", GREEDY)
        huge = [{"role": "user", "content": "many words " * 100_000}]
        measuring = asyncio.ensure_future(measure())
        task = asyncio.ensure_future(engine.generate(huge, GREEDY))
        while not task.done():
            before = time.perf_counter()
            await engine.generate([5, 6, 7], SamplingParams(temperature=0, max_tokens=4))
            assert time.perf_counter() - before < 2
        measuring.cancel()
        with pytest.raises(ContextLengthError, match=r"has \d"):  # counted; "has over" would come from the length alone
            await task
    assert len(lags) > 20
    assert sorted(lags)[int(len(lags) * 0.99)] < 0.05
    assert max(lags) < 0.3


BOS_TEMPLATE = "{{ bos_token }}" + CHAT_TEMPLATE


async def test_g33_one_bos_only(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, chat_template=BOS_TEMPLATE)
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    from tokenizers.processors import TemplateProcessing

    backend.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    backend.save(str(tmp_path / "tokenizer.json"))
    async with AsyncEngine(str(tmp_path), **SMALL) as engine:
        chat = await engine.generate([{"role": "user", "content": "hi"}], GREEDY)
        text = await engine.apply_chat_template([{"role": "user", "content": "hi"}])
        assert list(chat.prompt_token_ids) == backend.encode(text, add_special_tokens=False).ids
        assert chat.prompt_token_ids[:2] == (1, 1)  # the template's BOS, then its own <|im_start|>
        raw = await engine.generate("hi", GREEDY)
        assert raw.prompt_token_ids[0] == 1
        assert 1 not in raw.prompt_token_ids[1:]


async def test_g34_every_end_of_sequence_id_ends(tmp_path: Path, smollm2_tokenizer: Path) -> None:
    scripts = [[START, 4000, 0], [START + 1, 4001, 2]]
    write_script_model(tmp_path, scripts, tokenizer=smollm2_tokenizer, eos_token_ids=[0, 2])
    async with AsyncEngine(str(tmp_path), **SMALL) as engine:
        for prompt, word, eos in [(START, 4000, 0), (START + 1, 4001, 2)]:
            completion = await engine.generate([prompt], GREEDY)
            assert completion.finish_reason == "stop"
            assert completion.token_ids == (word, eos)
            assert completion.usage.completion_tokens == 2
            assert "<|" not in completion.text


MAPPING_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'bad' %}{{ raise_exception('no such role: bad') }}{% endif %}"
    "{{ m['role'] + ':' + m['content'] }}"
    "{% if m.tool_calls is defined %}{% for c in m.tool_calls %}"
    "{% for k, v in c.function.arguments|items %}{{ k }}={{ v }};{% endfor %}{% endfor %}{% endif %}\n{% endfor %}"
)


async def test_g35_message_shapes_are_normalised(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, chat_template=MAPPING_TEMPLATE)
    call = {"id": "c1", "type": "function", "function": {"name": "w", "arguments": '{"city": "Rome"}'}}
    async with AsyncEngine(str(tmp_path), **SMALL) as engine:
        parts = await engine.generate([{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], GREEDY)
        plain = await engine.generate([{"role": "user", "content": "Hi"}], GREEDY)
        assert parts.prompt_token_ids == plain.prompt_token_ids
        messages = [
            {"role": "user", "content": "Hi", "tool_calls": []},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "sunny"}]},
        ]
        assert "city=Rome;" in await engine.apply_chat_template(messages)
        assert (await engine.generate(messages, GREEDY)).usage.completion_tokens > 0
        with pytest.raises(ChatTemplateError, match="no such role"):
            await engine.generate([{"role": "bad", "content": "x"}], GREEDY)


async def test_g36_no_chat_template(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    messages = [{"role": "user", "content": "Hi"}]
    async with AsyncEngine(str(tmp_path), **SMALL) as engine:
        assert (await engine.generate("Hi", GREEDY)).usage.completion_tokens > 0
        with pytest.raises(ChatTemplateError, match="chat template"):
            await engine.generate(messages, GREEDY)
    async with AsyncEngine(str(tmp_path), **SMALL, chat_template=CHAT_TEMPLATE) as engine:
        assert (await engine.generate(messages, GREEDY)).usage.completion_tokens > 0


def greedy_reference(folder: Path, prompt: list[int], count: int) -> list[int]:
    """transformers' greedy ids with its cache, ends of sequence ignored."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    answer: list[int] = []
    with torch.inference_mode():
        output = model(torch.tensor([prompt]), use_cache=True)
        while True:
            answer.append(int(output.logits[0, -1].argmax()))
            if len(answer) == count:
                return answer
            output = model(torch.tensor([answer[-1:]]), cache=output.cache, use_cache=True)


async def greedy(folder: Path, prompt: list[int], count: int, **config: Any) -> list[int]:
    async with AsyncEngine(str(folder), **{**SMALL, **config}) as engine:
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        return list((await engine.generate(prompt, params)).token_ids)


PROMPT = [5, 99, 340, 17, 256, 8, 400, 77]


@pytest.mark.parametrize(("tied", "head"), [(True, False), (True, True), (False, True)])
async def test_g37_tied_and_untied_heads(tied: bool, head: bool, tmp_path: Path) -> None:
    write_tiny_model(tmp_path, config={"tie_word_embeddings": tied}, head=head)
    assert await greedy(tmp_path, PROMPT, 16) == greedy_reference(tmp_path, PROMPT, 16)


async def test_g37_an_untied_model_without_its_head_is_refused(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, head=False)
    with pytest.raises(CheckpointError, match="lm_head"):
        await greedy(tmp_path, PROMPT, 1)


async def test_g38_shards(tmp_path: Path) -> None:
    whole = write_tiny_model(tmp_path / "whole", shards=3)
    expected = await greedy(whole, PROMPT, 12)
    stray = load_file(whole / "model-00001-of-00003.safetensors")
    save_file({name: tensor * 0 + 1 for name, tensor in stray.items()}, whole / "model-old.safetensors")
    assert await greedy(whole, PROMPT, 12) == expected

    missing = write_tiny_model(tmp_path / "missing", shards=3)
    (missing / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="model-00002-of-00003"):
        await greedy(missing, PROMPT, 1)

    short = write_tiny_model(tmp_path / "short", shards=3)
    shard = short / "model-00003-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="model-00003-of-00003"):
        await greedy(short, PROMPT, 1)


ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "yarn_attention_factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "attention_factor": 1.0,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}


def long_prompt(length: int) -> list[int]:
    return [(7 * i) % 500 + 5 for i in range(length)]


@pytest.fixture(scope="module")
def unscaled_answer(tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """What the weights of `test_g39_rope_scaling` answer to its long prompt with the default rope."""
    folder = write_tiny_model(tmp_path_factory.mktemp("unscaled"), config={"max_position_embeddings": 128})
    return asyncio.run(greedy(folder, long_prompt(80), 12, max_model_len=128))


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("length", [24, 80])
async def test_g39_rope_scaling(rope: str, length: int, tmp_path: Path, unscaled_answer: list[int]) -> None:
    positions = 32 if rope == "dynamic" else 128
    write_tiny_model(tmp_path, config={"max_position_embeddings": positions, "rope_scaling": ROPES[rope]})
    answer = await greedy(tmp_path, long_prompt(length), 12, max_model_len=128)
    assert answer == greedy_reference(tmp_path, long_prompt(length), 12)
    if length == 80:
        assert answer != unscaled_answer


async def test_g39_an_unknown_rope_type_is_refused(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, config={"rope_scaling": {"rope_type": "foo", "factor": 2.0}})
    with pytest.raises(UnsupportedModelError, match="foo"):
        await greedy(tmp_path, PROMPT, 1)
    assert issubclass(UnsupportedModelError, ModelLoadError)
