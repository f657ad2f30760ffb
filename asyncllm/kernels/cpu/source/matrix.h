// Products of rows with packed weights.
//
// A matrix is cut into blocks of 16 output features by 32 input features, a group of columns with a scale and a zero
// for each feature. The blocks of 16 features follow each other along the input, so that a thread reads its part of a
// matrix as one piece. A block is, by the bits of a weight:
//
//   4, 8   codes from 0 on, then 16 scales and 16 zeros in float16: weight = code · scale + zero. Of a feature's codes
//          four neighbours are a lane's four bytes. With 4 bits, the upper halves of bytes are those 16 further on.
//   16     bfloat16, each pair of inputs of a feature as a lane.
//
// Few rows are multiplied as integers: a row's group of 32 is rounded to 16 bits, of which the upper and the lower byte
// are two products of 8 bits, whose sums are exact. So the error is that of float32 sums. Many rows are multiplied in
// the processor's matrix unit, in bfloat16, where it has one; weights become bfloat16 on their way there.
#pragma once

#include <algorithm>

#include "simd.h"
#include "team.h"

namespace asyncllm {

constexpr int64_t kGroup = 32;     // inputs that share a scale and a zero
constexpr int64_t kFeatures = 16;  // outputs of a block
constexpr int64_t kFewRows = 4;    // multiplied as integers even where there is a matrix unit

// As kernels/cpu/matrix.py writes it.
struct Matrix {
  const std::uint8_t *blocks;
  const float *bias;  // of each output; null: none
  int64_t outputs;    // with an activation, blocks of 16 of the gate and of what is gated take turns
  int64_t inputs;
  int64_t bits;
  int64_t activation;

  int64_t groups() const { return inputs / kGroup; }
  int64_t block_bytes() const { return kFeatures * kGroup * bits / 8 + (bits < 16 ? 4 * kFeatures : 0); }
  const std::uint8_t *block(int64_t feature_block, int64_t group) const {
    return blocks + (feature_block * groups() + group) * block_bytes();
  }
};

// What becomes of a product.
struct Sink {
  enum Kind { kStore, kStoreFloat, kAddFloat } kind;
  void *rows;
  int64_t stride;  // elements of a row

  void take(int64_t row, int64_t column, __m512 value) const {
    if (kind == kStore) return store_bf16(static_cast<bf16 *>(rows) + row * stride + column, value);
    float *to = static_cast<float *>(rows) + row * stride + column;
    if (kind == kAddFloat) value = _mm512_add_ps(value, _mm512_loadu_ps(to));
    _mm512_storeu_ps(to, value);
  }
};

// How the rows of a product's input are held.
enum class Form { kIntegers, kBfloat16 };

inline Form form_of(const Matrix &matrix, int64_t rows, bool tiles) {
  return matrix.bits == 16 || (tiles && rows > kFewRows) ? Form::kBfloat16 : Form::kIntegers;
}

// A row of integers: upper bytes, lower bytes, then of each group the scale, and the sum of what the integers stand
// for.
inline int64_t integer_row_bytes(int64_t inputs) { return 2 * inputs + 8 * (inputs / kGroup); }

inline int64_t row_bytes(Form form, int64_t inputs) {
  return form == Form::kIntegers ? integer_row_bytes(inputs) : 2 * inputs;
}

inline void put_integers(std::uint8_t *row, int64_t inputs, int64_t group, __m512 low, __m512 high) {
  constexpr float kMost = 32512.0f;  // its upper byte, once the lower one is taken off as a signed one, is at most 127
  const __m512 largest = _mm512_max_ps(_mm512_abs_ps(low), _mm512_abs_ps(high));
  const float most = _mm512_reduce_max_ps(largest);
  const __m512 factor = _mm512_set1_ps(most > 0.0f ? kMost / most : 0.0f);
  float scale = most / kMost;
  const __mmask16 unordered = _mm512_cmp_ps_mask(low, low, _CMP_UNORD_Q) | _mm512_cmp_ps_mask(high, high, _CMP_UNORD_Q);
  if (unordered) scale = NAN;  // what is not a number stays so
  int64_t at = group * kGroup;
  __m512i sum = _mm512_setzero_si512();
  for (const __m512 values : {low, high}) {
    const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(values, factor));
    const __m512i lower = _mm512_srai_epi32(_mm512_slli_epi32(whole, 24), 24);
    const __m512i upper = _mm512_srai_epi32(_mm512_sub_epi32(whole, lower), 8);
    _mm_storeu_si128((__m128i *)(row + at), _mm512_cvtepi32_epi8(upper));
    _mm_storeu_si128((__m128i *)(row + inputs + at), _mm512_cvtepi32_epi8(lower));
    sum = _mm512_add_epi32(sum, whole);
    at += kLanes;
  }
  float *scales = reinterpret_cast<float *>(row + 2 * inputs);
  scales[group] = scale;
  scales[inputs / kGroup + group] = scale * static_cast<float>(_mm512_reduce_add_epi32(sum));
}

