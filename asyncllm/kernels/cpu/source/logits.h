// What follows a decoder's layers: the logits of some of a step's tokens, and the tokens that are drawn from them.
#pragma once

#include "decoder.h"
#include "draw.h"
#include "philox.h"

namespace asyncllm {

// The structures are those of kernels/cpu/decoder.py, field by field.
struct Head {
  Matrix matrix;
  const bf16 *norm;
  double eps;
};

struct Sampled {
  const Head *head;
  int64_t count;
  const int64_t *tokens;  // [count] of the step's; null: all, in their order
  float *logits;          // [count, vocabulary]; null where tokens are drawn
  // [count] of a draw: what kernels/cpu/draw.py takes, and 0 as a temperature too. Null: none is drawn.
  const float *temperature;
  const std::uint64_t *seed, *choice;
  std::int32_t *found;  // [count]

  int64_t token(int64_t row) const { return tokens ? tokens[row] : row; }
};

// One thread's part of them. Each number is what `asyncllm_product` and `asyncllm_draw` would give, to the bit.
//
// Where tokens are drawn, nobody wants all logits; of 16 rows they are a tenth of the memory that a small model's head
// is, and go to it and back. A thread makes a piece of them and weighs it while it is in the nearest cache; those of the
// tile that a token is in are made a second time.
class Sampling {
 public:
  Sampling(const Team &team, const Step &step, const Sampled &sampled, bool tiles, std::uint8_t *workspace)
      : team_(team),
        step_(step),
        sampled_(sampled),
        matrix_(sampled.head->matrix),
        tiles_(tiles),
        form_(form_of(matrix_, sampled.count, tiles)),
        stride_(row_bytes(form_, matrix_.inputs)),
        input_(workspace),
        weighed_(reinterpret_cast<float *>(workspace + input_bytes(sampled))),
        scratch_(workspace + input_bytes(sampled) + weighed_bytes(sampled) + team.thread * own_bytes(sampled)),
        piece_(reinterpret_cast<float *>(scratch_ + kProductScratchBytes)) {}

  static int64_t workspace_bytes(const Sampled &sampled, int64_t threads) {
    return input_bytes(sampled) + weighed_bytes(sampled) + threads * own_bytes(sampled);
  }

  // The layers have left the stream in the step's `residual`.
  void run() {
    team_.for_each(sampled_.count, [&](int64_t row) { put_input(row); });
    team_.wait();
    if (!sampled_.temperature) return multiply_by_head();
    const int64_t pieces = (matrix_.outputs + kDrawPiece - 1) / kDrawPiece;
    team_.for_each(pieces, [&](int64_t piece) { weigh_piece(piece * kDrawPiece); });
    team_.wait();
    team_.for_each(sampled_.count,
                   [&](int64_t row) { sampled_.found[row] = static_cast<std::int32_t>(draw_again(row)); });
  }

 private:
  static constexpr int64_t kRowsAgain = 16;  // that the matrix unit multiplies at once, of which one is wanted

  static int64_t input_bytes(const Sampled &sampled) {
    const int64_t padded = (sampled.count + 31) / 32 * 32;
    return (padded * integer_row_bytes(sampled.head->matrix.inputs) + 63) / 64 * 64;
  }

  static int64_t weighed_bytes(const Sampled &sampled) {
    return sampled.count * 4 * DrawTiles::floats(sampled.head->matrix.outputs);
  }

  static int64_t own_bytes(const Sampled &sampled) {
    return (kProductScratchBytes + 63) / 64 * 64 + 4 * kDrawPiece * sampled.count;
  }

  Temperature temperature(int64_t row) const { return Temperature(sampled_.temperature[row]); }

  DrawTiles weighed(int64_t row) const {
    return DrawTiles::in(weighed_ + row * DrawTiles::floats(matrix_.outputs), matrix_.outputs);
  }

  void put_input(int64_t row) {
    const Head &head = *sampled_.head;
    const bf16 *from = step_.residual + sampled_.token(row) * matrix_.inputs;
    put_normed(form_, input_ + row * stride_, [&](int64_t i) { return load_bf16(from + i); }, head.norm, matrix_.inputs,
               static_cast<float>(head.eps));
  }

  void multiply_by_head() {
    multiply(team_, matrix_, {form_, input_, stride_}, sampled_.count,
             {Output::kStoreFloat, sampled_.logits, matrix_.outputs}, tiles_, scratch_, [](int64_t) {});
  }

  // Up to `most` logits from token `first` on, of `rows` rows from `row` on, which lie `most` apart. Returns how many.
  int64_t make_piece(int64_t row, int64_t rows, int64_t first, int64_t most) {
    const int64_t count = std::min(most, matrix_.outputs - first);
    multiply(Team{0, 1}, matrix_.part(first, count), {form_, input_ + row * stride_, stride_}, rows,
             {Output::kStoreFloat, piece_, most}, tiles_, scratch_, [](int64_t) {});
    return count;
  }

  void weigh_piece(int64_t first) {
    const int64_t count = make_piece(0, sampled_.count, first, kDrawPiece);
    for (int64_t row = 0; row < sampled_.count; ++row) {
      weigh(piece_ + row * kDrawPiece, count, temperature(row), weighed(row), first / kDrawTile);
    }
  }

  int64_t draw_again(int64_t row) {
    const auto position = static_cast<std::uint64_t>(step_.positions[sampled_.token(row)] + 1);
    const float share = uniform(sampled_.seed[row], position, sampled_.choice[row], 0);
    const Choice choice = choose_tile(weighed(row), temperature(row), share);
    if (choice.tile < 0) return -1;
    const int64_t rows = std::min(sampled_.count, kRowsAgain), first = std::min(row, sampled_.count - rows);
    const int64_t count = make_piece(first, rows, choice.tile * kDrawTile, kDrawTile);
    return choose_token(choice, piece_ + (row - first) * kDrawTile, count, temperature(row));
  }

  const Team team_;
  const Step &step_;
  const Sampled &sampled_;
  const Matrix &matrix_;
  const bool tiles_;
  const Form form_;
  const int64_t stride_;
  std::uint8_t *input_;  // [count] of the product
  float *weighed_;       // [count] tiles of each row
  std::uint8_t *scratch_;
  float *piece_;  // [count, kDrawPiece] logits, or [kRowsAgain, kDrawTile]
};

}  // namespace asyncllm
