// Makes the experts of a step resident before their products run. Hits cost a look at a table; only a
// miss, or a long step that may load ahead, calls back into the store, which owns all decisions.
#include "expert_cache.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <mutex>
#include <new>
#include <vector>

#include "handlers.h"
#include "reading.h"

namespace kvarts {
namespace {

std::mutex caches_mutex;

std::map<int32_t, std::shared_ptr<const ExpertCache>>& caches() {
  static std::map<int32_t, std::shared_ptr<const ExpertCache>> all;
  return all;
}

enum Count { kLookups = 0, kHits = 1, kLoadsAhead = 2 };

// Uses are compared, never added up over long: what a use counts doubles after this many tokens.
constexpr double kHalfLifeTokens = 128;
constexpr double kMostClock = 1e150;

void pass_time(const ExpertCache& c, int64_t num_tokens) {
  *c.clock *= std::exp2((double)num_tokens / kHalfLifeTokens);
  if (*c.clock < kMostClock) return;
  for (int64_t i = 0; i < c.num_layers * c.num_experts; ++i) c.uses[i] /= *c.clock;
  *c.clock = 1;
}

using Ids = ffi::BufferR2<ffi::S32>;

ffi::Error EnsureExperts(ffi::ThreadPool threads, ffi::BufferR0<ffi::S32> cache_id, ffi::BufferR0<ffi::S32> layer_of, Ids ids,
                         ffi::ResultBufferR2<ffi::S32> slots) try {
  const auto cache = find_cache(cache_id.typed_data()[0]);
  if (!cache) return invalid("ensure_experts: no such cache");
  const ExpertCache& c = *cache;
  const int32_t layer = layer_of.typed_data()[0];
  const int64_t num_pairs = ids.element_count();
  if (layer < 0 || layer >= c.num_layers || slots->element_count() != ids.element_count())
    return invalid("ensure_experts: shapes differ");
  std::vector<int64_t> uses(c.num_experts);
  for (int64_t i = 0; i < num_pairs; ++i) {
    const int32_t id = ids.typed_data()[i];
    if (id < 0 || id >= c.num_experts) return invalid("ensure_experts: no such expert");
    ++uses[id];
  }
  if (layer == 0) pass_time(c, ids.dimensions()[0]);
  std::vector<int32_t> needed;
  int32_t* const slot_of = c.slot_of + layer * c.num_experts;
  int64_t num_missing = 0;
  for (int64_t id = 0; id < c.num_experts; ++id) {
    if (!uses[id]) continue;
    c.uses[layer * c.num_experts + id] += uses[id] * *c.clock;
    needed.push_back((int32_t)id);
  }
  const bool is_long = num_pairs >= c.num_experts;
  // Slots that are being filled ahead must not be looked at before the store has waited for them.
  if (!c.counts[kLoadsAhead])
    for (const int32_t id : needed) num_missing += slot_of[id] < 0;
  if (num_missing || is_long || c.counts[kLoadsAhead]) {
    const SharedReads shared(threads);
    if (c.load(layer, needed.data(), (int64_t)needed.size(), is_long)) return ffi::Error::Internal("experts could not be loaded");
  } else {
    c.counts[kLookups] += needed.size();
    c.counts[kHits] += needed.size();
  }
  for (int64_t i = 0; i < num_pairs; ++i) {
    const int32_t slot = slot_of[ids.typed_data()[i]];
    if (slot < 0 || slot >= c.num_slots) return ffi::Error::Internal("an expert is in no slot");
    slots->typed_data()[i] = slot;
  }
  return ffi::Error::Success();
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

}  // namespace

std::shared_ptr<const ExpertCache> find_cache(int32_t id) {
  std::lock_guard<std::mutex> lock(caches_mutex);
  const auto found = caches().find(id);
  return found == caches().end() ? nullptr : found->second;
}

}  // namespace kvarts

#pragma GCC visibility push(default)

// Returns the new cache's number, or 0 if there is no memory for it.
extern "C" int32_t kvarts_open_expert_cache(const kvarts::ExpertCache* cache) try {
  static int32_t last = 0;
  std::lock_guard<std::mutex> lock(kvarts::caches_mutex);
  kvarts::caches()[++last] = std::make_shared<const kvarts::ExpertCache>(*cache);
  return last;
} catch (const std::bad_alloc&) {
  return 0;
}

extern "C" void kvarts_close_expert_cache(int32_t id) {
  std::lock_guard<std::mutex> lock(kvarts::caches_mutex);
  kvarts::caches().erase(id);
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(kvarts_ensure_experts, kvarts::EnsureExperts,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::BufferR0<ffi::S32>>()
                                  .Arg<ffi::BufferR0<ffi::S32>>()
                                  .Arg<ffi::BufferR2<ffi::S32>>()
                                  .Ret<ffi::BufferR2<ffi::S32>>());

#pragma GCC visibility pop
