// Low-rank changes of products: y += scale * up.T (down x), by row, over banks of adapters.
#pragma once
#include <cstdint>

namespace kvarts {

constexpr int64_t kMaxRank = 512;

// One weight of one layer: its pair in every place of the bank, and the product that they change.
struct AdaptedWeight {
  int64_t rows, cols;
  int64_t stride;                // of tokens in y
  int64_t down_bytes, up_bytes;  // of a place
  const uint8_t* down;           // [places, down_bytes]: [rank, cols], or [vocabulary, rank]
  const uint8_t* up;             // [places, up_bytes]: [rank, rows]
  const int32_t* entries;        // [places]: 4 * rank + Float, 0 for none
  const float* factors;          // [places]
  float* y;                      // [tokens, rows], `stride` apart
};

// What a step adds to the products of one input. Token n belongs to row min(n, num_decodes).
struct Adaptation {
  int64_t num_tokens, num_decodes, list_length;
  const int32_t* places;  // [rows, list_length], -1 for none
  const float* scales;    // [rows, list_length]
  const float* x;         // [tokens, cols]; of an embedding null
  const int32_t* tokens;  // [tokens], whose rows of `down` are taken; else null
  const AdaptedWeight* weights;
  int64_t num_weights;
};

}  // namespace kvarts
