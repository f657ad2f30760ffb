// Steps that follow one another in one call, each with the tokens that the one before has drawn. Other threads ask for
// them while it computes, and are told of each that is done.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <immintrin.h>
#include <sched.h>
#include <semaphore.h>

namespace asyncllm {

using std::int64_t;

// Of kernels/cpu/further.py, field by field.
struct Further {
  static constexpr std::uint64_t kEnded = std::uint64_t{1} << 63;
  static constexpr int kSpins = 500;  // some 25 microseconds

  std::atomic<std::uint64_t> asked;  // steps of the call, the first among them; with `kEnded`, there will be no more
  std::atomic<std::uint64_t> done;
  int64_t most;          // steps of a call
  int64_t tokens;        // of a step
  int64_t drawn;         // tokens that it draws
  const int64_t *order;  // [tokens] which of those drawn is the next of each
  int64_t *ids, *positions;  // [tokens] of the step
  std::int32_t *kept;        // [most, drawn]
  sem_t *told;               // posted to for each step that is done
  std::atomic<int64_t> owed;  // 1: not yet posted to

  // From any thread: one more step; false where it is too late for that.
  bool ask() {
    std::uint64_t now = asked.load(std::memory_order_relaxed);
    while (!(now & kEnded)) {
      if (asked.compare_exchange_weak(now, now + 1)) return true;
    }
    return false;
  }

  void end() { asked.fetch_or(kEnded); }

  // The call is over, and has computed so many steps: the last of them is taken back if it is not done.
  void close(int64_t steps, std::int32_t *found) {
    end();
    post();
    const auto finished = static_cast<int64_t>(done.load(std::memory_order_relaxed));
    if (finished && finished < steps) go_back(found);
  }

  // Tells of the last step that is done, if nobody has.
  void post() {
    if (!owed.load(std::memory_order_relaxed)) return;
    sem_post(told);
    owed.store(0, std::memory_order_release);
  }

  // By each thread of a step's team, before it joins: one of them tells of the step before. Whoever hears of it wants
  // the processor of any of them, and gets it now. Later on, the others would wait for what the thread has begun.
  void give_way(bool posts) {
    if (!owed.load(std::memory_order_relaxed)) return;
    if (posts) post();
    for (int spins = 0; spins < kSpins && owed.load(std::memory_order_acquire); ++spins) _mm_pause();
    sched_yield();
  }

  // A step has drawn these: notes it, and whether there is another to compute, which then is the step. One with a
  // token that is none is not told of.
  bool finish(const std::int32_t *found) {
    const std::uint64_t step = done.load(std::memory_order_relaxed);
    if (std::any_of(found, found + drawn, [](std::int32_t token) { return token < 0; })) return false;
    std::memcpy(kept + static_cast<int64_t>(step) * drawn, found, sizeof(*found) * drawn);
    done.store(step + 1, std::memory_order_release);
    owed.store(1);
    if (static_cast<int64_t>(step) + 1 >= most) return false;
    std::uint64_t last = step + 1;
    if (asked.compare_exchange_strong(last, last | kEnded) || (last & kEnded)) return false;
    for (int64_t i = 0; i < tokens; ++i) {
      ids[i] = found[order[i]];
      ++positions[i];
    }
    return true;
  }

  // A step is not done after all: all is left as the one before it has.
  void go_back(std::int32_t *found) {
    const auto steps = static_cast<int64_t>(done.load(std::memory_order_relaxed));
    std::memcpy(found, kept + (steps - 1) * drawn, sizeof(*found) * drawn);
    for (int64_t i = 0; i < tokens; ++i) --positions[i];
  }
};

}  // namespace asyncllm
