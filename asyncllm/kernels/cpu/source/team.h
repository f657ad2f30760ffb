// Threads of a kernel: the team of the OpenMP runtime that torch has loaded, so that no second one competes with it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <immintrin.h>
#include <sched.h>
#include <vector>

// Of that runtime (libgomp's interface, which LLVM's and Intel's runtimes offer too). Named here and left undefined:
// compilers would link a runtime of their own.
extern "C" void GOMP_parallel(void (*function)(void *), void *data, unsigned threads, unsigned flags);
extern "C" int omp_get_thread_num();
extern "C" int omp_get_num_threads();

namespace asyncllm {

using std::int64_t;

// Waits for all threads that have joined a team. They spin, since a kernel's phases take microseconds, and yield where
// that is long: one of them does not run then, because others use its processor.
class Barrier {
 public:
  // Ticks of the processor's clock that threads have waited beyond the spinning, all together.
  std::uint64_t stalled() const { return stalled_.load(std::memory_order_relaxed); }

  // From now on others wait for this thread too. Returns how often they have waited before.
  std::uint64_t join() { return state_.fetch_add(kMember, std::memory_order_acq_rel) / kTurn; }

  // For `least` threads, if no more have joined.
  void wait(int64_t least) {
    std::uint64_t state = state_.fetch_add(1, std::memory_order_acq_rel) + 1;
    const std::uint64_t now = state / kTurn;
    const auto joined = [&] { return state % kTurn / kMember; };
    while (state / kTurn == now && state % kMember == std::max(joined(), static_cast<std::uint64_t>(least))) {
      const std::uint64_t next = (now + 1) * kTurn + joined() * kMember;
      if (state_.compare_exchange_weak(state, next, std::memory_order_acq_rel)) return;  // else one has joined
    }
    const auto over = [&] { return state_.load(std::memory_order_acquire) / kTurn != now; };
    for (int spins = 0; spins < kSpins; ++spins) {
      if (over()) return;
      _mm_pause();
    }
    const std::uint64_t start = __rdtsc();
    while (!over()) sched_yield();
    stalled_.fetch_add(__rdtsc() - start, std::memory_order_relaxed);
  }

 private:
  static constexpr int kSpins = 1000;  // some 50 microseconds
  static constexpr std::uint64_t kMember = 1 << 16, kTurn = std::uint64_t{1} << 32;
  // of kTurn: turns; of kMember: threads that joined; threads that wait
  alignas(64) std::atomic<std::uint64_t> state_{0};
  alignas(64) std::atomic<std::uint64_t> stalled_{0};
};

struct Range {
  int64_t begin, end;

  bool empty() const { return begin >= end; }
};

// What is taken of one thread's share of what its team divides: by itself from the beginning on, by threads that are
// done with theirs from the end on. These seldom look at it, so it stays in the thread's cache. Divisions are numbered,
// and follow each other: who goes on with the next has found nothing left of the last.
class alignas(64) Share {
 public:
  // Up to `piece` things of what is left of `all`; none is left of a division before the last.
  Range take(std::uint64_t division, Range all, int64_t piece, bool from_end) {
    std::uint64_t state = state_.load(std::memory_order_relaxed);
    for (;;) {
      const std::uint64_t now = std::max(state, division * kDivision);
      const Range left{all.begin + static_cast<int64_t>(now % kBehind),
                       all.end - static_cast<int64_t>(now % kDivision / kBehind)};
      if (now / kDivision > division || left.empty()) return {0, 0};
      const int64_t count = std::min(piece, left.end - left.begin);
      const std::uint64_t next = now + static_cast<std::uint64_t>(count) * (from_end ? kBehind : 1);
      if (!state_.compare_exchange_weak(state, next, std::memory_order_relaxed)) continue;
      return from_end ? Range{left.end - count, left.end} : Range{left.begin, left.begin + count};
    }
  }

 private:
  static constexpr std::uint64_t kBehind = 1 << 21, kDivision = std::uint64_t{1} << 42;
  // of kDivision: the last one's number; of kBehind: taken from the end; taken from the beginning
  std::atomic<std::uint64_t> state_{0};
};

// How often a thread has waited, and how often its team had when it joined; what it was asked to divide.
struct Progress {
  std::uint64_t waits = 0, joined = 0, divisions = 0;
};

// One thread's view of its team. All threads go through the same waits and divisions. Those that join when some are over
// do nothing in these: they were absent.
struct Team {
  int64_t thread, threads;
  Barrier *barrier;
  Share *shares;  // of each thread
  Progress *progress;

  void wait(int64_t least = 1) const {
    if (progress->waits++ >= progress->joined && threads > 1) barrier->wait(least);
  }

  // Nobody waits for a thread before.
  void join() const {
    if (threads > 1) progress->joined = barrier->join();
  }

  bool absent() const { return progress->waits < progress->joined; }

  // This thread's share of `count` things that cost the same, and follow each other in memory.
  Range share(int64_t count) const { return share(count, thread); }

  // Calls `function(begin, end)` for pieces of this thread's share, of up to `piece` things, and then for what is left
  // of the others' shares, one by one: a thread that others hold up for a while, or that is absent, holds up the team
  // less.
  template <class Function>
  void divide(int64_t count, int64_t piece, Function &&function) const {
    if (threads == 1) return function(0, count);
    const std::uint64_t division = ++progress->divisions;
    if (absent()) return;
    for (int64_t i = 0; i < threads; ++i) {
      const int64_t whose = (thread + i) % threads;
      for (;;) {
        const Range taken = shares[whose].take(division, share(count, whose), i ? 1 : piece, i);
        if (taken.empty()) break;
        function(taken.begin, taken.end);
      }
    }
  }

  // Calls `function(i)` for each of `count` things.
  template <class Function>
  void for_each(int64_t count, Function &&function) const {
    divide(count, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) function(i);
    });
  }

  // Calls `function(i)` for each of `count` things of which the first cost most: whoever is done takes the next.
  template <class Function>
  void divide_in_order(int64_t count, Function &&function) const {
    const std::uint64_t division = ++progress->divisions;
    if (absent()) return;
    for (;;) {
      const Range taken = shares[0].take(division, {0, count}, 1, false);
      if (taken.empty()) return;
      function(taken.begin);
    }
  }

 private:
  Range share(int64_t count, int64_t whose) const { return {count * whose / threads, count * (whose + 1) / threads}; }
};

// Calls `function(team)` on each thread of a team of at most `threads`; each of them joins it first. Returns how much of
// the time the others have waited for a thread that did not run: from 0 to 1.
template <class Function>
double run_team(int64_t threads, Function &&function) {
  struct Call {
    Function *function;
    Barrier barrier;
    std::vector<Share> shares;
  } call{&function, {}, std::vector<Share>(std::max<int64_t>(1, threads))};
  if (threads <= 1) {
    Progress progress;
    function(Team{0, 1, &call.barrier, call.shares.data(), &progress});
    return 0.0;
  }
  const std::uint64_t start = __rdtsc();
  GOMP_parallel(
      [](void *data) {
        Call &call = *static_cast<Call *>(data);
        Progress progress;
        const Team team{omp_get_thread_num(), omp_get_num_threads(), &call.barrier, call.shares.data(), &progress};
        (*call.function)(team);
        team.wait(team.threads);
      },
      &call, static_cast<unsigned>(threads), 0);
  const auto others = static_cast<double>(threads - 1), ticks = static_cast<double>(__rdtsc() - start);
  return std::min(1.0, static_cast<double>(call.barrier.stalled()) / (others * ticks));
}

}  // namespace asyncllm
