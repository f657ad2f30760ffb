// Products of few rows, or on a processor without a matrix unit: integers, or pairs of bfloat16, by vectors.
#pragma once

#include "matrix.h"

namespace asyncllm {

constexpr int64_t kBytesAhead = 5120;
constexpr int64_t kBytesFarAhead = 12288;
constexpr int64_t kBlocksAtOnce = 4;  // of features that a thread takes

// Asks for a group's weights, of those far ahead for a few lines only: processors foresee what follows these, but not
// beyond a page, and have room for few lines that are asked for one by one.
inline void prefetch_group(const std::uint8_t *at, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 256) prefetch_next(at + kBytesFarAhead + i);
  prefetch_lines(at + kBytesAhead, bytes);
}

// Adds a group's sums of products with the upper and the lower bytes of x. `at`: scales and zeros of the lines;
// `scales`: those of the first row of x, and the sums of its groups.
template <int M>
__attribute__((always_inline)) inline void add_group(const std::uint8_t *at, const __m512i *upper, const __m512i *lower,
                                                     const std::uint8_t *scales, int64_t stride, int64_t group,
                                                     int64_t groups, __m512 *sums) {
  const __m512 scale = _mm512_cvtph_ps(_mm256_load_si256((const __m256i *)at));
  const __m512 zero = _mm512_cvtph_ps(_mm256_load_si256((const __m256i *)(at + 32)));
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) {
    const auto *row = reinterpret_cast<const float *>(scales + m * stride);
    const __m512 dot = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(upper[m], 8), lower[m]));
    sums[m] = _mm512_fmadd_ps(_mm512_mul_ps(dot, _mm512_set1_ps(row[group])), scale, sums[m]);
    sums[m] = _mm512_fmadd_ps(zero, _mm512_set1_ps(row[groups + group]), sums[m]);
  }
}

template <int M>
inline void multiply_block_4(const Matrix &w, int64_t block, const std::uint8_t *x, int64_t stride, __m512 sums[M]) {
  const int64_t inputs = w.inputs, groups = w.groups();
  const __m512i nibble = _mm512_set1_epi8(15);
  const std::uint8_t *at = w.block(block, 0);
  for (int m = 0; m < M; ++m) sums[m] = _mm512_setzero_ps();
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
inline void multiply_block_8(const Matrix &w, int64_t block, const std::uint8_t *x, int64_t stride, __m512 sums[M]) {
  const int64_t inputs = w.inputs, groups = w.groups();
  const std::uint8_t *at = w.block(block, 0);
  for (int m = 0; m < M; ++m) sums[m] = _mm512_setzero_ps();
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
inline void multiply_block_16(const Matrix &w, int64_t block, const std::uint8_t *x, int64_t stride, __m512 sums[M]) {
  const std::uint8_t *at = w.block(block, 0);
  __m512 even[M], odd[M];
  for (int m = 0; m < M; ++m) even[m] = odd[m] = _mm512_setzero_ps();
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
  for (int m = 0; m < M; ++m) sums[m] = _mm512_add_ps(even[m], odd[m]);
}

template <int M>
inline void multiply_some(const Matrix &w, const Rows &x, int64_t row, int64_t block, const Output &output) {
  const std::uint8_t *from = x.data + row * x.stride;
  const auto multiply = w.bits == 4 ? multiply_block_4<M> : w.bits == 8 ? multiply_block_8<M> : multiply_block_16<M>;
  __m512 gates[M] = {}, sums[M];
  if (w.activation != kNone) {
    multiply(w, block, from, x.stride, gates);
    ++block;
  }
  multiply(w, block, from, x.stride, sums);
  const __m512 unit = _mm512_set1_ps(static_cast<float>(w.unit));
  for (int m = 0; m < M; ++m) {
    finish(w, output, row + m, block, _mm512_mul_ps(gates[m], unit), _mm512_mul_ps(sums[m], unit));
  }
}

// By vectors: weights are read once for all rows, where a block of features stays in the nearest cache.
template <class Between>
inline void multiply_by_vectors(const Team &team, const Matrix &w, const Rows &x, int64_t rows, const Output &output,
                                Between &&between) {
  const int64_t step = w.activation == kNone ? 1 : 2;
  team.divide(w.outputs / kFeatures / step, kBlocksAtOnce / step, [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) {
      between(step * w.groups());
      int64_t row = 0;
      for (; row + kFewRows <= rows; row += kFewRows) multiply_some<4>(w, x, row, unit * step, output);
      if (rows - row == 3) multiply_some<3>(w, x, row, unit * step, output);
      if (rows - row == 2) multiply_some<2>(w, x, row, unit * step, output);
      if (rows - row == 1) multiply_some<1>(w, x, row, unit * step, output);
    }
  });
}

}  // namespace asyncllm
