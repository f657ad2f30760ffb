// x Wᵀ + b, and what follows it, by a team of threads.
#pragma once

#include "tile_product.h"
#include "vector_product.h"

namespace asyncllm {

// Each thread takes a part of the features. `scratch` is its own, of `kProductScratchBytes`. `between(blocks)` is called
// for each few blocks of weights: it may ask for what comes next.
template <class Between>
inline void multiply(const Team &team, const Matrix &w, const Rows &x, int64_t rows, const Output &output, bool tiles,
                     std::uint8_t *scratch, Between &&between) {
#ifdef ASYNCLLM_AMX
  if (tiles && rows > kFewRows) return multiply_by_tiles(team, w, x, rows, output, scratch, between);
#endif
  multiply_by_vectors(team, w, x, rows, output, between);
}

}  // namespace asyncllm
