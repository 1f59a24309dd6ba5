// XLA's doors to the kernels: shapes are checked, pointers made, work split. Nothing throws.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#elif defined(__aarch64__)
#include <sys/sysctl.h>
#endif

#include "handlers.h"
#include "parallel.h"

namespace kvarts {
namespace portable { extern const Kernels kernels; }
#if defined(__x86_64__)
namespace avx2 { extern const Kernels kernels; }
namespace avxvnni { extern const Kernels kernels; }
namespace avx512vnni { extern const Kernels kernels; }
#elif defined(__aarch64__)
namespace dotprod { extern const Kernels kernels; }
namespace i8mm { extern const Kernels kernels; }
#endif

namespace {

#if defined(__x86_64__)
// Compilers name this feature differently; the processor's own word is leaf 7.1, EAX bit 4.
bool has_avx_vnni() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}
#elif defined(__aarch64__)
bool has_dot_products() {
#if defined(__linux__)
  return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#else
  return true;  // every processor of Apple that runs macOS
#endif
}

// Dot products of unsigned with signed bytes.
bool has_mixed_dot_products() {
#if defined(__linux__)
  return getauxval(AT_HWCAP2) & HWCAP2_I8MM;
#else
  int has = 0;
  size_t size = sizeof has;
  return !sysctlbyname("hw.optional.arm.FEAT_I8MM", &has, &size, nullptr, 0) && has;
#endif
}
#endif

// What this processor runs, the best first.
std::vector<const Kernels*> supported() {
  std::vector<const Kernels*> found;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool has_avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vnni"))
    found.push_back(&avx512vnni::kernels);
  if (has_avx2 && has_avx_vnni()) found.push_back(&avxvnni::kernels);
  if (has_avx2) found.push_back(&avx2::kernels);
#elif defined(__aarch64__)
  if (has_dot_products() && has_mixed_dot_products()) found.push_back(&i8mm::kernels);
  if (has_dot_products()) found.push_back(&dotprod::kernels);
#endif
  found.push_back(&portable::kernels);
  return found;
}

const Kernels* in_use = supported().front();

}  // namespace

const Kernels& chosen() { return *in_use; }

