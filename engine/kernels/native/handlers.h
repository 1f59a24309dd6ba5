// What XLA's doors to the kernels share: refusals, and matrices read from tables and looked at.
#pragma once
#include <cstdint>

#include "kernels.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace kvarts {

// The kernels of the instruction set in use.
const Kernels& chosen();

constexpr int64_t kTile = 16;
constexpr int64_t kWorthSharing = 1 << 17;  // multiplications; below, waking a thread costs more

inline ffi::Error invalid(const char* what) { return ffi::Error::InvalidArgument(what); }
inline ffi::Error out_of_memory() { return ffi::Error(ffi::ErrorCode::kResourceExhausted, "out of memory"); }

using Bytes = ffi::BufferR2<ffi::U8>;
using Layouts = ffi::Span<const int64_t>;

// Bytes that whole tiles hold `rows` rows in.
inline int64_t code_bytes(const Matrix& m, int64_t rows) {
  const int64_t count = (rows + kTile - 1) / kTile * kTile * m.cols;
  if (m.index < 0) return count * (m.format.number == Float::kF32 ? 4 : 2);
  return m.format.kind == Kind::kQ8 ? count : count / 2;
}

inline int64_t scale_bytes(const Matrix& m, int64_t rows) {
  return (rows + kTile - 1) / kTile * tile_scale_bytes(m.format, m.cols);
}

// Whether the kernels know such a matrix; finds its format.
inline bool is_known(Matrix& m) {
  const Float number = m.format.number;
  if (m.format.kind == Kind::kDense) return number == Float::kF32 || number == Float::kF16 || number == Float::kBf16;
  if (m.cols % 32) return false;
  for (m.index = 0; m.index < kNumFormats; ++m.index)
    if (kFormats[m.index] == m.format) return true;
  return false;
}

// Reads a matrix from its entry of a table. Entries are data of the program: what they name is
// looked at before it is touched. Returns what is wrong, if anything.
inline const char* read_matrix(const uint8_t* data, int64_t held, const int32_t* entry, Layouts layouts, int64_t rows,
                               int64_t cols, Matrix* m) {
  if (entry[0] < 0 || 5 * (size_t)entry[0] + 4 >= layouts.size()) return "a matrix has a layout that does not exist";
  const int64_t* layout = layouts.begin() + 5 * entry[0];
  const Format format{(Kind)layout[0], (Float)layout[1], (int32_t)layout[2], layout[3] != 0, (int32_t)layout[4]};
  *m = Matrix{format, -1, rows, cols,
              data + 64 * (int64_t)entry[1], data + 64 * (int64_t)entry[2], data + 64 * (int64_t)entry[3]};
  if (!is_known(*m)) return "a matrix does not fit its layout";
  const auto is_inside = [&](int32_t block, int64_t bytes) { return block >= 0 && 64 * (int64_t)block + bytes <= held; };
  const bool has_scales = m->index >= 0;
  if (!is_inside(entry[1], code_bytes(*m, rows)) ||
      (has_scales && !is_inside(entry[2], scale_bytes(*m, rows))) ||
      (has_scales && m->format.has_offset && !is_inside(entry[3], scale_bytes(*m, rows))))
    return "a matrix is not inside the arena";
  return nullptr;
}

inline const char* read_matrix(const Bytes& arena, const int32_t* entry, Layouts layouts, int64_t rows, int64_t cols,
                               Matrix* m) {
  return read_matrix(arena.typed_data(), arena.element_count(), entry, layouts, rows, cols, m);
}

}  // namespace kvarts
