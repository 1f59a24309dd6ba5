// Attention of a step's tokens over paged keys and values.
#pragma once
#include <cstdint>

namespace kvarts {

struct Attention {
  int64_t num_tokens, num_heads, num_kv_heads;
  int64_t key_dim, value_dim, mixed_dim;  // value_dim 0: values are the first mixed_dim components of keys
  int64_t page_tokens, table_pages, num_decodes;
  bool is_half;            // the pool holds f16, else f32
  float scale, soft_cap;   // soft_cap 0: none
  int32_t window;
  const float* queries;    // [tokens, heads, key_dim], rotated
  const float* keys;       // [tokens, kv_heads, key_dim] of this step, rotated
  const float* values;     // [tokens, kv_heads, value_dim]
  const float* sinks;      // [heads], one more score of each head that has no value; null: none
  const int32_t* positions;  // [tokens], -1: padding
  const int32_t* units;      // [tokens], where each is stored
  const int32_t* offsets;    // [tokens], place in its page
  const int32_t* tables;     // [rows, table_pages]; token i < num_decodes has row i, others the last
  void* pool_keys;           // [units, page_tokens, kv_heads, key_dim]
  void* pool_values;         // [units, page_tokens, kv_heads, value_dim]
  float* out;                // [tokens, heads, mixed_dim]

  // How the work is split, of which no result depends.
  int64_t block_tokens;  // of the chunk, that share one reading of keys and values
  int64_t num_spans;     // units that a decode row's keys are split into, per K/V head
  float* partials;       // [decodes, kv_heads, num_spans, partial_size], null if num_spans is 1
};

// Keys of a span. What a token gets of each span is found from scratch and added to that of the spans
// before it, whoever does it: one thread after another, or several at a time.
constexpr int64_t kSpan = 512;

// Of one span and K/V head: the weighted sum of values, the best score and the sum of weights of every
// query that shares the head.
inline int64_t partial_size(const Attention& a) {
  return a.num_heads / a.num_kv_heads * ((a.mixed_dim + 15) / 16 * 16 + 2);
}

inline int64_t chunk_blocks(const Attention& a) {
  return (a.num_tokens - a.num_decodes + a.block_tokens - 1) / a.block_tokens;
}

// Blocks of the chunk first: they take longest.
inline int64_t attend_units(const Attention& a) {
  return (chunk_blocks(a) + a.num_decodes * a.num_spans) * a.num_kv_heads;
}

}  // namespace kvarts