// Rows in the form that a product takes. `source(row, column)` gives 16 values.
template <class Source>
inline void put_row(Form form, std::uint8_t *to, int64_t inputs, Source &&source) {
  for (int64_t column = 0; column < inputs; column += kGroup) {
    const __m512 low = source(column), high = source(column + kLanes);
    if (form == Form::kIntegers) {
      put_integers(to, inputs, column / kGroup, low, high);
    } else {
      store_bf16(reinterpret_cast<bf16 *>(to) + column, low);
      store_bf16(reinterpret_cast<bf16 *>(to) + column + kLanes, high);
    }
  }
}

// RMSNorm of a row, of which `source(column)` gives 16 values, with weights in bfloat16.
template <class Source>
inline void put_normed(Form form, std::uint8_t *to, Source &&source, const bf16 *weight, int64_t size, float eps) {
  __m512 squares = _mm512_setzero_ps();
  for (int64_t i = 0; i < size; i += kLanes) {
    const __m512 x = source(i);
    squares = _mm512_fmadd_ps(x, x, squares);
  }
  const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / static_cast<float>(size) + eps));
  put_row(form, to, size,
          [&](int64_t i) { return _mm512_mul_ps(_mm512_mul_ps(source(i), scale), load_bf16(weight + i)); });
}

// The rows of a product's input, as all threads of a team see them.
struct Rows {
  Form form;
  const std::uint8_t *data;
  int64_t stride;  // bytes of a row

  const std::uint8_t *tile(int64_t row, int64_t group) const { return data + row * stride + group * 2 * kGroup; }
};

// What a product gives for one block of a row: `gate` is that of the block before.
inline void finish(const Matrix &w, const Sink &sink, int64_t row, int64_t block, __m512 gate, __m512 value) {
  if (w.bias) value = _mm512_add_ps(value, _mm512_loadu_ps(w.bias + block * kFeatures));
  if (w.activation == kNone) return sink.take(row, block * kFeatures, value);
  if (w.bias) gate = _mm512_add_ps(gate, _mm512_loadu_ps(w.bias + (block - 1) * kFeatures));
  sink.take(row, block / 2 * kFeatures, _mm512_mul_ps(activate(gate, w.activation), value));
}

// The processor's own prefetcher stops at the end of each 4096 bytes; what lies behind a matrix is the next one.
inline void prefetch_ahead(const std::uint8_t *at, int64_t bytes) {
  constexpr int64_t kAhead = 5120;
  for (int64_t i = 0; i < bytes; i += 64) prefetch(at + kAhead + i);
}

