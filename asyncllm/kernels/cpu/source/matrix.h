// Packed weights, and the rows that products with them take (vector_product.h, tile_product.h).
//
// A matrix is cut into blocks of 16 output features by 32 input features, a group of columns with a scale and a zero
// for each feature. The blocks of 16 features follow each other along the input, so that a thread reads its part of a
// matrix as one piece. A block is, by the bits of a weight:
//
//   4, 8   codes from 0 on, then 16 scales and 16 zeros in float16: weight = (code * scale + zero) * unit. A lane of 32
//          bits has neighbouring codes of one feature: of 4 bits those of 8 inputs, 0 2 4 6 in the lower half from the
//          lowest bits on and 1 3 5 7 in the upper one; of 8 bits those of 4 inputs, byte by byte 0 2 1 3. So a shift
//          and a mask make a pair of neighbours for the matrix unit, or four bytes for integer products.
//   16     bfloat16, each pair of inputs of a feature as a lane.
//
// Few rows are multiplied as integers, whose sums are exact: a row's group of 32 is rounded to 16 bits, so that the error
// is that of float32 sums. By AVX2 that takes nearly twice as long as 8 bits, so of a row for 4-bit codes only some groups
// have 16: those with a number that is large for its row, which with 8 would bear most of the error. Many rows are
// multiplied in the processor's matrix unit, in bfloat16, where it has one; weights become bfloat16 on their way there.
#pragma once

#include <algorithm>

#include "simd.h"
#include "team.h"

namespace asyncllm {

constexpr int64_t kGroup = 32;     // inputs that share a scale and a zero
constexpr int64_t kFeatures = 16;  // outputs of a block
constexpr int64_t kFewRows = 4;    // multiplied as integers even where there is a matrix unit

// As kernels/cpu/matrix.py writes it.
struct Matrix {
  const std::uint8_t *blocks;
  const float *bias;  // of each output; null: none
  int64_t outputs;    // with an activation, blocks of 16 of the gate and of what is gated take turns
  int64_t inputs;
  int64_t bits;
  int64_t activation;
  double unit;  // a power of two: what scales and zeros are multiples of

  int64_t groups() const { return inputs / kGroup; }
  int64_t block_bytes() const { return kFeatures * kGroup * bits / 8 + (bits < 16 ? 4 * kFeatures : 0); }
  const std::uint8_t *block(int64_t feature_block, int64_t group) const {
    return blocks + (feature_block * groups() + group) * block_bytes();
  }

  // Some of its outputs, which a product with them makes as one with all does. Multiples of 16; without an activation.
  Matrix part(int64_t first, int64_t count) const {
    Matrix some = *this;
    some.blocks = block(first / kFeatures, 0);
    some.bias = bias ? bias + first : nullptr;
    some.outputs = count;
    return some;
  }
};

// Where a product goes.
struct Output {
  enum Kind { kStore, kStoreFloat, kAddFloat } kind;
  void *rows;
  int64_t stride;        // elements of a row
  float factor = 1.0f;   // of what is stored in bfloat16

  template <Kind As>
  void put(int64_t row, int64_t column, Floats value) const {
    if (As == kStore) {
      return store_bf16(static_cast<bf16 *>(rows) + row * stride + column, value * every(factor));
    }
    float *to = static_cast<float *>(rows) + row * stride + column;
    store(to, As == kAddFloat ? value + load(to) : value);
  }

  void take(int64_t row, int64_t column, Floats value) const {
    if (kind == kStore) return put<kStore>(row, column, value);
    if (kind == kStoreFloat) return put<kStoreFloat>(row, column, value);
    put<kAddFloat>(row, column, value);
  }

