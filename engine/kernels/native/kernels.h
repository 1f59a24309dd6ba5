// Products of quantised matrices with f32 activations, 16 rows of the matrix at a time.
#pragma once
#include <cstdint>

#include "attention.h"
#include "lora.h"
#include "recurrence.h"

namespace kvarts {

enum class Kind : int32_t { kDense = 0, kQ8 = 1, kQ4 = 2, kIq4 = 3, kMx4 = 4 };
enum class Float : int32_t { kF32 = 0, kF16 = 1, kBf16 = 2, kF16x8 = 3, kE8 = 4 };

// How a matrix is stored. Planes of quantised ones are interleaved by tiles of 16 rows:
//   codes   per tile and group, 64-byte runs of 16 rows x 4 columns (4-bit kinds: columns c and
//           c + group/2 in the low and high nibble)
//   scales  kF16 and kE8: [tile, group, 16]; kF16x8: per tile f16 [cols / 256 rounded up, 16], then int8
//           [group, 16], whose products are the scales; offsets the same.
struct Format {
  Kind kind;
  Float number;  // of dense values, or of scales and offsets
  int32_t group;
  bool has_offset;
  int32_t bound;  // of the magnitude of codes
};

// Those of quantised matrices that there are kernels for.
constexpr Format kFormats[] = {
    {Kind::kQ4, Float::kF16, 32, true, 15},     // Q4_0, Q4_1
    {Kind::kQ4, Float::kF16x8, 32, true, 15},   // Q4_K
    {Kind::kQ4, Float::kF16x8, 16, true, 15},   // Q2_K, Q3_K
    {Kind::kQ8, Float::kF16, 32, false, 16},    // Q5_0
    {Kind::kQ8, Float::kF16, 32, true, 31},     // Q5_1
    {Kind::kQ8, Float::kF16, 32, false, 128},   // Q8_0
    {Kind::kQ8, Float::kF16x8, 32, true, 31},   // Q5_K
    {Kind::kQ8, Float::kF16x8, 16, false, 32},  // Q6_K
    {Kind::kIq4, Float::kF16, 32, false, 127},  // IQ4_NL
    {Kind::kIq4, Float::kF16x8, 32, false, 127},  // IQ4_XS
    {Kind::kMx4, Float::kE8, 32, false, 12},    // MXFP4
};
constexpr int64_t kNumFormats = sizeof(kFormats) / sizeof(Format);
constexpr int64_t kSuperBlock = 256;  // columns that share an f16 of kF16x8

inline bool operator==(const Format& a, const Format& b) {
  return a.kind == b.kind && a.number == b.number && a.group == b.group && a.has_offset == b.has_offset && a.bound == b.bound;
}

// Bytes of a plane of scales or offsets that 16 rows take.
inline int64_t tile_scale_bytes(const Format& f, int64_t cols) {
  const int64_t groups = cols / f.group;
  if (f.number == Float::kF16x8) return 32 * ((cols + kSuperBlock - 1) / kSuperBlock) + 16 * groups;
  return f.number == Float::kE8 ? 16 * groups : 32 * groups;
}

// A matrix in the arena.
struct Matrix {
  Format format;
  int64_t index;  // of kFormats, -1 if dense
  int64_t rows, cols;
  const uint8_t* codes;
  const uint8_t* scales;
  const uint8_t* offsets;
};

// Activations of a step, quantised once: int8 in groups of kActivationGroup columns. Fine ones are in 16
// bits, 256 * codes + fine_codes.
constexpr int64_t kActivationGroup = 32;
struct Activations {
  int64_t num, cols;
  const float* x;      // [num, cols]
  int8_t* codes;       // [num, cols]
  int8_t* fine_codes;  // [num, cols], or null
  float* scales;       // [num, cols / kActivationGroup]
  int32_t* sums;       // [num, cols / kActivationGroup * 2], sums of (fine) codes of half groups
};

// Root-mean-square norm of rows: y = x / sqrt(mean(x * x) + epsilon) * weight.
struct Norm {
  int64_t cols;
  float epsilon;
  const float* x;       // [rows, cols]
  const float* weight;  // [cols]
  float* y;             // [rows, cols]
};

// y = log(sum(exp(x))) of rows.
struct LogSum {
  int64_t cols;
  const float* x;  // [rows, cols]
  float* y;        // [rows]
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
  void (*log_sum_exp)(const LogSum&, int64_t first, int64_t end);
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
