from __future__ import annotations

from asyncllm.outputs.token_table import TokenTable


def table() -> TokenTable:
    return TokenTable(
        texts=["a", None, "</s>", "", "é"],
        fragments={1: b"\xc3"},
        special_ids=frozenset({2}),
        absent_ids=frozenset({3}),
        byte_level=True,
    )


def test_bytes_of_every_id() -> None:
    assert [table().token_bytes(token_id) for token_id in range(-1, 6)] == [
        b"",
        b"a",
        b"\xc3",
        b"</s>",
        b"",
        "é".encode(),
        b"",
    ]


def test_views_without_special_tokens() -> None:
    assert table().texts_without_special == ["a", None, "", "", "é"]
    assert table().silent_ids == {2, 3}
