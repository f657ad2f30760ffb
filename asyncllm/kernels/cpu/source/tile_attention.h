// Attention by the processor's matrix unit (AMX), in bfloat16 with float32 scores and sums.
//
// The tokens of a chunk are attended 32 at a time, with scores and outputs transposed: a query is a lane, so that no
// maximum or sum goes across lanes. Of a token that is alone in its row the queries of several KV heads are the lanes.
#pragma once

#include "attention.h"

namespace asyncllm {

constexpr int64_t kTokensAtOnce = 32;  // of a chunk
constexpr int64_t kKeysAtOnce = 256;

#ifdef __AMX_BF16__

// Of tokens that are alone in their rows, those KV heads are attended together whose queries fit into the 16 columns of
// a tile; none where the queries of one do not.
inline int64_t heads_at_once(const Heads &heads) { return std::min(heads.keys, 16 / heads.group()); }

// Of queries and outputs; then of values transposed, scores and weights of some keys.
inline int64_t tile_attention_bytes(const Heads &heads) {
  const int64_t tiles = std::max(kTokensAtOnce / 16 * heads.group(), heads_at_once(heads)), dim = heads.dim;
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
  alignas(64) std::uint16_t order[32];
  for (int i = 0; i < 16; ++i) {
    order[2 * i] = static_cast<std::uint16_t>(i);
    order[2 * i + 1] = static_cast<std::uint16_t>(16 + i);
  }
  const __m512i in_turn = _mm512_load_si512(order);
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
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int64_t token = tile / group * 16, query_head = head * group + tile % group;
    const __m512 share = _mm512_div_ps(_mm512_set1_ps(factor), _mm512_load_ps(sums + 16 * tile));
    for (int64_t d = 0; d < dim; d += 16) {
      __m512i rows[16];
      const float *from = outputs + (tile * dim + d) * 16;
      for (int i = 0; i < 16; ++i) rows[i] = _mm512_castps_si512(_mm512_mul_ps(_mm512_load_ps(from + 16 * i), share));
      transpose(rows);
      for (int64_t i = 0; i < std::min<int64_t>(16, count - token); ++i) {
        store_bf16(out + (token + i) * out_stride + query_head * dim + d, _mm512_castsi512_ps(rows[i]));
      }
    }
  }
}
// Queries [count · group, dim] of `count` KV heads as tiles of 16 pairs of dimensions by 16 queries: for each head those
// of its own, with zeros for the others', so that the products of all heads' keys add up to the scores of all.
inline void put_queries(const bf16 *queries, const Heads &heads, int64_t count, std::uint8_t *tiles) {
  for (int64_t head = 0; head < count; ++head) {
    for (int64_t part = 0; part < heads.dim; part += 32, tiles += kTileBytes) {
      __m512i rows[16];
      for (int64_t i = 0; i < 16; ++i) {
        const bool own = i / heads.group() == head;
        rows[i] = own ? _mm512_loadu_si512(queries + i * heads.dim + part) : _mm512_setzero_si512();
      }
      transpose(rows);
      for (int i = 0; i < 16; ++i) _mm512_store_si512(tiles + 64 * i, rows[i]);
    }
  }
}

// Scores [64, 16] of the keys from `start` on, of `count` KV heads from `head` on; of keys after `last` by 16 they are
// left as they are.
inline void score_heads(const History &history, int64_t start, int64_t last, int64_t head, int64_t count,
                        const std::uint8_t *queries, float *scores) {
  const int64_t dim = history.heads.dim, stride = 2 * history.line_size();
  const int64_t blocks = std::min<int64_t>(4, (last - start) / 16 + 1);
  const bf16 *keys[4];
  for (int64_t i = 0; i < 4; ++i) keys[i] = history.key(start + 16 * std::min(i, blocks - 1), head);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t i = 0; i < count * dim; i += 32, queries += kTileBytes) {  // heads lie beside each other
    _tile_loadd(6, queries, 64);
    _tile_loadd(4, keys[0] + i, stride);
    _tile_dpbf16ps(0, 4, 6);
    if (blocks > 1) {
      _tile_loadd(5, keys[1] + i, stride);
      _tile_dpbf16ps(1, 5, 6);
    }
    if (blocks > 2) {
      _tile_loadd(4, keys[2] + i, stride);
      _tile_dpbf16ps(2, 4, 6);
      _tile_loadd(5, keys[3] + i, stride);
      _tile_dpbf16ps(3, 5, 6);
    }
  }
  _tile_stored(0, scores, 64);
  if (blocks > 1) _tile_stored(1, scores + 256, 64);
  if (blocks > 2) {
    _tile_stored(2, scores + 512, 64);
    _tile_stored(3, scores + 768, 64);
  }
}

