// XLA's door to products with quantised matrices, and to what adapters add to them. Nothing throws.
#include <algorithm>
#include <cstring>
#include <new>
#include <vector>

#include "activations.h"
#include "adaptation.h"
#include "parallel.h"

namespace kvarts {
namespace {

// Rows [first, first + num).
struct Run {
  int64_t first, num;
};

// Where neighbours have a mark that is not negative; all of `num` rows where there are no marks.
std::vector<Run> live_runs(ffi::BufferR1<ffi::S32> marks, int64_t num) {
  if (!marks.element_count()) return {{0, num}};
  std::vector<Run> runs;
  for (int64_t n = 0; n < num; ++n) {
    if (marks.typed_data()[n] < 0) continue;
    if (runs.empty() || runs.back().first + runs.back().num < n) runs.push_back({n, 0});
    ++runs.back().num;
  }
  return runs;
}

// All that is in no run becomes 0.
void clear_others(const std::vector<Run>& runs, int64_t num, int64_t stride, float* y) {
  int64_t at = 0;
  for (const Run& run : runs) {
    std::memset(y + at * stride, 0, (run.first - at) * stride * sizeof(float));
    at = run.first + run.num;
  }
  std::memset(y + at * stride, 0, (num - at) * stride * sizeof(float));
}

// The matrices of a call, side by side.
struct Matrices {
  std::vector<Matrix> each;
  std::vector<int64_t> first_tiles, outs;  // where the tiles of each begin, and its rows in a result
  int64_t tiles = 0, rows = 0;
  bool is_quantised = false;
};

const char* read_matrices(const Bytes& arena, ffi::BufferR2<ffi::S32> table, ffi::Span<const int64_t> rows, int64_t cols,
                          Layouts layouts, Matrices* to) {
  if (table.element_count() != 4 * rows.size()) return "qmatmul: shapes differ";
  for (size_t i = 0; i < rows.size(); ++i) {
    Matrix m;
    if (const char* wrong = read_matrix(arena, table.typed_data() + 4 * i, layouts, rows[i], cols, &m)) return wrong;
    to->is_quantised |= m.index >= 0;
    to->each.push_back(m);
    to->first_tiles.push_back(to->tiles);
    to->outs.push_back(to->rows);
    to->tiles += (rows[i] + kTile - 1) / kTile;
    to->rows += rows[i];
  }
  return nullptr;
}

// Reads what adapters change of the matrices that `adapted` names: places, scales and layer, then a bank each.
const char* read_adaptation(ffi::RemainingArgs& args, ffi::Span<const int64_t> adapted, const Matrices& matrices,
                            int64_t num_decodes, ffi::BufferR2<ffi::F32> x, float* y, std::vector<AdaptedWeight>* weights,
                            Adaptation* a) {
  constexpr size_t kFirst = 3;
  if (args.size() != (adapted.size() ? kFirst + kBankArrays * adapted.size() : 0)) return "adapt: arrays are missing";
  if (!adapted.size()) return nullptr;
  const auto places = args.get<Places>(0);
  const auto scales = args.get<Scales>(1);
  const auto layer = args.get<ffi::BufferR0<ffi::S32>>(2);
  if (!places || !scales || !layer) return "adapt: lists differ";
  const int64_t num_places = places_of(args, kFirst);
  if (const char* wrong = read_lists(*places, *scales, x.dimensions()[0], num_decodes, num_places, a)) return wrong;
  weights->resize(adapted.size());
  for (size_t i = 0; i < adapted.size(); ++i) {
    if (adapted[i] < 0 || adapted[i] >= (int64_t)matrices.each.size()) return "adapt: there is no such matrix";
    AdaptedWeight& w = (*weights)[i];
    if (const char* wrong = read_bank(args, kFirst + kBankArrays * i, layer->typed_data()[0], num_places, &w)) return wrong;
    w.rows = matrices.each[adapted[i]].rows;
    w.cols = matrices.each[adapted[i]].cols;
    w.stride = matrices.rows;
    w.y = y + matrices.outs[adapted[i]];
    if (const char* wrong = check_entries(w, num_places, w.cols)) return wrong;
  }
  a->x = x.typed_data();
  a->weights = weights->data();
  a->num_weights = (int64_t)weights->size();
  return nullptr;
}

// Calls fn(first, end) for the part of each run that lies in [first, end).
template <typename Fn>
void in_runs(const std::vector<Run>& runs, int64_t first, int64_t end, Fn fn) {
  for (const Run& run : runs) {
    const int64_t from = std::max(first, run.first), to = std::min(end, run.first + run.num);
    if (from < to) fn(from, to);
  }
}

// `layouts` has (kind, number, group, has_offset, bound) per layout that the matrices may have; `table`
// per matrix (layout, codes, scales, offsets), the planes as 64-byte blocks of the arena. Rows whose mark
// in `live` is negative are padding, whose products are 0; no marks: no padding.
ffi::Error QMatmul(ffi::ThreadPool pool, Bytes arena, ffi::BufferR2<ffi::S32> table, ffi::BufferR2<ffi::F32> x,
                   ffi::BufferR1<ffi::S32> live, ffi::RemainingArgs args, ffi::ResultBufferR2<ffi::F32> y,
                   ffi::Span<const int64_t> rows, Layouts layouts, bool is_fine, ffi::Span<const int64_t> adapted,
                   int64_t num_decodes) try {
  const int64_t num = x.dimensions()[0], cols = x.dimensions()[1], stride = y->dimensions()[1];
  const int64_t num_marks = live.element_count();
  const Kernels& kernels = chosen();
  if (y->dimensions()[0] != num || (num_marks && num_marks != num)) return invalid("qmatmul: shapes differ");
  Matrices matrices;
  if (const char* wrong = read_matrices(arena, table, rows, cols, layouts, &matrices)) return invalid(wrong);
  if (matrices.rows != stride) return invalid("qmatmul: shapes differ");
  float* result = y->typed_data();
  std::vector<AdaptedWeight> weights;
  Adaptation change{};
  if (const char* wrong = read_adaptation(args, adapted, matrices, num_decodes, x, result, &weights, &change))
    return invalid(wrong);

  const std::vector<Run> runs = live_runs(live, num);
  int64_t num_live = 0;
  for (const Run& run : runs) num_live += run.num;
  clear_others(runs, num, stride, result);
  const ActivationMemory memory(num, cols, false, is_fine);
  const Activations a = memory.view(num, cols, x.typed_data());
  const int64_t threads = std::max<int64_t>(1, pool.num_threads()), tiles = matrices.tiles;

  const auto quantise = [a, &runs, &kernels](int64_t first, int64_t end) noexcept {
    in_runs(runs, first, end, [&](int64_t from, int64_t to) { kernels.quantise(a, from, to); });
  };
  const int64_t quantised = matrices.is_quantised ? num : 0;
  const int64_t row_grain = num_live * cols < kWorthSharing ? num : num / (4 * threads);

  const auto multiply = [a, &matrices, &runs, result, stride, &kernels](int64_t first, int64_t end) noexcept {
    for (size_t i = 0; i < matrices.each.size(); ++i) {
      const Matrix& m = matrices.each[i];
      const int64_t own = (m.rows + kTile - 1) / kTile, skipped = matrices.first_tiles[i];
      const int64_t from = std::max<int64_t>(0, first - skipped), to = std::min(own, end - skipped);
      if (from >= to) continue;
      for (const Run& run : runs)
        kernels.product(m, rows_of(a, run.first, run.num), from, to, result + run.first * stride + matrices.outs[i], stride);
    }
  };
  const bool is_small = num_live * cols * tiles * kTile < kWorthSharing;
  // Pieces that fit the second cache together with a block of tokens, and enough of them to balance.
  const int64_t most = std::max<int64_t>(1, (1 << 20) / (cols * kTile));
  const int64_t tile_grain = is_small ? tiles : std::clamp<int64_t>(tiles / (8 * threads), 1, most);

  const auto adapt = [change, &runs, &kernels](int64_t first, int64_t end) noexcept {
    in_runs(runs, first, end, [&](int64_t from, int64_t to) { kernels.adapt(change, from, to); });
  };
  const int64_t work = work_of(change);
  parallel_stages(pool, Stage(quantised, row_grain, quantise), Stage(tiles, tile_grain, multiply),
                  Stage(work ? num : 0, grain_of(change, work, threads), adapt));
  return ffi::Error::Success();
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

}  // namespace
}  // namespace kvarts

// What jax looks up by name; all else is hidden.
#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(kvarts_qmatmul, kvarts::QMatmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<kvarts::Bytes>()
                                  .Arg<ffi::BufferR2<ffi::S32>>()
                                  .Arg<ffi::BufferR2<ffi::F32>>()
                                  .Arg<ffi::BufferR1<ffi::S32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::BufferR2<ffi::F32>>()
                                  .Attr<ffi::Span<const int64_t>>("rows")
                                  .Attr<ffi::Span<const int64_t>>("layouts")
                                  .Attr<bool>("is_fine")
                                  .Attr<ffi::Span<const int64_t>>("adapted")
                                  .Attr<int64_t>("num_decodes"));

#pragma GCC visibility pop
