// XLA's doors to the kernels: shapes are checked, pointers made, work split. Nothing throws.
#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "kernels.h"
#include "parallel.h"

namespace ffi = xla::ffi;

namespace kvarts {
namespace portable { extern const Kernels kernels; }
#if defined(__x86_64__)
namespace avx2 { extern const Kernels kernels; }
namespace avxvnni { extern const Kernels kernels; }
namespace avx512vnni { extern const Kernels kernels; }
#endif

namespace {

#if defined(__x86_64__)
// Compilers name this feature differently; the processor's own word is leaf 7.1, EAX bit 4.
bool has_avx_vnni() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
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
#endif
  found.push_back(&portable::kernels);
  return found;
}

const Kernels* in_use = supported().front();

const Kernels& chosen() { return *in_use; }

constexpr int64_t kTile = 16;
constexpr int64_t kWorthSharing = 1 << 17;  // multiplications; below, waking a thread costs more

// A matrix from its entry of a table; false if its layout does not exist.
bool read_matrix(const uint8_t* arena, const int32_t* entry, ffi::Span<const int64_t> layouts, int64_t rows,
                 int64_t cols, Matrix* m) {
  if (entry[0] < 0 || 4 * (size_t)entry[0] + 3 >= layouts.size()) return false;
  const int64_t* layout = layouts.begin() + 4 * entry[0];
  *m = Matrix{(Kind)layout[0], (Float)layout[1], (int32_t)layout[2], layout[3] != 0, rows, cols,
              arena + 64 * (int64_t)entry[1], arena + 64 * (int64_t)entry[2], arena + 64 * (int64_t)entry[3]};
  return true;
}

ffi::Error no_such_layout() { return ffi::Error::InvalidArgument("a matrix has a layout that does not exist"); }

ffi::Error Gather(ffi::Buffer<ffi::U8> arena, ffi::Buffer<ffi::S32> entry, ffi::Buffer<ffi::S32> row_ids,
                  ffi::ResultBuffer<ffi::F32> y, ffi::Span<const int64_t> layouts) {
  const int64_t num = y->dimensions()[0], cols = y->dimensions()[1];
  Matrix m;
  if (!read_matrix(arena.typed_data(), entry.typed_data(), layouts, 0, cols, &m)) return no_such_layout();
  for (int64_t n = 0; n < num; ++n) chosen().decode_row(m, row_ids.typed_data()[n], y->typed_data() + n * cols);
  return ffi::Error::Success();
}

// `layouts` has (kind, number, group, has_offset) per layout that the matrices may have; `table`
// per matrix (layout, codes, scales, offsets), the planes as 64-byte blocks of the arena.
ffi::Error QMatmul(ffi::ThreadPool pool, ffi::Buffer<ffi::U8> arena, ffi::Buffer<ffi::S32> table,
                   ffi::Buffer<ffi::F32> x, ffi::ResultBuffer<ffi::F32> y, ffi::Span<const int64_t> rows,
                   ffi::Span<const int64_t> layouts) {
  const int64_t num = x.dimensions()[0], cols = x.dimensions()[1], stride = y->dimensions()[1];
  const Kernels& kernels = chosen();
  std::unique_ptr<int8_t[]> codes(new (std::nothrow) int8_t[num * cols]);
  const int64_t groups = cols / 32;
  std::unique_ptr<float[]> scales(new (std::nothrow) float[num * groups + 1]);
  std::unique_ptr<int32_t[]> sums(new (std::nothrow) int32_t[num * groups * 2 + 1]);
  if (!codes || !scales || !sums) return ffi::Error(ffi::ErrorCode::kResourceExhausted, "qmatmul: out of memory");
  const Activations a{num, cols, x.typed_data(), codes.get(), scales.get(), sums.get()};

  std::vector<Matrix> matrices;
  std::vector<int64_t> first_tiles, outs;
  int64_t tiles = 0, out = 0;
  bool is_quantised = false;
  for (size_t i = 0; i < rows.size(); ++i) {
    Matrix m;
    if (!read_matrix(arena.typed_data(), table.typed_data() + 4 * i, layouts, rows[i], cols, &m)) return no_such_layout();
    is_quantised |= m.kind != Kind::kDense;
    matrices.push_back(m);
    first_tiles.push_back(tiles);
    outs.push_back(out);
    tiles += (rows[i] + kTile - 1) / kTile;
    out += rows[i];
  }
  const int64_t threads = std::max<int64_t>(1, pool.num_threads());
  if (is_quantised) {
    const int64_t grain = std::max<int64_t>(1, num * cols < kWorthSharing ? num : num / (4 * threads));
    parallel_for(pool, num, grain, [a, &kernels](int64_t f, int64_t e) { kernels.quantise(a, f, e); });
  }
  const bool is_small = num * cols * tiles * kTile < kWorthSharing;
  // Pieces that fit the second cache together with a block of tokens, and enough of them to balance.
  const int64_t grain = is_small ? tiles : std::clamp<int64_t>(tiles / (8 * threads), 1, std::max<int64_t>(1, (1 << 20) / (cols * kTile)));
  float* result = y->typed_data();
  auto run = [&matrices, &first_tiles, &outs, a, result, stride, &kernels](int64_t first, int64_t end) {
    for (size_t i = 0; i < matrices.size(); ++i) {
      const Matrix& m = matrices[i];
      const int64_t own = (m.rows + kTile - 1) / kTile;
      const int64_t from = std::max<int64_t>(0, first - first_tiles[i]), to = std::min(own, end - first_tiles[i]);
      if (from < to) kernels.product(m, a, from, to, result + outs[i], stride);
    }
  };
  parallel_for(pool, tiles, grain, run);
  return ffi::Error::Success();
}

template <bool kHalf, typename Pool, typename PoolOut>
ffi::Error Attend(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> q, ffi::Buffer<ffi::F32> k, ffi::Buffer<ffi::F32> v,
                  ffi::Buffer<ffi::S32> positions, ffi::Buffer<ffi::S32> units, ffi::Buffer<ffi::S32> offsets,
                  ffi::Buffer<ffi::S32> tables, ffi::Buffer<ffi::S32> window, Pool, Pool,
                  ffi::ResultBuffer<ffi::F32> out, PoolOut keys, PoolOut values, int64_t num_decodes, float scale, float soft_cap) {
  Attention a;
  a.num_tokens = q.dimensions()[0];
  a.num_heads = q.dimensions()[1];
  a.dim = q.dimensions()[2];
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
  a.positions = positions.typed_data();
  a.units = units.typed_data();
  a.offsets = offsets.typed_data();
  a.tables = tables.typed_data();
  a.pool_keys = keys->untyped_data();
  a.pool_values = values->untyped_data();
  a.out = out->typed_data();
  const Kernels& kernels = chosen();
  kernels.store_tokens(a, 0, a.num_tokens);
  int64_t held = 0;
  for (int64_t n = 0; n < a.num_tokens; ++n) held += a.positions[n] + 1;
  const int64_t work = query_blocks(a) * a.num_kv_heads;
  const bool is_small = held * a.num_heads * a.dim < kWorthSharing;
  const int64_t grain = is_small ? work : std::max<int64_t>(1, work / (16 * std::max<int64_t>(1, pool.num_threads())));
  parallel_for(pool, work, grain, [a, &kernels](int64_t f, int64_t e) { kernels.attend(a, f, e); });
  return ffi::Error::Success();
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

XLA_FFI_DEFINE_HANDLER_SYMBOL(kvarts_qmatmul, kvarts::QMatmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::U8>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<ffi::Span<const int64_t>>("rows")
                                  .Attr<ffi::Span<const int64_t>>("layouts"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(kvarts_gather, kvarts::Gather,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::U8>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<ffi::Span<const int64_t>>("layouts"));

#define KVARTS_ATTEND(NAME, HALF, TYPE)                                                                       \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(                                                                              \
      NAME, (kvarts::Attend<HALF, ffi::Buffer<TYPE>, ffi::ResultBuffer<TYPE>>),                               \
      ffi::Ffi::Bind()                                                                                        \
          .Ctx<ffi::ThreadPool>()                                                                             \
          .Arg<ffi::Buffer<ffi::F32>>().Arg<ffi::Buffer<ffi::F32>>().Arg<ffi::Buffer<ffi::F32>>()             \
          .Arg<ffi::Buffer<ffi::S32>>().Arg<ffi::Buffer<ffi::S32>>().Arg<ffi::Buffer<ffi::S32>>()             \
          .Arg<ffi::Buffer<ffi::S32>>().Arg<ffi::Buffer<ffi::S32>>()                                          \
          .Arg<ffi::Buffer<TYPE>>().Arg<ffi::Buffer<TYPE>>()                                                  \
          .Ret<ffi::Buffer<ffi::F32>>().Ret<ffi::Buffer<TYPE>>().Ret<ffi::Buffer<TYPE>>()                     \
          .Attr<int64_t>("num_decodes").Attr<float>("scale").Attr<float>("soft_cap"))

KVARTS_ATTEND(kvarts_attend_f16, true, ffi::F16);
KVARTS_ATTEND(kvarts_attend_f32, false, ffi::F32);
