// A decoder's layers, the tokens of a step, and the memory that the step needs.
#pragma once

#include "chunk_attention.h"
#include "product.h"
#include "token_attention.h"

namespace asyncllm {

// The structures are those of kernels/cpu/decoder.py, field by field.
struct Layer {
  const bf16 *attention_norm, *mlp_norm;
  const bf16 *query_norm, *key_norm;  // null: none
  Matrix qkv, output, gate_up, down;
  bf16 *cache;
  int64_t group;   // whose block tables it uses
  int64_t window;  // keys that a query sees; very large: all
  double eps;
};

struct Decoder {
  const Layer *layers;
  int64_t count, hidden, queries, keys, dim, block_size;

  Heads heads() const { return {queries, keys, dim}; }
};

// Lines of a table, one for each token.
struct Lines {
  const std::uint8_t *table;
  int64_t count;  // of the table's
  int64_t bytes;  // of a line
  const int64_t *chosen;
  std::uint8_t *out;

  bool exist(int64_t tokens) const {
    return std::all_of(chosen, chosen + tokens, [&](int64_t line) { return line >= 0 && line < count; });
  }

  void take(Range tokens) const {
    for (int64_t i = tokens.begin; i < tokens.end; ++i) std::memcpy(out + i * bytes, table + chosen[i] * bytes, bytes);
  }
};

struct Step {
  int64_t tokens, singles;     // the first `singles` tokens are alone in their rows
  int64_t spans;               // chunks of neighbours: all other tokens
  const int64_t *span_starts;  // [spans + 1]
  const int64_t *rows, *positions;
  const int64_t *const *tables;  // of each cache group: [rows, table_width]
  int64_t table_width;
  int64_t longest;            // keys of the row that has most: `asyncllm_workspace_bytes` looks
  int64_t reads_new;          // 1: tokens may see keys that this step writes for other rows
  const bf16 *cosine, *sine;  // [tokens, dim]
  bf16 *residual;             // [tokens, hidden], overwritten
  std::uint8_t *workspace;
  int64_t threads;
  const Lines *lines;  // what of the above is taken from tables first
  int64_t tables_read;
};

// Whether the step has one token, whose attention is cut into parts.
inline bool is_alone(const Step &step) { return step.tokens == 1 && step.singles == 1; }

// Gives aligned pieces of a workspace, one behind the other.
struct Arena {
  std::uint8_t *at;
  template <class T = std::uint8_t>
  T *take(int64_t bytes) {
    auto *piece = reinterpret_cast<T *>(at);
    at += (bytes + 63) / 64 * 64;
    return piece;
  }
};

// What the threads share, and what each has for itself.
struct Workspace {
  float *residual;
  std::uint8_t *input;  // of a product, in its form
  bf16 *qkv, *attended, *inner;
  float *parts;  // of attention
  int64_t queries, part_width;
  std::uint8_t *own;

  Workspace(const Decoder &model, const Step &step, Arena &arena, int64_t thread) {
    const Layer &layer = model.layers[0];
    const int64_t padded = (step.tokens + 31) / 32 * 32, widest = widest_input(model);
    residual = arena.take<float>(4 * padded * model.hidden);
    input = arena.take(padded * integer_row_bytes(widest));
    qkv = arena.take<bf16>(2 * padded * layer.qkv.outputs);
    attended = arena.take<bf16>(2 * padded * layer.output.inputs);
    inner = arena.take<bf16>(2 * padded * layer.down.inputs);
    queries = model.queries;
    part_width = part_floats(model.dim);
    parts = is_alone(step) ? arena.take<float>(4 * Parts::kMost * queries * part_width) : nullptr;
    own = arena.at + thread * own_bytes(model, step);
    arena.at += step.threads * own_bytes(model, step);
  }

  float *partial(int64_t part, int64_t query) const { return parts + (part * queries + query) * part_width; }

  static int64_t widest_input(const Decoder &model) {
    const Layer &layer = model.layers[0];
    return std::max({model.hidden, layer.output.inputs, layer.down.inputs});
  }

  // A thread's: a product's input of few rows, what a product or an attention needs. All layers have one shape.
  static int64_t own_bytes(const Decoder &model, const Step &step) {
    const int64_t scores = 4 * kQueriesAtOnce * (step.longest + 32);
    const int64_t work =
        std::max({kProductScratchBytes, scores, chunk_scratch_bytes(model.heads()),
                  token_scratch_bytes(model.heads())});
    return (few_bytes(model) + work + 4095) / 4096 * 4096;
  }

  static int64_t few_bytes(const Decoder &model) {
    return (kFewRows * integer_row_bytes(widest_input(model)) + 63) / 64 * 64 + joined_bytes(model);
  }

  // At the end of those: a row of what attention gives.
  static int64_t joined_bytes(const Decoder &model) { return 2 * model.queries * model.dim; }
};

inline History history_of(const Decoder &model, const Step &step, const Layer &layer, int64_t token, int64_t asked) {
  const int64_t *table = step.tables[layer.group] + step.rows[token] * step.table_width;
  return {layer.cache, table, model.block_size, model.heads(), asked};
}

// The first key that a token sees.
inline int64_t first_key(const Layer &layer, int64_t position) {
  return std::max<int64_t>(0, position - layer.window + 1);
}

}  // namespace asyncllm
