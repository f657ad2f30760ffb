// Attention of tokens that are alone in their rows, with scores by the processor's matrix unit (AMX).
//
// The queries of several KV heads are the columns of a tile: a vector has the scores of all of them for one key, so
// that no maximum or sum goes across lanes. Values are added up by vectors, in float32: a tile would have too few
// queries.
#pragma once

#include "amx.h"
#include "attention.h"

namespace asyncllm {

#ifdef ASYNCLLM_AMX

constexpr int64_t kScoresAtOnce = 256;  // keys whose scores are held
constexpr int64_t kBlocksExpected = 2;  // of 16 keys, whose values are asked for before they are read
constexpr int64_t kKeysExpected = 64;   // that are asked for beside the values of others: the nearest cache holds those

// Those KV heads are attended together whose queries fit into the 16 columns of a tile; none where those of one do not.
inline int64_t heads_at_once(const Heads &heads) { return std::min(heads.keys, 16 / heads.group()); }

inline int64_t token_scratch_bytes(const Heads &heads) {
  const int64_t queries = 16 * heads.dim;  // tiles of queries, sums of values; scores
  return 2 * queries * heads_at_once(heads) + 4 * queries + kScoresAtOnce * 64;
}

// Queries [count * group, dim] of `count` KV heads as tiles of 16 pairs of dimensions by 16 queries: for each head
// those of its own, with zeros for the others', so that the products of all heads' keys add up to the scores of all.
inline void put_queries(const bf16 *queries, const Heads &heads, int64_t count, std::uint8_t *tiles) {
  const int64_t group = heads.group(), parts = heads.dim / 32;
  for (int64_t part = 0; part < parts; ++part, tiles += kTileBytes) {
    __m512i rows[16];
    for (int64_t i = 0; i < 16; ++i) {
      rows[i] = i < count * group ? _mm512_loadu_si512(queries + i * heads.dim + 32 * part) : _mm512_setzero_si512();
    }
    transpose(rows);
    for (int64_t head = 0; head < count; ++head) {
      const auto own = static_cast<__mmask16>(((1u << group) - 1) << (head * group));
      std::uint8_t *tile = tiles + head * parts * kTileBytes;
      for (int i = 0; i < 16; ++i) _mm512_store_si512(tile + 64 * i, _mm512_maskz_mov_epi32(own, rows[i]));
    }
  }
}

// The keys from `first` to `last` of a row, that are read next; no history: none.
struct NextKeys {
  const History *history;
  int64_t first, last;

  // The line of the `block`th 16 of them, or null.
  const bf16 *block(int64_t block) const {
    const int64_t at = first / 16 * 16 + 16 * block;
    return history && at <= last ? history->line(at) : nullptr;
  }
};

// Keys or values, 16 at a time, that are asked for into the nearest cache. Tiles are loaded from there five times as
// fast as from the next one, which loads of vectors too wait for.
struct Expected {
  const bf16 *lines[4];
  int64_t count = 0;