  // Asks for what is going to be added to: other threads have read it, or it has left the nearest cache.
  void expect(int64_t row, int64_t column, int64_t count) const {
    if (kind != kAddFloat) return;
    const float *at = static_cast<const float *>(rows) + row * stride + column;
    for (int64_t i = 0; i < count; i += kLanes) prefetch_to_write(at + i);
  }
};

// How the rows of a product's input are held: as integers, of two bytes in the order of 4-bit or of 8-bit codes, or of
// words, some of which are bytes; in bfloat16; or so, but times `kRaise`, for weights that tile_product.h makes of codes.
enum class Form { kNibbles, kBytes, kWords, kMixed, kBfloat16, kRaised };

constexpr float kRaise = 16777216.0f;  // 2^24

inline Form form_of(const Matrix &matrix, int64_t rows, bool tiles) {
  if (matrix.bits == 16) return Form::kBfloat16;
  if (tiles && rows > kFewRows) return Form::kRaised;
#ifdef ASYNCLLM_AVX512
  return matrix.bits == 4 ? Form::kNibbles : Form::kBytes;
#else
  return matrix.bits == 4 ? Form::kMixed : Form::kWords;
#endif
}

inline bool holds_integers(Form form) { return form != Form::kBfloat16 && form != Form::kRaised; }

// What bfloat16 values are multiplied by, in this form.
inline float factor_of(Form form) { return form == Form::kRaised ? kRaise : 1.0f; }

// A row of integers: upper bytes and lower bytes, or words; then of each group the scale, and the sum of what the
// integers stand for. By AVX2, behind that: the integers as bytes, and of each group whether these do not hold them.
struct IntegerRow {
  int64_t scales, sums, bytes, fine, end;  // where they begin

  explicit IntegerRow(int64_t inputs)
      : scales(2 * inputs),
        sums(scales + 4 * (inputs / kGroup)),
        bytes(sums + 4 * (inputs / kGroup)),
        fine(kCompiledForAvx512 ? bytes : bytes + inputs),
        end(kCompiledForAvx512 ? bytes : (fine + inputs / kGroup + 7) / 8 * 8) {}
};

inline int64_t integer_row_bytes(int64_t inputs) { return IntegerRow(inputs).end; }

inline int64_t row_bytes(Form form, int64_t inputs) {
  return holds_integers(form) ? integer_row_bytes(inputs) : 2 * inputs;
}

#ifdef ASYNCLLM_AVX512
// 16 integers from `at` on, as their upper and their lower bytes.
inline void store_integers(Form form, std::uint8_t *row, int64_t inputs, int64_t at, Ints whole) {
  const __m128i order = form == Form::kNibbles ? _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15)
                                               : _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
  const __m512i lower = _mm512_srai_epi32(_mm512_slli_epi32(whole, 24), 24);
  const __m512i upper = _mm512_srai_epi32(_mm512_sub_epi32(whole, lower), 8);
  _mm_storeu_si128((__m128i *)(row + at), _mm_shuffle_epi8(_mm512_cvtepi32_epi8(upper), order));
  _mm_storeu_si128((__m128i *)(row + inputs + at), _mm_shuffle_epi8(_mm512_cvtepi32_epi8(lower), order));
}
#else
inline void store_integers(Form form, std::uint8_t *row, int64_t inputs, int64_t at, Ints whole) {
  const __m256i words = to_words(whole);
  _mm256_storeu_si256((__m256i *)(row + 2 * at), words);
  if (form != Form::kMixed) return;
  const __m128i order = _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128((__m128i *)(row + IntegerRow(inputs).bytes + at), _mm_shuffle_epi8(bytes, order));
}
#endif

