// Threads of a kernel: the team of the OpenMP runtime that torch has loaded, so that no second one competes with it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <immintrin.h>
#include <sched.h>

// Of that runtime (libgomp's interface, which LLVM's and Intel's runtimes offer too). Named here and left undefined:
// compilers would link a runtime of their own.
extern "C" void GOMP_parallel(void (*function)(void *), void *data, unsigned threads, unsigned flags);
extern "C" int omp_get_thread_num();
extern "C" int omp_get_num_threads();

namespace asyncllm {

using std::int64_t;

// Waits for all threads of a team. They spin, since a kernel's phases take microseconds, and yield where that is long:
// one of them does not run then, because others use its processor.
class Barrier {
 public:
  // `late`: threads may join a team that has begun; its first one is there.
  explicit Barrier(bool late) : late_(late), state_(late ? kMember : 0) {}

  bool late() const { return late_; }

  // Ticks of the processor's clock that threads have waited beyond the spinning, all together.
  std::uint64_t stalled() const { return stalled_.load(std::memory_order_relaxed); }

  // From now on others wait for this thread too. Returns how often they have waited before.
  std::uint64_t join() { return state_.fetch_add(kMember, std::memory_order_acq_rel) / kTurn; }

  void wait(int64_t threads) {
    if (threads == 1) return;
    std::uint64_t state = state_.fetch_add(1, std::memory_order_acq_rel) + 1;
    const std::uint64_t now = state / kTurn;
    while (state / kTurn == now && state % kMember == (late_ ? state % kTurn / kMember : threads)) {
      const std::uint64_t next = (now + 1) * kTurn + state % kTurn / kMember * kMember;
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
  const bool late_;
  alignas(64) std::atomic<std::uint64_t> state_;  // of kTurn: turns; of kMember: threads that joined; threads that wait
  alignas(64) std::atomic<std::uint64_t> stalled_{0};
};

struct Range {
  int64_t begin, end;
};

// What is taken of a thread's share: by itself from its beginning on, counted in the lower half, and from its end on by
// threads that are done with theirs. 0 before. Threads seldom look at those of others, which so stay in their caches.
struct alignas(64) Share {
  std::atomic<std::uint64_t> taken;
};

// How often a thread has waited, and how often its team had when it joined.
struct Progress {
  std::uint64_t waits = 0, joined = 0;
};

// One thread's view of its team.
struct Team {
  int64_t thread, threads;
  Barrier *barrier;
  Progress *progress;

  void wait() const {
    if (progress->waits++ >= progress->joined) barrier->wait(threads);
  }

  // Of a team that threads may join late, all but the first do so. What the team has done before is not theirs: they go
  // through it without doing it.
  void join() const {
    if (barrier->late() && thread) progress->joined = barrier->join();
  }

  bool absent() const { return progress->waits < progress->joined; }

  // This thread's part of what is not worth dividing where threads may be late.
  Range whole(int64_t count) const {
    if (!barrier->late()) return share(count);
    return thread ? Range{0, 0} : Range{0, count};
  }

  // This thread's part of `count` things that cost the same, and follow each other in memory.
  Range share(int64_t count) const { return share(count, thread); }

  Range share(int64_t count, int64_t whose) const { return {count * whose / threads, count * (whose + 1) / threads}; }

  // Calls `function(begin, end)` for pieces of this thread's share, of up to `piece` things, and then for what is left
  // of the others' shares, one by one: a thread that others hold up for a while holds up the team less. `shares`, of
  // each thread, are for this call alone; null: each thread has its share.
  template <class Function>
  void divide(int64_t count, int64_t piece, Share *shares, Function &&function) const {
    if (!shares || threads == 1) return function(share(count).begin, share(count).end);
    const auto take = [&](int64_t whose, std::uint64_t what) {
      const Range range = share(count, whose);
      const std::uint64_t taken = shares[whose].taken.fetch_add(what, std::memory_order_relaxed);
      const auto before = static_cast<int64_t>(taken & 0xffffffff);
      const auto behind = static_cast<int64_t>(taken >> 32);
      return Range{range.begin + before, range.end - behind};
    };
    for (;;) {
      const Range left = take(thread, static_cast<std::uint64_t>(piece));
      if (left.begin >= left.end) break;
      function(left.begin, std::min(left.begin + piece, left.end));
    }
    for (int64_t i = 1; i < threads; ++i) {
      for (;;) {
        const Range left = take((thread + i) % threads, std::uint64_t{1} << 32);
        if (left.begin >= left.end) break;
        function(left.end - 1, left.end);
      }
    }
  }
};

// Calls `function(team)` on each thread of a team of at most `threads`. Returns how much of the time the others have
// waited for a thread that did not run: from 0 to 1. `late`: it calls `join`, and nobody waits for a thread before.
template <class Function>
double run_team(int64_t threads, bool late, Function &&function) {
  struct Call {
    Function *function;
    Barrier barrier;
  } call{&function, Barrier(late)};
  if (threads <= 1) {
    Progress progress;
    function(Team{0, 1, &call.barrier, &progress});
    return 0.0;
  }
  const std::uint64_t start = __rdtsc();
  GOMP_parallel(
      [](void *data) {
        Call &call = *static_cast<Call *>(data);
        Progress progress;
        const Team team{omp_get_thread_num(), omp_get_num_threads(), &call.barrier, &progress};
        (*call.function)(team);
        team.wait();
      },
      &call, static_cast<unsigned>(threads), 0);
  const auto others = static_cast<double>(threads - 1), ticks = static_cast<double>(__rdtsc() - start);
  return std::min(1.0, static_cast<double>(call.barrier.stalled()) / (others * ticks));
}

}  // namespace asyncllm
