// What Python calls: all layers of a decoder at once (kernels/cpu/decoder.py), a product alone (matrix.py), and draws
// (draw.py).
#include "further.h"
#include "key_prefetcher.h"
#include "logits.h"

namespace asyncllm {

// One thread's way through the layers.
class Pass {
 public:
  Pass(const Team &team, const Decoder &model, const Step &step, bool tiles)
      : team_(team),
        model_(model),
        step_(step),
        heads_(model.heads()),
        tiles_(tiles),
        heads_at_once_(choose_heads_at_once()),
        prefetcher_(team, model, step, tasks_of_token()),
        arena_{step.workspace},
        space_(model, step, arena_, team.thread),
        scratch_(space_.own + Workspace::few_bytes(model)) {}

  void run() {
    team_.divide(step_.tokens, kRowsAtOnce, [&](int64_t begin, int64_t end) {
      for (int64_t i = 0; i < step_.tables_read; ++i) step_.lines[i].take({begin, end});
      for (int64_t i = begin * model_.hidden; i < end * model_.hidden; i += kLanes) {
        store(space_.residual + i, load_bf16(step_.residual + i));
      }
    });
    team_.wait();
    prefetcher_.start(model_.layers[0]);
    for (int64_t index = 0; index < model_.count; ++index) run_layer(model_.layers[index], index);
    team_.divide(step_.tokens, kRowsAtOnce, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin * model_.hidden; i < end * model_.hidden; i += kLanes) {
        store_bf16(step_.residual + i, load(space_.residual + i));
      }
    });
  }

 private:
  static constexpr int64_t kWeightsExpected = 8192;  // bytes
  static constexpr int64_t kLinesAtOnce = 2;
  static constexpr int64_t kRowsAtOnce = 4;  // of what is quick

  void run_layer(const Layer &layer, int64_t index) {
    const Output stream{Output::kAddFloat, space_.residual, model_.hidden};
    const auto eps = static_cast<float>(layer.eps);
    product(layer.qkv, [&] { return normed(layer.qkv, layer.attention_norm, eps); },
            {Output::kStore, space_.qkv, layer.qkv.outputs});
    attend(layer);
    if (index + 1 < model_.count) prefetcher_.start(model_.layers[index + 1]);
    team_.wait();
    product(layer.output, [&] { return plain(layer.output, alone() ? joined(layer) : space_.attended); }, stream);
    const int64_t inner = layer.gate_up.outputs / 2;
    product(layer.gate_up, [&] { return normed(layer.gate_up, layer.mlp_norm, eps); },
            {Output::kStore, space_.inner, inner, input_factor(layer.down)});
    product(layer.down, [&] { return plain(layer.down, space_.inner); }, stream);
  }

  template <class Input>
  void product(const Matrix &matrix, Input &&input, const Output &output) {
    multiply(team_, matrix, input(), step_.tokens, output, tiles_, scratch_,
             [&](int64_t blocks) { prefetcher_.ask(blocks); });
    team_.wait();
  }

  // The rows of the stream through a norm, for a product.
  Rows normed(const Matrix &matrix, const bf16 *weight, float eps) {
    const int64_t size = model_.hidden;
    return prepared(matrix, [&](Form form, std::uint8_t *to, int64_t row) {
      const float *from = space_.residual + row * size;
      const auto source = [&](int64_t i) {
        expect_weights();
        return load(from + i);
      };
      put_normed(form, to, source, weight, size, eps);
    });
  }

  // What a product wants rows in bfloat16 to be multiplied by.
  float input_factor(const Matrix &matrix) const { return factor_of(form_of(matrix, step_.tokens, tiles_)); }

  // Rows that are there in bfloat16, times `input_factor`.
  Rows plain(const Matrix &matrix, const bf16 *rows) {
    const int64_t size = matrix.inputs;
    const Form form = form_of(matrix, step_.tokens, tiles_);
    if (!holds_integers(form)) return {form, reinterpret_cast<const std::uint8_t *>(rows), 2 * size};
    return prepared(matrix, [&](Form form, std::uint8_t *to, int64_t row) {
      const auto source = [&](int64_t i) {
        expect_weights();
        return load_bf16(rows + row * size + i);
      };
      put_row(form, to, size, source);
    });
  }

  // Before a product of few rows: its weights come while its input is made, which would else interrupt their stream.
  void begin_weights(const Matrix &matrix) {
    const int64_t blocks = matrix.activation == kNone ? 1 : 2;
    const Range mine = team_.share(matrix.outputs / kFeatures / blocks);
    weights_ = matrix.block(blocks * mine.begin, 0);
    weights_end_ = std::min(weights_ + kWeightsExpected, matrix.block(blocks * mine.end, 0));
  }

  void expect_weights() {
    for (int64_t i = 0; i < kLinesAtOnce && weights_ < weights_end_; ++i, weights_ += 64) prefetch(weights_);
  }

  // Few rows each thread makes for itself, which is quicker than to wait for each other.
  template <class Put>
  Rows prepared(const Matrix &matrix, Put &&put) {
    const int64_t rows = step_.tokens;
    const Form form = form_of(matrix, rows, tiles_);
    const int64_t stride = row_bytes(form, matrix.inputs);
    const bool few = rows <= kFewRows;
    std::uint8_t *to = few ? space_.own : space_.input;
    const auto put_rows = [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) put(form, to + row * stride, row);
    };
    if (!few) {
      team_.divide(rows, kRowsAtOnce, put_rows);
      team_.wait();
    } else if (!team_.absent()) {
      begin_weights(matrix);
      put_rows(0, rows);
    }
    return {form, to, stride};
  }

  // `first`: the first key that is going to be read.
  History history(const Layer &layer, int64_t token, int64_t first = 0) const {
    return history_of(model_, step_, layer, token, prefetcher_.asked(first));
  }

  bf16 *qkv(int64_t token) const { return space_.qkv + token * heads_.width(); }

  void rotate_heads(const Layer &layer, int64_t token, int64_t head, int64_t count) {
    const int64_t at = token * model_.dim;
    const auto eps = static_cast<float>(layer.eps);
    const Rotation queries{step_.cosine + at, step_.sine + at, layer.query_norm, eps};
    const Rotation keys{step_.cosine + at, step_.sine + at, layer.key_norm, eps};
    for (int64_t i = head; i < head + count; ++i) {
      rotate_and_write(qkv(token), history(layer, token), step_.positions[token], i, queries, keys);
    }
  }

  // The only token of a step: its keys are cut into parts, so that the threads have as much to do.
  void attend_alone(const Layer &layer) {
    const int64_t position = step_.positions[0];
    const Parts parts(first_key(layer, position), position);
    team_.for_each(parts.count * heads_.keys, [&](int64_t task) {
      attend_part_of(layer, parts, task / heads_.keys, task % heads_.keys, position);
    });
  }

  void attend_part_of(const Layer &layer, const Parts &parts, int64_t part, int64_t head, int64_t position) {
    const auto eps = static_cast<float>(layer.eps);
    const Rotation queries{step_.cosine, step_.sine, layer.query_norm, eps};
    const Rotation keys{step_.cosine, step_.sine, layer.key_norm, eps};
    const int64_t group = heads_.group(), dim = model_.dim;
    const Range range = parts.range(part);
    const History past = history(layer, 0, range.begin);
    auto *rotated = reinterpret_cast<bf16 *>(space_.own);  // other threads need the queries as they are
    for (int64_t i = 0; i < group; ++i) {
      rotate(qkv(0) + (head * group + i) * dim, rotated + i * dim, dim, queries);
    }
    if (part == parts.count - 1) write_key(qkv(0), past, position, head, keys);
    attend_part(rotated, past, range.begin, range.end - 1, head, scale(), space_.partial(part, head * group),
                reinterpret_cast<float *>(scratch_));
  }

  // What the parts have come to, in bfloat16: each thread puts it together for itself.
  const bf16 *joined(const Layer &layer) {
    const int64_t position = step_.positions[0];
    auto *out = reinterpret_cast<bf16 *>(space_.own + space_.few_bytes(model_) - space_.joined_bytes(model_));
    if (team_.absent()) return out;
    join_parts(space_.partial(0, 0), Parts(first_key(layer, position), position).count, heads_.queries, model_.dim,
               input_factor(layer.output), out);
    return out;
  }

  // Neighbouring KV heads of one token.
  void attend_heads(const Layer &layer, int64_t token, int64_t head, int64_t count) {
    const int64_t position = step_.positions[token], first = first_key(layer, position);
    const int64_t group = heads_.group() * model_.dim, offset = head * group;
    const bf16 *queries = qkv(token) + offset;
    bf16 *out = space_.attended + token * heads_.queries * model_.dim + offset;
    const float factor = input_factor(layer.output);
#ifdef ASYNCLLM_AMX
    if (by_tiles()) {
      const int64_t next = std::min(token + 1, step_.singles - 1), place = step_.positions[next];
      const History following = history(layer, next);
      const bool whole = count == heads_.keys;  // else other heads of this token are next
      const NextKeys keys{whole && next > token ? &following : nullptr, first_key(layer, place), place};
      return attend_heads_by_tiles(queries, history(layer, token), first, position, head, count, scale(), factor, out,
                                   scratch_, keys);
    }
#endif
    for (int64_t i = 0; i < count; ++i) {
      attend_token(queries + i * group, history(layer, token), first, position, head + i, scale(), factor,
                   out + i * group, reinterpret_cast<float *>(scratch_));
    }
  }

  float scale() const { return 1.0f / std::sqrt(static_cast<float>(model_.dim)); }

  // Whether single tokens are attended by the matrix unit.
  bool by_tiles() const { return tiles_ && step_.singles > 1 && model_.block_size % 16 == 0 && heads_.group() <= 16; }

  int64_t choose_heads_at_once() const {
#ifdef ASYNCLLM_AMX
    if (by_tiles()) {  // of few tokens no more than leave some to each thread
      const int64_t heads = std::max<int64_t>(1, step_.singles * heads_.keys);
      return std::min(heads_at_once(heads_), (heads + team_.threads - 1) / team_.threads);
    }
#endif
    return 1;
  }

  int64_t tasks_of_token() const { return (heads_.keys + heads_at_once_ - 1) / heads_at_once_; }

  // Divides the KV heads of the tokens from `first` to `last`: `function(token, head, count)`.
  template <class Function>
  void for_heads(int64_t first, int64_t last, Function &&function) {
    const int64_t tasks = tasks_of_token();
    team_.divide((last - first) * tasks, first < step_.singles ? 1 : kRowsAtOnce, [&](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; ++task) {
        const int64_t head = task % tasks * heads_at_once_;
        function(first + task / tasks, head, std::min(heads_at_once_, heads_.keys - head));
      }
    });
  }

  bool alone() const { return is_alone(step_); }

  void attend(const Layer &layer) {
    if (alone()) return attend_alone(layer);
    const int64_t singles = step_.singles;
    const bool waits = step_.spans || step_.reads_new;
    for_heads(0, singles, [&](int64_t token, int64_t head, int64_t count) {
      rotate_heads(layer, token, head, count);
      if (!waits) attend_heads(layer, token, head, count);
    });
    if (!waits) return;
    for_heads(singles, step_.tokens,
              [&](int64_t token, int64_t head, int64_t count) { rotate_heads(layer, token, head, count); });
    team_.wait();  // queries see keys that other threads have written
    for_heads(0, singles,
              [&](int64_t token, int64_t head, int64_t count) { attend_heads(layer, token, head, count); });
#ifdef ASYNCLLM_AMX
    if (tiles_ && model_.block_size % 16 == 0) return attend_chunks(layer);
#endif
    for_heads(singles, step_.tokens,
              [&](int64_t token, int64_t head, int64_t count) { attend_heads(layer, token, head, count); });
  }