  void ask(int64_t part, int64_t stride) const {
    for (int64_t i = 0; i < count; ++i)
      for (int64_t key = 0; key < 16; ++key) prefetch(lines[i] + key * stride + part);
  }
};

// Scores [64, 16] of the keys from `start` on, of `count` KV heads from `head` on. Past the key `last` they
// may be anything. `expected`, of the same heads, come meanwhile.
inline void score_heads(const History &history, int64_t start, int64_t last, int64_t head, int64_t count,
                        const std::uint8_t *queries, float *scores, const Expected &expected) {
  const int64_t dim = history.heads.dim, stride = 2 * history.line_size();
  const int64_t blocks = std::min<int64_t>(4, (last - start) / 16 + 1);
  const bf16 *keys[4];
  for (int64_t i = 0; i < 4; ++i) keys[i] = history.key(start + 16 * std::min(i, blocks - 1), head);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t i = 0; i < count * dim; i += 32, queries += kTileBytes) {  // heads lie beside each other
    expected.ask(i, history.line_size());
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

// Scores [count, 16] of keys that all queries see become weights. `most` and `sum` [16] go on. Returns what sums of
// values so far are to be multiplied by.
inline __m512 weigh_scores(int64_t count, float scale, float *scores, float *most, float *sum) {
  const __m512 factor = _mm512_set1_ps(scale * kLog2E), before = _mm512_load_ps(most);
  __m512 highest = _mm512_load_ps(scores);
  for (int64_t key = 1; key < count; ++key) highest = _mm512_max_ps(highest, _mm512_load_ps(scores + 16 * key));
  const __m512 largest = _mm512_max_ps(before, _mm512_mul_ps(highest, factor));
  __m512 added = _mm512_setzero_ps();
  for (int64_t key = 0; key < count; ++key) {
    const __m512 weight = exp2(_mm512_fmsub_ps(_mm512_load_ps(scores + 16 * key), factor, largest));
    _mm512_store_ps(scores + 16 * key, weight);
    added = _mm512_add_ps(added, weight);
  }
  const __m512 shrink = exp2(_mm512_sub_ps(before, largest));
  _mm512_store_ps(most, largest);
  _mm512_store_ps(sum, _mm512_fmadd_ps(_mm512_load_ps(sum), shrink, added));
  return shrink;
}

// Adds to sums [H, dim] the values of `count` keys, `stride` apart, by the weights [keys, 16] of H queries. Of 32
// dimensions the first vector has those with even numbers. `ahead` and `further`, of as many lines, come meanwhile.
template <int Vectors, int H>
inline void add_values(const bf16 *value, int64_t stride, int64_t count, const float *weights, const bf16 *ahead,
                       const bf16 *further, float *sums_so_far) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000));
  __m512 sums[H][Vectors];
#pragma GCC unroll 4
  for (int h = 0; h < H; ++h) {
#pragma GCC unroll 16
    for (int i = 0; i < Vectors; ++i) sums[h][i] = _mm512_load_ps(sums_so_far + (h * Vectors + i) * kLanes);
  }
  for (int64_t key = 0; key < count; ++key, weights += 16) {
#pragma GCC unroll 8
    for (int i = 0; i < Vectors; i += 2) {
      prefetch(ahead + key * stride + kLanes * i);
      prefetch(further + key * stride + kLanes * i);
      const __m512i both = _mm512_loadu_si512(value + key * stride + kLanes * i);
      const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
      const __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(both, upper));
#pragma GCC unroll 4
      for (int h = 0; h < H; ++h) {
        sums[h][i] = _mm512_fmadd_ps(even, _mm512_set1_ps(weights[h]), sums[h][i]);
        sums[h][i + 1] = _mm512_fmadd_ps(odd, _mm512_set1_ps(weights[h]), sums[h][i + 1]);
      }
    }
  }
#pragma GCC unroll 4
  for (int h = 0; h < H; ++h) {
#pragma GCC unroll 16
    for (int i = 0; i < Vectors; ++i) _mm512_store_ps(sums_so_far + (h * Vectors + i) * kLanes, sums[h][i]);
  }
}

// The same for all queries of the KV head, `Most` at once.
template <int Vectors, int Most>
inline void add_values_of_head(int64_t group, const bf16 *value, int64_t stride, int64_t count, const float *weights,
                               const bf16 *ahead, const bf16 *further, float *sums) {
  constexpr int64_t kDim = Vectors * kLanes;
  int64_t done = 0;
  for (; done + Most <= group; done += Most, ahead = further = value)
    add_values<Vectors, Most>(value, stride, count, weights + done, ahead, further, sums + done * kDim);
  for (; done < group; ++done, ahead = further = value)
    add_values<Vectors, 1>(value, stride, count, weights + done, ahead, further, sums + done * kDim);
}