// Adds a group's sums of products with the upper and the lower bytes of x. `at`: scales and zeros of the lines;
// `scales`: those of the first row of x, and the sums of its groups.
template <int M>
__attribute__((always_inline)) inline void add_group(const std::uint8_t *at, const __m512i *upper, const __m512i *lower,
                                                     const std::uint8_t *scales, int64_t stride, int64_t group,
                                                     int64_t groups, __m512 *sums) {
  const __m512 scale = _mm512_cvtph_ps(_mm256_load_si256((const __m256i *)at));
  const __m512 zero = _mm512_cvtph_ps(_mm256_load_si256((const __m256i *)(at + 32)));
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) {
    const auto *row = reinterpret_cast<const float *>(scales + m * stride);
    const __m512 dot = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(upper[m], 8), lower[m]));
    sums[m] = _mm512_fmadd_ps(_mm512_mul_ps(dot, _mm512_set1_ps(row[group])), scale, sums[m]);
    sums[m] = _mm512_fmadd_ps(zero, _mm512_set1_ps(row[groups + group]), sums[m]);
  }
}

template <int M>
inline void multiply_block_4(const Matrix &w, int64_t block, const std::uint8_t *x, int64_t stride, __m512 sums[M]) {
  const int64_t inputs = w.inputs, groups = w.groups();
  const __m512i nibble = _mm512_set1_epi8(15);
  const std::uint8_t *at = w.block(block, 0);
  for (int m = 0; m < M; ++m) sums[m] = _mm512_setzero_ps();
  for (int64_t group = 0; group < groups; ++group, at += 320) {
    __m512i upper[M], lower[M];
    for (int m = 0; m < M; ++m) upper[m] = lower[m] = _mm512_setzero_si512();
    prefetch_ahead(at, 320);
#pragma GCC unroll 4
    for (int quad = 0; quad < 4; ++quad) {
      const __m512i both = _mm512_load_si512(at + 64 * quad);
      const __m512i first = _mm512_and_si512(both, nibble);
      const __m512i second = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble);
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) {
        const auto *high = reinterpret_cast<const int *>(x + m * stride + group * kGroup);
        const auto *low = reinterpret_cast<const int *>(x + m * stride + inputs + group * kGroup);
        upper[m] = _mm512_dpbusd_epi32(upper[m], first, _mm512_set1_epi32(high[quad]));
        lower[m] = _mm512_dpbusd_epi32(lower[m], first, _mm512_set1_epi32(low[quad]));
        upper[m] = _mm512_dpbusd_epi32(upper[m], second, _mm512_set1_epi32(high[4 + quad]));
        lower[m] = _mm512_dpbusd_epi32(lower[m], second, _mm512_set1_epi32(low[4 + quad]));
      }
    }
    add_group<M>(at + 256, upper, lower, x + 2 * inputs, stride, group, groups, sums);
  }
}

template <int M>
inline void multiply_block_8(const Matrix &w, int64_t block, const std::uint8_t *x, int64_t stride, __m512 sums[M]) {
  const int64_t inputs = w.inputs, groups = w.groups();
  const std::uint8_t *at = w.block(block, 0);
  for (int m = 0; m < M; ++m) sums[m] = _mm512_setzero_ps();
  for (int64_t group = 0; group < groups; ++group, at += 576) {
    __m512i upper[M], lower[M];
    for (int m = 0; m < M; ++m) upper[m] = lower[m] = _mm512_setzero_si512();
    prefetch_ahead(at, 576);
#pragma GCC unroll 8
    for (int quad = 0; quad < 8; ++quad) {
      const __m512i codes = _mm512_load_si512(at + 64 * quad);
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) {
        const auto *high = reinterpret_cast<const int *>(x + m * stride + group * kGroup);
        const auto *low = reinterpret_cast<const int *>(x + m * stride + inputs + group * kGroup);
        upper[m] = _mm512_dpbusd_epi32(upper[m], codes, _mm512_set1_epi32(high[quad]));
        lower[m] = _mm512_dpbusd_epi32(lower[m], codes, _mm512_set1_epi32(low[quad]));
      }
    }
    add_group<M>(at + 512, upper, lower, x + 2 * inputs, stride, group, groups, sums);
  }
}

