// Products of many rows by the processor's matrix unit (AMX), in bfloat16.
//
// Codes become bfloat16 in five instructions for 32 of them. They are multiplied and added to in float16, which has 11
// bits; of these, 8 are kept by a shift of the exponent and the mantissa by three places: of a float16 number that
// makes the bfloat16 one with the same exponent field, which is 2^112 times as small. Rows are multiplied by `kRaise`
// before, so that no product of two numbers gets lost, and sums by what is missing afterwards.
//
// That takes longer than the matrix unit and than reading the weights, so instructions are chosen by the processor's
// two ports for vectors: beside the matrix unit, one of them has shifts and all arithmetic, and a permutation of words
// would take both.
#pragma once

#include "amx.h"
#include "matrix.h"

namespace asyncllm {

#ifdef ASYNCLLM_AMX

// What sums of products with weights that were made of codes are multiplied by. What the shift cuts off is up to a
// whole unit of the last place: on average it makes a weight smaller by ln(2) / 256 of itself.
inline float sum_factor(const Matrix &w) {
  if (w.bits == 16) return 1.0f;
  constexpr double kShifted = 0x1p112, kLarger = 1.0 + 0.6931472 / 256.0;
  return static_cast<float>(kShifted * kLarger / kRaise * w.unit);
}

// Of 32 float16 numbers. Not the compiler's own functions, which older ones than the processor do not have.
inline __m512i multiply_add_half(__m512i a, __m512i b, __m512i c) {
  asm("vfmadd213ph %2, %1, %0" : "+v"(a) : "v"(b), "v"(c));
  return a;
}

inline __m512i subtract_half(__m512i a, __m512i b) {
  __m512i difference;
  asm("vsubph %2, %1, %0" : "=v"(difference) : "v"(a), "v"(b));
  return difference;
}

// 16 numbers of 16 bits, each twice in its lane.
inline __m512i load_twice(const std::uint8_t *from) {
  const __m512i lanes = _mm512_cvtepu16_epi32(_mm256_load_si256((const __m256i *)from));
  return _mm512_or_si512(lanes, _mm512_slli_epi32(lanes, 16));
}

// The upper byte of each word, in the place of the lower one; a shift would take the port that has all arithmetic.
inline __m512i upper_bytes(__m512i words) {
  return _mm512_multishift_epi64_epi8(_mm512_set1_epi64(0x3838282818180808), words);
}

// A block's weights as a tile: 16 rows of a pair of inputs of each feature.
template <int Bits>
inline void put_tile(std::uint8_t *tile, const std::uint8_t *block) {
  constexpr int kCodes = kFeatures * kGroup * Bits / 8, kFields = 8 / Bits;  // codes of a byte
  const __m512i scale = load_twice(block + kCodes), zero = load_twice(block + kCodes + 32);
  const __m512i kept = _mm512_set1_epi16(static_cast<short>(0x8fff));  // but for copies of the sign
  // In float16, 1024, and 64: a code that is laid over the lowest bits, or over those above a code, is added to it.
  const __m512i larger[] = {_mm512_set1_epi16(0x6400), _mm512_set1_epi16(0x5400)};
  const __m512i field[] = {_mm512_set1_epi16((1 << Bits) - 1), _mm512_set1_epi16(15 << 4)};
#pragma GCC unroll 8
  for (int vector = 0; vector < Bits; ++vector) {
    const __m512i lower = _mm512_load_si512(block + 64 * vector), upper = upper_bytes(lower);
#pragma GCC unroll 4
    for (int row = 0; row < 2 * kFields; ++row, tile += 64) {
      const int place = row % kFields;
      const __m512i codes = row < kFields ? lower : upper;
      const __m512i sum = _mm512_ternarylogic_epi32(codes, field[place], larger[place], 0xea);  // (a & b) | c
      const __m512i code = subtract_half(sum, larger[place]);
      const __m512i weight = _mm512_srai_epi16(multiply_add_half(code, scale, zero), 3);
      _mm512_store_si512(tile, _mm512_and_si512(weight, kept));
    }
  }
}

constexpr int64_t kBlocksAhead = 8;  // that weights are asked for before they are read
constexpr int64_t kGroupsAhead = 6;  // that rows are, where another thread has made them

// The tile of a block: made in `room`, or where it is. Blocks of so many features are read beside each other.
template <int Bits>
inline const std::uint8_t *tile_of(const Matrix &w, int64_t block, int64_t group, int64_t beside, std::uint8_t *room) {
  const std::uint8_t *from = w.block(block, group);
  // behind the last block of these features come those of others, which are read at the same time
  const int64_t bytes = w.block_bytes();
  const int64_t skipped = group + kBlocksAhead < w.groups() ? 0 : (beside - 1) * w.groups() * bytes;
  prefetch_lines(from + kBlocksAhead * bytes + skipped, bytes);
  if (Bits == 16) return from;
  put_tile<Bits>(room, from);
  return room;
}

// Up to 16 rows of sums [Blocks, 16, 16] become the product with the features from `block` on. The output is passed by
// value: compilers take stores to its rows for stores to itself, else.
template <int Blocks, Output::Kind Kind, bool Gated>
inline void finish_rows(const Matrix &w, Output output, int64_t row, int64_t rows, int64_t block, const float *sums) {
  const __m512 factor = _mm512_set1_ps(sum_factor(w));
  const int64_t activation = w.activation;
  __m512 biases[Blocks];
#pragma GCC unroll 4
  for (int i = 0; i < Blocks; ++i)
    biases[i] = w.bias ? _mm512_loadu_ps(w.bias + (block + i) * kFeatures) : _mm512_setzero_ps();
  const int64_t column = (Gated ? block / 2 : block) * kFeatures;
  for (int64_t m = row; m < row + rows; ++m, sums += 16) {
#pragma GCC unroll 4
    for (int i = 0; i < Blocks; i += Gated ? 2 : 1) {
      __m512 value = _mm512_fmadd_ps(_mm512_load_ps(sums + 256 * i), factor, biases[i]);
      if constexpr (Gated) {
        const __m512 gated = _mm512_fmadd_ps(_mm512_load_ps(sums + 256 * (i + 1)), factor, biases[i + 1]);
        value = _mm512_mul_ps(activate(value, activation), gated);
      }
      output.put<Kind>(m, column + (Gated ? i / 2 : i) * kFeatures, value);
    }
  }
}

template <int Blocks, bool Gated>
inline void finish_rows(const Matrix &w, const Output &output, int64_t row, int64_t rows, int64_t block,
                        const float *sums) {
  if (output.kind == Output::kStore)
    return finish_rows<Blocks, Output::kStore, Gated>(w, output, row, rows, block, sums);
  if (output.kind == Output::kStoreFloat)
    return finish_rows<Blocks, Output::kStoreFloat, Gated>(w, output, row, rows, block, sums);
  finish_rows<Blocks, Output::kAddFloat, Gated>(w, output, row, rows, block, sums);
}

// The sums in tiles 0 to 3 become the product of up to 16 rows with four blocks or two, or of up to 32 with two. Behind
// the last block there is nothing.
template <int Blocks, int Tiles>
inline void finish_tiles(const Matrix &w, const Output &output, int64_t row, int64_t rows, int64_t block,
                         float *sums) {
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + 256, 64);
  if (Blocks * Tiles > 2) {
    _tile_stored(2, sums + 512, 64);
    _tile_stored(3, sums + 768, 64);
  }
  for (; rows > 0; rows -= 16, row += 16, sums += 512) {
    const int64_t some = std::min<int64_t>(rows, 16), left = w.outputs / kFeatures - block;
    if (w.activation != kNone) {
      finish_rows<Blocks, true>(w, output, row, some, block, sums);
    } else if (left >= Blocks) {
      finish_rows<Blocks, false>(w, output, row, some, block, sums);
    } else {
      for (int64_t i = 0; i < left; ++i) finish_rows<1, false>(w, output, row, some, block + i, sums + 256 * i);
    }
  }
}

