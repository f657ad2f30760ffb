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
  // Of 16 positions from `first` on; behind the `count`th, again that one.
  void take_lines(int64_t first, int64_t count, const bf16 *lines[16]) const {
    const bf16 *at = line(first);
    for (int64_t i = 0; i < 16; ++i, ++first) {
      if (i && i < count) at = first & (block_size - 1) ? at + line_size() : line(first);
      lines[i] = at;
    }
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
  Floats scale = every(1.0f);
  if (by.norm) {
    Floats squares = zeros();
    for (int64_t i = 0; i < dim; i += kLanes) {
      const Floats x = load_bf16(from + i);
      squares = multiply_add(x, x, squares);
    }
    scale = every(1.0f / std::sqrt(sum_of(squares) / static_cast<float>(dim) + by.eps));
  }
  const int64_t half = dim / 2;
  for (int64_t i = 0; i < half; i += kLanes) {
    Floats first = load_bf16(from + i), second = load_bf16(from + half + i);
    if (by.norm) {
      first = first * scale * load_bf16(by.norm + i);
      second = second * scale * load_bf16(by.norm + half + i);
    }
    const Floats left = second * load_bf16(by.sine + i), right = first * load_bf16(by.sine + half + i);
    store_bf16(to + i, multiply_add(first, load_bf16(by.cosine + i), left));
    store_bf16(to + half + i, multiply_add(second, load_bf16(by.cosine + half + i), right));
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

// Products of H queries [H, dim] with 16 keys, each at `offset` of its line.
template <int Vectors, int H>
inline void multiply_keys(const bf16 *query, const bf16 *const lines[16], int64_t offset, Floats found[H]) {
  constexpr int kDim = Vectors * kLanes;
#ifdef ASYNCLLM_AVX512
  for (int h = 0; h < H; ++h) {
    Partial dots[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      dots[i] = zeros();
#pragma GCC unroll 8
      for (int part = 0; part < Vectors / 2; ++part) {
        const __m512i q = _mm512_loadu_si512(query + h * kDim + 32 * part);
        const __m512i k = _mm512_loadu_si512(lines[i] + offset + 32 * part);
        dots[i] = _mm512_dpbf16_ps(dots[i], (__m512bh)q, (__m512bh)k);
      }
    }
    found[h] = sums_of(dots);
  }
#else
  Floats queries[H][Vectors];
  Partial dots[H][16];
  for (int h = 0; h < H; ++h)
    for (int part = 0; part < Vectors; ++part) queries[h][part] = load_unordered(query + h * kDim + kLanes * part);
  for (int i = 0; i < 16; ++i) {
    Floats sums[H];
    for (int h = 0; h < H; ++h) sums[h] = zeros();
#pragma GCC unroll 16
    for (int part = 0; part < Vectors; ++part) {
      const Floats key = load_unordered(lines[i] + offset + kLanes * part);
#pragma GCC unroll 4
      for (int h = 0; h < H; ++h) sums[h] = multiply_add(key, queries[h][part], sums[h]);
    }
    for (int h = 0; h < H; ++h) dots[h][i] = _mm256_add_ps(sums[h].low, sums[h].high);
  }
  for (int h = 0; h < H; ++h) found[h] = sums_of(dots[h]);
#endif
}

// Vectors of values for which the sums of H queries stay in registers.
constexpr int values_at_once(int vectors, int h) {
#ifdef ASYNCLLM_AVX512
  return vectors;
#else
  return h > 2 ? 1 : h > 1 || vectors % 4 ? 2 : 4;
#endif
}

// Keys `first` to `last` of one KV head for H of its queries [H, dim]; `scores` has room for H · (keys + 16) floats.
// `put(query, largest, weight, sums)` takes what came of each query: its largest score, the sum of its weights beside
// that one's 1, and [dim / 16] sums of values times weights.
template <int Vectors, int H, class Put>
inline void attend_by_vectors(const bf16 *query, const History &history, int64_t first, int64_t last, int64_t head,
                              float scale, float *scores, Put &&put) {
  constexpr int kDim = Vectors * kLanes;
  const int64_t count = last - first + 1, stride = (count + 15) / 16 * 16;
  const int64_t offset = (history.heads.keys + head) * kDim;  // of a value in its line
  const Floats least = every(kLeastScore), factor = every(scale * kLog2E);
  Floats most[H];
  for (int h = 0; h < H; ++h) most[h] = least;
  for (int64_t start = 0; start < count; start += 16) {
    const bf16 *lines[16];
    history.take_lines(first + start, count - start, lines);
    const int64_t ahead = start + kKeysAhead;
    if (head == 0 && ahead >= history.asked) prefetch_keys(history, first + ahead, std::min(first + ahead + 15, last));
    Floats found[H];
    multiply_keys<Vectors, H>(query, lines, head * kDim, found);
    for (int h = 0; h < H; ++h) {
      found[h] = found[h] * factor;
      most[h] = choose(lanes_below(count - start), larger(most[h], found[h]), most[h]);
      store(scores + h * stride + start, found[h]);
    }
  }
  float peaks[H], totals[H];
  for (int h = 0; h < H; ++h) {
    peaks[h] = largest_of(most[h]);
    const Floats largest = every(peaks[h]);
    Floats sum = zeros();
    for (int64_t start = 0; start < count; start += 16) {
      float *at = scores + h * stride + start;
      const Floats weight = choose(lanes_below(count - start), exp2(load(at) - largest), zeros());
      store(at, weight);
      sum = sum + weight;
    }
    totals[h] = sum_of(sum);
  }
  constexpr int kAtOnce = values_at_once(Vectors, H);
  Floats sums[H][Vectors];
  for (int h = 0; h < H; ++h)
    for (int i = 0; i < Vectors; ++i) sums[h][i] = zeros();
  for (int64_t start = 0; start < count; start += 16) {
    const int64_t some = std::min<int64_t>(16, count - start);
    const bf16 *lines[16];
    history.take_lines(first + start, some, lines);
    for (int part = 0; part < Vectors; part += kAtOnce) {
      Floats so_far[H][kAtOnce];
      for (int h = 0; h < H; ++h)
        for (int i = 0; i < kAtOnce; ++i) so_far[h][i] = sums[h][part + i];
      for (int64_t key = 0; key < some; ++key) {
#pragma GCC unroll 16
        for (int i = 0; i < kAtOnce; ++i) {
          const Floats value = load_unordered(lines[key] + offset + kLanes * (part + i));
#pragma GCC unroll 4
          for (int h = 0; h < H; ++h)
            so_far[h][i] = multiply_add(every(scores[h * stride + start + key]), value, so_far[h][i]);
        }
      }
      for (int h = 0; h < H; ++h)
        for (int i = 0; i < kAtOnce; ++i) sums[h][part + i] = so_far[h][i];
    }
  }
  for (int h = 0; h < H; ++h)
    for (int i = 0; i < Vectors; ++i) sums[h][i] = in_order(sums[h][i]);
  for (int h = 0; h < H; ++h) put(h, peaks[h], totals[h], sums[h]);
}

// All queries of one KV head, `Most` at once.
template <int Vectors, int Most, class Put>
inline void attend_queries(const bf16 *query, const History &history, int64_t first, int64_t last, int64_t head,
                           float scale, float *scores, Put &&put) {
  const int64_t group = history.heads.group(), dim = history.heads.dim;
  int64_t done = 0;
  const auto put_next = [&](int64_t h, float peak, float total, const Floats *sums) {
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
              [&](int64_t h, float, float total, const Floats *sums) {
                const Floats share = every(factor / total);
                for (int64_t i = 0; i < dim / kLanes; ++i) store_bf16(out + h * dim + i * kLanes, sums[i] * share);
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
              [&](int64_t h, float peak, float total, const Floats *sums) {
                float *to = out + h * part_floats(dim);
                for (int64_t i = 0; i < dim / kLanes; ++i) store(to + i * kLanes, sums[i]);
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
    Floats shares[Parts::kMost];
    for (int64_t i = 0; i < count; ++i) {
      shares[i] = exp2(every(part(i)[dim] - peak));
      total += first_of(shares[i]) * part(i)[dim + 1];
    }
    for (int64_t i = 0; i < count; ++i) shares[i] = shares[i] * every(factor / total);
    for (int64_t d = 0; d < dim; d += kLanes) {
      Floats sum = shares[0] * load(part(0) + d);
      for (int64_t i = 1; i < count; ++i) sum = multiply_add(shares[i], load(part(i) + d), sum);
      store_bf16(out + d, sum);
    }
  }
}

}  // namespace asyncllm
