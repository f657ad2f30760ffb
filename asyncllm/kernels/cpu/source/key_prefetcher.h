#pragma once

#include "decoder.h"

namespace asyncllm {

// What the tokens that are alone in their rows are going to read from a layer's cache. It lies in pieces that no
// processor foresees; so a thread asks for its part of it little by little, while it computes the product before.
class KeyPrefetcher {
 public:
  // A token's attention is cut into `tasks_of_token` pieces, which follow each other.
  KeyPrefetcher(const Team &team, const Decoder &model, const Step &step, int64_t tasks_of_token)
      : model_(model), step_(step) {
    const Range tasks = team.share(step.singles * tasks_of_token);
    tokens_ = {tasks.begin / tasks_of_token, (tasks.end + tasks_of_token - 1) / tasks_of_token};
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

}  // namespace asyncllm