// Tiles 0 to 3 += one group of inputs of 16 or 32 rows by tiles of weights of four blocks of features or two.
template <int Blocks, int Tiles>
inline void multiply_tiles(const Rows &x, int64_t row, int64_t group, const std::uint8_t *const *tiles) {
  const std::uint8_t *from = x.tile(row, group);
  _tile_loadd(6, tiles[0], 64);
  _tile_loadd(7, tiles[1], 64);
  _tile_loadd(4, from, x.stride);
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  if (Blocks == 4) {
    _tile_loadd(6, tiles[2], 64);
    _tile_dpbf16ps(2, 4, 6);
    _tile_loadd(7, tiles[3], 64);
    _tile_dpbf16ps(3, 4, 7);
  }
  if (Tiles == 2) {
    _tile_loadd(5, from + 16 * x.stride, x.stride);
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

inline void load_sums(const float *sums) {
  _tile_loadd(0, sums, 64);
  _tile_loadd(1, sums + 256, 64);
  _tile_loadd(2, sums + 512, 64);
  _tile_loadd(3, sums + 768, 64);
}

inline void store_sums(float *sums) {
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + 256, 64);
  _tile_stored(2, sums + 512, 64);
  _tile_stored(3, sums + 768, 64);
}

// Up to 32 rows, `cold` where this thread has not read them yet. Each tile of weights is used once, soon after it was
// made, but not at once: a tile's load would wait for the stores.
template <int Bits, int Blocks, int Tiles, class Between>
inline void multiply_once(const Matrix &w, const Rows &x, int64_t rows, int64_t block, const Output &output,
                          std::uint8_t *scratch, bool cold, Between &&between) {
  constexpr int64_t kRoom = 8 / Blocks, kBehind = kRoom / 2;  // groups
  const int64_t groups = w.groups(), last = w.outputs / kFeatures - 1;
  const std::uint8_t *tiles[kRoom][Blocks];
  zero_tiles();
  for (int64_t group = 0; group < groups + kBehind; ++group) {
    if (group < groups) {
#pragma GCC unroll 4
      for (int64_t i = 0; i < Blocks; ++i) {
        std::uint8_t *room = scratch + (group % kRoom * Blocks + i) * kTileBytes;
        tiles[group % kRoom][i] = tile_of<Bits>(w, std::min(block + i, last), group, Blocks, room);
      }
      if (cold && group + kGroupsAhead < groups) x.expect(rows, group + kGroupsAhead);
      if (group < rows) output.expect(group, block * kFeatures, Blocks * kFeatures);
      between(Blocks);
    }
    const int64_t ready = group - kBehind;
    if (ready >= 0) multiply_tiles<Blocks, Tiles>(x, 0, ready, tiles[ready % kRoom]);
  }
  finish_tiles<Blocks, Tiles>(w, output, 0, rows, block, reinterpret_cast<float *>(scratch + 8 * kTileBytes));
}

// A piece of a strip of weights stays in the nearest cache, beside as much of 32 rows.
constexpr int64_t kGroupsAtOnce = 9, kPieceBytes = 2 * kTileBytes * kGroupsAtOnce;

// More rows, from `first` to `last`: a strip of weights is made once for all of them, piece by piece. Between pieces,
// their sums are in memory.
template <int Bits>
inline void multiply_strip(const Matrix &w, const Rows &x, int64_t first, int64_t last, int64_t block,
                           const Output &output, std::uint8_t *scratch) {
  const int64_t groups = w.groups(), second = std::min(block + 1, w.outputs / kFeatures - 1);
  constexpr bool kMade = Bits < 16;
  constexpr int64_t kStep = kMade ? 2 * kTileBytes : kTileBytes;
  auto *sums = reinterpret_cast<float *>(scratch + kPieceBytes);
  for (int64_t begin = 0; begin < groups; begin += kGroupsAtOnce) {
    const int64_t end = std::min(begin + kGroupsAtOnce, groups);
    for (int64_t group = begin; group < end && kMade; ++group) {
      std::uint8_t *room = scratch + kStep * (group - begin);
      tile_of<Bits>(w, block, group, 2, room);
      tile_of<Bits>(w, second, group, 2, room + kTileBytes);
    }
    const std::uint8_t *left = kMade ? scratch : w.block(block, begin),
                       *right = kMade ? scratch + kTileBytes : w.block(second, begin);
    for (int64_t row = first; row < last; row += 32) {
      float *of_rows = sums + (row - first) * 2 * kFeatures;
      if (begin == 0)
        zero_tiles();
      else
        load_sums(of_rows);
      for (int64_t group = begin; group < end; ++group) {
        const int64_t at = kStep * (group - begin);
        const std::uint8_t *const tiles[] = {left + at, right + at};
        multiply_tiles<2, 2>(x, row, group, tiles);
      }
      if (end < groups)
        store_sums(of_rows);
      else
        finish_tiles<2, 2>(w, output, row, std::min<int64_t>(32, last - row), block, of_rows);
    }
  }
}

constexpr int64_t kMostRows = 1024;     // that are multiplied with a strip
constexpr int64_t kLeastRows = 256;     // for which a thread makes weights of its own
constexpr int64_t kRowBytes = 1 << 20;  // of rows that many features are multiplied with: they stay in a cache so long

// Units `begin` to `end` of 32 features, by rows `first` to `last`: all up to 32, or some of more. What a unit's sums
// are does not depend on the others.
template <int Bits, class Between>
inline void multiply_units(const Matrix &w, const Rows &x, int64_t first, int64_t last, int64_t begin, int64_t end,
                           const Output &output, std::uint8_t *scratch, bool cold, Between &&between) {
  const int64_t rows = last - first;
  for (int64_t unit = begin; unit < end; ++unit, cold = false) {
    if (first > 0 || rows > 32) {
      between(2 * w.groups());
      multiply_strip<Bits>(w, x, first, last, 2 * unit, output, scratch);
    } else if (rows > 16) {
      multiply_once<Bits, 2, 2>(w, x, rows, 2 * unit, output, scratch, cold, between);
    } else if (unit + 1 < end) {
      multiply_once<Bits, 4, 1>(w, x, rows, 2 * unit++, output, scratch, cold, between);
    } else {
      multiply_once<Bits, 2, 1>(w, x, rows, 2 * unit, output, scratch, cold, between);
    }
  }
}

// Rows are read 32 at a time, past the last one too. `scratch` has `kProductScratchBytes`.
//
// Many rows are cut into parts, of which each thread takes its own as far as there are enough: it has made them itself
// for the most part, so that they are in its caches, and reads there what it writes now.
template <class Between>
inline void multiply_by_tiles(const Team &team, const Matrix &w, const Rows &x, int64_t rows, const Output &output,
                              std::uint8_t *scratch, Between &&between) {
  const int64_t units = (w.outputs / kFeatures + 1) / 2, blocks = (rows + 31) / 32;
  const int64_t at_once = std::max<int64_t>(1, std::min(kMostRows, kRowBytes / x.stride) / 32);  // blocks of 32 rows
  const int64_t parts = std::max((blocks + at_once - 1) / at_once, std::min(team.threads, rows / kLeastRows));
  const auto multiply = w.bits == 4   ? multiply_units<4, Between>
                        : w.bits == 8 ? multiply_units<8, Between>
                                      : multiply_units<16, Between>;
  bool cold = true;
  team.divide(parts * units, 2, [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t part = begin / units, before = part * units, until = std::min(end, before + units);
      const int64_t first = blocks * part / parts * 32, last = std::min(rows, blocks * (part + 1) / parts * 32);
      multiply(w, x, first, last, begin - before, until - before, output, scratch, cold, between);
      begin = until;
    }
  });
}

constexpr int64_t kProductScratchBytes = kPieceBytes + 128 * kMostRows;
#else
constexpr int64_t kProductScratchBytes = 0;
#endif

}  // namespace asyncllm
