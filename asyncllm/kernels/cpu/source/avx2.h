// Vectors of 16 float32 as two of AVX2's: what avx512.h has, for processors that have no AVX-512.
#pragma once

#include <immintrin.h>

namespace asyncllm {

struct Floats {
  __m256 low, high;
};
struct Ints {  // 16 of 32 bits
  __m256i low, high;
};
using Partial = __m256;     // numbers that add up to one
using Lanes = std::int64_t;  // the first so many of 16

inline Floats operator+(Floats a, Floats b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline Floats operator-(Floats a, Floats b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
inline Floats operator*(Floats a, Floats b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }

inline Floats both(__m256 half) { return {half, half}; }
inline Floats zeros() { return both(_mm256_setzero_ps()); }
inline Floats every(float value) { return both(_mm256_set1_ps(value)); }
inline Floats load(const float *from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
inline void store(float *to, Floats values) {
  _mm256_storeu_ps(to, values.low);
  _mm256_storeu_ps(to + 8, values.high);
}

inline __m256 to_float(__m128i values) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(values), 16));
}
inline Floats load_bf16(const bf16 *from) {
  return {to_float(_mm_loadu_si128((const __m128i *)from)), to_float(_mm_loadu_si128((const __m128i *)(from + 8)))};
}

// The numbers at even places of 16 of bfloat16, and those at odd ones.
inline __m256 even_of(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
inline __m256 odd_of(__m256i pairs) {
  return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
}

// 16 numbers in an order that is quicker to make: those at even places, then those at odd ones. And back.
inline Floats load_unordered(const bf16 *from) {
  const __m256i pairs = _mm256_loadu_si256((const __m256i *)from);
  return {even_of(pairs), odd_of(pairs)};
}
inline Floats in_order(Floats a) {
  const __m256 first = _mm256_unpacklo_ps(a.low, a.high), second = _mm256_unpackhi_ps(a.low, a.high);
  return {_mm256_permute2f128_ps(first, second, 0x20), _mm256_permute2f128_ps(first, second, 0x31)};
}

// Rounded to the nearest, in the upper halves of lanes: of two, to the even one. What is no number becomes a quiet one.
inline __m256i round_to_bf16(__m256 values) {
  const __m256i bits = _mm256_castps_si256(values);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256 none = _mm256_cmp_ps(values, values, _CMP_UNORD_Q);
  return _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(none));
}
inline void store_bf16(bf16 *to, Floats values) {
  const __m256i low = _mm256_srli_epi32(round_to_bf16(values.low), 16);
  const __m256i high = _mm256_srli_epi32(round_to_bf16(values.high), 16);
  _mm256_storeu_si256((__m256i *)to, _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8));
}
inline Floats load_half(const std::uint8_t *from) {
  return {_mm256_cvtph_ps(_mm_load_si128((const __m128i *)from)),
          _mm256_cvtph_ps(_mm_load_si128((const __m128i *)(from + 16)))};
}

inline Floats multiply_add(Floats a, Floats b, Floats c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline Floats larger(Floats a, Floats b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
inline Floats magnitude(Floats a) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, a.low), _mm256_andnot_ps(sign, a.high)};
}
// 1 / a
inline Floats about_inverse(Floats a) {
  const __m256 one = _mm256_set1_ps(1.0f);
  return {_mm256_div_ps(one, a.low), _mm256_div_ps(one, a.high)};
}

inline float first_of(Floats a) { return _mm256_cvtss_f32(a.low); }
inline float sum_of(Floats a) {
  const __m256 eight = _mm256_add_ps(a.low, a.high);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float largest_of(Floats a) {
  const __m256 eight = _mm256_max_ps(a.low, a.high);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

inline Lanes lanes_below(std::int64_t count) { return count; }
// Of 8 lanes from `first` on.
inline __m256i mask_of(Lanes lanes, int first) {
  const __m256i order = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const int count = lanes > 16 ? 16 : static_cast<int>(lanes);
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(count - first), order);
}
inline Floats choose(Lanes lanes, Floats a, Floats b) {
  return {_mm256_blendv_ps(b.low, a.low, _mm256_castsi256_ps(mask_of(lanes, 0))),
          _mm256_blendv_ps(b.high, a.high, _mm256_castsi256_ps(mask_of(lanes, 8)))};
}
inline Floats load_some(Lanes lanes, const float *from, Floats others) {
  const Floats loaded{_mm256_maskload_ps(from, mask_of(lanes, 0)), _mm256_maskload_ps(from + 8, mask_of(lanes, 8))};
  return choose(lanes, loaded, others);
}
inline bool unordered(Floats a, Floats b) {
  const __m256 low = _mm256_cmp_ps(a.low, b.low, _CMP_UNORD_Q), high = _mm256_cmp_ps(a.high, b.high, _CMP_UNORD_Q);
  return _mm256_movemask_ps(_mm256_or_ps(low, high));
}

inline Ints to_ints(Floats a) { return {_mm256_cvtps_epi32(a.low), _mm256_cvtps_epi32(a.high)}; }
inline int sum_of(Ints a, Ints b) {
  const __m256i eight = _mm256_add_epi32(_mm256_add_epi32(a.low, a.high), _mm256_add_epi32(b.low, b.high));
  const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  const __m128i two = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
  return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 1)));
}
// As words of 16 bits.
inline __m256i to_words(Ints values) {
  return _mm256_permute4x64_epi64(_mm256_packs_epi32(values.low, values.high), 0xd8);
}

// At most 128, of which 2 to the power is infinite here; of a minimum, what is no number stays.
inline __m256 cut(__m256 x) { return _mm256_min_ps(_mm256_set1_ps(128.0f), x); }
inline Floats above_whole(Floats x) {
  const Floats most{cut(x.low), cut(x.high)};
  return most - Floats{_mm256_floor_ps(most.low), _mm256_floor_ps(most.high)};
}
inline __m256 times_power(__m256 a, __m256 x) {
  const __m256i whole = _mm256_cvtps_epi32(_mm256_floor_ps(cut(x)));
  const __m256 power = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(whole, _mm256_set1_epi32(127)), 23));
  return _mm256_and_ps(_mm256_mul_ps(a, power), _mm256_cmp_ps(x, _mm256_set1_ps(-126.0f), _CMP_NLT_UQ));
}
inline Floats times_power(Floats a, Floats x) { return {times_power(a.low, x.low), times_power(a.high, x.high)}; }

// The sum of each of 8 vectors of 8.
inline __m256 sums_of_eight(const __m256 v[8]) {
  const __m256 a = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
  const __m256 b = _mm256_hadd_ps(_mm256_hadd_ps(v[4], v[5]), _mm256_hadd_ps(v[6], v[7]));
  return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}
inline Floats sums_of(const Partial v[16]) { return {sums_of_eight(v), sums_of_eight(v + 8)}; }
inline void store_sums_of_eight(float *to, const Floats v[8]) {
  __m256 halves[8];
  for (int i = 0; i < 8; ++i) halves[i] = _mm256_add_ps(v[i].low, v[i].high);
  _mm256_storeu_ps(to, sums_of_eight(halves));
}

}  // namespace asyncllm