// All queries of `count` KV heads, from `head` on, of one token, over keys `first` to `last`, its own position; they
// and `out` are those of the first of these heads. Sums are multiplied by `factor`. `scratch` has
// `token_scratch_bytes`. `next`, of the same heads, come meanwhile.
inline void attend_heads_by_tiles(const bf16 *queries, const History &history, int64_t first, int64_t last,
                                  int64_t head, int64_t count, float scale, float factor, bf16 *out,
                                  std::uint8_t *scratch, const NextKeys &next) {
  const Heads &heads = history.heads;
  const int64_t dim = heads.dim, group = heads.group();
  const auto add = dim == 32    ? add_values_of_head<2, 4>
                   : dim == 64  ? add_values_of_head<4, 3>
                   : dim == 96  ? add_values_of_head<6, 2>
                   : dim == 128 ? add_values_of_head<8, 2>
                                : add_values_of_head<16, 1>;
  std::uint8_t *query_tiles = scratch;
  auto *sums = reinterpret_cast<float *>(query_tiles + count * 32 * dim);
  auto *scores = sums + count * group * dim;
  alignas(64) float most[16], shares[16], shrinks[16];
  std::fill(most, most + 16, kLeastScore);
  std::fill(shares, shares + 16, 0.0f);
  put_queries(queries, heads, count, query_tiles);
  std::memset(sums, 0, 4 * count * group * dim);
  const int64_t begin = first / 16 * 16;
  for (int64_t start = begin; start <= last; start += kScoresAtOnce) {
    const int64_t from = std::max(first, start), to = std::min(last, start + kScoresAtOnce - 1);
    for (int64_t key = start; key <= to; key += 64) {
      const int64_t ahead = key + kKeysAhead;
      if (head == 0 && ahead - first >= history.asked) prefetch_keys(history, ahead, std::min(ahead + 63, last));
      const bool values = key + 64 > to;  // are next
      const int64_t at = values ? from / 16 * 16 : key + 64;
      // keys that were asked for just now would come no sooner
      const int64_t end = std::min(to, at + (values ? 31 : key - first < history.asked ? 63 : -1));
      Expected expected;
      for (int64_t i = at; i <= end; i += 16)
        expected.lines[expected.count++] = values ? history.value(i, head) : history.key(i, head);
      score_heads(history, key, last, head, count, query_tiles, scores + 16 * (key - start), expected);
    }
    float *weights = scores + 16 * (from - start);
    _mm512_store_ps(shrinks, weigh_scores(to - from + 1, scale, weights, most, shares));
    if (start > begin) {
      for (int64_t i = 0; i < count * group * dim; i += kLanes) {
        _mm512_store_ps(sums + i, _mm512_mul_ps(_mm512_load_ps(sums + i), _mm512_set1_ps(shrinks[i / dim])));
      }
    }
    const NextKeys following = to < last ? NextKeys{&history, to + 1, last} : next;
    for (int64_t block = from / 16 * 16; block <= to; block += 16) {
      const int64_t at = std::max(from, block), keys = std::min(to, block + 15) - at + 1;
      const int64_t later = block + 16 * kBlocksExpected;
      const bf16 *line = history.line(at), *ahead = later <= to ? history.line(later) : line;
      const bf16 *further = block - start < kKeysExpected ? following.block((block - start) / 16) : nullptr;
      for (int64_t i = 0; i < count; ++i) {
        const int64_t query = i * group, key = (head + i) * dim, value = key + heads.keys * dim;
        add(group, line + value, history.line_size(), keys, weights + 16 * (at - from) + query, ahead + value,
            further ? further + key : line + value, sums + query * dim);
      }
    }
  }
  const __m512i in_turn = in_turn_of_halves();
  for (int64_t query = 0; query < count * group; ++query) {
    const __m512 share = _mm512_set1_ps(factor / shares[query]);
    for (int64_t d = 0; d < dim; d += 32, sums += 32, out += 32) {
      const __m512 even = _mm512_mul_ps(_mm512_load_ps(sums), share);
      const __m512 odd = _mm512_mul_ps(_mm512_load_ps(sums + 16), share);
      const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(odd, even);
      _mm512_storeu_si512(out, _mm512_permutexvar_epi16(in_turn, both));
    }
  }
}
#else
inline int64_t token_scratch_bytes(const Heads &) { return 0; }
#endif

}  // namespace asyncllm
