// Philox4x32-10, a counter-based generator: the draw is a function of key and counter.
//
// Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
#pragma once

#include <cstdint>

namespace asyncllm {

// The first of four words.
inline std::uint32_t philox(std::uint32_t c0, std::uint32_t c1, std::uint32_t c2, std::uint32_t c3, std::uint32_t k0,
                            std::uint32_t k1) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t first = std::uint64_t{0xD2511F53} * c0, second = std::uint64_t{0xCD9E8D57} * c2;
    c0 = static_cast<std::uint32_t>(second >> 32) ^ c1 ^ k0;
    c1 = static_cast<std::uint32_t>(second);
    c2 = static_cast<std::uint32_t>(first >> 32) ^ c3 ^ k1;
    c3 = static_cast<std::uint32_t>(first);
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
  return c0;
}

// A number of (0, 1]; see kernels/cpu/draw.py.
inline float uniform(std::uint64_t seed, std::uint64_t position, std::uint64_t choice, std::uint64_t stream) {
  const auto low = [](std::uint64_t value) { return static_cast<std::uint32_t>(value); };
  const std::uint32_t word =
      philox(low(position), low(position >> 32), low(choice), low(stream), low(seed), low(seed >> 32));
  return (static_cast<float>(word >> 8) + 0.5f) * 0x1p-24f;
}

}  // namespace asyncllm
