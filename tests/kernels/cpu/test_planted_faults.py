"""Kernels of the processor with a planted fault, each compiled anew: their tests catch it."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncllm.kernels.cpu.build import Library
from tests.kernels.cpu import test_decoder, test_draw, test_logits, test_matrix
from tests.kernels.cpu.altered_sources import altered

CHECKS = {
    "rows": lambda library: test_decoder.test_rows_beside_each_other(library, "smollm2"),
    "window": lambda library: test_decoder.test_a_prompt_and_what_follows(library, "window", 77),
    "alone": lambda library: test_decoder.test_what_follows_alone(library, "window"),
    "heads": lambda library: test_decoder.test_a_prompt_and_what_follows(library, "head norms", 13),
    "many keys": lambda library: test_decoder.test_single_tokens_with_many_keys(library, "smollm2"),
    "many keys in a window": lambda library: test_decoder.test_single_tokens_with_many_keys(library, "window"),
    "no number": lambda library: test_decoder.test_what_is_no_number_reaches_no_token_that_does_not_see_it(
        library, "window", 47
    ),
    "product": lambda library: test_matrix.test_nearer_than_bfloat16(library, 4, 208, 576, 12),
    "product of bytes": lambda library: test_matrix.test_nearer_than_bfloat16(library, 8, 208, 576, 12),
    "large numbers": lambda library: test_matrix.test_large_numbers_leave_the_others_their_bits(library, 16),
    "dense product": lambda library: test_matrix.test_nearer_than_bfloat16(library, 16, 208, 576, 12),
    "product of parts": lambda library: test_matrix.test_rows_that_are_cut_into_parts(library, 4),
    "rounding": test_matrix.test_rounds_as_torch_does,
    "uniform": test_draw.test_uniform_numbers,
    "draw": lambda library: test_draw.test_the_share_that_is_asked_for(library, 1000),
    "outputs": lambda library: test_logits.test_some_of_the_tokens_in_any_order(library, 1),
    "largest": lambda library: test_logits.test_the_first_of_the_largest(library, 700),
    "many rows drawn": lambda library: test_logits.test_draws_from_any_vocabulary(library, 40, 4, 528),
    "no number drawn": lambda library: test_logits.test_what_is_no_number(library, 517),
}


def assert_caught(check: str, right: Library, faulty: Library) -> None:
    CHECKS[check](right)
    with pytest.raises(AssertionError):
        CHECKS[check](faulty)


FILES_OF_TILES = ("chunk_attention.h", "token_attention.h", "tile_product.h")


@pytest.mark.full
@pytest.mark.parametrize(
    ("file", "right", "wrong", "check"),
    [
        ("decoder.h", "step.rows[token] * step.table_width", "step.rows[0] * step.table_width", "rows"),
        ("decoder.h", "position - layer.window + 1)", "position - layer.window)", "alone"),
        ("chunk_attention.h", "_mm512_cmple_epi32_mask(at, pos", "_mm512_cmplt_epi32_mask(at, pos", "window"),
        ("chunk_attention.h", "_mm512_cmpgt_epi32_mask(at, oldest)", "_mm512_cmpge_epi32_mask(at, oldest)", "window"),
        ("chunk_attention.h", "position > last ? nullptr", "position >= last ? nullptr", "rows"),
        ("chunk_attention.h", "if (!broken || count == 1) return", "return", "no number"),
        ("chunk_attention.h", "position + token, 1, window", "position + token + 1, 1, window", "no number"),
        ("token_attention.h", "from = std::max(first, start)", "from = start", "many keys in a window"),
        ("token_attention.h", "if (start > begin) {", "if (start < begin) {", "many keys"),
        ("token_attention.h", "std::min(to, block + 15) - at", "block + 15 - at", "many keys"),
        ("token_attention.h", "16 * (at - from) + query", "16 * (block - start) + query", "many keys in a window"),
        ("token_attention.h", "*line = history.line(at)", "*line = history.line(block)", "many keys in a window"),
        (
            "token_attention.h",
            "if (blocks > 1) _tile_stored(1",
            "if (blocks > 2) _tile_stored(1",
            "many keys in a window",
        ),
        ("tile_product.h", "_mm512_and_si512(weight, kept)", "weight", "product"),
        ("tile_product.h", "std::min(block + i, last), group", "std::min(block, last), group", "product"),
        ("philox.h", "k1 += 0xBB67AE85", "k1 += 0xBB67AE84", "uniform"),
        ("token_attention.h", "_mm512_maskz_mov_epi32(own, rows[i])", "rows[i]", "many keys"),
        ("attention.h", "load_bf16(by.norm + half + i)", "load_bf16(by.norm + i)", "heads"),
        ("tile_product.h", "row < kFields ? lower : upper", "lower", "product"),
        ("draw.h", "reached = before;", "reached = sum;", "draw"),
        ("draw.h", "first += kLanes, reached = next", "first += kLanes, reached = 0.0", "draw"),
        ("draw.h", "most + kDrawTiles, of_all)", "most + kDrawTiles, 9.0f)", "draw"),
        ("draw.h", "largest_of(largest[i])", "largest_of(largest[0])", "largest"),
        ("draw.h", "if (odd) {", "if (false) {", "no number drawn"),
        ("draw.h", "numeric_limits<float>::lowest()", "numeric_limits<float>::quiet_NaN()", "no number drawn"),
        ("draw.h", "if (!(sum > 0.0)) return", "if (false) return", "no number drawn"),
        ("simd.h", "6.9315130e-1f", "7.0315130e-1f", "draw"),
        ("matrix.h", "bias ? bias + first", "bias ? bias", "largest"),
        ("logits.h", "std::min(row, sampled_.count - rows)", "int64_t{0}", "many rows drawn"),
        ("logits.h", "piece_ + (row - first) * kDrawTile", "piece_", "many rows drawn"),
        ("logits.h", "weighed(row), first / kDrawTile", "weighed(row), 0", "many rows drawn"),
        ("logits.h", "step_.residual + sampled_.token(row)", "step_.residual + row", "outputs"),
        ("logits.h", "step_.positions[sampled_.token(row)] + 1)", "step_.positions[sampled_.token(row)])", "outputs"),
    ],
)
def test_planted_fault_is_caught(  # noqa: PLR0917  (a parameter for each of what the table gives)
    compiled: Library, file: str, right: str, wrong: str, check: str, tmp_path: Path
) -> None:
    if file in FILES_OF_TILES and not compiled.tiles:
        pytest.skip("this processor has no matrix unit")
    assert_caught(check, compiled, altered(tmp_path, [(file, right, wrong)]))


@pytest.mark.full
@pytest.mark.parametrize(
    ("file", "right", "wrong", "check"),
    [
        ("avx2_blocks.h", "if (shift + Bits < 16)", "if (shift + Bits < 12)", "large numbers"),
        ("avx2_blocks.h", "pair / kFields * 64", "0 * 64", "product of bytes"),
        ("avx2_blocks.h", "quad / 2 * 64 + half", "quad / 4 * 64 + half", "product"),
        ("avx2_blocks.h", "fine = fine || x[m", "fine = x[m", "large numbers"),
        ("avx2_blocks.h", "x + group * 2 * kGroup", "x", "product of bytes"),
        ("avx2_blocks.h", "x + parts.bytes + group * kGroup", "x + parts.bytes", "product"),
        ("avx2_blocks.h", "of_group(parts.sums)", "of_group(parts.scales)", "product"),
        ("avx2_blocks.h", "multiply_add(odd, {second, second}", "multiply_add(odd, {first, first}", "dense product"),
        ("matrix.h", "kOrdinary * root_mean_square(source, inputs)", "HUGE_VALF", "large numbers"),
        ("matrix.h", "most <= ordinary ? kByte", "most < 0.0f ? kByte", "product"),
        ("vector_product.h", "x.data + row * x.stride", "x.data + row % 256 * x.stride", "product of parts"),
        ("avx2.h", "_mm256_set1_epi32(count - first)", "_mm256_set1_epi32(count)", "rows"),
        ("avx2.h", "_mm256_add_epi32(odd, ", "_mm256_or_si256(odd, ", "rounding"),
        ("avx2.h", "_mm256_unpackhi_ps(a.low, a.high)", "_mm256_unpackhi_ps(a.high, a.low)", "rows"),
        ("attention.h", "first & (block_size - 1) ? ", "true ? ", "window"),
        ("attention.h", "choose(lanes_below(count - start), exp2", "choose(lanes_below(16), exp2", "rows"),
    ],
)
def test_planted_fault_is_caught_without_avx512(  # noqa: PLR0917  (as above)
    avx2: Library, avx2_compiler: str, file: str, right: str, wrong: str, check: str, tmp_path: Path
) -> None:
    assert_caught(check, avx2, altered(tmp_path, [(file, right, wrong)], avx2_compiler))
