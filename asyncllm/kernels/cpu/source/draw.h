// Draws a token of a row of logits: the first whose weight, e^(logit / temperature), added to those of all before it,
// reaches a given share of their sum. Where there is no temperature, the first of the largest logits.
//
// For neither all logits need be there at once. Of each tile of tokens, the largest logit and the sum of the weights
// are kept; they tell which tile the token is in, and only that tile's logits are looked at again.
#pragma once

#include <algorithm>
#include <limits>

#include "simd.h"

namespace asyncllm {

constexpr std::int64_t kDrawTile = 32;  // tokens
constexpr std::int64_t kDrawTiles = 8;  // that are weighed at once
constexpr std::int64_t kDrawPiece = kDrawTile * kDrawTiles;

// Of a row.
struct DrawTiles {
  std::int64_t count;
  float *most;  // [count] of which none of a tile's logits is larger; not a number where one of them is none
  float *sums;  // [count] of weights, where that of such a logit is 1

  static std::int64_t floats(std::int64_t vocabulary) { return 2 * padded(vocabulary); }

  static DrawTiles in(float *memory, std::int64_t vocabulary) {
    return {(vocabulary + kDrawTile - 1) / kDrawTile, memory, memory + padded(vocabulary)};
  }

 private:
  static std::int64_t padded(std::int64_t vocabulary) {
    return (vocabulary + 2 * kDrawPiece - 1) / (2 * kDrawPiece) * 2 * kDrawTiles;
  }
};

// 16 numbers from `at` on; behind the last one, what has no weight.
inline Floats some_from(const float *numbers, std::int64_t at, std::int64_t count, float none = -INFINITY) {
  if (at + kLanes <= count) return load(numbers + at);
  return load_some(lanes_below(count - at), numbers + at, every(none));
}

class Temperature {
 public:
  explicit Temperature(float value) : value_(value) {}

  bool draws() const { return value_ > 0.0f; }

  // Compared with that of the largest logit, of which the difference is taken first: so no temperature makes it
  // overflow, as long as no factor is infinite.
  Floats weights(Floats logits, float most) const {
    const float factor = std::min(kLog2E / value_, std::numeric_limits<float>::max());
    return exp2((logits - every(most)) * every(factor));
  }

