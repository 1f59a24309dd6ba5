// Products of quantised matrices with f32 activations, 16 rows of the matrix at a time.
#pragma once
#include <cstdint>

#include "attention.h"
#include "lora.h"
#include "recurrence.h"

namespace kvarts {

enum class Kind : int32_t { kDense = 0, kQ8 = 1, kQ4 = 2 };
enum class Float : int32_t { kF32 = 0, kF16 = 1, kBf16 = 2 };

// A matrix in the arena. Quantised planes are interleaved by tiles of 16 rows:
//   codes   per tile and group, 64-byte runs of 16 rows x 4 columns (q4: columns c and c + group/2
//           in the low and high nibble)
//   scales  [tile, group, 16], offsets the same.
struct Matrix {
  Kind kind;
  Float number;  // of dense values, or of scales and offsets
  int32_t group;
  bool has_offset;
  int64_t rows, cols;
  const uint8_t* codes;
  const uint8_t* scales;
  const uint8_t* offsets;
};

// Activations of a step, quantised once: int8 in groups of 32 columns.
struct Activations {
  int64_t num, cols;
  const float* x;        // [num, cols]
  int8_t* codes;         // [num, cols]
  float* scales;         // [num, cols / 32]
  int32_t* sums;         // [num, cols / 16], sums of codes of half groups
};

// Root-mean-square norm of rows: y = x / sqrt(mean(x * x) + epsilon) * weight.
struct Norm {
  int64_t cols;
  float epsilon;
  const float* x;       // [rows, cols]
  const float* weight;  // [cols]
  float* y;             // [rows, cols]
};

// None of these throws.
struct Kernels {
  const char* name;
  // Quantises tokens [first, end).
  void (*quantise)(const Activations&, int64_t first, int64_t end);
  // Rows [16 * first_tile, 16 * end_tile) of every token; y is [num, stride].
  void (*product)(const Matrix&, const Activations&, int64_t first_tile, int64_t end_tile, float* y,
                  int64_t stride);
  // Row `row` as f32 [cols].
  void (*decode_row)(const Matrix&, int64_t row, float* to);
  // Rows [first, end).
  void (*norm)(const Norm&, int64_t first, int64_t end);
  // Keys and values of tokens [first, end) into the pool.
  void (*store_tokens)(const Attention&, int64_t first, int64_t end);
  // Units [first, end) of attend_units; false if there is no memory for it.
  bool (*attend)(const Attention&, int64_t first, int64_t end);
  // Decode rows [first, end), if they were split into spans.
  bool (*merge_rows)(const Attention&, int64_t first, int64_t end);
  // Adds what their adapters change to products of tokens [first, end).
  void (*adapt)(const Adaptation&, int64_t first, int64_t end);
  // Units [first, end) of work; false if there is no memory for it.
  bool (*convolve)(const Convolution&, int64_t first, int64_t end);
  bool (*recur)(const Recurrence&, int64_t first, int64_t end);
};

}  // namespace kvarts
