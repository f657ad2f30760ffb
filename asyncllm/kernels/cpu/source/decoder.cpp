// What Python calls: a product alone, and all layers of a decoder in one call (kernels/cpu/decoder.py).
#include <cstddef>

#include "attention.h"
#include "draw.h"
#include "product.h"

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

struct Step {
  int64_t tokens, singles;     // the first `singles` tokens are alone in their rows
  int64_t spans;               // chunks of neighbours: all other tokens
  const int64_t *span_starts;  // [spans + 1]
  const int64_t *rows, *positions;
  const int64_t *const *tables;  // of each cache group: [rows, table_width]
  int64_t table_width;
  int64_t longest;            // keys of the row that has most
  int64_t reads_new;          // 1: tokens may see keys that this step writes for other rows
  const bf16 *cosine, *sine;  // [tokens, dim]
  bf16 *residual;             // [tokens, hidden], overwritten
  std::uint8_t *workspace;
  int64_t threads;
};

struct Cut {  // takes aligned pieces of a workspace
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
  std::uint8_t *own;

  Workspace(const Decoder &model, const Step &step, Cut &cut, int64_t thread) {
    const Layer &layer = model.layers[0];
    const int64_t padded = (step.tokens + 31) / 32 * 32, widest = widest_input(model);
    residual = cut.take<float>(4 * padded * model.hidden);
    input = cut.take(padded * integer_row_bytes(widest));
    qkv = cut.take<bf16>(2 * padded * layer.qkv.outputs);
    attended = cut.take<bf16>(2 * padded * layer.output.inputs);
    inner = cut.take<bf16>(2 * padded * layer.down.inputs);
    own = cut.at + thread * own_bytes(model, step);
    cut.at += step.threads * own_bytes(model, step);
  }

  static int64_t widest_input(const Decoder &model) {
    const Layer &layer = model.layers[0];
    return std::max({model.hidden, layer.output.inputs, layer.down.inputs});
  }

  // A thread's: a product's input of few rows, what a product or an attention needs. All layers have one shape.
  static int64_t own_bytes(const Decoder &model, const Step &step) {
    const int64_t scores = 4 * kHeadsAtOnce * (step.longest + 32);
    const int64_t work =
        std::max({product_scratch_bytes(widest_input(model)), scores, chunk_scratch_bytes(model.heads())});
    return (few_bytes(model) + work + 4095) / 4096 * 4096;
  }

  static int64_t few_bytes(const Decoder &model) {
    return (kFewRows * integer_row_bytes(widest_input(model)) + 63) / 64 * 64;
  }
};

inline History history_of(const Decoder &model, const Step &step, const Layer &layer, int64_t token, int64_t asked) {
  const int64_t *table = step.tables[layer.group] + step.rows[token] * step.table_width;
  return {layer.cache, table, model.block_size, model.heads(), asked};
}

// The first key that a token sees.
inline int64_t first_key(const Layer &layer, int64_t position) {
  return std::max<int64_t>(0, position - layer.window + 1);
}

// What the tokens that are alone in their rows are going to read from a layer's cache. It lies in pieces that no
// processor foresees; so a thread asks for its part of it little by little, while it computes the product before.
class Ahead {
 public:
  Ahead(const Team &team, const Decoder &model, const Step &step) : model_(model), step_(step) {
    const Range tasks = team.share(step.singles * model.keys);
    tokens_ = {tasks.begin / model.keys, (tasks.end + model.keys - 1) / model.keys};
    if (tasks.begin == tasks.end) tokens_.end = tokens_.begin;
    const int64_t count = std::max<int64_t>(1, tokens_.end - tokens_.begin);
    most_ = kBytes / (4 * model.keys * model.dim) / count;
    int64_t keys = 0;
    for (int64_t token = tokens_.begin; token < tokens_.end; ++token)
      keys += std::min(step.positions[token] + 1, most_);
    at_once_ = keys * 2 * kFeatures * team.threads / model.layers[0].qkv.outputs + 1;
    token_ = tokens_.end;
  }

  int64_t most() const { return most_; }  // keys of each token

  void start(const Layer &layer) {
    layer_ = &layer;
    token_ = tokens_.begin;
    begin_token();
  }

