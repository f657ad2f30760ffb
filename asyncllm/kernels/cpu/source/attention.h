// Rotation, cache write and attention over the paged cache, in bfloat16 with float32 scores and sums.
//
// A layer's part of the cache is [blocks, block_size, 2 (keys, values), kv_heads, head_dim]. Here is what processors
// without a matrix unit do, and what all need; chunk_attention.h and token_attention.h have the rest.
#pragma once

#include <algorithm>
#include <atomic>
#include <limits>

#include "simd.h"
#include "team.h"

namespace asyncllm {

struct Heads {
  int64_t queries, keys, dim;

  int64_t group() const { return queries / keys; }
  int64_t width() const { return (queries + 2 * keys) * dim; }  // of a token's queries, keys and values
};

// A layer's cache, and one row's place in it.
struct History {
  bf16 *cache;
  const int64_t *table;
  int64_t block_size;
  Heads heads;
  int64_t asked;  // keys that are on their way already: the first that are read

  int64_t line_size() const { return 2 * heads.keys * heads.dim; }
  bf16 *line(int64_t position) const {  // blocks have a power of two of tokens
    const int64_t block = table[position >> __builtin_ctzll(block_size)];
    return cache + (block * block_size + (position & (block_size - 1))) * line_size();
  }
  bf16 *key(int64_t position, int64_t head) const { return line(position) + head * heads.dim; }
  bf16 *value(int64_t position, int64_t head) const { return line(position) + (heads.keys + head) * heads.dim; }
};

// How the heads of one token are rotated: [dim] each, the sines of the first half negated.
struct Rotation {
  const bf16 *cosine, *sine;
  const bf16 *norm;  // weights of a head's RMSNorm before it; null: none
  float eps;
};

inline void rotate(const bf16 *from, bf16 *to, int64_t dim, const Rotation &by) {
  __m512 scale = _mm512_set1_ps(1.0f);
  if (by.norm) {
    __m512 squares = _mm512_setzero_ps();
    for (int64_t i = 0; i < dim; i += kLanes) {
      const __m512 x = load_bf16(from + i);
      squares = _mm512_fmadd_ps(x, x, squares);
    }
    scale = _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / static_cast<float>(dim) + by.eps));
  }
  const int64_t half = dim / 2;
  for (int64_t i = 0; i < half; i += kLanes) {
    __m512 first = load_bf16(from + i), second = load_bf16(from + half + i);
    if (by.norm) {
      first = _mm512_mul_ps(_mm512_mul_ps(first, scale), load_bf16(by.norm + i));
      second = _mm512_mul_ps(_mm512_mul_ps(second, scale), load_bf16(by.norm + half + i));
    }
    const __m512 left = _mm512_mul_ps(second, load_bf16(by.sine + i));
    const __m512 right = _mm512_mul_ps(first, load_bf16(by.sine + half + i));
    store_bf16(to + i, _mm512_fmadd_ps(first, load_bf16(by.cosine + i), left));
    store_bf16(to + half + i, _mm512_fmadd_ps(second, load_bf16(by.cosine + half + i), right));
  }
}

// Write one KV head's key, rotated, and its value.
inline void write_key(const bf16 *qkv, const History &history, int64_t position, int64_t head, const Rotation &keys) {
  const Heads &heads = history.heads;
  rotate(qkv + (heads.queries + head) * heads.dim, history.key(position, head), heads.dim, keys);
  std::memcpy(history.value(position, head), qkv + (heads.queries + heads.keys + head) * heads.dim, 2 * heads.dim);
}

// Rotate one KV head's queries in place, and write its key and value. `qkv` is the token's.
inline void rotate_and_write(bf16 *qkv, const History &history, int64_t position, int64_t head,
                             const Rotation &queries, const Rotation &keys) {
  const Heads &heads = history.heads;
  for (int64_t i = 0; i < heads.group(); ++i) {
    bf16 *query = qkv + (head * heads.group() + i) * heads.dim;
    rotate(query, query, heads.dim, queries);
  }
  write_key(qkv, history, position, head, keys);
}

// What the largest score of some keys is at least: finite, so that keys whose scores are all -infinity weigh nothing
// beside the others, as they do where the largest of all is known.
constexpr float kLeastScore = std::numeric_limits<float>::lowest();

constexpr int64_t kKeysAhead = 64;  // that a history is asked for before it is read

