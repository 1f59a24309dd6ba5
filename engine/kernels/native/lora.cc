// XLA's doors to the low-rank kernels alone; those of products go through qmatmul.cc. Nothing throws.
#include <new>
#include <vector>

#include "adaptation.h"
#include "parallel.h"

namespace kvarts {
namespace {

constexpr size_t kPerWeight = kBankArrays + 1;  // and the product

void run(ffi::ThreadPool& pool, const Adaptation& a) {
  const int64_t work = work_of(a);
  if (!work) return;
  const Kernels& kernels = chosen();
  const int64_t grain = grain_of(a, work, std::max<int64_t>(1, pool.num_threads()));
  parallel_for(pool, a.num_tokens, grain, [a, &kernels](int64_t f, int64_t e) noexcept { kernels.adapt(a, f, e); });
}

ffi::Error Adapt(ffi::ThreadPool pool, Places places, Scales scales, ffi::BufferR0<ffi::S32> layer, Scales x,
                 ffi::RemainingArgs args, ffi::RemainingRets results, int64_t num_decodes) try {
  Adaptation a{};
  if (args.size() != kPerWeight * results.size()) return invalid("adapt: arrays are missing");
  const int64_t num_places = places_of(args, 0);
  if (const char* wrong = read_lists(places, scales, x.dimensions()[0], num_decodes, num_places, &a)) return invalid(wrong);
  std::vector<AdaptedWeight> weights(results.size());
  for (size_t i = 0; i < weights.size(); ++i) {
    AdaptedWeight& w = weights[i];
    if (const char* wrong = read_bank(args, kPerWeight * i, layer.typed_data()[0], num_places, &w)) return invalid(wrong);
    const auto given = args.get<Scales>(kPerWeight * i + kBankArrays);
    auto y = results.get<Scales>(i);
    if (!given || !y || (*y)->element_count() != given->element_count() || (*y)->dimensions()[0] != a.num_tokens)
      return invalid("adapt: shapes differ");
    w.rows = w.stride = (*y)->dimensions()[1];
    w.cols = x.dimensions()[1];
    w.y = (*y)->typed_data();
    if (const char* wrong = check_entries(w, num_places, w.cols)) return invalid(wrong);
  }
  a.x = x.typed_data();
  a.weights = weights.data();
  a.num_weights = (int64_t)weights.size();
  run(pool, a);
  return ffi::Error::Success();
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

ffi::Error AdaptEmbedding(ffi::ThreadPool pool, Places places, Scales scales, ffi::BufferR1<ffi::S32> tokens,
                          ffi::RemainingArgs args, ffi::ResultBufferR2<ffi::F32> y, int64_t vocabulary,
                          int64_t num_decodes) try {
  Adaptation a{};
  const int64_t num_tokens = y->dimensions()[0];
  if (args.size() != kPerWeight || (int64_t)tokens.element_count() != num_tokens) return invalid("adapt: shapes differ");
  const int64_t num_places = places_of(args, 0);
  if (const char* wrong = read_lists(places, scales, num_tokens, num_decodes, num_places, &a)) return invalid(wrong);
  AdaptedWeight w{};
  if (const char* wrong = read_bank(args, 0, 0, num_places, &w)) return invalid(wrong);
  const auto given = args.get<Scales>(kBankArrays);
  if (!given || given->element_count() != y->element_count()) return invalid("adapt: shapes differ");
  w.rows = w.stride = y->dimensions()[1];
  w.y = y->typed_data();
  if (const char* wrong = check_entries(w, num_places, vocabulary)) return invalid(wrong);
  for (int64_t n = 0; n < num_tokens; ++n)
    if (tokens.typed_data()[n] < 0 || tokens.typed_data()[n] >= vocabulary) return invalid("adapt: there is no such token");
  a.tokens = tokens.typed_data();
  a.weights = &w;
  a.num_weights = 1;
  run(pool, a);
  return ffi::Error::Success();
} catch (const std::bad_alloc&) {
  return out_of_memory();
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