namespace {

ffi::Error Gather(Bytes arena, ffi::BufferR1<ffi::S32> entry, ffi::BufferR1<ffi::S32> row_ids,
                  ffi::ResultBufferR2<ffi::F32> y, Layouts layouts) {
  const int64_t num = y->dimensions()[0], cols = y->dimensions()[1];
  if (entry.element_count() != 4 || (int64_t)row_ids.element_count() != num) return invalid("gather: shapes differ");
  const int32_t* ids = row_ids.typed_data();
  int64_t rows = 0;
  for (int64_t n = 0; n < num; ++n) {
    if (ids[n] < 0) return invalid("gather: a row is negative");
    rows = std::max<int64_t>(rows, (int64_t)ids[n] + 1);
  }
  Matrix m;
  if (const char* wrong = read_matrix(arena, entry.typed_data(), layouts, rows, cols, &m)) return invalid(wrong);
  for (int64_t n = 0; n < num; ++n) chosen().decode_row(m, ids[n], y->typed_data() + n * cols);
  return ffi::Error::Success();
}

ffi::Error NormRows(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::BufferR1<ffi::F32> weight,
                    ffi::ResultBuffer<ffi::F32> y, float epsilon) try {
  const int64_t cols = weight.element_count(), count = x.element_count();
  if (cols < 1 || x.dimensions().back() != cols || (int64_t)y->element_count() != count) return invalid("norm: shapes differ");
  const Norm norm{cols, epsilon, x.typed_data(), weight.typed_data(), y->typed_data()};
  const Kernels& kernels = chosen();
  const int64_t rows = count / cols;
  const bool is_small = count < 8 * kWorthSharing;  // a value takes a handful of operations
  const int64_t grain = is_small ? rows : rows / (4 * std::max<int64_t>(1, pool.num_threads()));
  parallel_for(pool, rows, grain, [norm, &kernels](int64_t f, int64_t e) noexcept { kernels.norm(norm, f, e); });
  return ffi::Error::Success();
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

ffi::Error LogSumExp(ffi::ThreadPool pool, ffi::BufferR2<ffi::F32> x, ffi::ResultBufferR1<ffi::F32> y) try {
  const int64_t rows = x.dimensions()[0], cols = x.dimensions()[1];
  if (cols < 1 || (int64_t)y->element_count() != rows) return invalid("log_sum_exp: shapes differ");
  const LogSum sum{cols, x.typed_data(), y->typed_data()};
  const Kernels& kernels = chosen();
  const int64_t grain = rows * cols < kWorthSharing ? rows : 1;
  parallel_for(pool, rows, grain, [sum, &kernels](int64_t f, int64_t e) noexcept { kernels.log_sum_exp(sum, f, e); });
  return ffi::Error::Success();
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

// Whether what positions [earliest, latest] of a row may see lies in pages of the pool.
bool row_fits(const Attention& a, int64_t row, int64_t earliest, int64_t latest, int64_t num_units) {
  if (latest >= a.table_pages * a.page_tokens) return false;
  const int32_t* table = a.tables + row * a.table_pages;
  const int64_t low = std::max<int64_t>(0, earliest - a.window + 1);
  for (int64_t page = low / a.page_tokens; page <= latest / a.page_tokens; ++page)
    if (table[page] < 0 || table[page] >= num_units) return false;
  return true;
}

// Whether every place that the step names exists: they are data, and a wrong one would overwrite
// what is not this step's.
bool indexes_fit(const Attention& a, int64_t num_units) {
  int64_t earliest = INT32_MAX, latest = -1;  // of the chunk
  for (int64_t n = 0; n < a.num_tokens; ++n) {
    if (a.units[n] < 0 || a.units[n] >= num_units || a.offsets[n] < 0 || a.offsets[n] >= a.page_tokens) return false;
    const int64_t position = a.positions[n];
    if (position < 0) continue;
    if (n < a.num_decodes && !row_fits(a, n, position, position, num_units)) return false;
    if (n < a.num_decodes) continue;
    earliest = std::min(earliest, position);
    latest = std::max(latest, position);
  }
  return latest < 0 || row_fits(a, a.num_decodes, earliest, latest, num_units);
}

// Decides how attention is shared by threads. Returns memory for spans, if decode rows are split.
std::unique_ptr<float[]> split_work(Attention& a, int64_t threads) {
  const int64_t group = a.num_heads / a.num_kv_heads, wanted = 4 * threads;
  const int64_t chunk = a.num_tokens - a.num_decodes;
  // A block's queries stay in the second cache; few blocks would leave threads idle.
  a.block_tokens = std::clamp<int64_t>(96 / group, 1, 32);
  while (a.block_tokens > 4 && (chunk + a.block_tokens - 1) / a.block_tokens * a.num_kv_heads < wanted) a.block_tokens /= 2;
  int64_t latest = 0;
  for (int64_t n = 0; n < a.num_decodes; ++n) latest = std::max<int64_t>(latest, a.positions[n]);
  a.num_spans = a.num_decodes * a.num_kv_heads < wanted ? latest / kSpan + 1 : 1;
  if (a.num_spans == 1) return nullptr;
  return std::unique_ptr<float[]>(new float[a.num_decodes * a.num_kv_heads * a.num_spans * partial_size(a)]);
}

using Numbers = ffi::BufferR3<ffi::F32>;
using Indexes = ffi::BufferR1<ffi::S32>;

template <bool kHalf, typename Pool, typename PoolOut>
ffi::Error Attend(ffi::ThreadPool pool, Numbers q, Numbers k, Numbers v, Indexes positions, Indexes units,
                  Indexes offsets, ffi::BufferR2<ffi::S32> tables, ffi::BufferR0<ffi::S32> window,
                  ffi::BufferR1<ffi::F32> sinks, Pool, Pool, ffi::ResultBufferR3<ffi::F32> out, PoolOut keys,
                  PoolOut values, int64_t num_decodes, float scale, float soft_cap) try {
  Attention a;
  a.num_tokens = q.dimensions()[0];
  a.num_heads = q.dimensions()[1];
  a.key_dim = q.dimensions()[2];
  a.value_dim = values->dimensions()[3];
  a.mixed_dim = out->dimensions()[2];
  a.num_kv_heads = k.dimensions()[1];
  a.page_tokens = keys->dimensions()[1];
  a.table_pages = tables.dimensions()[1];
  a.num_decodes = num_decodes;
  a.is_half = kHalf;
  a.scale = scale;
  a.soft_cap = soft_cap;
  a.window = window.typed_data()[0];
  a.queries = q.typed_data();
  a.keys = k.typed_data();
  a.values = v.typed_data();
  a.sinks = sinks.element_count() ? sinks.typed_data() : nullptr;
  a.positions = positions.typed_data();
  a.units = units.typed_data();
  a.offsets = offsets.typed_data();
  a.tables = tables.typed_data();
  a.pool_keys = keys->untyped_data();
  a.pool_values = values->untyped_data();
  a.out = out->typed_data();
  const int64_t num_kept = a.num_tokens * a.num_kv_heads, num_places = keys->dimensions()[0] * a.page_tokens;
  const bool has_dims = a.value_dim ? a.mixed_dim == a.value_dim : a.mixed_dim <= a.key_dim;
  const bool has_rows = num_decodes >= 0 && num_decodes <= a.num_tokens &&
                        tables.dimensions()[0] >= num_decodes + (a.num_tokens > num_decodes);
  if (!has_rows || a.num_kv_heads < 1 || a.num_heads % a.num_kv_heads || a.page_tokens < 1 ||
      !has_dims || (a.sinks && (int64_t)sinks.element_count() != a.num_heads) ||
      (int64_t)k.element_count() != num_kept * a.key_dim || (int64_t)v.element_count() != num_kept * a.value_dim ||
      keys->dimensions()[2] != a.num_kv_heads || keys->dimensions()[3] != a.key_dim ||
      (int64_t)values->element_count() != num_places * a.num_kv_heads * a.value_dim ||
      (int64_t)out->element_count() != a.num_tokens * a.num_heads * a.mixed_dim ||
      (int64_t)positions.element_count() != a.num_tokens || (int64_t)units.element_count() != a.num_tokens ||
      (int64_t)offsets.element_count() != a.num_tokens)
    return invalid("attend: shapes differ");
  if (!indexes_fit(a, keys->dimensions()[0])) return invalid("attend: a position or a page is out of range");
  const Kernels& kernels = chosen();
  kernels.store_tokens(a, 0, a.num_tokens);
  const int64_t threads = std::max<int64_t>(1, pool.num_threads());
  std::unique_ptr<float[]> partials = split_work(a, threads);
  a.partials = partials.get();
  int64_t held = 0;
  for (int64_t n = 0; n < a.num_tokens; ++n) held += a.positions[n] + 1;
  const int64_t work = attend_units(a);
  const bool is_small = held * a.num_heads * a.key_dim < kWorthSharing;
  const int64_t grain = is_small ? work : work / (16 * threads);
  std::atomic<bool> has_memory{true};
  parallel_for(pool, work, grain, [a, &kernels, &has_memory](int64_t f, int64_t e) noexcept {
    if (!kernels.attend(a, f, e)) has_memory = false;
  });
  if (a.partials && !kernels.merge_rows(a, 0, a.num_decodes)) has_memory = false;
  return has_memory ? ffi::Error::Success() : out_of_memory();
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

}  // namespace
}  // namespace kvarts

extern "C" __attribute__((visibility("default"))) const char* kvarts_isa() { return kvarts::chosen().name; }

// For tests: uses an instruction set that is not the best one, if this processor has it.
extern "C" __attribute__((visibility("default"))) bool kvarts_use_isa(const char* name) {
  for (const kvarts::Kernels* kernels : kvarts::supported()) {
    if (std::strcmp(kernels->name, name)) continue;
    kvarts::in_use = kernels;
    return true;
  }
  return false;
}

// What jax looks up by name; all else is hidden.
#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(kvarts_gather, kvarts::Gather,
                              ffi::Ffi::Bind()
                                  .Arg<kvarts::Bytes>()
                                  .Arg<ffi::BufferR1<ffi::S32>>()
                                  .Arg<ffi::BufferR1<ffi::S32>>()
                                  .Ret<ffi::BufferR2<ffi::F32>>()
                                  .Attr<ffi::Span<const int64_t>>("layouts"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(kvarts_norm, kvarts::NormRows,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::BufferR1<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("epsilon"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(kvarts_log_sum_exp, kvarts::LogSumExp,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::BufferR2<ffi::F32>>()
                                  .Ret<ffi::BufferR1<ffi::F32>>());

#define KVARTS_ATTEND(NAME, HALF, TYPE)                                                                     \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(                                                                            \
      NAME, (kvarts::Attend<HALF, ffi::BufferR4<TYPE>, ffi::ResultBufferR4<TYPE>>),                         \
      ffi::Ffi::Bind()                                                                                      \
          .Ctx<ffi::ThreadPool>()                                                                           \
          .Arg<kvarts::Numbers>().Arg<kvarts::Numbers>().Arg<kvarts::Numbers>()                             \
          .Arg<kvarts::Indexes>().Arg<kvarts::Indexes>().Arg<kvarts::Indexes>()                             \
          .Arg<ffi::BufferR2<ffi::S32>>().Arg<ffi::BufferR0<ffi::S32>>().Arg<ffi::BufferR1<ffi::F32>>()     \
          .Arg<ffi::BufferR4<TYPE>>().Arg<ffi::BufferR4<TYPE>>()                                            \
          .Ret<ffi::BufferR3<ffi::F32>>().Ret<ffi::BufferR4<TYPE>>().Ret<ffi::BufferR4<TYPE>>()             \
          .Attr<int64_t>("num_decodes").Attr<float>("scale").Attr<float>("soft_cap"))

KVARTS_ATTEND(kvarts_attend_f16, true, ffi::F16);
KVARTS_ATTEND(kvarts_attend_f32, false, ffi::F32);

#pragma GCC visibility pop
