// Adaptations as XLA hands them over: lists and banks are data of the program, so every index is looked at
// before it is followed. All that returns text says what is wrong, if anything.
#pragma once
#include <algorithm>

#include "handlers.h"

namespace kvarts {

using Places = ffi::BufferR2<ffi::S32>;
using Scales = ffi::BufferR2<ffi::F32>;

constexpr size_t kBankArrays = 4;  // down, up, entries, factors

// Bytes of a pair in its own precision.
inline int64_t number_bytes(int32_t entry) { return (Float)(entry & 3) == Float::kF32 ? 4 : 2; }

// Whether every pair lies in its place: `down_width` values per rank, and w.rows.
inline const char* check_entries(const AdaptedWeight& w, int64_t num_places, int64_t down_width) {
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

// Reads the bank of one weight, whose four arrays begin at `first`.
inline const char* read_bank(ffi::RemainingArgs& args, size_t first, int32_t layer, int64_t num_places, AdaptedWeight* w) {
  const auto down = args.get<ffi::BufferR3<ffi::U32>>(first), up = args.get<ffi::BufferR3<ffi::U32>>(first + 1);
  const auto entries = args.get<Places>(first + 2);
  const auto factors = args.get<Scales>(first + 3);
  if (!down || !up || !entries || !factors) return "adapt: a bank has another type";
  const int64_t layers = down->dimensions()[0];
  const auto fits = [&](auto dims) { return dims[0] == layers && dims[1] == num_places; };
  if (layer < 0 || layer >= layers || !fits(down->dimensions()) || !fits(up->dimensions()) ||
      !fits(entries->dimensions()) || !fits(factors->dimensions()))
    return "adapt: shapes differ";
  w->down_bytes = 4 * down->dimensions()[2];
  w->up_bytes = 4 * up->dimensions()[2];
  w->down = (const uint8_t*)down->typed_data() + layer * num_places * w->down_bytes;
  w->up = (const uint8_t*)up->typed_data() + layer * num_places * w->up_bytes;
  w->entries = entries->typed_data() + layer * num_places;
  w->factors = factors->typed_data() + layer * num_places;
  return nullptr;
}

// How many adapters the banks have room for, -1 if there is no bank at `first`.
inline int64_t places_of(ffi::RemainingArgs& args, size_t first) {
  const auto down = args.get<ffi::BufferR3<ffi::U32>>(first);
  return down ? down->dimensions()[1] : -1;
}

inline const char* read_lists(Places places, Scales scales, int64_t num_tokens, int64_t num_decodes, int64_t num_places,
                              Adaptation* a) {
  const int64_t rows = places.dimensions()[0];
  a->num_tokens = num_tokens;
  a->num_decodes = num_decodes;
  a->list_length = places.dimensions()[1];
  a->places = places.typed_data();
  a->scales = scales.typed_data();
  if (scales.element_count() != places.element_count() || num_decodes < 0 ||
      rows < std::min(num_decodes, num_tokens) + (num_tokens > num_decodes))
    return "adapt: lists differ";
  for (int64_t i = 0; i < rows * a->list_length; ++i)
    if (a->places[i] >= num_places) return "adapt: there is no such place";
  return nullptr;
}

// Multiplications of all tokens.
inline int64_t work_of(const Adaptation& a) {
  int64_t work = 0;
  for (int64_t row = 0; row <= std::min(a.num_decodes, a.num_tokens - 1); ++row) {
    const int64_t tokens = row < a.num_decodes ? 1 : a.num_tokens - a.num_decodes;
    for (int64_t k = 0; k < a.list_length; ++k) {
      const int64_t place = a.places[row * a.list_length + k];
      for (int64_t i = 0; place >= 0 && i < a.num_weights; ++i)
        work += tokens * (a.weights[i].entries[place] >> 2) * (a.weights[i].cols + a.weights[i].rows);
    }
  }
  return work;
}

// How many tokens a thread takes at a time.
inline int64_t grain_of(const Adaptation& a, int64_t work, int64_t threads) {
  // Whole blocks of tokens that share their loads, but single rows where each has its own pair.
  const int64_t least = a.num_tokens - a.num_decodes > 1 ? 4 : 1;
  return work < kWorthSharing ? a.num_tokens : std::max(least, a.num_tokens / (4 * threads));
}

}  // namespace kvarts
