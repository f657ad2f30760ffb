from __future__ import annotations

from asyncllm.kernels.uniform_draw import philox4x32


def test_generator_gives_the_published_words() -> None:
    """The known answers of Random123 for counter and key 0."""
    assert philox4x32(0, 0, 0) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
