// A block of features times rows, by AVX2: of codes as words of 16 bits or as bytes, or of bfloat16 as float32.
#pragma once

#include "matrix.h"

namespace asyncllm {

// Compilers would put off additions of integers until all that is added is there, which no registers hold; and load what
// is multiplied for each product anew.
inline void keep(__m256i &first, __m256i &second) { asm("" : "+x"(first), "+x"(second)); }

// Eight sums and products of neighbouring words, two each.
inline __m256i add_products(__m256i sums, __m256i a, __m256i b) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  return _mm256_dpwssd_epi32(sums, a, b);
#elif defined(__AVXVNNI__)
  return _mm256_dpwssd_avx_epi32(sums, a, b);
#else
  return _mm256_add_epi32(sums, _mm256_madd_epi16(a, b));
#endif
}

// Of 16 features two inputs each.
inline void add_products(const __m256i pairs[2], int x, Ints &sums) {
  const __m256i both = _mm256_set1_epi32(x);
  sums.low = add_products(sums.low, pairs[0], both);
  sums.high = add_products(sums.high, pairs[1], both);
  keep(sums.low, sums.high);
}

// The words that two inputs' codes of so many bits are, for 16 features.
template <int Bits>
inline void take_words(const std::uint8_t *group, int pair, __m256i words[2]) {
  constexpr int kFields = 16 / Bits;  // pairs whose codes are in one vector
  const int shift = pair % kFields * Bits;
  for (int half = 0; half < 2; ++half) {
    const auto *from = reinterpret_cast<const __m256i *>(group + pair / kFields * 64 + half * 32);
    words[half] = _mm256_srli_epi16(_mm256_load_si256(from), shift);
    if (shift + Bits < 16) words[half] = _mm256_and_si256(words[half], _mm256_set1_epi16((1 << Bits) - 1));
  }
}

// A group's products with words of x, for 16 features. `at`: its codes; `x`: the group's first integer.
template <int Bits, int M>
inline void multiply_words(const std::uint8_t *at, const std::uint8_t *x, int64_t stride, Ints dots[M]) {
  for (int m = 0; m < M; ++m) dots[m] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
#pragma GCC unroll 16
  for (int pair = 0; pair < kGroup / 2; ++pair) {
    __m256i words[2];
    take_words<Bits>(at, pair, words);
    keep(words[0], words[1]);
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) add_products(words, reinterpret_cast<const int *>(x + m * stride)[pair], dots[m]);
  }
}

// Of 8 features four inputs each: codes of 4 bits, and signed bytes.
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
inline __m256i add_bytes(__m256i sums, __m256i codes, __m256i x) { return _mm256_dpbusd_epi32(sums, codes, x); }
inline __m256i widen(__m256i sums) { return sums; }
#elif defined(__AVXVNNI__)
inline __m256i add_bytes(__m256i sums, __m256i codes, __m256i x) { return _mm256_dpbusd_avx_epi32(sums, codes, x); }
inline __m256i widen(__m256i sums) { return sums; }
#else
// Two sums of words, which hold a group's: 32 / 2 products of at most 15 * 127.
inline __m256i add_bytes(__m256i sums, __m256i codes, __m256i x) {
  return _mm256_add_epi16(sums, _mm256_maddubs_epi16(codes, x));
}
inline __m256i widen(__m256i sums) { return _mm256_madd_epi16(sums, _mm256_set1_epi16(1)); }
#endif

