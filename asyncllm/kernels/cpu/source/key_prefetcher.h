// Keys and values of the next layer, asked for while the products of this one are computed.
#pragma once

#include "decoder.h"

namespace asyncllm {

// What the tokens that are alone in their rows are going to read from the next layer's cache. It lies in pieces that no
// processor foresees, and takes as long to come as all weights of a layer where contexts are long. So a thread asks for
// its part of it little by little, while it computes products: all at once would leave them waiting. Where many tokens
// read, nothing is asked for beside the first product: half of that would have left the cache again.
class KeyPrefetcher {
 public:
  // A token's attention is cut into `tasks_of_token` pieces, which follow each other.
  KeyPrefetcher(const Team &team, const Decoder &model, const Step &step, int64_t tasks_of_token)
      : team_(team), model_(model), step_(step) {
    const Range tasks = team.share(step.singles * tasks_of_token);
    tokens_ = {tasks.begin / tasks_of_token, (tasks.end + tasks_of_token - 1) / tasks_of_token};
    if (tasks.begin == tasks.end) tokens_.end = tokens_.begin;
    const int64_t count = std::max<int64_t>(1, tokens_.end - tokens_.begin);
    const int64_t key_bytes = 4 * model.keys * model.dim;
    most_ = kBytes / key_bytes / count;
    int64_t keys = 0, blocks = 0;
    const Layer &layer = model.layers[0];
    if (is_alone(step)) tokens_ = {0, 1};
    for (int64_t token = tokens_.begin; token < tokens_.end; ++token) {
      const Range range = keys_of(layer, token);
      keys += std::min(range.end - range.begin, most_);
    }
    for (const Matrix *matrix : {&layer.qkv, &layer.gate_up, &layer.down}) blocks += blocks_of(*matrix);
    const int64_t skipped = is_alone(step) ? 0 : blocks_of(layer.output);
    if (!skipped) blocks += blocks_of(layer.output);
    credit_of_block_ = kLine * keys * (key_bytes / kLineBytes) * team.threads / blocks + 1;
    debt_ = skipped / team.threads * credit_of_block_;
    token_ = tokens_.end;
  }

  // Of the keys from `first` on of a token: how many were asked for.
  int64_t asked(int64_t first) const { return is_alone(step_) ? std::max<int64_t>(0, until_ - first) : most_; }

  void start(const Layer &layer) {
    layer_ = &layer;
    credit_ = -debt_;
    token_ = tokens_.begin;
    begin_token();
  }

  // As much as belongs to the time that so many blocks of weights take.
  void ask(int64_t blocks) {
    for (credit_ += blocks * credit_of_block_; credit_ >= kLine && token_ < tokens_.end; credit_ -= kLine) {
      prefetch_next(at_);
      at_ += kLineBytes;
      if (at_ == end_) begin_piece();
    }
  }

 private:
  static constexpr int64_t kBytes = 1 << 20;  // about half of a second-level cache
  static constexpr int64_t kLineBytes = 64;
  static constexpr int64_t kLine = 1 << 16;  // what one costs

  static int64_t blocks_of(const Matrix &matrix) { return matrix.outputs / kFeatures * matrix.groups(); }

  void begin_token() {
    if (token_ >= tokens_.end) return;
    const Range range = keys_of(*layer_, token_);
    key_ = range.begin;
    last_ = std::min(range.end, key_ + most_) - 1;
    until_ = last_ + 1;
    begin_piece();
  }

  // Those that this thread reads: of a token whose keys are cut into parts, its own parts'.
  Range keys_of(const Layer &layer, int64_t token) const {
    const int64_t position = step_.positions[token], first = first_key(layer, position);
    if (!is_alone(step_)) return {first, position + 1};
    const Parts parts(first, position);
    const Range tasks = team_.share(parts.count * model_.keys);
    if (tasks.begin == tasks.end) return {first, first};
    return {parts.range(tasks.begin / model_.keys).begin, parts.range((tasks.end - 1) / model_.keys).end};
  }

  // What follows in one block of the cache.
  void begin_piece() {
    if (key_ > last_) {
      ++token_;
      return begin_token();
    }
    const History history = history_of(model_, step_, *layer_, token_, 0);
    const int64_t count = std::min(last_ - key_ + 1, model_.block_size - key_ % model_.block_size);
    at_ = reinterpret_cast<const char *>(history.line(key_));
    end_ = at_ + 2 * history.line_size() * count;
    key_ += count;
  }

  const Team team_;
  const Decoder &model_;
  const Step &step_;
  Range tokens_;
  int64_t most_, credit_of_block_, debt_, credit_ = 0;
  const Layer *layer_ = nullptr;
  int64_t token_, key_ = 0, last_ = 0, until_ = 0;
  const char *at_ = nullptr, *end_ = nullptr;
};

}  // namespace asyncllm
