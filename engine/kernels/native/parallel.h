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
#include <tuple>
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

// A part of some work: fn(first, end) for pieces of [0, count), each `grain` long but the last.
template <typename Fn>
struct Stage {
  static_assert(std::is_nothrow_invocable_v<const Fn&, int64_t, int64_t>, "helpers would be left with a dead caller");
  static_assert(std::is_trivially_destructible_v<Fn>, "it outlives the caller");
  Stage(int64_t count, int64_t grain, Fn fn) : count(count), grain(std::max<int64_t>(1, grain)), fn(std::move(fn)) {}
  int64_t pieces() const { return (count + grain - 1) / grain; }
  void run(int64_t piece) const { fn(piece * grain, std::min(count, (piece + 1) * grain)); }

  int64_t count, grain;
  Fn fn;
};

// Stages that some threads do together, each begun when the one before is done.
template <typename... Fns>
class StagedWork {
 public:
  StagedWork(int64_t threads, Stage<Fns>... given)
      : threads_(threads), stages_(std::move(given)...), stretches_(new Stretch[kStages * threads]) {
    size_t stage = 0;
    const auto lay = [&](int64_t pieces) {
      pieces_[stage] = pieces;
      for (int64_t i = 0; i < threads; ++i) {
        stretches_[stage * threads + i].next = pieces * i / threads;
        stretches_[stage * threads + i].end = pieces * (i + 1) / threads;
      }
      ++stage;
    };
    std::apply([&](const auto&... each) { (lay(each.pieces()), ...); }, stages_);
  }

  // What one of the threads does. The first, the caller, returns when all is done.
  template <size_t I = 0>
  void work(int64_t thread) {
    for (int64_t i = 0; i < threads_; ++i) {
      Stretch& stretch = stretches_[I * threads_ + (thread + i) % threads_];
      for (int64_t piece; (piece = stretch.next.fetch_add(1)) < stretch.end;) {
        std::get<I>(stages_).run(piece);
        if (done_[I].fetch_add(1) + 1 < pieces_[I]) continue;
        std::lock_guard<std::mutex> lock(mutex_);
        stage_done_.notify_all();
      }
    }
    if constexpr (I + 1 < kStages) {
      wait(I);
      work<I + 1>(thread);
    } else if (thread == 0) {
      wait(I);
    }
  }

 private:
  static constexpr size_t kStages = sizeof...(Fns);

  // Each thread has a stretch of neighbouring pieces, whose memory the processor can fetch ahead, and
  // takes from the others' when its own is done.
  struct alignas(64) Stretch {
    std::atomic<int64_t> next;
    int64_t end;
  };

  // Nobody waits for a thread that has not begun: pieces that are under way are all that is left.
  void wait(size_t stage) {
    const auto is_done = [&] { return done_[stage].load() == pieces_[stage]; };
    for (int spin = 0; spin < kSpins && !is_done(); ++spin) relax();
    if (is_done()) return;
    std::unique_lock<std::mutex> lock(mutex_);
    stage_done_.wait(lock, is_done);
  }

  const int64_t threads_;
  const std::tuple<Stage<Fns>...> stages_;
  std::unique_ptr<Stretch[]> stretches_;
  int64_t pieces_[kStages];
  std::atomic<int64_t> done_[kStages] = {};
  std::mutex mutex_;
  std::condition_variable stage_done_;
};

// Does stages one after another on threads that are woken once.
//
// A stage's fn may refer to what lives on the caller's stack: it runs only for a piece that was taken,
// and the caller returns only when all pieces are done. A helper that wakes later finds no piece left and
// touches the shared state alone. For the same reason fn must not throw, and must be trivial to
// destroy: the last helper destroys it.
template <typename... Fns>
void parallel_stages(xla::ffi::ThreadPool pool, Stage<Fns>... stages) {
  const int64_t threads = std::min<int64_t>(pool.num_threads(), std::max({stages.pieces()...}));
  if (threads < 2) {
    ((stages.count > 0 ? stages.fn(0, stages.count) : void()), ...);
    return;
  }
  // Shared: a helper may wake after the caller has returned.
  auto work = std::make_shared<StagedWork<Fns...>>(threads, std::move(stages)...);
  try {
    for (int64_t i = 1; i < threads; ++i) pool.Schedule([work, i] { work->work(i); });
  } catch (const std::bad_alloc&) {
    // Those that were scheduled share the work, the caller does the rest.
  }
  work->work(0);
}

// Calls fn(first, end) for pieces of [0, count).
template <typename Fn>
void parallel_for(xla::ffi::ThreadPool pool, int64_t count, int64_t grain, Fn fn) {
  parallel_stages(pool, Stage(count, grain, std::move(fn)));
}

}  // namespace kvarts
