// Vectors of 16 float32, and what bfloat16 and the matrix unit need.
#pragma once

#include <cmath>
#include <cpuid.h>
#include <cstdint>
#include <cstring>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#if !defined(__AVX512F__) || !defined(__AVX512BW__) || !defined(__AVX512DQ__) || !defined(__AVX512VL__) || \
    !defined(__AVX512VNNI__) || !defined(__AVX512BF16__)
#error "these kernels need AVX-512 with VNNI and BF16"
#endif

namespace asyncllm {

using bf16 = std::uint16_t;
constexpr std::int64_t kLanes = 16;
constexpr std::int64_t kTileBytes = 1024;  // of the matrix unit: 16 rows of 64

// Into the nearest, or the next cache. Not the compiler's own function, which it leaves out with what only calls it.
inline void prefetch(const void *line) { asm volatile("prefetcht0 %0" : : "m"(*static_cast<const char *>(line))); }
inline void prefetch_next(const void *line) { asm volatile("prefetcht1 %0" : : "m"(*static_cast<const char *>(line))); }
inline void prefetch_to_write(const void *line) {
  asm volatile("prefetchw %0" : : "m"(*static_cast<const char *>(line)));
}

inline __m512 to_float(__m256i values) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(values), 16));
}

inline __m512 load_bf16(const bf16 *from) { return to_float(_mm256_loadu_si256((const __m256i *)from)); }

inline __m256i to_bf16(__m512 values) { return (__m256i)_mm512_cvtneps_pbh(values); }

inline void store_bf16(bf16 *to, __m512 values) { _mm256_storeu_si256((__m256i *)to, to_bf16(values)); }

// 2^x, to about 2^-23; 0 where that would be a denormal number, which processors take a hundred times as long to make.
inline __m512 exp2(__m512 x) {
  const __mmask16 normal = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  const __m512 part = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // of an infinite number 0
  // of polynomials that are 1 at 0, the one with the least relative error up to 1
  __m512 sum = _mm512_set1_ps(1.8671302e-3f);
  sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(9.0170298e-3f));
  sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(5.5799913e-2f));
  sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(2.4016444e-1f));
  sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(6.9315130e-1f));
  sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(1.0f));
  return _mm512_maskz_scalef_ps(normal, sum, x);  // by a power of 2 with the next lower whole number
}

constexpr float kLog2E = 1.44269504f;

// x / (1 + e^-exponent), to about 2^-14: what comes of it has 8 bits. A division would take as long as all the rest.
inline __m512 gated_by_sigmoid(__m512 x, __m512 exponent) {
  const __m512 e = exp2(_mm512_mul_ps(exponent, _mm512_set1_ps(-kLog2E)));
  return _mm512_mul_ps(x, _mm512_rcp14_ps(_mm512_add_ps(_mm512_set1_ps(1.0f), e)));
}

// By the number that Python gives it: kernels/cpu/matrix.py.
enum Activation : std::int64_t { kNone = 0, kSilu = 1, kGelu = 2, kGeluTanh = 3 };

inline __m512 activate(__m512 x, std::int64_t kind) {
  if (kind == kSilu) return gated_by_sigmoid(x, x);
  if (kind == kGeluTanh) {  // tanh(u) = 2 · sigmoid(2u) − 1
    const __m512 cube = _mm512_mul_ps(_mm512_mul_ps(x, x), x);
    const __m512 inner = _mm512_fmadd_ps(cube, _mm512_set1_ps(0.044715f), x);
    return gated_by_sigmoid(x, _mm512_mul_ps(inner, _mm512_set1_ps(1.5957691216f)));  // 2 · sqrt(2 / π)
  }
  alignas(64) float lanes[kLanes];
  _mm512_store_ps(lanes, x);
  for (float &lane : lanes) lane = 0.5f * lane * (1.0f + erff(lane * 0.70710678f));
  return _mm512_load_ps(lanes);
}

// For a permutation of 32 words: of the lower and of the upper half in turn.
inline __m512i in_turn_of_halves() {
  alignas(64) std::uint16_t order[32];
  for (int i = 0; i < 16; ++i) {
    order[2 * i] = static_cast<std::uint16_t>(i);
    order[2 * i + 1] = static_cast<std::uint16_t>(16 + i);
  }
  return _mm512_load_si512(order);
}

// Rows of 16 dwords to columns.
inline void transpose(__m512i rows[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    rows[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    rows[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    rows[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    rows[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    rows[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    rows[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    rows[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    rows[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

// Of two vectors, the sums of neighbouring quarters.
inline __m512 sums_of_quarters(__m512 a, __m512 b) {
  return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

// Of each of 8 vectors two partial sums: of the first 4 vectors one and the other, then of the last 4.
inline __m512 half_sums_of(const __m512 v[8]) {
  __m512 quads[2];
  for (int i = 0; i < 2; ++i) {
    const __m512 *p = v + 4 * i;
    const __m512 a = _mm512_add_ps(_mm512_unpacklo_ps(p[0], p[1]), _mm512_unpackhi_ps(p[0], p[1]));
    const __m512 b = _mm512_add_ps(_mm512_unpacklo_ps(p[2], p[3]), _mm512_unpackhi_ps(p[2], p[3]));
    const __m512d c = _mm512_castps_pd(a), d = _mm512_castps_pd(b);
    quads[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(c, d)), _mm512_castpd_ps(_mm512_unpackhi_pd(c, d)));
  }
  return sums_of_quarters(quads[0], quads[1]);
}

// The sum of each of 16 vectors, or of 8, in their order.
inline __m512 sums_of(const __m512 v[16]) { return sums_of_quarters(half_sums_of(v), half_sums_of(v + 8)); }

inline __m256 sums_of_eight(const __m512 v[8]) {
  const __m512 halves = half_sums_of(v);
  return _mm512_castps512_ps256(sums_of_quarters(halves, halves));
}

#ifdef __AMX_BF16__
constexpr bool kCompiledForTiles = true;

// Eight tiles of 16 rows of 64 bytes, for the calling thread, until it goes out of scope.
class Tiles {
 public:
  Tiles() {
    alignas(64) std::uint8_t config[64] = {};
    config[0] = 1;
    for (int tile = 0; tile < 8; ++tile) {
      config[16 + 2 * tile] = 64;
      config[48 + tile] = 16;
    }
    asm volatile("" : : "r"(config) : "memory");  // GCC's own function says that it reads only 8 of these bytes
    _tile_loadconfig(config);
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles &) = delete;
};

// Linux gives the tiles' registers to a process that asks. Every processor that has them has arithmetic in float16 too,
// unless a virtual machine hides it.
inline bool may_use_tiles() {
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || !(edx & 1u << 23 /* AVX512-FP16 */)) return false;
  static const bool permitted = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */) == 0;
  return permitted;
}
#else
constexpr bool kCompiledForTiles = false;
inline bool may_use_tiles() { return false; }
#endif

}  // namespace asyncllm