#ifdef ASYNCLLM_AMX
  // Pieces of chunks, the last, which see most, first.
  void attend_chunks(const Layer &layer) {
    int64_t pieces = 0;
    for (int64_t span = 0; span < step_.spans; ++span) pieces += pieces_of(span);
    const int64_t heads = model_.keys, width = heads_.queries * model_.dim;
    team_.divide_in_order(pieces * heads, [&](int64_t task) {
      int64_t piece = pieces - 1 - task / heads, span = 0;
      while (piece >= pieces_of(span)) piece -= pieces_of(span++);
      const int64_t token = step_.span_starts[span] + piece * kTokensAtOnce;
      const int64_t count = std::min(kTokensAtOnce, step_.span_starts[span + 1] - token);
      attend_chunk(qkv(token), heads_.width(), history(layer, token), step_.positions[token], count, layer.window,
                   task % heads, scale(), input_factor(layer.output), space_.attended + token * width, width, scratch_);
    });
  }

  int64_t pieces_of(int64_t span) const {
    return (step_.span_starts[span + 1] - step_.span_starts[span] + kTokensAtOnce - 1) / kTokensAtOnce;
  }
#endif

  const Team team_;
  const Decoder &model_;
  const Step &step_;
  const Heads heads_;
  const bool tiles_;
  const int64_t heads_at_once_;  // KV heads of a token alone in its row
  KeyPrefetcher prefetcher_;
  Arena arena_;
  Workspace space_;
  std::uint8_t *scratch_;
  const std::uint8_t *weights_ = nullptr, *weights_end_ = nullptr;  // that are yet to be asked for
};

}  // namespace asyncllm

