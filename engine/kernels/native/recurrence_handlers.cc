// XLA's doors to the recurrences: shapes and places are checked, pointers made, work split.
#include <algorithm>
#include <atomic>
#include <new>

#include "handlers.h"
#include "parallel.h"

namespace ffi = xla::ffi;

namespace kvarts {
namespace {

using Indexes = ffi::BufferR1<ffi::S32>;

// Reads the rows of a step. Places are data of the program: what they name is looked at before it is
// touched. Returns what is wrong, if anything.
const char* read_rows(const Indexes& positions, const Indexes& units, int64_t num_decodes, int64_t num_units, Rows* rows) {
  *rows = Rows{(int64_t)positions.element_count(), num_decodes, positions.typed_data(), units.typed_data()};
  if (num_decodes < 0 || num_decodes > rows->num_tokens || (int64_t)units.element_count() != rows->count())
    return "recurrence: shapes differ";
  for (int64_t row = 0; row < rows->count(); ++row)
    if (rows->units[row] < 0 || rows->units[row] >= num_units) return "recurrence: a state is out of range";
  return nullptr;
}

// Splits the work so that each piece is worth waking a thread.
template <typename Work>
ffi::Error share(ffi::ThreadPool pool, const Work& work, int64_t operations, bool (*run)(const Work&, int64_t, int64_t)) {
  const int64_t units = work.work(), threads = std::max<int64_t>(1, pool.num_threads());
  const int64_t grain = operations < kWorthSharing ? units : units / (8 * threads);
  std::atomic<bool> has_memory{true};
  parallel_for(pool, units, grain, [work, run, &has_memory](int64_t first, int64_t end) noexcept {
    if (!run(work, first, end)) has_memory = false;
  });
  return has_memory ? ffi::Error::Success() : out_of_memory();
}

ffi::Error Convolve(ffi::ThreadPool pool, ffi::BufferR2<ffi::F32> x, ffi::BufferR2<ffi::F32> kernel, Indexes positions,
                    Indexes units, ffi::BufferR3<ffi::F32>, ffi::ResultBufferR2<ffi::F32> y,
                    ffi::ResultBufferR3<ffi::F32> states, int64_t num_decodes) try {
  Convolution a;
  if (const char* wrong = read_rows(positions, units, num_decodes, states->dimensions()[0], &a.rows)) return invalid(wrong);
  a.channels = x.dimensions()[1];
  a.taps = kernel.dimensions()[1];
  a.x = x.typed_data();
  a.kernel = kernel.typed_data();
  a.y = y->typed_data();
  a.states = states->typed_data();
  if (a.taps < 2 || kernel.dimensions()[0] != a.channels || x.dimensions()[0] != a.rows.num_tokens ||
      y->element_count() != x.element_count() || states->dimensions()[1] != a.taps - 1 ||
      states->dimensions()[2] != a.channels)
    return invalid("convolve: shapes differ");
  return share(pool, a, a.rows.num_tokens * a.channels * a.taps, chosen().convolve);
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

ffi::Error Recur(ffi::ThreadPool pool, ffi::BufferR3<ffi::F32> q, ffi::BufferR3<ffi::F32> k, ffi::BufferR3<ffi::F32> v,
                 ffi::BufferR2<ffi::F32> decays, ffi::BufferR2<ffi::F32> strengths, Indexes positions, Indexes units,
                 ffi::BufferR4<ffi::F32>, ffi::ResultBufferR3<ffi::F32> y, ffi::ResultBufferR4<ffi::F32> states,
                 int64_t num_decodes, bool is_delta, bool is_interleaved) try {
  Recurrence a;
  if (const char* wrong = read_rows(positions, units, num_decodes, states->dimensions()[0], &a.rows)) return invalid(wrong);
  const int64_t num = a.rows.num_tokens;
  a.is_delta = is_delta;
  a.is_interleaved = is_interleaved;
  a.heads = v.dimensions()[1];
  a.groups = q.dimensions()[1];
  a.keys = q.dimensions()[2];
  a.values = v.dimensions()[2];
  a.q = q.typed_data();
  a.k = k.typed_data();
  a.v = v.typed_data();
  a.a = decays.typed_data();
  a.b = strengths.typed_data();
  a.y = y->typed_data();
  a.states = states->typed_data();
  const int64_t per_head = num * a.heads;
  if (a.groups < 1 || a.heads % a.groups || (int64_t)q.element_count() != num * a.groups * a.keys ||
      k.element_count() != q.element_count() || (int64_t)v.element_count() != per_head * a.values ||
      y->element_count() != v.element_count() || (int64_t)decays.element_count() != per_head ||
      (int64_t)strengths.element_count() != per_head || states->dimensions()[1] != a.heads ||
      states->dimensions()[2] != a.keys || states->dimensions()[3] != a.values)
    return invalid("recur: shapes differ");
  return share(pool, a, per_head * a.keys * a.values, chosen().recur);
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

}  // namespace
}  // namespace kvarts

// What jax looks up by name; all else is hidden.
#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(kvarts_convolve, kvarts::Convolve,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::BufferR2<ffi::F32>>()
                                  .Arg<ffi::BufferR2<ffi::F32>>()
                                  .Arg<kvarts::Indexes>()
                                  .Arg<kvarts::Indexes>()
                                  .Arg<ffi::BufferR3<ffi::F32>>()
                                  .Ret<ffi::BufferR2<ffi::F32>>()
                                  .Ret<ffi::BufferR3<ffi::F32>>()
                                  .Attr<int64_t>("num_decodes"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(kvarts_recur, kvarts::Recur,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::BufferR3<ffi::F32>>()
                                  .Arg<ffi::BufferR3<ffi::F32>>()
                                  .Arg<ffi::BufferR3<ffi::F32>>()
                                  .Arg<ffi::BufferR2<ffi::F32>>()
                                  .Arg<ffi::BufferR2<ffi::F32>>()
                                  .Arg<kvarts::Indexes>()
                                  .Arg<kvarts::Indexes>()
                                  .Arg<ffi::BufferR4<ffi::F32>>()
                                  .Ret<ffi::BufferR3<ffi::F32>>()
                                  .Ret<ffi::BufferR4<ffi::F32>>()
                                  .Attr<int64_t>("num_decodes")
                                  .Attr<bool>("is_delta")
                                  .Attr<bool>("is_interleaved"));

#pragma GCC visibility pop