// The same as `multiply_words` for codes of 4 bits and bytes of x.
template <int M>
inline void multiply_bytes(const std::uint8_t *at, const std::uint8_t *x, int64_t stride, Ints dots[M]) {
  for (int m = 0; m < M; ++m) dots[m] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
  const __m256i nibble = _mm256_set1_epi8(15);
#pragma GCC unroll 8
  for (int quad = 0; quad < kGroup / 4; ++quad) {
    __m256i codes[2];
    for (int half = 0; half < 2; ++half) {
      const __m256i both = _mm256_load_si256(reinterpret_cast<const __m256i *>(at + quad / 2 * 64 + half * 32));
      codes[half] = _mm256_and_si256(quad % 2 ? _mm256_srli_epi16(both, 4) : both, nibble);
    }
    keep(codes[0], codes[1]);
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      const __m256i four = _mm256_set1_epi32(reinterpret_cast<const int *>(x + m * stride)[quad]);
      dots[m].low = add_bytes(dots[m].low, codes[0], four);
      dots[m].high = add_bytes(dots[m].high, codes[1], four);
      keep(dots[m].low, dots[m].high);
    }
  }
  for (int m = 0; m < M; ++m) dots[m] = {widen(dots[m].low), widen(dots[m].high)};
}

template <int Bits, int M>
inline void multiply_codes(const Matrix &w, int64_t block, const std::uint8_t *x, int64_t stride, Floats sums[M]) {
  constexpr int kCodeBytes = 64 * Bits;
  const IntegerRow parts(w.inputs);
  const std::uint8_t *at = w.block(block, 0);
  for (int m = 0; m < M; ++m) sums[m] = zeros();
  for (int64_t group = 0; group < w.groups(); ++group, at += kCodeBytes + 64) {
    prefetch_group(at, kCodeBytes + 64);
    bool fine = Bits == 8;
    for (int m = 0; m < M; ++m) fine = fine || x[m * stride + parts.fine + group];
    Ints dots[M];
    if (fine) {
      multiply_words<Bits, M>(at, x + group * 2 * kGroup, stride, dots);
    } else {
      multiply_bytes<M>(at, x + parts.bytes + group * kGroup, stride, dots);
    }
    const Floats scale = load_half(at + kCodeBytes), zero = load_half(at + kCodeBytes + 32);
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      const auto of_group = [&](int64_t part) {
        return every(reinterpret_cast<const float *>(x + m * stride + part)[group]);
      };
      const Floats dot{_mm256_cvtepi32_ps(dots[m].low), _mm256_cvtepi32_ps(dots[m].high)};
      sums[m] = multiply_add(dot * of_group(parts.scales), scale, sums[m]);
      sums[m] = multiply_add(zero, of_group(parts.sums), sums[m]);
    }
  }
}

template <int M>
inline void multiply_block_4(const Matrix &w, int64_t block, const std::uint8_t *x, int64_t stride, Floats sums[M]) {
  multiply_codes<4, M>(w, block, x, stride, sums);
}

template <int M>
inline void multiply_block_8(const Matrix &w, int64_t block, const std::uint8_t *x, int64_t stride, Floats sums[M]) {
  multiply_codes<8, M>(w, block, x, stride, sums);
}

template <int M>
inline void multiply_block_16(const Matrix &w, int64_t block, const std::uint8_t *x, int64_t stride, Floats sums[M]) {
  const std::uint8_t *at = w.block(block, 0);
  for (int m = 0; m < M; ++m) sums[m] = zeros();
  for (int64_t pair = 0; pair < w.inputs / 2; ++pair, at += 64) {
    const __m256i low = _mm256_load_si256((const __m256i *)at), high = _mm256_load_si256((const __m256i *)(at + 32));
    const Floats even{even_of(low), even_of(high)}, odd{odd_of(low), odd_of(high)};
    prefetch_group(at, 64);
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      const __m256i both = _mm256_set1_epi32(reinterpret_cast<const int *>(x + m * stride)[pair]);
      const __m256 first = even_of(both), second = odd_of(both);
      sums[m] = multiply_add(even, {first, first}, sums[m]);
      sums[m] = multiply_add(odd, {second, second}, sums[m]);
    }
  }
}

constexpr int64_t kRowBytesAtOnce = 384 << 10;  // of rows that many features are multiplied with, in the second cache

}  // namespace asyncllm