 private:
  float value_;
};

// Of a piece's logits, which are `count`; `tile` is the first of its tiles.
inline void weigh(const float *logits, std::int64_t count, Temperature temperature, const DrawTiles &tiles,
                  std::int64_t tile) {
  Floats largest[kDrawTiles];
  bool odd = false;
#pragma GCC unroll 8
  for (int i = 0; i < kDrawTiles; ++i) {
    const Floats low = some_from(logits, 2 * i * kLanes, count), high = some_from(logits, (2 * i + 1) * kLanes, count);
    odd |= unordered(low, high);
    largest[i] = larger(low, high);
  }
  float *most = tiles.most + tile;
  if (odd) {
    std::fill(most, most + kDrawTiles, NAN);
    return;
  }
  if (!temperature.draws()) {
    for (int i = 0; i < kDrawTiles; ++i) most[i] = largest_of(largest[i]);
    return;
  }
#pragma GCC unroll 8
  for (int step = kDrawTiles / 2; step; step /= 2) {
    for (int i = 0; i < step; ++i) largest[i] = larger(largest[i], largest[i + step]);
  }
  const float of_all = std::max(largest_of(largest[0]), std::numeric_limits<float>::lowest());
  std::fill(most, most + kDrawTiles, of_all);
  Floats sums[kDrawTiles];
#pragma GCC unroll 8
  for (int i = 0; i < kDrawTiles; ++i) {
    sums[i] = temperature.weights(some_from(logits, 2 * i * kLanes, count), of_all) +
              temperature.weights(some_from(logits, (2 * i + 1) * kLanes, count), of_all);
  }
  store_sums_of_eight(tiles.sums + tile, sums);
}

// The tile that a token is in.
struct Choice {
  std::int64_t tile;  // -1: there is none
  float most;         // the row's largest logit
  double target;      // that the sum of the weights is to reach
  double reached;     // before this tile
};

// The first of the weights that makes the sum reach the target; if none does, which rounding may bring about, the last
// one there is. `weights(i)` are those of 16 from i on. `reached` becomes the sum of those before it.
template <class Weights>
inline std::int64_t find_target(std::int64_t begin, std::int64_t end, double target, double &reached,
                                Weights &&weights) {
  std::int64_t last = begin;
  double before = reached, sum = reached;
  for (std::int64_t i = begin; i < end && sum < target; i += kLanes) {
    alignas(64) float lanes[kLanes];
    store(lanes, weights(i));
    for (std::int64_t lane = 0; lane < kLanes && sum < target; ++lane) {
      if (!(lanes[lane] > 0.0f)) continue;
      last = i + lane;
      before = sum;
      sum += lanes[lane];
    }
  }
  reached = before;
  return last;
}

// None where a logit is not a number, or all are -inf; and where it is drawn, none where one is +inf.
inline Choice choose_tile(const DrawTiles &tiles, Temperature temperature, float uniform) {
  constexpr Choice kNone{-1, 0.0f, 0.0, 0.0};
  Floats largest = every(-INFINITY);
  bool odd = false;
  const auto most_of = [&](std::int64_t i) { return some_from(tiles.most, i, tiles.count); };
  for (std::int64_t i = 0; i < tiles.count; i += kLanes) {
    const Floats most = most_of(i);
    odd |= unordered(most, most);
    largest = larger(largest, most);
  }
  const float most = largest_of(largest);
  if (odd || !(most > -INFINITY)) return kNone;
  if (!temperature.draws()) return {std::find(tiles.most, tiles.most + tiles.count, most) - tiles.most, most, 0.0, 0.0};
  const auto weights = [&](std::int64_t i) {
    return some_from(tiles.sums, i, tiles.count, 0.0f) * temperature.weights(most_of(i), most);
  };
  double sum = 0.0, reached = 0.0;
  for (std::int64_t i = 0; i < tiles.count; i += kLanes) sum += sum_of(weights(i));
  if (!(sum > 0.0)) return kNone;  // the largest is +inf
  const double target = static_cast<double>(uniform) * sum;
  std::int64_t first = 0;
  for (double next = reached; first < tiles.count; first += kLanes, reached = next) {
    next += sum_of(weights(first));
    if (next >= target) break;
  }
  const std::int64_t tile = find_target(first, std::min(first + kLanes, tiles.count), target, reached, weights);
  return {tile, most, target, reached};
}

// Of the chosen tile's logits.
inline std::int64_t choose_token(const Choice &choice, const float *logits, std::int64_t count,
                                 Temperature temperature) {
  const std::int64_t first = choice.tile * kDrawTile;
  if (!temperature.draws()) return first + (std::find(logits, logits + count, choice.most) - logits);
  double reached = choice.reached;
  return first + find_target(0, count, choice.target, reached, [&](std::int64_t i) {
           return temperature.weights(some_from(logits, i, count), choice.most);
         });
}

// Of a row that is there as a whole; `tiles` is room for its own.
inline std::int64_t draw(const float *logits, std::int64_t vocabulary, Temperature temperature, float uniform,
                         const DrawTiles &tiles) {
  for (std::int64_t i = 0; i < vocabulary; i += kDrawPiece) {
    weigh(logits + i, std::min(kDrawPiece, vocabulary - i), temperature, tiles, i / kDrawTile);
  }
  const Choice choice = choose_tile(tiles, temperature, uniform);
  if (choice.tile < 0) return -1;
  const std::int64_t first = choice.tile * kDrawTile;
  return choose_token(choice, logits + first, std::min(kDrawTile, vocabulary - first), temperature);
}

}  // namespace asyncllm
