// Vectors of 16 float32, and what bfloat16 needs.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__) && \
    defined(__AVX512VNNI__) && defined(__AVX512BF16__)
#define ASYNCLLM_AVX512
#elif !defined(__AVX2__) || !defined(__FMA__) || !defined(__F16C__)
#error "these kernels need AVX2 with FMA and F16C"
#endif
#if defined(ASYNCLLM_AVX512) && defined(__AMX_BF16__)
#define ASYNCLLM_AMX
#endif

namespace asyncllm {

using bf16 = std::uint16_t;
constexpr std::int64_t kLanes = 16;
#ifdef ASYNCLLM_AVX512
constexpr bool kCompiledForAvx512 = true;
#else
constexpr bool kCompiledForAvx512 = false;
#endif

}  // namespace asyncllm

#ifdef ASYNCLLM_AVX512
#include "avx512.h"
#else
#include "avx2.h"
#endif

namespace asyncllm {

// Into the nearest, or the next cache. Not the compiler's own function, which it leaves out with what only calls it.
inline void prefetch(const void *line) { asm volatile("prefetcht0 %0" : : "m"(*static_cast<const char *>(line))); }
inline void prefetch_next(const void *line) { asm volatile("prefetcht1 %0" : : "m"(*static_cast<const char *>(line))); }
inline void prefetch_to_write(const void *line) {
  asm volatile("prefetchw %0" : : "m"(*static_cast<const char *>(line)));
}

// 2^x, to about 2^-23; 0 where that would be a denormal number, which processors take a hundred times as long to make.
inline Floats exp2(Floats x) {
  const Floats part = above_whole(x);
  // of polynomials that are 1 at 0, the one with the least relative error up to 1
  Floats sum = every(1.8671302e-3f);
  sum = multiply_add(sum, part, every(9.0170298e-3f));
  sum = multiply_add(sum, part, every(5.5799913e-2f));
  sum = multiply_add(sum, part, every(2.4016444e-1f));
  sum = multiply_add(sum, part, every(6.9315130e-1f));
  sum = multiply_add(sum, part, every(1.0f));
  return times_power(sum, x);
}

constexpr float kLog2E = 1.44269504f;

// x / (1 + e^-exponent), to about 2^-14: what comes of it has 8 bits.
inline Floats gated_by_sigmoid(Floats x, Floats exponent) {
  return x * about_inverse(every(1.0f) + exp2(exponent * every(-kLog2E)));
}

// By the number that Python gives it: kernels/cpu/matrix.py.
enum Activation : std::int64_t { kNone = 0, kSilu = 1, kGelu = 2, kGeluTanh = 3 };

inline Floats activate(Floats x, std::int64_t kind) {
  if (kind == kSilu) return gated_by_sigmoid(x, x);
  if (kind == kGeluTanh) {  // tanh(u) = 2 · sigmoid(2u) − 1
    const Floats inner = multiply_add(x * x * x, every(0.044715f), x);
    return gated_by_sigmoid(x, inner * every(1.5957691216f));  // 2 · sqrt(2 / π)
  }
  alignas(64) float lanes[kLanes];
  store(lanes, x);
  for (float &lane : lanes) lane = 0.5f * lane * (1.0f + erff(lane * 0.70710678f));
  return load(lanes);
}

}  // namespace asyncllm