// Groups whose largest number is at most `ordinary` have bytes.
inline void put_integers(Form form, std::uint8_t *row, int64_t inputs, int64_t group, Floats low, Floats high,
                         float ordinary) {
  constexpr float kByte = 127.0f;
  constexpr float kWord = 32512.0f;  // its upper byte, once the lower one is taken off as a signed one, is at most 127
  const IntegerRow parts(inputs);
  const float most = largest_of(larger(magnitude(low), magnitude(high)));
  const float largest = most <= ordinary ? kByte : kWord;
  const Floats factor = every(most > 0.0f ? largest / most : 0.0f);
  const Ints first = to_ints(low * factor), second = to_ints(high * factor);
  store_integers(form, row, inputs, group * kGroup, first);
  store_integers(form, row, inputs, group * kGroup + kLanes, second);
  if (form == Form::kMixed) row[parts.fine + group] = largest != kByte;
  const float scale = unordered(low, high) ? NAN : most / largest;  // what is not a number stays so
  reinterpret_cast<float *>(row + parts.scales)[group] = scale;
  reinterpret_cast<float *>(row + parts.sums)[group] = scale * static_cast<float>(sum_of(first, second));
}

// The root of the mean of squares of a row, of which `source(column)` gives 16 values.
template <class Source>
inline float root_mean_square(Source &&source, int64_t size, float eps = 0.0f) {
  Floats squares = zeros();
  for (int64_t i = 0; i < size; i += kLanes) {
    const Floats x = source(i);
    squares = multiply_add(x, x, squares);
  }
  return std::sqrt(sum_of(squares) / static_cast<float>(size) + eps);
}

constexpr float kOrdinary = 6.0f;  // as in matrix.py

// A row in the form that a product takes.
template <class Source>
inline void put_row(Form form, std::uint8_t *to, int64_t inputs, Source &&source) {
  const Floats factor = every(factor_of(form));
  const float ordinary = form == Form::kMixed ? kOrdinary * root_mean_square(source, inputs) : 0.0f;
  for (int64_t column = 0; column < inputs; column += kGroup) {
    const Floats low = source(column), high = source(column + kLanes);
    if (holds_integers(form)) {
      put_integers(form, to, inputs, column / kGroup, low, high, ordinary);
    } else {
      store_bf16(reinterpret_cast<bf16 *>(to) + column, low * factor);
      store_bf16(reinterpret_cast<bf16 *>(to) + column + kLanes, high * factor);
    }
  }
}

// RMSNorm of a row, of which `source(column)` gives 16 values, with weights in bfloat16.
template <class Source>
inline void put_normed(Form form, std::uint8_t *to, Source &&source, const bf16 *weight, int64_t size, float eps) {
  const Floats scale = every(1.0f / root_mean_square(source, size, eps));
  put_row(form, to, size, [&](int64_t i) { return source(i) * scale * load_bf16(weight + i); });
}

// The rows of a product's input, as all threads of a team see them.
struct Rows {
  Form form;
  const std::uint8_t *data;
  int64_t stride;  // bytes of a row

  const std::uint8_t *tile(int64_t row, int64_t group) const { return data + row * stride + group * 2 * kGroup; }

  void expect(int64_t rows, int64_t group) const {
    for (int64_t row = 0; row < rows; ++row) prefetch(tile(row, group));
  }
};

// What a product gives for one block of a row: `gate` is that of the block before.
inline void finish(const Matrix &w, const Output &output, int64_t row, int64_t block, Floats gate, Floats value) {
  if (w.bias) value = value + load(w.bias + block * kFeatures);
  if (w.activation == kNone) return output.take(row, block * kFeatures, value);
  if (w.bias) gate = gate + load(w.bias + (block - 1) * kFeatures);
  output.take(row, block / 2 * kFeatures, activate(gate, w.activation) * value);
}

// Asks for what is read some time later: the processor's own prefetcher stops at the end of each 4096 bytes. What lies
// behind a matrix is the next one.
inline void prefetch_lines(const std::uint8_t *at, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) prefetch(at + i);
}

constexpr int64_t kBytesAhead = 5120;
constexpr int64_t kBytesFarAhead = 12288;

// Asks for a group's weights, of those far ahead for a few lines only: processors foresee what follows these, but not
// beyond a page, and have room for few lines that are asked for one by one.
inline void prefetch_group(const std::uint8_t *at, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 256) prefetch_next(at + kBytesFarAhead + i);
  prefetch_lines(at + kBytesAhead, bytes);
}

}  // namespace asyncllm
