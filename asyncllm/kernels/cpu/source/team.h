// Threads of a kernel: the team of the OpenMP runtime that torch has loaded, so that no second one competes with it.
#pragma once

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

// Waits for all threads of a team. They spin, since a kernel's phases take microseconds, and yield where that is long.
class Barrier {
 public:
  void wait(int64_t threads) {
    if (threads == 1) return;
    const unsigned now = generation_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
      arrived_.store(0, std::memory_order_relaxed);
      generation_.store(now + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; generation_.load(std::memory_order_acquire) == now; ++spins) {
      if (spins < kSpins) {
        _mm_pause();
      } else {
        sched_yield();
      }
    }
  }

 private:
  static constexpr int kSpins = 4000;
  alignas(64) std::atomic<int64_t> arrived_{0};
  alignas(64) std::atomic<unsigned> generation_{0};
};

struct Range {
  int64_t begin, end;
};

// One thread's view of its team.
struct Team {
  int64_t thread, threads;
  Barrier *barrier;

  void wait() const { barrier->wait(threads); }

  // This thread's part of `count` things that cost the same, and follow each other in memory.
  Range share(int64_t count) const { return {count * thread / threads, count * (thread + 1) / threads}; }
};

// Calls `function(team)` on each thread of a team of at most `threads`.
template <class Function>
void run_team(int64_t threads, Function &&function) {
  struct Call {
    Function *function;
    Barrier barrier;
  } call{&function, {}};
  if (threads <= 1) {
    function(Team{0, 1, &call.barrier});
    return;
  }
  GOMP_parallel(
      [](void *data) {
        Call &call = *static_cast<Call *>(data);
        (*call.function)(Team{omp_get_thread_num(), omp_get_num_threads(), &call.barrier});
      },
      &call, static_cast<unsigned>(threads), 0);
}

}  // namespace asyncllm