  void ask() {
    for (int64_t left = at_once_; left > 0 && token_ < tokens_.end;) {
      const int64_t count = std::min(left, last_ - key_ + 1);
      prefetch_keys(history_of(model_, step_, *layer_, token_, 0), key_, key_ + count - 1);
      left -= count;
      key_ += count;
      if (key_ > last_) {
        ++token_;
        begin_token();
      }
    }
  }

 private:
  static constexpr int64_t kBytes = 1 << 20;  // about half of a second-level cache

  void begin_token() {
    if (token_ >= tokens_.end) return;
    const int64_t position = step_.positions[token_];
    key_ = first_key(*layer_, position);
    last_ = std::min(position, key_ + most_ - 1);
  }

  const Decoder &model_;
  const Step &step_;
  Range tokens_;
  int64_t most_, at_once_;
  const Layer *layer_ = nullptr;
  int64_t token_, key_ = 0, last_ = 0;
};

// One thread's way through the layers.
class Pass {
 public:
  Pass(const Team &team, const Decoder &model, const Step &step, bool tiles, std::atomic<int64_t> *tasks)
      : team_(team),
        model_(model),
        step_(step),
        heads_(model.heads()),
        tiles_(tiles),
        tasks_(tasks),
        ahead_(team, model, step),
        cut_{step.workspace},
        space_(model, step, cut_, team.thread),
        scratch_(space_.own + Workspace::few_bytes(model)) {}

  void run() {
    const int64_t hidden = model_.hidden, tokens = step_.tokens;
    const Range mine = team_.share(tokens);
    for (int64_t i = mine.begin * hidden; i < mine.end * hidden; i += kLanes) {
      _mm512_storeu_ps(space_.residual + i, load_bf16(step_.residual + i));
    }
    team_.wait();
    for (int64_t index = 0; index < model_.count; ++index) run_layer(model_.layers[index], index);
    for (int64_t i = mine.begin * hidden; i < mine.end * hidden; i += kLanes) {
      store_bf16(step_.residual + i, _mm512_loadu_ps(space_.residual + i));
    }
  }

 private:
  void run_layer(const Layer &layer, int64_t index) {
    const Output stream{Output::kAddFloat, space_.residual, model_.hidden};
    const auto eps = static_cast<float>(layer.eps);
    ahead_.start(layer);
    product(layer.qkv, normed(layer.qkv, layer.attention_norm, eps), {Output::kStore, space_.qkv, layer.qkv.outputs});
    attend(layer, index);
    team_.wait();
    product(layer.output, plain(layer.output, space_.attended), stream);
    const int64_t inner = layer.gate_up.outputs / 2;
    product(layer.gate_up, normed(layer.gate_up, layer.mlp_norm, eps),
            {Output::kStore, space_.inner, inner, input_factor(layer.down)});
    product(layer.down, plain(layer.down, space_.inner), stream);
  }

  void product(const Matrix &matrix, const Rows &input, const Output &output) {
    multiply(team_, matrix, input, step_.tokens, output, tiles_, scratch_, [&] { ahead_.ask(); });
    team_.wait();
  }

  // The rows of the stream through a norm, for a product.
  Rows normed(const Matrix &matrix, const bf16 *weight, float eps) {
    const int64_t size = model_.hidden;
    return prepared(matrix, [&](Form form, std::uint8_t *to, int64_t row) {
      const float *from = space_.residual + row * size;
      put_normed(form, to, [&](int64_t i) { return _mm512_loadu_ps(from + i); }, weight, size, eps);
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
      put_row(form, to, size, [&](int64_t i) { return load_bf16(rows + row * size + i); });
    });
  }

  // Few rows each thread makes for itself, which is quicker than to wait for each other.
  template <class Put>
  Rows prepared(const Matrix &matrix, Put &&put) {
    const int64_t rows = step_.tokens;
    const Form form = form_of(matrix, rows, tiles_);
    const int64_t stride = row_bytes(form, matrix.inputs);
    const bool few = rows <= kFewRows;
    std::uint8_t *to = few ? space_.own : space_.input;
    const Range range = few ? Range{0, rows} : team_.share(rows);
    for (int64_t row = range.begin; row < range.end; ++row) put(form, to + row * stride, row);
    if (!few) team_.wait();
    return {form, to, stride};
  }