template <int M>
inline void multiply_block_16(const Matrix &w, int64_t block, const std::uint8_t *x, int64_t stride, __m512 sums[M]) {
  const std::uint8_t *at = w.block(block, 0);
  __m512 even[M], odd[M];
  for (int m = 0; m < M; ++m) even[m] = odd[m] = _mm512_setzero_ps();
  for (int64_t pair = 0; pair < w.inputs / 2; pair += 2, at += 128) {
    const __m512i first = _mm512_load_si512(at), second = _mm512_load_si512(at + 64);
    prefetch_ahead(at, 128);
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      const auto *row = reinterpret_cast<const int *>(x + m * stride);
      even[m] = _mm512_dpbf16_ps(even[m], (__m512bh)first, (__m512bh)_mm512_set1_epi32(row[pair]));
      odd[m] = _mm512_dpbf16_ps(odd[m], (__m512bh)second, (__m512bh)_mm512_set1_epi32(row[pair + 1]));
    }
  }
  for (int m = 0; m < M; ++m) sums[m] = _mm512_add_ps(even[m], odd[m]);
}

template <int M>
inline void multiply_some(const Matrix &w, const Rows &x, int64_t row, int64_t block, const Sink &sink) {
  const std::uint8_t *from = x.data + row * x.stride;
  const auto multiply = w.bits == 4 ? multiply_block_4<M> : w.bits == 8 ? multiply_block_8<M> : multiply_block_16<M>;
  __m512 gates[M] = {}, sums[M];
  if (w.activation != kNone) {
    multiply(w, block, from, x.stride, gates);
    ++block;
  }
  multiply(w, block, from, x.stride, sums);
  for (int m = 0; m < M; ++m) finish(w, sink, row + m, block, gates[m], sums[m]);
}

// By vectors: weights are read once for all rows, where a block of features stays in the nearest cache.
template <class Between>
inline void multiply_by_vectors(const Team &team, const Matrix &w, const Rows &x, int64_t rows, const Sink &sink,
                                Between &&between) {
  const int64_t step = w.activation == kNone ? 1 : 2;
  const Range range = team.share(w.outputs / kFeatures / step);
  for (int64_t unit = range.begin; unit < range.end; ++unit) {
    between();
    int64_t row = 0;
    for (; row + kFewRows <= rows; row += kFewRows) multiply_some<4>(w, x, row, unit * step, sink);
    if (rows - row == 3) multiply_some<3>(w, x, row, unit * step, sink);
    if (rows - row == 2) multiply_some<2>(w, x, row, unit * step, sink);
    if (rows - row == 1) multiply_some<1>(w, x, row, unit * step, sink);
  }
}

#ifdef __AMX_BF16__

// A block's weights as a tile: 16 rows of a pair of inputs of each feature, in bfloat16. Of a float32 the upper half is
// taken, which is up to a whole unit too small; so weights are made larger by what that takes away on average.
template <int Bits>
inline void put_tile(std::uint8_t *tile, const std::uint8_t *block) {
  constexpr int kCodes = kFeatures * kGroup * Bits / 8;
  const __m512 larger = _mm512_set1_ps(1.0f + 0.6931472f / 256.0f);
  const __m512 scale = _mm512_mul_ps(_mm512_cvtph_ps(_mm256_load_si256((const __m256i *)(block + kCodes))), larger);
  const __m512 zero = _mm512_mul_ps(_mm512_cvtph_ps(_mm256_load_si256((const __m256i *)(block + kCodes + 32))), larger);
  const __m512 numbers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i first_bytes = _mm512_set4_epi32(0x8080800c, 0x80808008, 0x80808004, 0x80808000);  // of dwords
  const __m512i upper_halves = _mm512_add_epi32(  // of two vectors, in turn
      _mm512_set1_epi32(0x00210001),
      _mm512_mullo_epi32(_mm512_set1_epi32(0x00020002),
                         _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)));
  const auto weights = [&](__m512i codes, int shift) {
    const __m512i bytes = _mm512_add_epi32(first_bytes, _mm512_set1_epi32(shift / 8));
    const __m512 code = Bits == 4 ? _mm512_permutexvar_ps(_mm512_srli_epi32(codes, shift), numbers)
                                  : _mm512_cvtepi32_ps(_mm512_shuffle_epi8(codes, bytes));
    return _mm512_castps_si512(_mm512_fmadd_ps(code, scale, zero));
  };
