// A block of features times few rows, by AVX-512: of codes as integers of two bytes, or of pairs of bfloat16.
#pragma once

#include "matrix.h"

namespace asyncllm {

// Adds a group's sums of products with the upper and the lower bytes of x. `at`: scales and zeros of the lines;
// `scales`: those of the first row of x, and the sums of its groups.
template <int M>
__attribute__((always_inline)) inline void add_group(const std::uint8_t *at, const __m512i *upper, const __m512i *lower,
                                                     const std::uint8_t *scales, int64_t stride, int64_t group,
                                                     int64_t groups, Floats *sums) {
  const Floats scale = load_half(at), zero = load_half(at + 32);
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) {
    const auto *row = reinterpret_cast<const float *>(scales + m * stride);
    const Floats dot = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(upper[m], 8), lower[m]));
    sums[m] = multiply_add(dot * every(row[group]), scale, sums[m]);
    sums[m] = multiply_add(zero, every(row[groups + group]), sums[m]);
  }
}

template <int M>
inline void multiply_block_4(const Matrix &w, int64_t block, const std::uint8_t *x, int64_t stride, Floats sums[M]) {
  const int64_t inputs = w.inputs, groups = w.groups();
  const __m512i nibble = _mm512_set1_epi8(15);
  const std::uint8_t *at = w.block(block, 0);
  for (int m = 0; m < M; ++m) sums[m] = zeros();
  for (int64_t group = 0; group < groups; ++group, at += 320) {
    __m512i upper[M], lower[M];
    for (int m = 0; m < M; ++m) upper[m] = lower[m] = _mm512_setzero_si512();
    prefetch_group(at, 320);
#pragma GCC unroll 4
    for (int quad = 0; quad < 4; ++quad) {
      const __m512i both = _mm512_load_si512(at + 64 * quad);  // of 8 inputs
      const __m512i first = _mm512_and_si512(both, nibble);
      const __m512i second = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble);
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) {
        const auto *high = reinterpret_cast<const int *>(x + m * stride + group * kGroup);
        const auto *low = reinterpret_cast<const int *>(x + m * stride + inputs + group * kGroup);
        upper[m] = _mm512_dpbusd_epi32(upper[m], first, _mm512_set1_epi32(high[2 * quad]));
        lower[m] = _mm512_dpbusd_epi32(lower[m], first, _mm512_set1_epi32(low[2 * quad]));
        upper[m] = _mm512_dpbusd_epi32(upper[m], second, _mm512_set1_epi32(high[2 * quad + 1]));
        lower[m] = _mm512_dpbusd_epi32(lower[m], second, _mm512_set1_epi32(low[2 * quad + 1]));
      }
    }
    add_group<M>(at + 256, upper, lower, x + 2 * inputs, stride, group, groups, sums);
  }
}

template <int M>
inline void multiply_block_8(const Matrix &w, int64_t block, const std::uint8_t *x, int64_t stride, Floats sums[M]) {
  const int64_t inputs = w.inputs, groups = w.groups();
  const std::uint8_t *at = w.block(block, 0);
  for (int m = 0; m < M; ++m) sums[m] = zeros();
  for (int64_t group = 0; group < groups; ++group, at += 576) {
    __m512i upper[M], lower[M];
    for (int m = 0; m < M; ++m) upper[m] = lower[m] = _mm512_setzero_si512();
    prefetch_group(at, 576);
#pragma GCC unroll 8
    for (int quad = 0; quad < 8; ++quad) {
      const __m512i codes = _mm512_load_si512(at + 64 * quad);
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) {
        const auto *high = reinterpret_cast<const int *>(x + m * stride + group * kGroup);
        const auto *low = reinterpret_cast<const int *>(x + m * stride + inputs + group * kGroup);
        upper[m] = _mm512_dpbusd_epi32(upper[m], codes, _mm512_set1_epi32(high[quad]));
        lower[m] = _mm512_dpbusd_epi32(lower[m], codes, _mm512_set1_epi32(low[quad]));
      }
    }
    add_group<M>(at + 512, upper, lower, x + 2 * inputs, stride, group, groups, sums);
  }
}

template <int M>
inline void multiply_block_16(const Matrix &w, int64_t block, const std::uint8_t *x, int64_t stride, Floats sums[M]) {
  const std::uint8_t *at = w.block(block, 0);
  Floats even[M], odd[M];
  for (int m = 0; m < M; ++m) even[m] = odd[m] = zeros();
  for (int64_t pair = 0; pair < w.inputs / 2; pair += 2, at += 128) {
    const __m512i first = _mm512_load_si512(at), second = _mm512_load_si512(at + 64);
    prefetch_group(at, 128);
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      const auto *row = reinterpret_cast<const int *>(x + m * stride);
      even[m] = _mm512_dpbf16_ps(even[m], (__m512bh)first, (__m512bh)_mm512_set1_epi32(row[pair]));
      odd[m] = _mm512_dpbf16_ps(odd[m], (__m512bh)second, (__m512bh)_mm512_set1_epi32(row[pair + 1]));
    }
  }
  for (int m = 0; m < M; ++m) sums[m] = even[m] + odd[m];
}

constexpr int64_t kRowBytesAtOnce = 1 << 20;  // of rows that many features are multiplied with, in the second cache

}  // namespace asyncllm
