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
  // Ticks of the processor's clock that threads have waited beyond the spinning, all together.
  std::uint64_t stalled() const { return stalled_.load(std::memory_order_relaxed); }

  void wait(int64_t threads) {
    if (threads == 1) return;
    const unsigned now = generation_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
      arrived_.store(0, std::memory_order_relaxed);
      generation_.store(now + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; spins < kSpins; ++spins) {
      if (generation_.load(std::memory_order_acquire) != now) return;
      _mm_pause();
    }
    const std::uint64_t start = __rdtsc();
    while (generation_.load(std::memory_order_acquire) == now) sched_yield();
    stalled_.fetch_add(__rdtsc() - start, std::memory_order_relaxed);
  }

 private:
  static constexpr int kSpins = 1000;  // some 50 microseconds
  alignas(64) std::atomic<int64_t> arrived_{0};
  alignas(64) std::atomic<unsigned> generation_{0};
  std::atomic<std::uint64_t> stalled_{0};
};

struct Range {
  int64_t begin, end;
};

// What is taken of a thread's share: by itself from its beginning on, counted in the lower half, and by threads that are
// done with theirs, from its end on. 0 before. Threads seldom look at those of others, which so stay in their caches.
struct alignas(64) Share {
  std::atomic<std::uint64_t> taken;
};

// One thread's view of its team.
struct Team {
  int64_t thread, threads;
  Barrier *barrier;

  void wait() const { barrier->wait(threads); }

  // This thread's part of `count` things that cost the same, and follow each other in memory.
  Range share(int64_t count) const { return share(count, thread); }

  Range share(int64_t count, int64_t whose) const { return {count * whose / threads, count * (whose + 1) / threads}; }

  // Calls `function(begin, end)` for pieces of this thread's share, of up to `piece` things, and then for what is left of
  // the others' shares, one by one: a thread that others hold up for a while holds up the team less. `shares`, of each
  // thread, are for this call alone; null: each thread has its share.
  template <class Function>
  void divide(int64_t count, int64_t piece, Share *shares, Function &&function) const {
    if (!shares || threads == 1) return function(share(count).begin, share(count).end);
    const auto take = [&](int64_t whose, std::uint64_t what) {
      const Range range = share(count, whose);
      const std::uint64_t taken = shares[whose].taken.fetch_add(what, std::memory_order_relaxed);
      const auto before = static_cast<int64_t>(taken & 0xffffffff), behind = static_cast<int64_t>(taken >> 32);
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
// waited for a thread that did not run: from 0 to 1.
template <class Function>
double run_team(int64_t threads, Function &&function) {
  struct Call {
    Function *function;
    Barrier barrier;
  } call{&function, {}};
  if (threads <= 1) {
    function(Team{0, 1, &call.barrier});
    return 0.0;
  }
  const std::uint64_t start = __rdtsc();
  GOMP_parallel(
      [](void *data) {
        Call &call = *static_cast<Call *>(data);
        const Team team{omp_get_thread_num(), omp_get_num_threads(), &call.barrier};
        (*call.function)(team);
        team.wait();
      },
      &call, static_cast<unsigned>(threads), 0);
  const auto others = static_cast<double>(threads - 1), ticks = static_cast<double>(__rdtsc() - start);
  return std::min(1.0, static_cast<double>(call.barrier.stalled()) / (others * ticks));
}

}  // namespace asyncllm
