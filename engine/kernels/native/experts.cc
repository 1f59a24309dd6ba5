// Mixtures of experts: the choice of experts, and products of each row with matrices of its own.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <numeric>
#include <vector>

#include "activations.h"
#include "expert_cache.h"
#include "handlers.h"
#include "parallel.h"

namespace kvarts {
namespace {

// The pairs of a row and one of its experts, by expert: pairs of expert e are
// order[starts[e]] to order[starts[e + 1] - 1], in the order of rows.
struct Grouping {
  std::vector<int64_t> starts, order;
  bool is_single;  // no expert has two pairs
};

Grouping group_by_expert(const int32_t* ids, int64_t num_pairs, int64_t count) {
  Grouping g;
  g.starts.assign(count + 1, 0);
  g.order.resize(num_pairs);
  for (int64_t i = 0; i < num_pairs; ++i) ++g.starts[ids[i] + 1];
  g.is_single = num_pairs == 0 || *std::max_element(g.starts.begin(), g.starts.end()) <= 1;
  std::partial_sum(g.starts.begin(), g.starts.end(), g.starts.begin());
  std::vector<int64_t> next(g.starts.begin(), g.starts.end() - 1);
  for (int64_t i = 0; i < num_pairs; ++i) g.order[next[ids[i]]++] = i;
  return g;
}

// Some rows times one matrix: tiles [first_tile, first_tile + its own) of all the work.
struct Piece {
  Matrix matrix;
  Activations rows;
  float* y;
  int64_t first_tile;
};

using Table = ffi::BufferR2<ffi::S32>;

// `table` has per stack (layout, codes, scales, offsets, stride), in 64-byte blocks of `data`, which
// is `held` bytes.
ffi::Error products(ffi::ThreadPool& pool, const uint8_t* data, int64_t held, Table table,
                    ffi::BufferR2<ffi::F32> x, Table ids, ffi::ResultBufferR2<ffi::F32> y,
                    ffi::Span<const int64_t> rows, Layouts layouts, int64_t count) try {
  const int64_t num = x.dimensions()[0], cols = x.dimensions()[1], stride = y->dimensions()[1];
  const int64_t num_pairs = ids.element_count(), used = ids.dimensions()[1], num_stacks = rows.size();
  if ((int64_t)table.element_count() != 5 * num_stacks || ids.dimensions()[0] != num ||
      y->dimensions()[0] != num_pairs || std::accumulate(rows.begin(), rows.end(), int64_t{0}) != stride)
    return invalid("expert_products: shapes differ");
  for (int64_t i = 0; i < num_pairs; ++i)
    if (ids.typed_data()[i] < 0 || ids.typed_data()[i] >= count) return invalid("expert_products: no such matrix");
  if (num_pairs == 0) return ffi::Error::Success();

  // A stack is inside the arena if its first and last matrix are.
  bool is_quantised = false, is_dense = false;
  std::vector<Matrix> firsts(num_stacks);
  for (int64_t s = 0; s < num_stacks; ++s) {
    const int32_t* entry = table.typed_data() + 5 * s;
    const int64_t reach = (count - 1) * (int64_t)entry[4];
    if (entry[4] < 0 || reach > std::numeric_limits<int32_t>::max() - std::max({entry[1], entry[2], entry[3], 0}))
      return invalid("a matrix is not inside the arena");
    Matrix last;
    const int32_t end[4] = {entry[0], (int32_t)(entry[1] + reach), (int32_t)(entry[2] + reach), (int32_t)(entry[3] + reach)};
    if (const char* wrong = read_matrix(data, held, end, layouts, rows[s], cols, &last)) return invalid(wrong);
    if (const char* wrong = read_matrix(data, held, entry, layouts, rows[s], cols, &firsts[s])) return invalid(wrong);
    (last.index < 0 ? is_dense : is_quantised) = true;
  }

  const Kernels& kernels = chosen();
  const int64_t threads = std::max<int64_t>(1, pool.num_threads());
  const bool is_small = num_pairs * cols * stride < kWorthSharing;
  const ActivationMemory given(num, cols, false);
  const Activations activations = given.view(num, cols, x.typed_data());
  if (is_quantised) {
    const int64_t grain = num * cols < kWorthSharing ? num : num / (4 * threads);
    parallel_for(pool, num, grain, [activations, &kernels](int64_t f, int64_t e) noexcept { kernels.quantise(activations, f, e); });
  }

  // Where experts have several rows, those are brought together, so that a matrix is read once.
  const Grouping grouping = group_by_expert(ids.typed_data(), num_pairs, count);
  const bool is_sorted = !grouping.is_single;
  std::unique_ptr<ActivationMemory> memory;
  std::unique_ptr<float[]> sorted_y;
  Activations sorted = activations;
  if (is_sorted) {
    memory.reset(new ActivationMemory(num_pairs, cols, is_dense));
    sorted_y.reset(new float[num_pairs * stride]);
    sorted = memory->view(num_pairs, cols, x.typed_data());
    for (int64_t i = 0; i < num_pairs; ++i)
      copy_row(activations, grouping.order[i] / used, sorted, i, is_dense, is_quantised);
  }
  float* const results = is_sorted ? sorted_y.get() : y->typed_data();

  std::vector<Piece> pieces;
  int64_t tiles = 0;
  const auto add = [&](int64_t expert, const Activations& own, float* to) {
    for (int64_t s = 0; s < num_stacks; to += rows[s++]) {
      Matrix m = firsts[s];
      const int64_t skip = 64 * expert * (int64_t)table.typed_data()[5 * s + 4];
      m.codes += skip;
      m.scales += skip;
      m.offsets += skip;
      pieces.push_back({m, own, to, tiles});
      tiles += (m.rows + kTile - 1) / kTile;
    }
  };
  if (is_sorted) {
    for (int64_t e = 0; e < count; ++e) {
      const int64_t first = grouping.starts[e], end = grouping.starts[e + 1];
      if (first < end) add(e, rows_of(sorted, first, end - first), results + first * stride);
    }
  } else {
    for (int64_t i = 0; i < num_pairs; ++i)
      add(ids.typed_data()[i], rows_of(activations, i / used, 1), results + i * stride);
  }

  // As in qmatmul: pieces of work that fit the second cache, and enough of them to balance.
  const int64_t most = std::max<int64_t>(1, (1 << 20) / (cols * kTile));
  const int64_t grain = is_small ? tiles : std::clamp<int64_t>(tiles / (8 * threads), 1, most);
  const auto run = [&pieces, stride, &kernels](int64_t first, int64_t end) noexcept {
    const auto after = std::upper_bound(pieces.begin(), pieces.end(), first,
                                        [](int64_t tile, const Piece& piece) { return tile < piece.first_tile; });
    for (auto piece = after - 1; piece != pieces.end() && piece->first_tile < end; ++piece) {
      const int64_t own = (piece->matrix.rows + kTile - 1) / kTile;
      const int64_t from = std::max<int64_t>(0, first - piece->first_tile), to = std::min(own, end - piece->first_tile);
      kernels.product(piece->matrix, piece->rows, from, to, piece->y, stride);
    }
  };
  parallel_for(pool, tiles, grain, run);
  if (is_sorted)
    for (int64_t i = 0; i < num_pairs; ++i)
      std::memcpy(y->typed_data() + grouping.order[i] * stride, results + i * stride, stride * sizeof(float));
  return ffi::Error::Success();
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

ffi::Error ExpertProducts(ffi::ThreadPool pool, Bytes arena, Table table, ffi::BufferR2<ffi::F32> x, Table ids,
                          ffi::ResultBufferR2<ffi::F32> y, ffi::Span<const int64_t> rows, Layouts layouts,
                          int64_t count) {
  return products(pool, arena.typed_data(), arena.element_count(), table, x, ids, y, rows, layouts, count);
}

// The same from the slots of a cache: `ids` are slots, and places in the table are those in a slot.
ffi::Error CachedProducts(ffi::ThreadPool pool, ffi::BufferR0<ffi::S32> cache_id, Table table,
                          ffi::BufferR2<ffi::F32> x, Table slots, ffi::ResultBufferR2<ffi::F32> y,
                          ffi::Span<const int64_t> rows, Layouts layouts) {
  const auto cache = find_cache(cache_id.typed_data()[0]);
  if (!cache) return invalid("cached_products: no such cache");
  const int64_t held = cache->num_slots * cache->slot_bytes;
  return products(pool, cache->slots, held, table, x, slots, y, rows, layouts, cache->num_slots);
}

enum Gating : int64_t { kSoftmax = 0, kSigmoid = 1, kChosenSoftmax = 2 };

struct Router {
  int64_t gating, num_experts, num_used, num_groups, num_groups_used;
  bool normalises;
  float scale;
  const float* bias;  // null: none
};

constexpr float kLeastSum = 0x1p-14f;

void softmax(float* values, int64_t count) {
  const float most = *std::max_element(values, values + count);
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += values[i] = std::exp(values[i] - most);
  const float inverse = (float)(1.0 / sum);
  for (int64_t i = 0; i < count; ++i) values[i] *= inverse;
}

// The `num` largest of `values`, the first of equals first; what is chosen becomes "never again".
// Always `num` different places, whatever the values are.
template <typename Taken>
void choose(const float* values, int64_t count, int64_t num, bool* is_taken, Taken taken) {
  for (int64_t k = 0; k < num; ++k) {
    int64_t best = -1;
    for (int64_t i = 0; i < count; ++i)
      if (!is_taken[i] && (best < 0 || values[i] > values[best])) best = i;
    is_taken[best] = true;
    taken(k, best);
  }
}

// Leaves only the groups whose two best sum highest.
void mask_groups(const Router& r, float* choice, float* sums, bool* is_taken) {
  const int64_t size = r.num_experts / r.num_groups;
  for (int64_t g = 0; g < r.num_groups; ++g) {
    float best = -std::numeric_limits<float>::infinity(), second = best;
    for (int64_t i = g * size; i < (g + 1) * size; ++i) {
      if (choice[i] > best) {
        second = best;
        best = choice[i];
      } else if (choice[i] > second) {
        second = choice[i];
      }
    }
    sums[g] = best + second;
  }
  std::fill(is_taken, is_taken + r.num_groups, false);
  choose(sums, r.num_groups, r.num_groups_used, is_taken, [](int64_t, int64_t) {});
  for (int64_t i = 0; i < r.num_experts; ++i)
    if (!is_taken[i / size]) choice[i] = -std::numeric_limits<float>::infinity();
}

// One row; `scores`, `choice` and `sums` are scratch of num_experts, as is `is_taken`.
void route_row(const Router& r, const float* logits, float* scores, float* choice, float* sums, bool* is_taken,
               int32_t* ids, float* weights) {
  const int64_t count = r.num_experts;
  std::copy(logits, logits + count, scores);
  if (r.gating == kSoftmax) softmax(scores, count);
  if (r.gating == kSigmoid)
    for (int64_t i = 0; i < count; ++i) scores[i] = 1.0f / (1.0f + std::exp(-scores[i]));
  for (int64_t i = 0; i < count; ++i) choice[i] = r.bias ? scores[i] + r.bias[i] : scores[i];
  if (r.num_groups > 1) mask_groups(r, choice, sums, is_taken);
  std::fill(is_taken, is_taken + count, false);
  choose(choice, count, r.num_used, is_taken, [&](int64_t k, int64_t i) {
    ids[k] = (int32_t)i;
    weights[k] = scores[i];
  });
  if (r.gating == kChosenSoftmax) softmax(weights, r.num_used);
  if (r.normalises) {
    const float sum = std::max(std::accumulate(weights, weights + r.num_used, 0.0f), kLeastSum);
    for (int64_t k = 0; k < r.num_used; ++k) weights[k] /= sum;
  }
  for (int64_t k = 0; k < r.num_used; ++k) weights[k] *= r.scale;
}

ffi::Error Route(ffi::BufferR2<ffi::F32> logits, ffi::BufferR1<ffi::F32> bias, ffi::ResultBufferR2<ffi::S32> ids,
                 ffi::ResultBufferR2<ffi::F32> weights, int64_t gating, int64_t normalises, float scale,
                 int64_t num_groups, int64_t num_groups_used) try {
  const int64_t num = logits.dimensions()[0], count = logits.dimensions()[1], used = ids->dimensions()[1];
  const Router router{gating, count, used, num_groups, num_groups_used, normalises != 0, scale,
                      bias.element_count() ? bias.typed_data() : nullptr};
  const bool has_groups = num_groups >= 1 && count % num_groups == 0 && num_groups_used >= 1 && num_groups_used <= num_groups;
  if (used < 1 || used > count || !has_groups || gating < kSoftmax || gating > kChosenSoftmax ||
      ids->dimensions()[0] != num || weights->element_count() != ids->element_count() ||
      (router.bias && (int64_t)bias.element_count() != count))
    return invalid("route: shapes differ");
  std::vector<float> scratch(3 * count);
  std::unique_ptr<bool[]> is_taken(new bool[count]);
  for (int64_t n = 0; n < num; ++n)
    route_row(router, logits.typed_data() + n * count, scratch.data(), scratch.data() + count,
              scratch.data() + 2 * count, is_taken.get(), ids->typed_data() + n * used, weights->typed_data() + n * used);
  return ffi::Error::Success();
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

}  // namespace
}  // namespace kvarts

// What jax looks up by name; all else is hidden.
#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(kvarts_expert_products, kvarts::ExpertProducts,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<kvarts::Bytes>()
                                  .Arg<kvarts::Table>()
                                  .Arg<ffi::BufferR2<ffi::F32>>()
                                  .Arg<kvarts::Table>()
                                  .Ret<ffi::BufferR2<ffi::F32>>()
                                  .Attr<ffi::Span<const int64_t>>("rows")
                                  .Attr<ffi::Span<const int64_t>>("layouts")
                                  .Attr<int64_t>("count"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(kvarts_cached_products, kvarts::CachedProducts,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::BufferR0<ffi::S32>>()
                                  .Arg<kvarts::Table>()
                                  .Arg<ffi::BufferR2<ffi::F32>>()
                                  .Arg<kvarts::Table>()
                                  .Ret<ffi::BufferR2<ffi::F32>>()
                                  .Attr<ffi::Span<const int64_t>>("rows")
                                  .Attr<ffi::Span<const int64_t>>("layouts"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(kvarts_route, kvarts::Route,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::BufferR2<ffi::F32>>()
                                  .Arg<ffi::BufferR1<ffi::F32>>()
                                  .Ret<ffi::BufferR2<ffi::S32>>()
                                  .Ret<ffi::BufferR2<ffi::F32>>()
                                  .Attr<int64_t>("gating")
                                  .Attr<int64_t>("normalises")
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("num_groups")
                                  .Attr<int64_t>("num_groups_used"));

#pragma GCC visibility pop