  History history(const Layer &layer, int64_t token) const {
    return history_of(model_, step_, layer, token, ahead_.most());
  }

  bf16 *qkv(int64_t token) const { return space_.qkv + token * heads_.width(); }

  void turn_head(const Layer &layer, int64_t token, int64_t head) {
    const int64_t at = token * model_.dim;
    const auto eps = static_cast<float>(layer.eps);
    const Turn queries{step_.cosine + at, step_.sine + at, layer.query_norm, eps};
    const Turn keys{step_.cosine + at, step_.sine + at, layer.key_norm, eps};
    turn_and_write(qkv(token), history(layer, token), step_.positions[token], head, queries, keys);
  }

  void attend_one(const Layer &layer, int64_t token, int64_t head) {
    const int64_t position = step_.positions[token], offset = head * heads_.group() * model_.dim;
    const int64_t first = first_key(layer, position);
    bf16 *out = space_.attended + token * heads_.queries * model_.dim + offset;
    attend_token(qkv(token) + offset, history(layer, token), first, position, head, scale(), input_factor(layer.output),
                 out, reinterpret_cast<float *>(scratch_));
  }

  float scale() const { return 1.0f / std::sqrt(static_cast<float>(model_.dim)); }

  void attend(const Layer &layer, int64_t index) {
    const int64_t heads = model_.keys, singles = step_.singles;
    const Range single = team_.share(singles * heads);
    const bool waits = step_.spans || step_.reads_new;
    for (int64_t task = single.begin; task < single.end; ++task) {
      turn_head(layer, task / heads, task % heads);
      if (!waits) attend_one(layer, task / heads, task % heads);
    }
    if (!waits) return;
    const Range others = team_.share((step_.tokens - singles) * heads);
    for (int64_t task = others.begin; task < others.end; ++task) {
      turn_head(layer, singles + task / heads, task % heads);
    }
    team_.wait();  // queries see keys that other threads have written
    for (int64_t task = single.begin; task < single.end; ++task) attend_one(layer, task / heads, task % heads);
#ifdef __AMX_BF16__
    if (tiles_ && model_.block_size % 16 == 0) return attend_chunks(layer, tasks_ + index);
#endif
    for (int64_t task = team_.thread; task < (step_.tokens - singles) * heads; task += team_.threads) {
      attend_one(layer, singles + task / heads, task % heads);
    }
  }

#ifdef __AMX_BF16__
  // Pieces of chunks, the last, which see most, first; whoever is done takes the next.
  void attend_chunks(const Layer &layer, std::atomic<int64_t> *next) {
    int64_t pieces = 0;
    for (int64_t span = 0; span < step_.spans; ++span) pieces += pieces_of(span);
    const int64_t heads = model_.keys, width = heads_.queries * model_.dim;
    for (int64_t task; (task = next->fetch_add(1, std::memory_order_relaxed)) < pieces * heads;) {
      int64_t piece = pieces - 1 - task / heads, span = 0;
      while (piece >= pieces_of(span)) piece -= pieces_of(span++);
      const int64_t token = step_.span_starts[span] + piece * kTokensAtOnce;
      const int64_t count = std::min(kTokensAtOnce, step_.span_starts[span + 1] - token);
      attend_chunk(qkv(token), heads_.width(), history(layer, token), step_.positions[token], count, layer.window,
                   task % heads, scale(), input_factor(layer.output), space_.attended + token * width, width, scratch_);
    }
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
  std::atomic<int64_t> *tasks_;  // of each layer: pieces of chunks that were taken
  Ahead ahead_;
  Cut cut_;
  Workspace space_;
  std::uint8_t *scratch_;
};

}  // namespace asyncllm

using namespace asyncllm;

