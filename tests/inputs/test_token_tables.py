from __future__ import annotations

import time

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from asyncllm.inputs.token_tables import build_token_table, byte_alphabet, vocabulary_size
from tests.inputs import toy_tokenizers as toys


def test_the_byte_alphabet_is_the_packages_own() -> None:
    assert set(byte_alphabet()) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(byte_alphabet().values()) == list(range(256))


def test_vocabulary_with_a_hole() -> None:
    tokenizer = toys.byte_level()
    assert tokenizer.vocab_size == vocabulary_size(tokenizer._backend) == 301
    assert tokenizer.table is not None
    assert tokenizer.table.absent_ids == {i for i in range(301) if tokenizer._backend.id_to_token(i) is None}
    assert len(tokenizer.table.absent_ids) > 30
    assert vocabulary_size(tokenizers.Tokenizer(models.BPE())) == 0


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.CTC(),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("a", "b")]),
        decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
        decoders.Sequence([decoders.ByteLevel(), decoders.Replace("a", "b")]),
    ],
)
def test_decoders_that_no_table_describes(decoder: decoders.Decoder) -> None:
    backend = toys.byte_level()._backend
    backend.decoder = decoder
    assert build_token_table(backend, frozenset()) is None


def test_a_table_takes_a_fraction_of_a_second() -> None:
    tokenizer = toys.smollm2()
    start = time.process_time()
    build_token_table(tokenizer._backend, tokenizer.special_ids)
    assert time.process_time() - start < 1.5  # 0.1 s on an idle core