// Asks for keys and values of all KV heads, line after line.
inline void prefetch_keys(const History &history, int64_t first, int64_t last) {
  const int64_t bytes = 2 * history.line_size();
  for (int64_t key = first; key <= last; ++key) {
    const auto *at = reinterpret_cast<const char *>(history.line(key));
    for (int64_t i = 0; i < bytes; i += 64) prefetch_next(at + i);
  }
}

// Keys `first` to `last` of one KV head for H of its queries [H, dim]; `scores` has room for H · (keys + 16) floats.
// `put(query, largest, weight, sums)` takes what came of each query: its largest score, the sum of its weights beside
// that one's 1, and [dim / 16] sums of values times weights.
template <int Vectors, int H, class Put>
inline void attend_by_vectors(const bf16 *query, const History &history, int64_t first, int64_t last, int64_t head,
                              float scale, float *scores, Put &&put) {
  constexpr int64_t kDim = Vectors * kLanes;
  const int64_t count = last - first + 1, stride = (count + 15) / 16 * 16;
  __m512 most[H];
  for (int h = 0; h < H; ++h) most[h] = _mm512_set1_ps(kLeastScore);
  for (int64_t start = 0; start < count; start += 16) {
    const bf16 *keys[16];
    for (int64_t i = 0; i < 16; ++i) keys[i] = history.key(first + std::min(start + i, count - 1), head);
    const int64_t ahead = start + kKeysAhead;
    if (head == 0 && ahead >= history.asked) prefetch_keys(history, first + ahead, std::min(first + ahead + 15, last));
    const auto inside = static_cast<__mmask16>(count - start >= 16 ? 0xffff : (1u << (count - start)) - 1);
    for (int h = 0; h < H; ++h) {
      __m512 dots[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) {
        dots[i] = _mm512_setzero_ps();
#pragma GCC unroll 8
        for (int part = 0; part < Vectors / 2; ++part) {
          const __m512i q = _mm512_loadu_si512(query + h * kDim + 32 * part);
          const __m512i k = _mm512_loadu_si512(keys[i] + 32 * part);
          dots[i] = _mm512_dpbf16_ps(dots[i], (__m512bh)q, (__m512bh)k);
        }
      }
      const __m512 found = _mm512_mul_ps(sums_of(dots), _mm512_set1_ps(scale * kLog2E));
      most[h] = _mm512_mask_max_ps(most[h], inside, most[h], found);
      _mm512_storeu_ps(scores + h * stride + start, found);
    }
  }
  float peaks[H], totals[H];
  for (int h = 0; h < H; ++h) {
    peaks[h] = _mm512_reduce_max_ps(most[h]);
    const __m512 largest = _mm512_set1_ps(peaks[h]);
    __m512 sum = _mm512_setzero_ps();
    for (int64_t start = 0; start < count; start += 16) {
      const auto inside = static_cast<__mmask16>(count - start >= 16 ? 0xffff : (1u << (count - start)) - 1);
      float *at = scores + h * stride + start;
      const __m512 weight = _mm512_maskz_mov_ps(inside, exp2(_mm512_sub_ps(_mm512_loadu_ps(at), largest)));
      _mm512_storeu_ps(at, weight);
      sum = _mm512_add_ps(sum, weight);
    }
    totals[h] = _mm512_reduce_add_ps(sum);
  }
  __m512 sums[H][Vectors];
  for (int h = 0; h < H; ++h)
    for (int i = 0; i < Vectors; ++i) sums[h][i] = _mm512_setzero_ps();
  for (int64_t key = 0; key < count; ++key) {
    const bf16 *value = history.value(first + key, head);
#pragma GCC unroll 16
    for (int i = 0; i < Vectors; ++i) {
      const __m512 part = load_bf16(value + 16 * i);
#pragma GCC unroll 4
      for (int h = 0; h < H; ++h)
        sums[h][i] = _mm512_fmadd_ps(_mm512_set1_ps(scores[h * stride + key]), part, sums[h][i]);
    }
  }
  for (int h = 0; h < H; ++h) put(h, peaks[h], totals[h], sums[h]);
}

// All queries of one KV head, `Most` at once.
template <int Vectors, int Most, class Put>
inline void attend_queries(const bf16 *query, const History &history, int64_t first, int64_t last, int64_t head,
                           float scale, float *scores, Put &&put) {
  const int64_t group = history.heads.group(), dim = history.heads.dim;
  int64_t done = 0;
  const auto put_next = [&](int64_t h, float peak, float total, const __m512 *sums) {
    put(done + h, peak, total, sums);
  };
  for (; done + Most <= group; done += Most)
    attend_by_vectors<Vectors, Most>(query + done * dim, history, first, last, head, scale, scores, put_next);
  for (; done < group; ++done)
    attend_by_vectors<Vectors, 1>(query + done * dim, history, first, last, head, scale, scores, put_next);
}