extern "C" {

// Bit 0: the processor's matrix unit may be used.
int64_t asyncllm_features() { return kCompiledForTiles && may_use_tiles() ? 1 : 0; }

int64_t asyncllm_takes_head(int64_t dim) { return takes_head(dim) ? 1 : 0; }

int64_t asyncllm_workspace_bytes(const Decoder *model, const Step *step) {
  Cut cut{nullptr};
  Workspace space(*model, *step, cut, 0);
  return static_cast<int64_t>(cut.at - static_cast<std::uint8_t *>(nullptr)) + 8 * model->count + 64;
}

// Returns what `run_team` does, as all functions that compute with several threads.
double asyncllm_decode(const Decoder *model, const Step *step, int64_t tiles) {
  Cut cut{step->workspace};
  Workspace space(*model, *step, cut, 0);
  auto *tasks = reinterpret_cast<std::atomic<int64_t> *>(cut.at);
  for (int64_t i = 0; i < model->count; ++i) tasks[i].store(0, std::memory_order_relaxed);
  return run_team(step->threads, [&](const Team &team) {
#ifdef __AMX_BF16__
    if (tiles) {
      const Tiles configured;
      return Pass(team, *model, *step, true, tasks).run();
    }
#endif
    Pass(team, *model, *step, false, tasks).run();
  });
}

int64_t asyncllm_product_workspace_bytes(const Matrix *matrix, int64_t rows, int64_t threads) {
  return (rows + 63) / 32 * 32 * integer_row_bytes(matrix->inputs) + threads * product_scratch_bytes(matrix->inputs);
}

// out [rows] = lines of a table, of so many bytes each; 0 where a line is not one of the table's `count`.
int64_t asyncllm_take_lines(const std::uint8_t *table, int64_t count, const int64_t *lines, int64_t rows, int64_t bytes,
                            std::uint8_t *out) {
  for (int64_t row = 0; row < rows; ++row) {
    if (lines[row] < 0 || lines[row] >= count) return 0;
    std::memcpy(out + row * bytes, table + lines[row] * bytes, bytes);
  }
  return 1;
}

// See kernels/cpu/draw.py; `ends` has room for a row's tiles for each thread.
double asyncllm_draw(const float *logits, int64_t rows, int64_t vocabulary, const float *temperature,
                     const float *uniform, int64_t *found, double *ends, int64_t threads) {
  const int64_t tiles = vocabulary / kDrawTile + 1;
  return run_team(threads, [&](const Team &team) {
    const Range range = team.share(rows);
    for (int64_t row = range.begin; row < range.end; ++row) {
      found[row] =
          draw(logits + row * vocabulary, vocabulary, temperature[row], uniform[row], ends + team.thread * tiles);
    }
  });
}

// out [rows, outputs] in bfloat16 or float32 = x Wᵀ + b, of x [rows, inputs] in bfloat16 or of its norm.
double asyncllm_product(const Matrix *matrix, const bf16 *x, const bf16 *norm, double eps, int64_t rows, void *out,
                        int64_t to_float, std::uint8_t *workspace, int64_t threads, int64_t tiles) {
  const int64_t inputs = matrix->inputs, width = matrix->outputs / (matrix->activation == kNone ? 1 : 2);
  const Form form = form_of(*matrix, rows, tiles);
  const int64_t stride = row_bytes(form, inputs);
  std::uint8_t *prepared = workspace + threads * product_scratch_bytes(inputs);
  const Output output{to_float ? Output::kStoreFloat : Output::kStore, out, width};
  return run_team(threads, [&](const Team &team) {
    const Range range = team.share(rows);
    for (int64_t row = range.begin; row < range.end; ++row) {
      const auto source = [&](int64_t i) { return load_bf16(x + row * inputs + i); };
      std::uint8_t *to = prepared + row * stride;
      if (norm)
        put_normed(form, to, source, norm, inputs, static_cast<float>(eps));
      else
        put_row(form, to, inputs, source);
    }
    team.wait();
    std::uint8_t *scratch = workspace + team.thread * product_scratch_bytes(inputs);
#ifdef __AMX_BF16__
    if (tiles) {
      const Tiles configured;
      return multiply(team, *matrix, {form, prepared, stride}, rows, output, true, scratch, [] {});
    }
#endif
    multiply(team, *matrix, {form, prepared, stride}, rows, output, false, scratch, [] {});
  });
}
}
