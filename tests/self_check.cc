// Compares an instruction set's kernels with the portable ones, bit by bit, on random matrices of
// every format: for processors that are emulated, where there is no Python. OTHER names the set.
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "kernels.h"

namespace kvarts {
namespace portable { extern const Kernels kernels; }
namespace OTHER { extern const Kernels kernels; }
}  // namespace kvarts

using namespace kvarts;

namespace {

constexpr int64_t kTokens = 11, kCols = 288, kRows = 39, kPadded = 64;

struct Results {
  std::vector<int8_t> codes;
  std::vector<float> values;
};

// Scales as bytes: float16 near one (exponent 15), and factors of any size.
std::vector<uint8_t> random_scales(const Format& f, std::mt19937& rng) {
  std::vector<uint8_t> plane(kPadded / 16 * tile_scale_bytes(f, kCols) + 64);
  for (size_t i = 0; i < plane.size(); ++i)
    plane[i] = f.number == Float::kE8 ? 120 + rng() % 10 : i % 2 && f.number == Float::kF16 ? 0x38 + rng() % 4 : rng() % 64;
  return plane;
}

Results run(const Kernels& kernels, const Format& f, int64_t index, uint32_t seed, bool is_fine) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal;
  std::vector<float> x(kTokens * kCols), scales(kTokens * kCols / 32);
  for (float& value : x) value = normal(rng);
  std::vector<int32_t> sums(kTokens * kCols / 16);
  // The codes, then the fine ones.
  Results r{std::vector<int8_t>(2 * x.size()), std::vector<float>(kTokens * kRows + kCols + kTokens)};
  std::vector<uint8_t> codes(kPadded * kCols);
  const bool is_whole = f.kind == Kind::kQ8;
  for (uint8_t& code : codes) code = is_whole ? 128 - f.bound + rng() % (2 * f.bound) : rng();
  const std::vector<uint8_t> factors = random_scales(f, rng), offsets = random_scales(f, rng);
  const Matrix m{f, index, kRows, kCols, codes.data(), factors.data(), f.has_offset ? offsets.data() : nullptr};
  int8_t* const fine_codes = is_fine ? r.codes.data() + x.size() : nullptr;
  const Activations a{kTokens, kCols, x.data(), r.codes.data(), fine_codes, scales.data(), sums.data()};
  kernels.quantise(a, 0, kTokens);
  kernels.product(m, a, 0, (kRows + 15) / 16, r.values.data(), kRows);
  kernels.decode_row(m, kRows - 1, r.values.data() + kTokens * kRows);
  const LogSum sum{kCols, x.data(), r.values.data() + kTokens * kRows + kCols};
  kernels.log_sum_exp(sum, 0, kTokens);
  return r;
}

}  // namespace

int main() {
  int failures = 0;
  for (int64_t i = 0; i < 2 * kNumFormats; ++i) {
    const int64_t index = i / 2;
    const bool is_fine = i % 2;
    const Results expected = run(portable::kernels, kFormats[index], index, i + 1, is_fine);
    const Results found = run(OTHER::kernels, kFormats[index], index, i + 1, is_fine);
    const bool same = expected.codes == found.codes && !std::memcmp(expected.values.data(), found.values.data(), 4 * expected.values.size());
    if (!same) std::printf("format %d (%d bits) differs, first values %g and %g\n", (int)index, is_fine ? 16 : 8, expected.values[0], found.values[0]);
    failures += !same;
  }
  std::printf("%s: %d of %d formats and precisions equal the portable kernels' bits\n", OTHER::kernels.name,
              (int)(2 * kNumFormats) - failures, (int)(2 * kNumFormats));
  return failures != 0;
}
