// Attention of a step's tokens over paged keys and values.
#pragma once
#include <cstdint>

namespace kvarts {

struct Attention {
  int64_t num_tokens, num_heads, num_kv_heads, dim;
  int64_t page_tokens, table_pages, num_decodes;
  bool is_half;            // the pool holds f16, else f32
  float scale, soft_cap;   // soft_cap 0: none
  int32_t window;
  const float* queries;    // [tokens, heads, dim], rotated
  const float* keys;       // [tokens, kv_heads, dim] of this step, rotated
  const float* values;
  const int32_t* positions;  // [tokens], -1: padding
  const int32_t* units;      // [tokens], where each is stored
  const int32_t* offsets;    // [tokens], place in its page
  const int32_t* tables;     // [rows, table_pages]; token i < num_decodes has row i, others the last
  void* pool_keys;           // [units, page_tokens, kv_heads, dim]
  void* pool_values;
  float* out;                // [tokens, heads * dim]
};

// Tokens that are attended together, sharing one reading of keys and values.
constexpr int64_t kQueryBlock = 8;

inline int64_t query_blocks(const Attention& a) {
  const int64_t chunk = a.num_tokens - a.num_decodes;
  return a.num_decodes + (chunk + kQueryBlock - 1) / kQueryBlock;
}

}  // namespace kvarts
