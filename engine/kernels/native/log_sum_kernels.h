// The logarithm of a sum of exponentials for one instruction set (KVARTS_ISA). Included once per set, after
// attention_kernels.h, whose exponential it uses.
//
// XLA's sum over a row takes another order when the number of rows changes; here it is always 16 lanes in
// the order of columns, a short end padded with what counts as nothing, then the tree of sum16.
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels.h"
#include "simd.h"

namespace kvarts {
namespace KVARTS_ISA {

inline float log_sum_of_row(const float* x, int64_t count) {
  const int64_t whole = count / 16 * 16;
  float rest[16];
  std::fill(rest, rest + 16, -std::numeric_limits<float>::infinity());
  std::memcpy(rest, x + whole, (count - whole) * sizeof(float));
  F32 most = load<F32>(rest);
  for (int p = 1; p < kParts16; ++p) most = select_max(load<F32>(rest + p * kLanes), most);
  for (int64_t i = 0; i < whole; i += kLanes) most = select_max(load<F32>(x + i), most);
  float best = most[0];
  for (int i = 1; i < kLanes; ++i) best = std::max(best, most[i]);
  F32 sums[kParts16] = {};
  const auto add = [&](const float* from) {
    for (int p = 0; p < kParts16; ++p) sums[p] += exp_nonpositive(load<F32>(from + p * kLanes) - best);
  };
  for (int64_t i = 0; i < whole; i += 16) add(x + i);
  if (whole < count) add(rest);
  return best + std::log(sum16(sums));
}

inline void log_sum_exp(const LogSum& a, int64_t first, int64_t end) {
  for (int64_t row = first; row < end; ++row) a.y[row] = log_sum_of_row(a.x + row * a.cols, a.cols);
}

}  // namespace KVARTS_ISA
}  // namespace kvarts
