// Experts that are not all in memory: which are, where, and how the others are asked for.
#pragma once
#include <cstdint>
#include <memory>

namespace kvarts {

// Brings experts into slots and says so in `slot_of`; returns 0, or anything else if it could not.
// `ids` are all that a step's layer needs; none of them may be taken away meanwhile.
using LoadExperts = int32_t (*)(int32_t layer, const int32_t* ids, int64_t count, int32_t is_long);

// Arrays belong to whoever registered the cache and outlive it.
struct ExpertCache {
  int64_t num_layers, num_experts, num_slots, slot_bytes;
  uint8_t* slots;      // [num_slots, slot_bytes]
  int32_t* slot_of;    // [num_layers, num_experts], -1: in no slot
  double* uses;        // [num_layers, num_experts], in units that grow with the clock
  double* clock;       // what one use counts now; grows by half a life per token
  int64_t* counts;     // lookups, hits, and whether experts are being loaded ahead
  LoadExperts load;
};

// The cache that has this number, or null.
std::shared_ptr<const ExpertCache> find_cache(int32_t id);

}  // namespace kvarts