using namespace asyncllm;

extern "C" {

// Bit 0: the processor's matrix unit may be used; bit 1: these are compiled for AVX-512.
int64_t asyncllm_features() { return (kCompiledForTiles && may_use_tiles() ? 1 : 0) | (kCompiledForAvx512 ? 2 : 0); }

int64_t asyncllm_takes_head(int64_t dim) { return takes_head(dim) ? 1 : 0; }

// `sampled`, here and below: null where nothing is wanted but what the layers leave. `steps`: of a call, at most.
int64_t asyncllm_workspace_bytes(const Decoder *model, Step *step, const Sampled *sampled, int64_t steps) {
  step->longest = steps + *std::max_element(step->positions, step->positions + step->tokens);
  Arena arena{nullptr};
  Workspace space(*model, *step, arena, 0);
  if (sampled) arena.take(Sampling::workspace_bytes(*sampled, step->threads));
  return static_cast<int64_t>(arena.at - static_cast<std::uint8_t *>(nullptr));
}

// Returns what `run_team` does, as all functions that compute with several threads; -1 where a table lacks a line.
// `further`: steps that may follow, each of which draws; null: none.
double asyncllm_decode(const Decoder *model, const Step *step, const Sampled *sampled, int64_t tiles,
                       Further *further) {
  const auto ready = [&] {
    return std::all_of(step->lines, step->lines + step->tables_read,
                       [&](const Lines &lines) { return lines.exist(step->tokens); });
  };
  if (!ready()) return -1.0;
  Arena arena{step->workspace};
  Workspace space(*model, *step, arena, 0);
  std::uint8_t *behind = sampled ? arena.take(Sampling::workspace_bytes(*sampled, step->threads)) : nullptr;
  const auto compute = [&](const Team &team, bool by_tiles) {
    if (further) further->give_way(team.thread == team.threads - 1);
    team.join();
    Pass(team, *model, *step, by_tiles).run();
    if (!sampled || !sampled->count) return;
    team.wait();  // the stream is whole
    Sampling(team, *step, *sampled, by_tiles, behind).run();
  };
  double lost = 0.0;
  int64_t steps = 0;
  for (bool goes_on = true; goes_on;) {
    lost += run_team(step->threads, [&](const Team &team) {
#ifdef ASYNCLLM_AMX
      if (tiles) {
        const Tiles configured;
        return compute(team, true);
      }
#endif
      compute(team, false);
    });
    ++steps;
    goes_on = further && further->finish(sampled->found);
    if (goes_on && !ready()) {
      further->go_back(sampled->found);
      break;
    }
  }
  if (further) further->close(steps, sampled->found);
  return lost / static_cast<double>(steps);
}

int64_t asyncllm_ask(Further *further) { return further->ask() ? 1 : 0; }

void asyncllm_end(Further *further) { further->end(); }

int64_t asyncllm_product_workspace_bytes(const Matrix *matrix, int64_t rows, int64_t threads) {
  return (rows + 63) / 32 * 32 * integer_row_bytes(matrix->inputs) + threads * kProductScratchBytes;
}

// Numbers of (0, 1]; see kernels/cpu/draw.py.
void asyncllm_uniform(const std::uint64_t *seed, const std::uint64_t *position, const std::uint64_t *choice,
                      std::uint64_t stream, int64_t count, float *out) {
  for (int64_t i = 0; i < count; ++i) out[i] = uniform(seed[i], position[i], choice[i], stream);
}

// Room for a row's tiles for each thread.
int64_t asyncllm_draw_workspace_bytes(int64_t vocabulary, int64_t threads) {
  return 4 * threads * DrawTiles::floats(vocabulary);
}

// See kernels/cpu/draw.py.
double asyncllm_draw(const float *logits, int64_t rows, int64_t vocabulary, const float *temperature,
                     const float *uniform, int64_t *found, float *workspace, int64_t threads) {
  return run_team(threads, [&](const Team &team) {
    team.join();
    const DrawTiles tiles = DrawTiles::in(workspace + team.thread * DrawTiles::floats(vocabulary), vocabulary);
    team.for_each(rows, [&](int64_t row) {
      found[row] = draw(logits + row * vocabulary, vocabulary, Temperature(temperature[row]), uniform[row], tiles);
    });
  });
}

// out [rows, outputs] in bfloat16 or float32 = x Wᵀ + b, of x [rows, inputs] in bfloat16 or of its norm.
double asyncllm_product(const Matrix *matrix, const bf16 *x, const bf16 *norm, double eps, int64_t rows, void *out,
                        int64_t to_float, std::uint8_t *workspace, int64_t threads, int64_t tiles) {
  const int64_t inputs = matrix->inputs, width = matrix->outputs / (matrix->activation == kNone ? 1 : 2);
  const Form form = form_of(*matrix, rows, tiles);
  const int64_t stride = row_bytes(form, inputs);
  std::uint8_t *prepared = workspace + threads * kProductScratchBytes;
  const Output output{to_float ? Output::kStoreFloat : Output::kStore, out, width};
  return run_team(threads, [&](const Team &team) {
    team.join();
    team.for_each(rows, [&](int64_t row) {
      const auto source = [&](int64_t i) { return load_bf16(x + row * inputs + i); };
      std::uint8_t *to = prepared + row * stride;
      if (norm)
        put_normed(form, to, source, norm, inputs, static_cast<float>(eps));
      else
        put_row(form, to, inputs, source);
    });
    team.wait();
    std::uint8_t *scratch = workspace + team.thread * kProductScratchBytes;
#ifdef ASYNCLLM_AMX
    if (tiles) {
      const Tiles configured;
      return multiply(team, *matrix, {form, prepared, stride}, rows, output, true, scratch, [](int64_t) {});
    }
#endif
    multiply(team, *matrix, {form, prepared, stride}, rows, output, false, scratch, [](int64_t) {});
  });
}
}