#pragma GCC unroll 8
  for (int quad = 0; quad < Bits; ++quad) {
    const __m512i codes = _mm512_load_si512(block + 64 * quad);
#pragma GCC unroll 2
    for (int upper = 0; upper < 8 / Bits; ++upper) {
#pragma GCC unroll 2
      for (int pair = 0; pair < 2; ++pair) {
        const __m512i even = weights(codes, 16 * pair + 4 * upper), odd = weights(codes, 16 * pair + 8 + 4 * upper);
        const __m512i row = _mm512_permutex2var_epi16(even, upper_halves, odd);
        _mm512_store_si512(tile + 64 * (2 * quad + 8 * upper + pair), row);
      }
    }
  }
}

// The tile of a block: made in `room`, or where it is.
inline const std::uint8_t *tile_of(const Matrix &w, int64_t block, int64_t group, std::uint8_t *room) {
  const std::uint8_t *from = w.block(block, group);
  if (w.bits == 16) return from;
  prefetch_ahead(from, w.block_bytes());
  w.bits == 4 ? put_tile<4>(room, from) : put_tile<8>(room, from);
  return room;
}

// Sums of the tiles 0 to 3 become the product of up to 32 rows with two blocks of features.
inline void finish_tiles(const Matrix &w, const Sink &sink, int64_t row, int64_t count, int64_t block, int64_t second,
                         float *sums) {
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + 256, 64);
  if (count > 16) {
    _tile_stored(2, sums + 512, 64);
    _tile_stored(3, sums + 768, 64);
  }
  for (int64_t m = 0; m < count; ++m) {
    const float *at = sums + (m / 16) * 512 + (m % 16) * 16;
    const __m512 left = _mm512_load_ps(at), right = _mm512_load_ps(at + 256);
    if (w.activation == kNone) finish(w, sink, row + m, block, left, left);
    if (second > block) finish(w, sink, row + m, second, left, right);
  }
}