// Sums [H, dim] of the values of `count` keys of one KV head by the weights of H queries, whose pairs of keys are 16
// numbers apart; times `shrinks` they go on where `goes_on`. Of 32 dimensions the first vector has 0 to 3, 8 to 11, 16
// to 19 and 24 to 27, the second one the others.
template <int Vectors, int H>
inline void add_pairs(const History &history, int64_t start, int64_t count, int64_t first, int64_t last, int64_t head,
                      const std::uint8_t *weights, const float *shrinks, bool goes_on, float *outputs) {
  alignas(64) static constexpr bf16 kZeros[kLanes * Vectors] = {};  // what no query sees may be no number
  __m512 sums[H][Vectors];
#pragma GCC unroll 4
  for (int h = 0; h < H; ++h) {
    const __m512 shrink = _mm512_set1_ps(shrinks[h]);
#pragma GCC unroll 16
    for (int i = 0; i < Vectors; ++i) {
      const float *at = outputs + (h * Vectors + i) * kLanes;
      sums[h][i] = goes_on ? _mm512_mul_ps(_mm512_load_ps(at), shrink) : _mm512_setzero_ps();
    }
  }
  for (int64_t key = start; key < start + count; key += 2, weights += 64) {
    const bf16 *even = key < first || key > last ? kZeros : history.value(key, head);
    const bf16 *odd = key + 1 < first || key + 1 > last ? kZeros : history.value(key + 1, head);
    __m512bh shares[H];
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) {
      shares[h] = (__m512bh)_mm512_set1_epi32(reinterpret_cast<const int *>(weights)[h]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < Vectors; i += 2) {
      const __m512i a = _mm512_loadu_si512(even + kLanes * i), b = _mm512_loadu_si512(odd + kLanes * i);
      const auto lower = (__m512bh)_mm512_unpacklo_epi16(a, b), upper = (__m512bh)_mm512_unpackhi_epi16(a, b);
#pragma GCC unroll 4
      for (int h = 0; h < H; ++h) {
        sums[h][i] = _mm512_dpbf16_ps(sums[h][i], lower, shares[h]);
        sums[h][i + 1] = _mm512_dpbf16_ps(sums[h][i + 1], upper, shares[h]);
      }
    }
  }
#pragma GCC unroll 4
  for (int h = 0; h < H; ++h)
#pragma GCC unroll 16
    for (int i = 0; i < Vectors; ++i) _mm512_store_ps(outputs + (h * Vectors + i) * kLanes, sums[h][i]);
}

// The same for all queries of the KV head, `Most` at once.
template <int Vectors, int Most>
inline void add_pairs_of_head(const History &history, int64_t start, int64_t count, int64_t first, int64_t last,
                              int64_t head, const std::uint8_t *weights, const float *shrinks, bool goes_on,
                              float *outputs) {
  constexpr int64_t kDim = Vectors * kLanes;
  const int64_t group = history.heads.group();
  int64_t done = 0;
  for (; done + Most <= group; done += Most)
    add_pairs<Vectors, Most>(history, start, count, first, last, head, weights + 4 * done, shrinks + done, goes_on,
                             outputs + done * kDim);
  for (; done < group; ++done)
    add_pairs<Vectors, 1>(history, start, count, first, last, head, weights + 4 * done, shrinks + done, goes_on,
                          outputs + done * kDim);
}

// All queries of `count` KV heads, from `head` on, of one token, over keys `first` to `last`, its own position.
// `queries` and `out` are those of the first of these heads; `scratch` has `tile_attention_bytes`.
inline void attend_heads_by_tiles(const bf16 *queries, const History &history, int64_t first, int64_t last,
                                  int64_t head, int64_t count, float scale, float factor, bf16 *out,
                                  std::uint8_t *scratch) {
  const Heads &heads = history.heads;
  const int64_t dim = heads.dim, group = heads.group();
  const auto add = dim == 32   ? add_pairs_of_head<2, 4>
                   : dim == 64 ? add_pairs_of_head<4, 3>
                   : dim == 96 ? add_pairs_of_head<6, 2>
                   : dim == 128 ? add_pairs_of_head<8, 2>
                                : add_pairs_of_head<16, 1>;
  std::uint8_t *query_tiles = scratch;
  auto *outputs = reinterpret_cast<float *>(query_tiles + count * 32 * dim);
  auto *scores = outputs + count * group * dim;
  auto *weights = reinterpret_cast<std::uint8_t *>(scores + kKeysAtOnce * 16);
  alignas(64) float most[16], sums[16], shrinks[16];
  std::fill(most, most + 16, -1e30f);  // finite: what sees none of some keys adds nothing then
  std::fill(sums, sums + 16, 0.0f);
  put_queries(queries, heads, count, query_tiles);
  const __m512i position = _mm512_set1_epi32(static_cast<int>(last));
  const int64_t begin = first / 16 * 16, window = last - first + 1;
  for (int64_t start = begin; start <= last; start += kKeysAtOnce) {
    const int64_t whole = std::min((last - start) / 32 * 32 + 32, kKeysAtOnce);
    for (int64_t key = 0; key < whole; key += 64) {
      score_heads(history, start + key, last, head, count, query_tiles, scores + 16 * key);
    }
    _mm512_store_ps(shrinks, weigh_keys(position, window, start, whole, scale, scores, most, sums, weights));
    for (int64_t i = 0; i < count; ++i) {
      add(history, start, whole, first, last, head + i, weights + 4 * i * group, shrinks + i * group, start > begin,
          outputs + i * group * dim);
    }
  }
  const __m512i lower = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i upper = _mm512_add_epi32(lower, _mm512_set1_epi32(8));
  for (int64_t query = 0; query < count * group; ++query) {
    const __m512 share = _mm512_set1_ps(factor / sums[query]);
    for (int64_t d = 0; d < dim; d += 32, outputs += 32, out += 32) {
      const __m512 a = _mm512_mul_ps(_mm512_load_ps(outputs), share);
      const __m512 b = _mm512_mul_ps(_mm512_load_ps(outputs + 16), share);
      store_bf16(out, _mm512_permutex2var_ps(a, lower, b));
      store_bf16(out + 16, _mm512_permutex2var_ps(a, upper, b));
    }
  }
}
#else
inline int64_t tile_attention_bytes(const Heads &) { return 0; }
#endif

}  // namespace asyncllm
