// The norm of kernels.h for one instruction set (KVARTS_ISA). Included once per set.
//
// XLA sums a row in an order that depends on how many rows there are; here it is always 16 lanes in
// the order of columns, a short end padded with zeros, then the tree of sum16.
#include <cmath>

#include "kernels.h"
#include "simd.h"

namespace kvarts {
namespace KVARTS_ISA {

inline float sum_of_squares(const float* x, int64_t count) {
  F32 sums[kParts16] = {};
  const int64_t whole = count / 16 * 16;
  const auto add = [&](const float* from) {
    for (int p = 0; p < kParts16; ++p) {
      const F32 part = load<F32>(from + p * kLanes);
      sums[p] = fma(part, part, sums[p]);
    }
  };
  for (int64_t i = 0; i < whole; i += 16) add(x + i);
  if (whole < count) {
    float rest[16] = {};
    std::memcpy(rest, x + whole, (count - whole) * sizeof(float));
    add(rest);
  }
  return sum16(sums);
}

inline void norm(const Norm& a, int64_t first, int64_t end) {
  const int64_t cols = a.cols;
  const float* __restrict weight = a.weight;
  for (int64_t row = first; row < end; ++row) {
    const float* __restrict x = a.x + row * cols;
    float* __restrict y = a.y + row * cols;
    const float inverse = 1.0f / std::sqrt(sum_of_squares(x, cols) / (float)cols + a.epsilon);
    for (int64_t i = 0; i < cols; ++i) y[i] = x[i] * inverse * weight[i];
  }
}

}  // namespace KVARTS_ISA
}  // namespace kvarts
