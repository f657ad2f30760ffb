// The processor's matrix unit (AMX), where there is one.
#pragma once

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "simd.h"

namespace asyncllm {

#ifdef ASYNCLLM_AMX
constexpr bool kCompiledForTiles = true;
constexpr std::int64_t kTileBytes = 1024;  // 16 rows of 64

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

#else
constexpr bool kCompiledForTiles = false;
inline bool may_use_tiles() { return false; }
#endif

}  // namespace asyncllm
