// Memory for the activations of some rows.
#pragma once
#include <cstring>
#include <memory>

#include "kernels.h"

namespace kvarts {

// Not zeroed, as it is as large as what is put there; `x` and the fine codes only where they are asked
// for.
struct ActivationMemory {
  ActivationMemory(int64_t num, int64_t cols, bool has_x, bool is_fine = false)
      : x(has_x ? new float[num * cols] : nullptr),
        codes(new int8_t[num * cols]),
        fine_codes(is_fine ? new int8_t[num * cols] : nullptr),
        scales(new float[num * (cols / kActivationGroup)]),
        sums(new int32_t[num * (cols / kActivationGroup) * 2]) {}
  Activations view(int64_t num, int64_t cols, const float* given) const {
    return {num, cols, x ? x.get() : given, codes.get(), fine_codes.get(), scales.get(), sums.get()};
  }
  std::unique_ptr<float[]> x;
  std::unique_ptr<int8_t[]> codes, fine_codes;
  std::unique_ptr<float[]> scales;
  std::unique_ptr<int32_t[]> sums;
};

// Those of a run of rows.
inline Activations rows_of(const Activations& a, int64_t first, int64_t num) {
  const int64_t groups = a.cols / kActivationGroup;
  return {num,
          a.cols,
          a.x + first * a.cols,
          a.codes + first * a.cols,
          a.fine_codes ? a.fine_codes + first * a.cols : nullptr,
          a.scales + first * groups,
          a.sums + first * groups * 2};
}

inline void copy_row(const Activations& from, int64_t row, const Activations& to, int64_t at, bool has_x, bool has_codes) {
  const int64_t cols = from.cols, groups = cols / kActivationGroup;
  if (has_x) std::memcpy(const_cast<float*>(to.x) + at * cols, from.x + row * cols, cols * sizeof(float));
  if (!has_codes) return;
  std::memcpy(to.codes + at * cols, from.codes + row * cols, cols);
  if (from.fine_codes) std::memcpy(to.fine_codes + at * cols, from.fine_codes + row * cols, cols);
  std::memcpy(to.scales + at * groups, from.scales + row * groups, groups * sizeof(float));
  std::memcpy(to.sums + at * groups * 2, from.sums + row * groups * 2, groups * 2 * sizeof(int32_t));
}

}  // namespace kvarts
