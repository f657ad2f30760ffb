// Draws a token of each row of logits: the first whose weight, added to those of all before it, reaches a given share.
// -1 where a logit is not a number, or +inf, or all are -inf.
#pragma once

#include <algorithm>
#include <limits>

#include "simd.h"

namespace asyncllm {

constexpr std::int64_t kDrawTile = 256;  // tokens whose weights are added up at once

// 16 logits from `at` on; past the end of the vocabulary, which have no weight, −inf.
inline __m512 logits_at(const float *logits, std::int64_t at, std::int64_t vocabulary) {
  const std::int64_t count = std::min<std::int64_t>(kLanes, vocabulary - at);
  const auto inside = static_cast<__mmask16>((1u << count) - 1);
  return _mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITY), inside, logits + at);
}

// The first of the largest logits; -1 where one is not a number, or all are -inf.
inline std::int64_t largest(const float *logits, std::int64_t vocabulary) {
  __m512 most = _mm512_set1_ps(-INFINITY);
  __m512i from = _mm512_setzero_si512();  // the first lane's token, of the vector that each lane's largest is in
  __mmask16 odd = 0;
  for (std::int64_t i = 0; i < vocabulary; i += kLanes) {
    const __m512 values = logits_at(logits, i, vocabulary);
    odd |= _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
    const __mmask16 larger = _mm512_cmp_ps_mask(values, most, _CMP_GT_OQ);
    most = _mm512_mask_mov_ps(most, larger, values);
    from = _mm512_mask_mov_epi32(from, larger, _mm512_set1_epi32(static_cast<int>(i)));
  }
  const float best = _mm512_reduce_max_ps(most);
  if (odd || !(best > -INFINITY)) return -1;
  const __m512i tokens = _mm512_add_epi32(from, _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
  return _mm512_mask_reduce_min_epi32(_mm512_cmp_ps_mask(most, _mm512_set1_ps(best), _CMP_EQ_OQ), tokens);
}

inline std::int64_t draw(const float *logits, std::int64_t vocabulary, float temperature, float uniform, double *ends) {
  __m512 most = _mm512_set1_ps(-INFINITY);
  for (std::int64_t i = 0; i < vocabulary; i += kLanes) most = _mm512_max_ps(most, logits_at(logits, i, vocabulary));
  // the largest becomes 0 before the division, so that no temperature makes it overflow, and no factor is infinite
  const __m512 largest = _mm512_set1_ps(_mm512_reduce_max_ps(most));
  const __m512 factor = _mm512_set1_ps(std::min(kLog2E / temperature, std::numeric_limits<float>::max()));
  const auto weights = [&](std::int64_t at) {
    return exp2(_mm512_mul_ps(_mm512_sub_ps(logits_at(logits, at, vocabulary), largest), factor));
  };
  const std::int64_t tiles = (vocabulary + kDrawTile - 1) / kDrawTile;
  double sum = 0.0;
  for (std::int64_t tile = 0; tile < tiles; ++tile) {
    __m512 part = _mm512_setzero_ps();
    const std::int64_t end = std::min(vocabulary, (tile + 1) * kDrawTile);
    for (std::int64_t i = tile * kDrawTile; i < end; i += kLanes) part = _mm512_add_ps(part, weights(i));
    sum += _mm512_reduce_add_ps(part);
    ends[tile] = sum;
  }
  if (!(sum > 0.0)) return -1;
  const double target = static_cast<double>(uniform) * sum;
  // past the end where no sum reaches it
  const std::int64_t tile = std::min<std::int64_t>(std::lower_bound(ends, ends + tiles, target) - ends, tiles - 1);
  double reached = tile ? ends[tile - 1] : 0.0;
  std::int64_t last = tile * kDrawTile;  // with a weight: what is drawn where rounding kept the sum below the target
  const std::int64_t end = std::min(vocabulary, (tile + 1) * kDrawTile);
  for (std::int64_t i = tile * kDrawTile; i < end; i += kLanes) {
    alignas(64) float lanes[kLanes];
    _mm512_store_ps(lanes, weights(i));
    for (std::int64_t lane = 0; lane < kLanes; ++lane) {
      if (!(lanes[lane] > 0.0f)) continue;
      reached += lanes[lane];
      last = i + lane;
      if (reached >= target) return last;
    }
  }
  return std::min(last, vocabulary - 1);
}

}  // namespace asyncllm
