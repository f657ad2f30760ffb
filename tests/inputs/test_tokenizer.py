from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from asyncllm.errors import ContextLengthError, InvalidPromptError, TokenizerError
from asyncllm.inputs.tokenizer import Tokenizer, TokenizerData
from tests.inputs import toy_tokenizers as toys


def test_facts_of_smollm2() -> None:
    tokenizer = toys.smollm2()
    facts = {
        "🌶": [10813, 230, 131],
        "😀": [10813, 242, 218],
        "ď": [143, 233],
        "你": [18645, 250],
        "\n": [198],
        "\n\n": [1116],
        "\t": [197],
        " ha": [421],
        "DEFGHIJ": [33203, 23960, 57, 58],
        "UNO DUE TRE": [5633, 63, 422, 16049, 312, 3256],
        "The capital of France is": [504, 3575, 282, 4649, 314],
    }
    for text, ids in facts.items():
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == text
    assert tokenizer.vocab_size == 49152
    assert tokenizer.eos_token_ids == {2}
    assert tokenizer.bos_token_id == 1
    assert tokenizer.special_ids == set(range(17))
    assert tokenizer.table is not None
    assert len(tokenizer.table.fragments) == 313
    assert tokenizer.encode("\x04") == []  # a byte without a token leaves no trace


def test_raw_bytes_of_one_id() -> None:
    tokenizer = toys.smollm2()
    assert [tokenizer.token_bytes(token_id) for token_id in (10813, 230, 131)] == [b"\xf0\x9f", b"\x8c", b"\xb6"]
    assert tokenizer.token_bytes(421) == b" ha"
    assert tokenizer.token_bytes(2) == b"<|im_end|>"
    assert tokenizer.token_bytes(49152) == b""
    assert b"".join(map(tokenizer.token_bytes, range(49152))).decode("utf-8", "replace") == tokenizer.decode(
        range(49152), skip_special_tokens=False
    )


def test_raw_bytes_in_other_kinds_of_tokenizer() -> None:
    llama = toys.llama_like()
    for token, data in {
        "<0x0A>": b"\n",
        "<0xE4>": b"\xe4",
        "▁the": b" the",
        "中": "中".encode(),
        "</s>": b"</s>",
    }.items():
        token_id = llama.token_id(token)
        assert token_id is not None
        assert llama.token_bytes(token_id) == data
    bert = toys.wordpiece()
    assert [bert.token_bytes(token_id) for token_id in (3, 4)] == [b" the", b"the"]
    assert [toys.suffixed().token_bytes(token_id) for token_id in (0, 1)] == [b"the", b"the"]
    hole = toys.byte_level()
    assert [hole.token_bytes(token_id) for token_id in (299, 300, 0xFF)] == [b"", b"far", b"\xff"]


def test_text_with_and_without_the_tokenizers_own_special_tokens(tmp_path: Path) -> None:
    folder = toys.write_folder(
        tmp_path, toys.byte_level(), {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    )
    tokenizer = Tokenizer.load(TokenizerData(folder=folder))
    bos = tokenizer.bos_token_id
    assert tokenizer.encode("hi") == [bos, *b"hi"]
    rendered = "<s>hi"  # as a chat template writes it: with its BOS
    assert tokenizer.encode(rendered, add_special_tokens=False) == [bos, *b"hi"]


def test_too_many_tokens_are_refused() -> None:
    tokenizer = toys.smollm2()
    assert len(tokenizer.encode("a b c", limit=3)) == 3
    with pytest.raises(ContextLengthError, match="has 3 tokens; the limit is 2"):
        tokenizer.encode("a b c", limit=2)
    with pytest.raises(ContextLengthError, match="has over 24,691 tokens"):
        tokenizer.encode("x" * 2_000_000, limit=8192)
    assert tokenizer.encode("\x04" * 2_000_000, limit=8192) == []


def test_text_that_cannot_be_encoded_is_refused() -> None:
    tokenizer = toys.smollm2()
    for limit in (None, 8):
        with pytest.raises(InvalidPromptError, match="not valid Unicode"):
            tokenizer.encode("a\ud800", limit=limit)
        with pytest.raises(InvalidPromptError, match="must be text, got int"):
            tokenizer.encode(7, limit=limit)  # type: ignore[arg-type]


def test_other_threads_run_while_a_long_text_is_encoded_and_decoded() -> None:
    tokenizer = toys.smollm2()
    done = threading.Event()
    steps = 0

    def count() -> None:
        nonlocal steps
        while not done.wait(0.001):
            steps += 1

    counter = threading.Thread(target=count)
    counter.start()
    ids = tokenizer.encode("The quick brown fox, ten times.\n" * 20_000)
    encoding_steps = steps
    tokenizer.decode(ids * 8)
    done.set()
    counter.join()
    assert len(ids) == 180_000
    assert encoding_steps >= 10
    assert steps > encoding_steps


def test_many_threads_at_once() -> None:
    tokenizer = toys.smollm2()
    texts = [f"text {n} 🌶\n" * n for n in range(1, 60)]
    alone = [tokenizer.encode(text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(tokenizer.encode, texts)) == alone
        assert list(pool.map(tokenizer.decode, alone)) == texts


def test_padding_and_truncation_of_the_file_are_off(tmp_path: Path) -> None:
    toy = toys.byte_level()
    toy._backend.enable_padding(length=8)
    toy._backend.enable_truncation(4)
    tokenizer = Tokenizer.load(TokenizerData(folder=toys.write_folder(tmp_path, toy)))
    assert [len(tokenizer.encode(text)) for text in ("ab", "abcdefghijk")] == [2, 11]


def test_without_a_tokenizer(tmp_path: Path) -> None:
    for data in (TokenizerData(), TokenizerData(folder=tmp_path), TokenizerData(gguf_fields={})):
        assert not data.present
        with pytest.raises(TokenizerError):
            Tokenizer.load(data)
    assert TokenizerData(folder=toys.write_folder(tmp_path, toys.byte_level())).present
    assert TokenizerData(gguf_fields={"tokenizer.ggml.model": "gpt2"}).present


def test_no_torch_and_no_transformers() -> None:
    code = (
        "import sys, asyncllm.inputs.tokenizer, asyncllm.inputs.chat_template, asyncllm.outputs.stop_matcher\n"
        "assert not {'torch', 'triton', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
