// XLA's doors to the low-rank kernels: lists and banks are data of the program, so every index is
// looked at before it is followed. Nothing throws.
#include <algorithm>
#include <new>
#include <vector>

#include "handlers.h"
#include "parallel.h"

namespace kvarts {
namespace {

using Places = ffi::BufferR2<ffi::S32>;
using Scales = ffi::BufferR2<ffi::F32>;

constexpr size_t kPerWeight = 5;  // down, up, entries, factors, product

// Bytes of a pair in its own precision.
int64_t number_bytes(int32_t entry) { return (Float)(entry & 3) == Float::kF32 ? 4 : 2; }

// Whether every pair lies in its place: `down_width` values per rank, and w.rows.
const char* check_entries(const AdaptedWeight& w, int64_t num_places, int64_t down_width) {
  for (int64_t place = 0; place < num_places; ++place) {
    const int32_t entry = w.entries[place];
    const int64_t rank = entry >> 2, size = number_bytes(entry);
    if (!entry) continue;
    if (entry < 0 || (entry & 3) > 2 || rank < 1 || rank > kMaxRank) return "adapt: a pair of no known form";
    if (rank * down_width * size > w.down_bytes || rank * w.rows * size > w.up_bytes)
      return "adapt: a pair is larger than its place";
  }
  return nullptr;
}

// The weight whose five arrays begin at `first`. Returns what is wrong, if anything.
const char* read_weight(ffi::RemainingArgs& args, size_t first, int32_t layer, int64_t num_places, AdaptedWeight* w) {
  const auto down = args.get<ffi::BufferR3<ffi::U32>>(first), up = args.get<ffi::BufferR3<ffi::U32>>(first + 1);
  const auto entries = args.get<Places>(first + 2);
  const auto factors = args.get<Scales>(first + 3), y = args.get<Scales>(first + 4);
  if (!down || !up || !entries || !factors || !y) return "adapt: a bank has another type";
  const int64_t layers = down->dimensions()[0];
  const auto fits = [&](auto dims) { return dims[0] == layers && dims[1] == num_places; };
  if (layer < 0 || layer >= layers || !fits(down->dimensions()) || !fits(up->dimensions()) ||
      !fits(entries->dimensions()) || !fits(factors->dimensions()))
    return "adapt: shapes differ";
  w->rows = y->dimensions()[1];
  w->down_bytes = 4 * down->dimensions()[2];
  w->up_bytes = 4 * up->dimensions()[2];
  w->down = (const uint8_t*)down->typed_data() + layer * num_places * w->down_bytes;
  w->up = (const uint8_t*)up->typed_data() + layer * num_places * w->up_bytes;
  w->entries = entries->typed_data() + layer * num_places;
  w->factors = factors->typed_data() + layer * num_places;
  return nullptr;
}

const char* read_lists(Places places, Scales scales, int64_t num_tokens, int64_t num_decodes, Adaptation* a) {
  const int64_t rows = places.dimensions()[0];
  a->num_tokens = num_tokens;
  a->num_decodes = num_decodes;
  a->list_length = places.dimensions()[1];
  a->places = places.typed_data();
  a->scales = scales.typed_data();
  if (scales.element_count() != places.element_count() || num_decodes < 0 ||
      rows < std::min(num_decodes, num_tokens) + (num_tokens > num_decodes))
    return "adapt: lists differ";
  return nullptr;
}

void run(ffi::ThreadPool& pool, const Adaptation& a, int64_t num_places) {
  int64_t work = 0;  // multiplications
  for (int64_t row = 0; row <= std::min(a.num_decodes, a.num_tokens - 1); ++row) {
    const int64_t tokens = row < a.num_decodes ? 1 : a.num_tokens - a.num_decodes;
    for (int64_t k = 0; k < a.list_length; ++k) {
      const int64_t place = a.places[row * a.list_length + k];
      if (place < 0 || place >= num_places) continue;
      for (int64_t i = 0; i < a.num_weights; ++i)
        work += tokens * (a.weights[i].entries[place] >> 2) * (a.weights[i].cols + a.weights[i].rows);
    }
  }
  if (!work) return;
  const Kernels& kernels = chosen();
  const int64_t threads = std::max<int64_t>(1, pool.num_threads());
  // Whole blocks of tokens that share their loads, but single rows where each has its own pair.
  const int64_t least = a.num_tokens - a.num_decodes > 1 ? 4 : 1;
  const int64_t grain = work < kWorthSharing ? a.num_tokens : std::max(least, a.num_tokens / (4 * threads));
  parallel_for(pool, a.num_tokens, grain, [a, &kernels](int64_t f, int64_t e) noexcept { kernels.adapt(a, f, e); });
}

bool lists_fit(const Adaptation& a, int64_t rows, int64_t num_places) {
  for (int64_t i = 0; i < rows * a.list_length; ++i)
    if (a.places[i] >= num_places) return false;
  return true;
}

ffi::Error Adapt(ffi::ThreadPool pool, Places places, Scales scales, ffi::BufferR0<ffi::S32> layer, Scales x,
                 ffi::RemainingArgs args, ffi::RemainingRets results, int64_t num_decodes) try {
  Adaptation a{};
  if (const char* wrong = read_lists(places, scales, x.dimensions()[0], num_decodes, &a)) return invalid(wrong);
  if (args.size() != kPerWeight * results.size()) return invalid("adapt: arrays are missing");
  const auto first = args.get<ffi::BufferR3<ffi::U32>>(0);
  if (!first) return invalid("adapt: a bank has another type");
  const int64_t num_places = first->dimensions()[1];
  if (!lists_fit(a, places.dimensions()[0], num_places)) return invalid("adapt: there is no such place");
  std::vector<AdaptedWeight> weights(results.size());
  for (size_t i = 0; i < weights.size(); ++i) {
    AdaptedWeight& w = weights[i];
    if (const char* wrong = read_weight(args, kPerWeight * i, layer.typed_data()[0], num_places, &w)) return invalid(wrong);
    auto y = results.get<Scales>(i);
    if (!y || (*y)->dimensions()[0] != a.num_tokens || (*y)->dimensions()[1] != w.rows) return invalid("adapt: shapes differ");
    w.cols = x.dimensions()[1];
    w.y = (*y)->typed_data();
    if (const char* wrong = check_entries(w, num_places, w.cols)) return invalid(wrong);
  }
  a.x = x.typed_data();
  a.weights = weights.data();
  a.num_weights = (int64_t)weights.size();
  run(pool, a, num_places);
  return ffi::Error::Success();
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

ffi::Error AdaptEmbedding(ffi::ThreadPool pool, Places places, Scales scales, ffi::BufferR1<ffi::S32> tokens,
                          ffi::RemainingArgs args, ffi::ResultBufferR2<ffi::F32> y, int64_t vocabulary,
                          int64_t num_decodes) {
  Adaptation a{};
  const int64_t num_tokens = y->dimensions()[0];
  if (const char* wrong = read_lists(places, scales, num_tokens, num_decodes, &a)) return invalid(wrong);
  const auto first = args.get<ffi::BufferR3<ffi::U32>>(0);
  if (!first || args.size() != kPerWeight || (int64_t)tokens.element_count() != num_tokens) return invalid("adapt: shapes differ");
  const int64_t num_places = first->dimensions()[1];
  if (!lists_fit(a, places.dimensions()[0], num_places)) return invalid("adapt: there is no such place");
  AdaptedWeight w{};
  if (const char* wrong = read_weight(args, 0, 0, num_places, &w)) return invalid(wrong);
  if (w.rows != y->dimensions()[1]) return invalid("adapt: shapes differ");
  w.y = y->typed_data();
  if (const char* wrong = check_entries(w, num_places, vocabulary)) return invalid(wrong);
  for (int64_t n = 0; n < num_tokens; ++n)
    if (tokens.typed_data()[n] < 0 || tokens.typed_data()[n] >= vocabulary) return invalid("adapt: there is no such token");
  a.tokens = tokens.typed_data();
  a.weights = &w;
  a.num_weights = 1;
  run(pool, a, num_places);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace kvarts

// What jax looks up by name; all else is hidden.
#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(kvarts_adapt, kvarts::Adapt,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<kvarts::Places>()
                                  .Arg<kvarts::Scales>()
                                  .Arg<ffi::BufferR0<ffi::S32>>()
                                  .Arg<kvarts::Scales>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<int64_t>("num_decodes"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(kvarts_adapt_embedding, kvarts::AdaptEmbedding,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<kvarts::Places>()
                                  .Arg<kvarts::Scales>()
                                  .Arg<ffi::BufferR1<ffi::S32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::BufferR2<ffi::F32>>()
                                  .Attr<int64_t>("vocabulary")
                                  .Attr<int64_t>("num_decodes"));

#pragma GCC visibility pop
