// What follows a decoder's layers: the logits of some of a step's tokens, and the tokens that are drawn from them.
#pragma once

#include "decoder.h"
#include "draw.h"
#include "philox.h"

namespace asyncllm {

// The structures are those of kernels/cpu/decoder.py, field by field.
struct Head {
  Matrix matrix;
  const bf16 *norm;
  double eps;
};

struct Sampled {
  const Head *head;
  int64_t count;
  const int64_t *tokens;  // [count] of the step's; null: all, in their order
  float *logits;          // [count, vocabulary]
  // [count] of a draw: what kernels/cpu/draw.py takes. A temperature of 0 takes the largest logit. Null: none is drawn.
  const float *temperature;
  const std::uint64_t *seed, *choice;
  std::int32_t *found;  // [count]

  int64_t token(int64_t row) const { return tokens ? tokens[row] : row; }
};

inline int64_t prepared_bytes(const Sampled &sampled) {
  const int64_t padded = (sampled.count + 31) / 32 * 32;
  return (padded * integer_row_bytes(sampled.head->matrix.inputs) + 63) / 64 * 64;
}

// A thread's own.
inline int64_t sampling_bytes(const Head &head) {
  const int64_t ends = 8 * (head.matrix.outputs / kDrawTile + 1);
  return (std::max(kProductScratchBytes, ends) + 63) / 64 * 64;
}

inline int64_t logits_bytes(const Sampled &sampled, int64_t threads) {
  return prepared_bytes(sampled) + threads * sampling_bytes(*sampled.head);
}

// The layers have left the stream in `step.residual`. Each number is what `asyncllm_product` and the functions of
// kernels/cpu/draw.py would give, to the bit.
inline void compute_logits(const Team &team, const Step &step, const Sampled &sampled, bool tiles,
                           std::uint8_t *workspace) {
  const Head &head = *sampled.head;
  const Matrix &matrix = head.matrix;
  const int64_t inputs = matrix.inputs, vocabulary = matrix.outputs;
  const Form form = form_of(matrix, sampled.count, tiles);
  const int64_t stride = row_bytes(form, inputs);
  std::uint8_t *scratch = workspace + prepared_bytes(sampled) + team.thread * sampling_bytes(head);
  team.divide(sampled.count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const bf16 *from = step.residual + sampled.token(row) * inputs;
      put_normed(form, workspace + row * stride, [&](int64_t i) { return load_bf16(from + i); }, head.norm, inputs,
                 static_cast<float>(head.eps));
    }
  });
  team.wait();
  multiply(team, matrix, {form, workspace, stride}, sampled.count, {Output::kStoreFloat, sampled.logits, vocabulary},
           tiles, scratch, [](int64_t) {});
  if (!sampled.temperature) return;
  team.wait();
  team.divide(sampled.count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float *logits = sampled.logits + row * vocabulary, temperature = sampled.temperature[row];
      const auto position = static_cast<std::uint64_t>(step.positions[sampled.token(row)] + 1);
      const int64_t found = temperature > 0.0f
                                ? draw(logits, vocabulary, temperature,
                                       uniform(sampled.seed[row], position, sampled.choice[row], 0),
                                       reinterpret_cast<double *>(scratch))
                                : largest(logits, vocabulary);
      sampled.found[row] = static_cast<std::int32_t>(found);
    }
  });
}

}  // namespace asyncllm