// Tiles 0 to 3 += one group of inputs of 16 rows, or 32 where it is wide, by two tiles of weights.
template <bool Wide>
inline void multiply_tiles(const std::uint8_t *x, int64_t stride, const std::uint8_t *left, const std::uint8_t *right) {
  _tile_loadd(4, x, stride);
  _tile_loadd(6, left, 64);
  _tile_dpbf16ps(0, 4, 6);
  _tile_loadd(7, right, 64);
  _tile_dpbf16ps(1, 4, 7);
  if (Wide) {
    _tile_loadd(5, x + 16 * stride, stride);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

inline void zero_tiles() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

inline int64_t strip_bytes(int64_t inputs) { return 2 * kTileBytes * (inputs / kGroup); }

// Up to 32 rows: each tile of weights is used once, soon after it was made, but not at once: a tile's load would wait
// for the stores.
template <bool Wide>
inline void multiply_once(const Matrix &w, const Rows &x, int64_t rows, int64_t block, int64_t second, const Sink &sink,
                          std::uint8_t *scratch) {
  constexpr int64_t kBehind = 2, kRoom = 4;  // groups
  const int64_t groups = w.groups();
  const std::uint8_t *left[kRoom], *right[kRoom];
  zero_tiles();
  for (int64_t group = 0; group < groups + kBehind; ++group) {
    if (group < groups) {
      std::uint8_t *room = scratch + group % kRoom * 2 * kTileBytes;
      left[group % kRoom] = tile_of(w, block, group, room);
      right[group % kRoom] = tile_of(w, second, group, room + kTileBytes);
    }
    const int64_t ready = group - kBehind;
    if (ready >= 0) multiply_tiles<Wide>(x.tile(0, ready), x.stride, left[ready % kRoom], right[ready % kRoom]);
  }
  finish_tiles(w, sink, 0, rows, block, second, reinterpret_cast<float *>(scratch + kRoom * 2 * kTileBytes));
}

// More rows, from `first` to `last`: a strip of weights is made once for all of them.
inline void multiply_strip(const Matrix &w, const Rows &x, int64_t first, int64_t last, int64_t block, int64_t second,
                           const Sink &sink, std::uint8_t *scratch) {
  const int64_t groups = w.groups();
  auto *sums = reinterpret_cast<float *>(scratch + strip_bytes(w.inputs));
  const bool made = w.bits < 16;
  for (int64_t group = 0; group < groups && made; ++group) {
    std::uint8_t *room = scratch + 2 * kTileBytes * group;
    tile_of(w, block, group, room);
    tile_of(w, second, group, room + kTileBytes);
  }
  const std::uint8_t *left = made ? scratch : w.block(block, 0),
                     *right = made ? scratch + kTileBytes : w.block(second, 0);
  const int64_t step = made ? 2 * kTileBytes : kTileBytes;
  for (int64_t row = first; row < last; row += 32) {
    zero_tiles();
    for (int64_t group = 0; group < groups; ++group) {
      multiply_tiles<true>(x.tile(row, group), x.stride, left + step * group, right + step * group);
    }
    finish_tiles(w, sink, row, std::min<int64_t>(32, last - row), block, second, sums);
  }
}

constexpr int64_t kRowBytes = 1 << 20;  // of rows that many features are multiplied with: they stay in a cache so long

// By the matrix unit, 32 features at a time. Rows are read 32 at a time, past the last one too. `scratch` has
// `product_scratch_bytes`.
template <class Between>
inline void multiply_by_tiles(const Team &team, const Matrix &w, const Rows &x, int64_t rows, const Sink &sink,
                              std::uint8_t *scratch, Between &&between) {
  const int64_t blocks = w.outputs / kFeatures, at_once = std::max<int64_t>(32, kRowBytes / x.stride / 32 * 32);
  const Range range = team.share((blocks + 1) / 2);
  for (int64_t first = 0; first < rows; first += at_once) {
    const int64_t last = std::min(first + at_once, rows);
    for (int64_t unit = range.begin; unit < range.end; ++unit) {
      const int64_t block = 2 * unit, second = std::min(block + 1, blocks - 1);
      between();
      if (rows > 32)
        multiply_strip(w, x, first, last, block, second, sink, scratch);
      else if (rows > 16)
        multiply_once<true>(w, x, rows, block, second, sink, scratch);
      else
        multiply_once<false>(w, x, rows, block, second, sink, scratch);
    }
  }
}

inline int64_t product_scratch_bytes(int64_t inputs) { return strip_bytes(inputs) + 12 * kTileBytes; }
#else
inline int64_t product_scratch_bytes(int64_t) { return 0; }
#endif

// Each thread takes a part of the features. `scratch` is its own, of `product_scratch_bytes`. `between` is called for
// each 16 or 32 of them: it may ask for what is read next.
template <class Between>
inline void multiply(const Team &team, const Matrix &w, const Rows &x, int64_t rows, const Sink &sink, bool tiles,
                     std::uint8_t *scratch, Between &&between) {
#ifdef __AMX_BF16__
  if (tiles && rows > kFewRows) return multiply_by_tiles(team, w, x, rows, sink, scratch, between);
#endif
  multiply_by_vectors(team, w, x, rows, sink, between);
}

}  // namespace asyncllm
