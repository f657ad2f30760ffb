// Attention of a chunk's tokens by the processor's matrix unit (AMX), in bfloat16 with float32 scores and sums.
//
// They are attended 32 at a time, with scores and outputs transposed: a query is a lane, so that no maximum or sum goes
// across lanes.
#pragma once

#include "amx.h"
#include "attention.h"

namespace asyncllm {

constexpr int64_t kTokensAtOnce = 32;  // of a chunk
constexpr int64_t kKeysAtOnce = 256;

#ifdef ASYNCLLM_AMX

inline int64_t chunk_scratch_bytes(const Heads &heads) {
  const int64_t tiles = kTokensAtOnce / 16 * heads.group(), dim = heads.dim;
  // queries and outputs transposed, maxima and sums; then values transposed, scores and weights of some keys
  return tiles * (32 * dim + 64 * dim + 128) + kKeysAtOnce * (2 * dim + 64 + 32);
}

// Values of 32 keys as tiles of 16 dimensions by pairs of keys; zeros where a key is outside of `first` to `last`.
inline void put_values(const History &history, int64_t start, int64_t first, int64_t last, int64_t head,
                       std::uint8_t *tiles) {
  alignas(64) std::uint16_t order[2][32];
  for (int i = 0; i < 16; ++i) {
    for (int part = 0; part < 2; ++part) {
      order[part][2 * i] = static_cast<std::uint16_t>(16 * part + i);
      order[part][2 * i + 1] = static_cast<std::uint16_t>(32 + 16 * part + i);
    }
  }
  const __m512i lower = _mm512_load_si512(order[0]), upper = _mm512_load_si512(order[1]);
  const bf16 *values[32];
  for (int64_t i = 0; i < 32; ++i) {
    const int64_t position = start + i;
    values[i] = position < first || position > last ? nullptr : history.value(position, head);
  }
  for (int64_t d = 0; d < history.heads.dim; d += 32, tiles += 2 * kTileBytes) {
    __m512i left[16], right[16];
    for (int pair = 0; pair < 16; ++pair) {
      const bf16 *even = values[2 * pair], *odd = values[2 * pair + 1];
      const __m512i a = even ? _mm512_loadu_si512(even + d) : _mm512_setzero_si512();
      const __m512i b = odd ? _mm512_loadu_si512(odd + d) : _mm512_setzero_si512();
      left[pair] = _mm512_permutex2var_epi16(a, lower, b);
      right[pair] = _mm512_permutex2var_epi16(a, upper, b);
    }
    transpose(left);
    transpose(right);
    for (int i = 0; i < 16; ++i) {
      _mm512_store_si512(tiles + 64 * i, left[i]);
      _mm512_store_si512(tiles + kTileBytes + 64 * i, right[i]);
    }
  }
}

// Scores of 16 queries for `count` keys (a multiple of 32) from `start` on: [count, 16], neither scaled nor masked. The
// row has no key, and perhaps no place in a table, after `last`.
inline void score_keys(const History &history, int64_t start, int64_t count, int64_t last, int64_t head,
                       const std::uint8_t *queries, float *scores) {
  const int64_t parts = history.heads.dim / 32, stride = 2 * history.line_size();
  for (int64_t key = 0; key < count; key += 32) {
    const int64_t upper = start + key + 16;
    const bf16 *first = history.key(start + key, head), *second = upper > last ? first : history.key(upper, head);
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t part = 0; part < parts; ++part) {
      _tile_loadd(4, first + 32 * part, stride);
      _tile_loadd(5, second + 32 * part, stride);
      _tile_loadd(6, queries + kTileBytes * part, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 5, 6);
    }
    _tile_stored(0, scores + 16 * key, 64);
    _tile_stored(1, scores + 16 * (key + 16), 64);
  }
}

