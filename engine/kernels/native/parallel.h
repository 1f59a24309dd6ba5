// Work split over XLA's own threads. The caller can finish everything alone, so a helper that is
// late, or never comes because the machine is busy, delays nobody.
#pragma once
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <type_traits>
#include <utility>

#include "xla/ffi/api/ffi.h"

namespace kvarts {

constexpr int kSpins = 2000;  // a few microseconds, then the caller sleeps

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Calls fn(first, end) for pieces of [0, count), each at least `grain` long but the last.
//
// fn may refer to what lives on the caller's stack: it runs only for a piece that was taken, and the
// caller returns only when all pieces are done. A helper that wakes later finds no piece left and
// touches the shared state alone. For the same reason fn must not throw, and must be trivial to
// destroy: the last helper destroys it.
template <typename Fn>
void parallel_for(xla::ffi::ThreadPool pool, int64_t count, int64_t grain, Fn fn) {
  static_assert(noexcept(fn(count, count)), "an exception would leave helpers with a dead caller");
  static_assert(std::is_trivially_destructible_v<Fn>, "it outlives the caller");
  grain = std::max<int64_t>(1, grain);
  const int64_t pieces = (count + grain - 1) / grain;
  const int64_t helpers = std::min<int64_t>(pool.num_threads(), pieces) - 1;
  if (helpers <= 0) {
    if (count > 0) fn(0, count);
    return;
  }
  // Each thread has a stretch of neighbouring pieces, whose memory the processor can fetch ahead, and
  // takes from the others' when its own is done.
  struct alignas(64) Stretch {
    std::atomic<int64_t> next;
    int64_t end;
  };
  struct State {
    State(Fn fn, int64_t count, int64_t grain, int64_t pieces, int64_t threads)
        : fn(std::move(fn)), count(count), grain(grain), pieces(pieces), threads(threads), stretches(new Stretch[threads]) {
      for (int64_t i = 0; i < threads; ++i) {
        stretches[i].next = pieces * i / threads;
        stretches[i].end = pieces * (i + 1) / threads;
      }
    }
    Fn fn;
    const int64_t count, grain, pieces, threads;
    std::unique_ptr<Stretch[]> stretches;
    std::atomic<int64_t> done{0};
    std::mutex mutex;
    std::condition_variable all_done;

    void work(int64_t thread) {
      for (int64_t i = 0; i < threads; ++i) {
        Stretch& stretch = stretches[(thread + i) % threads];
        for (int64_t piece; (piece = stretch.next.fetch_add(1)) < stretch.end;) run(piece);
      }
    }

    void run(int64_t piece) {
      fn(piece * grain, std::min(count, (piece + 1) * grain));
      if (done.fetch_add(1) + 1 == pieces) {
        std::lock_guard<std::mutex> lock(mutex);
        all_done.notify_one();
      }
    }
  };
  // Shared: a helper may wake after the caller has returned.
  auto state = std::make_shared<State>(std::move(fn), count, grain, pieces, helpers + 1);
  try {
    for (int64_t i = 1; i <= helpers; ++i) pool.Schedule([state, i] { state->work(i); });
  } catch (const std::bad_alloc&) {
    // Those that were scheduled share the work, the caller does the rest.
  }
  state->work(0);
  for (int spin = 0; spin < kSpins && state->done.load() < pieces; ++spin) relax();
  if (state->done.load() == pieces) return;
  std::unique_lock<std::mutex> lock(state->mutex);
  state->all_done.wait(lock, [&] { return state->done.load() == pieces; });
}

}  // namespace kvarts
