// Products of few rows, or on a processor without a matrix unit: integers, or pairs of bfloat16, by vectors.
#pragma once

#include "matrix.h"
#ifdef ASYNCLLM_AVX512
#include "avx512_blocks.h"
#else
#include "avx2_blocks.h"
#endif

namespace asyncllm {

constexpr int64_t kBlocksAtOnce = 4;  // of features that a thread takes
constexpr int64_t kLeastAtOnce = 64;  // rows of a part of many

template <int M>
inline void multiply_some(const Matrix &w, const Rows &x, int64_t row, int64_t block, const Output &output) {
  const std::uint8_t *from = x.data + row * x.stride;
  const auto multiply = w.bits == 4 ? multiply_block_4<M> : w.bits == 8 ? multiply_block_8<M> : multiply_block_16<M>;
  Floats gates[M] = {}, sums[M];
  if (w.activation != kNone) {
    multiply(w, block, from, x.stride, gates);
    ++block;
  }
  multiply(w, block, from, x.stride, sums);
  const Floats unit = every(static_cast<float>(w.unit));
  for (int m = 0; m < M; ++m) finish(w, output, row + m, block, gates[m] * unit, sums[m] * unit);
}

// Rows `first` to `last` by one block of features, or by one of a gate and the one that it gates.
inline void multiply_few(const Matrix &w, const Rows &x, int64_t first, int64_t last, int64_t block,
                         const Output &output) {
  int64_t row = first;
  for (; row + kFewRows <= last; row += kFewRows) multiply_some<4>(w, x, row, block, output);
  if (last - row == 3) multiply_some<3>(w, x, row, block, output);
  if (last - row == 2) multiply_some<2>(w, x, row, block, output);
  if (last - row == 1) multiply_some<1>(w, x, row, block, output);
}

// By vectors: weights are read once for all rows, where a block of features stays in the nearest cache. Many rows are
// cut into parts that stay in the next one.
template <class Between>
inline void multiply_by_vectors(const Team &team, const Matrix &w, const Rows &x, int64_t rows, const Output &output,
                                Between &&between) {
  const int64_t step = w.activation == kNone ? 1 : 2, units = w.outputs / kFeatures / step;
  const int64_t at_once = std::max(kRowBytesAtOnce / x.stride, kLeastAtOnce);
  const int64_t parts = (rows + at_once - 1) / at_once;
  team.divide(parts * units, kBlocksAtOnce / step, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t part = i / units, block = i % units * step;
      const int64_t first = rows * part / parts, last = rows * (part + 1) / parts;
      between(step * w.groups());
      multiply_few(w, x, first, last, block, output);
    }
  });
}

}  // namespace asyncllm