inline bool takes_head(int64_t dim) { return dim == 32 || dim == 64 || dim == 96 || dim == 128 || dim == 256; }

constexpr int64_t kQueriesAtOnce = 3;  // of a KV head, whose scores are held: the most below

// The same for a head of any size.
template <class Put>
inline void attend_head(const bf16 *query, const History &history, int64_t first, int64_t last, int64_t head,
                        float scale, float *scores, Put &&put) {
  switch (history.heads.dim) {
    case 32:
      return attend_queries<2, 3>(query, history, first, last, head, scale, scores, put);
    case 64:
      return attend_queries<4, 3>(query, history, first, last, head, scale, scores, put);
    case 96:
      return attend_queries<6, 2>(query, history, first, last, head, scale, scores, put);
    case 128:
      return attend_queries<8, 2>(query, history, first, last, head, scale, scores, put);
    default:
      return attend_queries<16, 1>(query, history, first, last, head, scale, scores, put);
  }
}

// All queries of one KV head of one token, over keys `first` to `last`.
inline void attend_token(const bf16 *query, const History &history, int64_t first, int64_t last, int64_t head,
                         float scale, float factor, bf16 *out, float *scores) {
  const int64_t dim = history.heads.dim;
  attend_head(query, history, first, last, head, scale, scores,
              [&](int64_t h, float, float total, const __m512 *sums) {
                const __m512 share = _mm512_set1_ps(factor / total);
                for (int64_t i = 0; i < dim / kLanes; ++i)
                  store_bf16(out + h * dim + i * kLanes, _mm512_mul_ps(sums[i], share));
              });
}

// How the keys that a token sees are cut into parts, whose sums are joined: by their number alone.
struct Parts {
  static constexpr int64_t kMost = 8;

  int64_t first, keys, count;

  Parts(int64_t first, int64_t last) : first(first), keys(last - first + 1) {
    count = keys < 32 ? 1 : keys < 1024 ? 2 : keys < 4096 ? 4 : kMost;
  }

  Range range(int64_t part) const { return {first + begin(part), first + begin(part + 1)}; }

 private:
  int64_t begin(int64_t part) const { return std::min(keys, (keys + 15) / 16 * part / count * 16); }
};

// What a part comes to for a query: [dim] sums, and its largest score and the sum of its weights, 16 floats.
inline int64_t part_floats(int64_t dim) { return dim + 16; }

// One part for all queries of one KV head; `out` [group, part_floats].
inline void attend_part(const bf16 *query, const History &history, int64_t first, int64_t last, int64_t head,
                        float scale, float *out, float *scores) {
  const int64_t dim = history.heads.dim;
  attend_head(query, history, first, last, head, scale, scores,
              [&](int64_t h, float peak, float total, const __m512 *sums) {
                float *to = out + h * part_floats(dim);
                for (int64_t i = 0; i < dim / kLanes; ++i) _mm512_store_ps(to + i * kLanes, sums[i]);
                to[dim] = peak;
                to[dim + 1] = total;
              });
}

// `parts` [count, queries, part_floats] to [queries, dim], times `factor`.
inline void join_parts(const float *parts, int64_t count, int64_t queries, int64_t dim, float factor, bf16 *out) {
  const int64_t width = part_floats(dim);
  for (int64_t query = 0; query < queries; ++query, parts += width, out += dim) {
    const auto part = [&](int64_t i) { return parts + i * queries * width; };
    float peak = part(0)[dim], total = 0.0f;
    for (int64_t i = 1; i < count; ++i) peak = std::max(peak, part(i)[dim]);
    __m512 shares[Parts::kMost];
    for (int64_t i = 0; i < count; ++i) {
      shares[i] = exp2(_mm512_set1_ps(part(i)[dim] - peak));
      total += _mm512_cvtss_f32(shares[i]) * part(i)[dim + 1];
    }
    for (int64_t i = 0; i < count; ++i) shares[i] = _mm512_mul_ps(shares[i], _mm512_set1_ps(factor / total));
    for (int64_t d = 0; d < dim; d += kLanes) {
      __m512 sum = _mm512_mul_ps(shares[0], _mm512_load_ps(part(0) + d));
      for (int64_t i = 1; i < count; ++i) sum = _mm512_fmadd_ps(shares[i], _mm512_load_ps(part(i) + d), sum);
      store_bf16(out + d, sum);
    }
  }
}

}  // namespace asyncllm