// Adds to outputs [dim, 16] the values of `count` keys by their weights.
inline void add_values(int64_t dim, int64_t count, const std::uint8_t *values, const std::uint8_t *weights,
                       float *outputs) {
  const int64_t step = dim / 16 * kTileBytes;
  for (int64_t d = 0; d < dim; d += 32, values += 2 * kTileBytes, outputs += 512) {
    const std::uint8_t *value = values, *weight = weights;
    _tile_loadd(0, outputs, 64);
    _tile_loadd(1, outputs + 256, 64);
    for (int64_t key = 0; key < count; key += 32, value += step, weight += kTileBytes) {
      _tile_loadd(4, value, 64);
      _tile_loadd(5, value + kTileBytes, 64);
      _tile_loadd(6, weight, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 5, 6);
    }
    _tile_stored(0, outputs, 64);
    _tile_stored(1, outputs + 256, 64);
  }
}

// Scores [count, 16] of queries at `positions` to weights: pairs of keys [count / 2, 16, 2] in bfloat16. `most` and
// `sum` [16] go on. Returns what outputs so far are to be multiplied by.
inline __m512 weigh_keys(__m512i positions, int64_t window, int64_t start, int64_t count, float scale, float *scores,
                         float *most, float *sum, std::uint8_t *weights) {
  const int64_t first_position = _mm512_reduce_min_epi32(positions), last_position = _mm512_reduce_max_epi32(positions);
  const bool cut = start + count - 1 > first_position || start <= last_position - window;
  const __m512 factor = _mm512_set1_ps(scale * kLog2E),
               hidden = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  const __m512i oldest =
      _mm512_sub_epi32(positions, _mm512_set1_epi32(static_cast<int>(std::min<int64_t>(window, 1 << 30))));
  const __m512 before = _mm512_load_ps(most);
  __m512 highest = hidden;
  for (int64_t key = 0; key < count; ++key) {
    __m512 score = _mm512_load_ps(scores + 16 * key);
    if (cut) {
      const __m512i at = _mm512_set1_epi32(static_cast<int>(start + key));
      const __mmask16 seen = _mm512_cmple_epi32_mask(at, positions) & _mm512_cmpgt_epi32_mask(at, oldest);
      score = _mm512_mask_mov_ps(hidden, seen, score);
      _mm512_store_ps(scores + 16 * key, score);
    }
    highest = _mm512_max_ps(highest, score);
  }
  const __m512 largest = _mm512_max_ps(before, _mm512_mul_ps(highest, factor));
  const __m512i in_turn = in_turn_of_halves();
  __m512 added = _mm512_setzero_ps();
  for (int64_t key = 0; key < count; key += 2) {
    const __m512 even = exp2(_mm512_fmsub_ps(_mm512_load_ps(scores + 16 * key), factor, largest));
    const __m512 odd = exp2(_mm512_fmsub_ps(_mm512_load_ps(scores + 16 * key + 16), factor, largest));
    added = _mm512_add_ps(added, _mm512_add_ps(even, odd));
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(odd, even);
    _mm512_store_si512(weights + 32 * key, _mm512_permutexvar_epi16(in_turn, both));
  }
  _mm512_store_ps(most, largest);
  const __m512 shrink = exp2(_mm512_sub_ps(before, largest));
  _mm512_store_ps(sum, _mm512_fmadd_ps(_mm512_load_ps(sum), shrink, added));
  return shrink;
}

inline bool is_one(__m512 values) { return !_mm512_cmp_ps_mask(values, _mm512_set1_ps(1.0f), _CMP_NEQ_UQ); }

