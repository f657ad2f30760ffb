// Vectors of 16 float32, by AVX-512.
#pragma once

#include <immintrin.h>

namespace asyncllm {

using Floats = __m512;
using Ints = __m512i;        // 16 of 32 bits
using Partial = __m512;      // numbers that add up to one
using Lanes = __mmask16;     // some of 16

inline Floats zeros() { return _mm512_setzero_ps(); }
inline Floats every(float value) { return _mm512_set1_ps(value); }
inline Floats load(const float *from) { return _mm512_loadu_ps(from); }
inline void store(float *to, Floats values) { _mm512_storeu_ps(to, values); }

inline Floats to_float(__m256i values) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(values), 16));
}
inline Floats load_bf16(const bf16 *from) { return to_float(_mm256_loadu_si256((const __m256i *)from)); }
// 16 numbers in whatever order is quickest to make. And back.
inline Floats load_unordered(const bf16 *from) { return load_bf16(from); }
inline Floats in_order(Floats a) { return a; }
inline __m256i to_bf16(Floats values) { return (__m256i)_mm512_cvtneps_pbh(values); }
inline void store_bf16(bf16 *to, Floats values) { _mm256_storeu_si256((__m256i *)to, to_bf16(values)); }
inline Floats load_half(const std::uint8_t *from) { return _mm512_cvtph_ps(_mm256_load_si256((const __m256i *)from)); }

inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats magnitude(Floats a) { return _mm512_abs_ps(a); }
// 1 / a, to about 2^-14: a division would take as long as all of an activation's rest.
inline Floats about_inverse(Floats a) { return _mm512_rcp14_ps(a); }

inline float first_of(Floats a) { return _mm512_cvtss_f32(a); }
inline float sum_of(Floats a) { return _mm512_reduce_add_ps(a); }
inline float largest_of(Floats a) { return _mm512_reduce_max_ps(a); }

// Those below `count`.
inline Lanes lanes_below(std::int64_t count) { return count >= 16 ? 0xffff : (1u << (count < 0 ? 0 : count)) - 1; }
inline Floats choose(Lanes lanes, Floats a, Floats b) { return _mm512_mask_mov_ps(b, lanes, a); }
// Reads no memory for the other lanes.
inline Floats load_some(Lanes lanes, const float *from, Floats others) {
  return _mm512_mask_loadu_ps(others, lanes, from);
}
// Whether in a lane one of both is no number.
inline bool unordered(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q); }

inline Ints to_ints(Floats a) { return _mm512_cvtps_epi32(a); }
inline int sum_of(Ints a, Ints b) { return _mm512_reduce_add_epi32(_mm512_add_epi32(a, b)); }

// What x is above the next lower whole number; of what is infinite, 0.
inline Floats above_whole(Floats x) { return _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
// Times 2 to the power of the whole number below x; 0 where x is less than -126.
inline Floats times_power(Floats a, Floats x) {
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ), a, x);
}

// Of two vectors, the sums of neighbouring quarters.
inline Floats sums_of_quarters(Floats a, Floats b) {
  return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

// Of each of 8 vectors two partial sums: of the first 4 vectors one and the other, then of the last 4.
inline Floats half_sums_of(const Floats v[8]) {
  Floats quads[2];
  for (int i = 0; i < 2; ++i) {
    const Floats *p = v + 4 * i;
    const Floats a = _mm512_add_ps(_mm512_unpacklo_ps(p[0], p[1]), _mm512_unpackhi_ps(p[0], p[1]));
    const Floats b = _mm512_add_ps(_mm512_unpacklo_ps(p[2], p[3]), _mm512_unpackhi_ps(p[2], p[3]));
    const __m512d c = _mm512_castps_pd(a), d = _mm512_castps_pd(b);
    quads[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(c, d)), _mm512_castpd_ps(_mm512_unpackhi_pd(c, d)));
  }
  return sums_of_quarters(quads[0], quads[1]);
}

// The sum of each of 16 vectors, or of 8, in their order.
inline Floats sums_of(const Partial v[16]) { return sums_of_quarters(half_sums_of(v), half_sums_of(v + 8)); }

inline void store_sums_of_eight(float *to, const Floats v[8]) {
  const Floats halves = half_sums_of(v);
  _mm256_storeu_ps(to, _mm512_castps512_ps256(sums_of_quarters(halves, halves)));
}

}  // namespace asyncllm
