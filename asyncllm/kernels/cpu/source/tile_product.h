// Products of many rows by the processor's matrix unit (AMX), in bfloat16.
//
// Codes become bfloat16 in four or five instructions for 32 of them. They are multiplied and added to in float16, which
// has 11 bits; of these, 8 are kept by a shift of the exponent and the mantissa by three places: of a float16 number
// that makes the bfloat16 one with the same exponent field, which is 2^112 times as small. Rows are multiplied by
// `kRaise` before, so that no product of two numbers gets lost, and sums by what is missing afterwards.
#pragma once

#include "matrix.h"

namespace asyncllm {

#ifdef __AMX_BF16__

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

inline __m512i to_half(__m512i unsigned_words) {
  __m512i halves;
  asm("vcvtuw2ph %1, %0" : "=v"(halves) : "v"(unsigned_words));
  return halves;
}

// 16 numbers of 16 bits, each twice in its lane.
inline __m512i load_twice(const std::uint8_t *from) {
  const __m512i lanes = _mm512_cvtepu16_epi32(_mm256_load_si256((const __m256i *)from));
  return _mm512_or_si512(lanes, _mm512_slli_epi32(lanes, 16));
}

// A block's weights as a tile: 16 rows of a pair of inputs of each feature.
template <int Bits>
inline void put_tile(std::uint8_t *tile, const std::uint8_t *block) {
  constexpr int kCodes = kFeatures * kGroup * Bits / 8, kRows = 16 / Bits;  // rows of a vector of codes
  const __m512i scale = load_twice(block + kCodes), zero = load_twice(block + kCodes + 32);
  const __m512i kept = _mm512_set1_epi16(static_cast<short>(0x8fff));  // but for copies of the sign
  alignas(64) static constexpr std::uint16_t kNumbers[16] = {  // in float16
      0x0000, 0x3c00, 0x4000, 0x4200, 0x4400, 0x4500, 0x4600, 0x4700,
      0x4800, 0x4880, 0x4900, 0x4980, 0x4a00, 0x4a80, 0x4b00, 0x4b80};
  const __m512i numbers = _mm512_broadcast_i64x4(_mm256_load_si256((const __m256i *)kNumbers));
#pragma GCC unroll 8
  for (int vector = 0; vector < Bits; ++vector) {
    const __m512i codes = _mm512_load_si512(block + 64 * vector);
#pragma GCC unroll 4
    for (int row = 0; row < kRows; ++row) {
      const __m512i shifted = row ? _mm512_srli_epi16(codes, Bits * row) : codes;
      __m512i code;
      if (Bits == 4)
        code = _mm512_permutexvar_epi16(shifted, numbers);  // by the lowest 5 bits, of which one is another code's
      else
        code = to_half(row ? shifted : _mm512_and_si512(codes, _mm512_set1_epi16(255)));
      const __m512i weight = _mm512_srai_epi16(multiply_add_half(code, scale, zero), 3);
      _mm512_store_si512(tile + 64 * (kRows * vector + row), _mm512_and_si512(weight, kept));
    }
  }
}

constexpr int64_t kBlocksAhead = 8;  // that weights are asked for before they are read

// The tile of a block: made in `room`, or where it is. Blocks of so many features are read beside each other.
inline const std::uint8_t *tile_of(const Matrix &w, int64_t block, int64_t group, int64_t beside, std::uint8_t *room) {
  const std::uint8_t *from = w.block(block, group);
  // behind the last block of these features come those of others, which are read at the same time
  const int64_t bytes = w.block_bytes();
  const int64_t skipped = group + kBlocksAhead < w.groups() ? 0 : (beside - 1) * w.groups() * bytes;
  prefetch_lines(from + kBlocksAhead * bytes + skipped, bytes);
  if (w.bits == 16) return from;
  w.bits == 4 ? put_tile<4>(room, from) : put_tile<8>(room, from);
  return room;
}

// What sums the tiles 0 to 3 hold. An instruction that adds to a tile waits for the one before that did.
enum class Sums {
  kFourBlocks,      // of 16 rows with four blocks of features
  kHalvesOfGroups,  // of 16 rows with two blocks: of groups with even numbers, then of the others
  kHalvesOfRows,    // of 32 rows with two blocks: of the first 16 rows, then of the others
};

// The sums become the product of up to 32 rows with two blocks of features, or four.
template <Sums Kind>
inline void finish_tiles(const Matrix &w, const Output &output, int64_t row, int64_t count, int64_t block,
                         int64_t second, float *sums) {
  const __m512 factor = _mm512_set1_ps(sum_factor(w));
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + 256, 64);
  _tile_stored(2, sums + 512, 64);
  _tile_stored(3, sums + 768, 64);
  for (int64_t pair = 0; pair < (Kind == Sums::kFourBlocks ? 2 : 1); ++pair, block += 2, second += 2, sums += 512) {
    for (int64_t m = 0; m < count; ++m) {
      const float *at = sums + (m / 16) * 512 + (m % 16) * 16;
      __m512 left = _mm512_load_ps(at), right = _mm512_load_ps(at + 256);
      if (Kind == Sums::kHalvesOfGroups) {
        left = _mm512_add_ps(left, _mm512_load_ps(at + 512));
        right = _mm512_add_ps(right, _mm512_load_ps(at + 768));
      }
      left = _mm512_mul_ps(left, factor);
      right = _mm512_mul_ps(right, factor);
      if (w.activation == kNone) finish(w, output, row + m, block, left, left);
      if (second > block) finish(w, output, row + m, second, left, right);
    }
  }
}