// All queries of one KV head of `count` neighbours in a chunk, the first at `position`. `qkv` and `out` are the first
// one's, `stride` and `out_stride` apart; `scratch` has `chunk_scratch_bytes`.
//
// A key that a query does not see has weight 0, which hides each value but an infinity and what is no number. So tokens
// whose outputs are no numbers are attended once more, one by one: all keys that are not seen have values of zeros then.
inline void attend_chunk(const bf16 *qkv, int64_t stride, const History &history, int64_t position, int64_t count,
                         int64_t window, int64_t head, float scale, float factor, bf16 *out, int64_t out_stride,
                         std::uint8_t *scratch) {
  const int64_t group = history.heads.group(), dim = history.heads.dim, halves = (count + 15) / 16,
                tiles = halves * group;
  std::uint8_t *queries = scratch;
  auto *outputs = reinterpret_cast<float *>(queries + tiles * 32 * dim);
  float *most = outputs + tiles * 16 * dim, *sums = most + tiles * 16;
  auto *values = reinterpret_cast<std::uint8_t *>(sums + tiles * 16);
  auto *scores = reinterpret_cast<float *>(values + kKeysAtOnce * 2 * dim);
  auto *weights = reinterpret_cast<std::uint8_t *>(scores + kKeysAtOnce * 16);

  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int64_t token = tile / group * 16, query_head = head * group + tile % group;
    for (int64_t part = 0; part < dim / 32; ++part) {
      __m512i rows[16];
      for (int64_t i = 0; i < 16; ++i) {
        rows[i] = _mm512_loadu_si512(qkv + std::min(token + i, count - 1) * stride + query_head * dim + 32 * part);
      }
      transpose(rows);
      for (int i = 0; i < 16; ++i) _mm512_store_si512(queries + tile * 32 * dim + part * kTileBytes + 64 * i, rows[i]);
    }
  }
  std::memset(outputs, 0, tiles * 64 * dim);
  std::fill(most, most + tiles * 16, -1e30f);  // finite: what sees none of some keys adds nothing then
  std::fill(sums, sums + tiles * 16, 0.0f);

  const int64_t last = position + count - 1, first = std::max<int64_t>(0, position - window + 1);
  for (int64_t start = first / 16 * 16; start <= last; start += kKeysAtOnce) {
    const int64_t whole = std::min((last - start) / 32 * 32 + 32, kKeysAtOnce);
    for (int64_t key = 0; key < whole; key += 32) {
      put_values(history, start + key, first, last, head, values + key * 2 * dim);
    }
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t token = tile / group * 16, newest = std::min(position + token + 15, last);
      if (start > newest) continue;
      const int64_t seen = std::min((newest - start) / 32 * 32 + 32, whole);
      const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
      const __m512i positions =
          _mm512_min_epi32(_mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int>(position + token))),
                           _mm512_set1_epi32(static_cast<int>(last)));
      float *output = outputs + tile * 16 * dim;
      score_keys(history, start, seen, last, head, queries + tile * 32 * dim, scores);
      const __m512 shrink =
          weigh_keys(positions, window, start, seen, scale, scores, most + 16 * tile, sums + 16 * tile, weights);
      for (int64_t d = 0; d < dim && !is_one(shrink); ++d) {
        _mm512_store_ps(output + 16 * d, _mm512_mul_ps(_mm512_load_ps(output + 16 * d), shrink));
      }
      add_values(dim, seen, values, weights, output);
    }
  }
  std::uint32_t broken = 0;  // tokens whose outputs are no numbers
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int64_t token = tile / group * 16, query_head = head * group + tile % group;
    const __m512 share = _mm512_div_ps(_mm512_set1_ps(factor), _mm512_load_ps(sums + 16 * tile));
    for (int64_t d = 0; d < dim; d += 16) {
      __m512i rows[16];
      const float *from = outputs + (tile * dim + d) * 16;
      __mmask16 unordered = 0;
      for (int i = 0; i < 16; ++i) {
        const __m512 value = _mm512_mul_ps(_mm512_load_ps(from + 16 * i), share);
        unordered |= _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
        rows[i] = _mm512_castps_si512(value);
      }
      broken |= static_cast<std::uint32_t>(unordered) << token;
      transpose(rows);
      for (int64_t i = 0; i < std::min<int64_t>(16, count - token); ++i) {
        store_bf16(out + (token + i) * out_stride + query_head * dim + d, _mm512_castsi512_ps(rows[i]));
      }
    }
  }
  if (!broken || count == 1) return;
  for (int64_t token = 0; token < count; ++token) {
    if (!(broken >> token & 1)) continue;
    attend_chunk(qkv + token * stride, stride, history, position + token, 1, window, head, scale, factor,
                 out + token * out_stride, out_stride, scratch);
  }
}
#else
inline int64_t chunk_scratch_bytes(const Heads &) { return 0; }
#endif

}  // namespace asyncllm