// Tiles 0 to 3 += one group of inputs of 16 or 32 rows by tiles of weights.
template <Sums Kind>
inline void multiply_tiles(const Rows &x, int64_t row, int64_t group, const std::uint8_t *const *tiles) {
  const std::uint8_t *from = x.tile(row, group);
  _tile_loadd(6, tiles[0], 64);
  _tile_loadd(7, tiles[1], 64);
  if (Kind == Sums::kHalvesOfGroups && group % 2) {
    _tile_loadd(5, from, x.stride);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    return;
  }
  _tile_loadd(4, from, x.stride);
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  if (Kind == Sums::kFourBlocks) {
    _tile_loadd(6, tiles[2], 64);
    _tile_dpbf16ps(2, 4, 6);
    _tile_loadd(7, tiles[3], 64);
    _tile_dpbf16ps(3, 4, 7);
  }
  if (Kind == Sums::kHalvesOfRows) {
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

inline int64_t strip_bytes(int64_t inputs) { return 2 * kTileBytes * (inputs / kGroup); }

// Up to 32 rows: each tile of weights is used once, soon after it was made, but not at once: a tile's load would wait
// for the stores.
template <Sums Kind, class Between>
inline void multiply_once(const Matrix &w, const Rows &x, int64_t rows, int64_t block, int64_t second,
                          const Output &output, std::uint8_t *scratch, Between &&between) {
  constexpr int64_t kBlocks = Kind == Sums::kFourBlocks ? 4 : 2;
  constexpr int64_t kRoom = 8 / kBlocks, kBehind = kRoom / 2;  // groups
  const int64_t groups = w.groups();
  const std::uint8_t *tiles[kRoom][kBlocks];
  zero_tiles();
  for (int64_t group = 0; group < groups + kBehind; ++group) {
    if (group < groups) {
      for (int64_t i = 0; i < kBlocks; ++i) {
        const int64_t at = kBlocks == 4 || !i ? block + i : second;
        tiles[group % kRoom][i] = tile_of(w, at, group, kBlocks, scratch + (group % kRoom * kBlocks + i) * kTileBytes);
      }
      between(kBlocks);
    }
    const int64_t ready = group - kBehind;
    if (ready >= 0) multiply_tiles<Kind>(x, 0, ready, tiles[ready % kRoom]);
  }
  finish_tiles<Kind>(w, output, 0, rows, block, second, reinterpret_cast<float *>(scratch + 8 * kTileBytes));
}

// More rows, from `first` to `last`: a strip of weights is made once for all of them.
inline void multiply_strip(const Matrix &w, const Rows &x, int64_t first, int64_t last, int64_t block, int64_t second,
                           const Output &output, std::uint8_t *scratch) {
  const int64_t groups = w.groups();
  auto *sums = reinterpret_cast<float *>(scratch + strip_bytes(w.inputs));
  const bool made = w.bits < 16;
  for (int64_t group = 0; group < groups && made; ++group) {
    std::uint8_t *room = scratch + 2 * kTileBytes * group;
    tile_of(w, block, group, 2, room);
    tile_of(w, second, group, 2, room + kTileBytes);
  }
  const std::uint8_t *left = made ? scratch : w.block(block, 0),
                     *right = made ? scratch + kTileBytes : w.block(second, 0);
  const int64_t step = made ? 2 * kTileBytes : kTileBytes;
  for (int64_t row = first; row < last; row += 32) {
    zero_tiles();
    for (int64_t group = 0; group < groups; ++group) {
      const std::uint8_t *const tiles[] = {left + step * group, right + step * group};
      multiply_tiles<Sums::kHalvesOfRows>(x, row, group, tiles);
    }
    const int64_t count = std::min<int64_t>(32, last - row);
    finish_tiles<Sums::kHalvesOfRows>(w, output, row, count, block, second, sums);
  }
}

constexpr int64_t kRowBytes = 1 << 20;  // of rows that many features are multiplied with: they stay in a cache so long

// Units `begin` to `end` of 32 features, by rows `first` to `last`: all up to 32, or some of more.
template <class Between>
inline void multiply_units(const Matrix &w, const Rows &x, int64_t first, int64_t last, int64_t begin, int64_t end,
                           const Output &output, std::uint8_t *scratch, Between &&between) {
  const int64_t blocks = w.outputs / kFeatures, rows = last - first;
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t block = 2 * unit, second = std::min(block + 1, blocks - 1);
    if (first > 0 || rows > 32) {
      between(2 * w.groups());
      multiply_strip(w, x, first, last, block, second, output, scratch);
    } else if (rows > 16) {
      multiply_once<Sums::kHalvesOfRows>(w, x, rows, block, second, output, scratch, between);
    } else if (unit + 1 < end && block + 4 <= blocks) {
      multiply_once<Sums::kFourBlocks>(w, x, rows, block, second, output, scratch, between);
      ++unit;
    } else {
      multiply_once<Sums::kHalvesOfGroups>(w, x, rows, block, second, output, scratch, between);
    }
  }
}

// Rows are read 32 at a time, past the last one too. `scratch` has `product_scratch_bytes`.
template <class Between>
inline void multiply_by_tiles(const Team &team, const Matrix &w, const Rows &x, int64_t rows, const Output &output,
                              std::uint8_t *scratch, std::atomic<int64_t> *taken, Between &&between) {
  const int64_t units = (w.outputs / kFeatures + 1) / 2;
  const int64_t at_once = std::max<int64_t>(32, kRowBytes / x.stride / 32 * 32);
  if (rows > at_once) taken = nullptr;  // which counts for some of the rows
  for (int64_t first = 0; first < rows; first += at_once) {
    team.divide(units, taken, [&](int64_t begin, int64_t end) {
      multiply_units(w, x, first, std::min(first + at_once, rows), begin, end, output, scratch, between);
    });
  }
}

inline int64_t product_scratch_bytes(int64_t inputs) { return strip_bytes(inputs) + 12 * kTileBytes; }
#else
inline int64_t product_scratch_bytes(int64_t) { return 0; }
#endif

}  // namespace asyncllm
