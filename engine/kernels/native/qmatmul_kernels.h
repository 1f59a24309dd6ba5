// The kernels of qmatmul.h for one instruction set (KVARTS_ISA). Included once per set.
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels.h"
#include "simd.h"

namespace kvarts {
namespace KVARTS_ISA {

constexpr int64_t kTile = 16;
constexpr int64_t kGroup = 32;   // of activations
constexpr int kBlock = kLanes == 16 ? 8 : 4;  // tokens that share one pass over a tile
constexpr int kParts = kTile / kLanes;

// 127 over a magnitude below this is no finite number: such a group is as good as zero.
constexpr float kLeast = 0x1p-120f;

// A group of 32 becomes codes of round(x * (127 / most)), half to even, and the scale most / 127.
// One with a value that is not finite gets a scale that is not either, so that its products show it.
inline void quantise(const Activations& a, int64_t first, int64_t end) {
  const int64_t groups = a.cols / kGroup;
  for (int64_t n = first; n < end; ++n) {
    for (int64_t g = 0; g < groups; ++g) {
      const float* x = a.x + n * a.cols + g * kGroup;
      int8_t* q = a.codes + n * a.cols + g * kGroup;
      int32_t bits = 0;  // of the largest magnitude: they order as the numbers do, NaN above all
      for (int i = 0; i < kGroup; ++i) bits = std::max(bits, load<int32_t>(x + i) & 0x7fffffff);
      const float most = load<float>(&bits);
      const bool is_finite = bits < 0x7f800000;
      const float inverse = is_finite && most >= kLeast ? 127.0f / most : 0.0f;
      int32_t sums[2] = {0, 0};
      for (int i = 0; i < kGroup; ++i) {
        const int32_t v = is_finite ? (int32_t)std::nearbyintf(x[i] * inverse) : 0;
        q[i] = (int8_t)v;
        sums[i / 16] += v;
      }
      a.scales[n * groups + g] = is_finite ? most / 127.0f : std::numeric_limits<float>::quiet_NaN();
      a.sums[(n * groups + g) * 2] = sums[0];
      a.sums[(n * groups + g) * 2 + 1] = sums[1];
    }
  }
}

template <Float F>
inline F32 load_numbers(const uint8_t* p, int64_t index) {
  if constexpr (F == Float::kF16) return load_f16(p + 2 * index);
  return load<F32>(p + 4 * index);
}

// One part of a tile, T tokens. The sums of a group are exact integers and groups are added in
// order, one multiply-add each, so the result depends neither on T nor on the register's size.
template <Kind K, int G, Float F, bool O, int T>
inline void part_product(const Matrix& m, const Activations& a, int64_t tile, int part, int64_t token,
                         float* y, int64_t stride) {
  constexpr int kBytes = K == Kind::kQ4 ? 8 * G : 16 * G;  // of a tile and group
  constexpr int kRuns = kBytes / 64;                       // of 16 rows x 4 columns
  const int64_t groups = m.cols / G, x_groups = m.cols / kGroup;
  const uint8_t* codes = m.codes + tile * groups * kBytes + part * 4 * kLanes;
  const int8_t* x = a.codes + token * a.cols;
  F32 acc[T];
  for (int t = 0; t < T; ++t) acc[t] = F32{};
  for (int64_t g = 0; g < groups; ++g, codes += kBytes, x += G) {
    I32 sum[T];
    for (int t = 0; t < T; ++t) sum[t] = I32{};
    for (int j = 0; j < kRuns; ++j) {
      const U8 code = load<U8>(codes + 64 * j);
      if constexpr (K == Kind::kQ4) {
        const U8 low = code & 15, high = code >> 4;
        for (int t = 0; t < T; ++t) {
          sum[t] = dot4<15>(sum[t], low, four(x + t * a.cols + 4 * j));
          sum[t] = dot4<15>(sum[t], high, four(x + t * a.cols + 4 * j + G / 2));
        }
      } else {
        // Signed codes are stored plus 128; 128 times the sum of x comes off below, exactly.
        for (int t = 0; t < T; ++t) sum[t] = dot4<255>(sum[t], code, four(x + t * a.cols + 4 * j));
      }
    }
    const int64_t at = (tile * groups + g) * kTile + part * kLanes;
    const F32 scale = load_numbers<F>(m.scales, at);
    F32 offset;
    if constexpr (O) offset = load_numbers<F>(m.offsets, at);
    for (int t = 0; t < T; ++t) {
      const int64_t xg = (token + t) * x_groups + g * G / kGroup;
      const float x_scale = a.scales[xg];
      const int32_t* halves = a.sums + 2 * xg;
      const int32_t x_sum = G == 32 ? halves[0] + halves[1] : halves[g & 1];
      if constexpr (K == Kind::kQ8) sum[t] -= 128 * x_sum;
      acc[t] = fma(scale * x_scale, to_f32(sum[t]), acc[t]);
      if constexpr (O) acc[t] = fma(offset, splat(x_scale * (float)x_sum), acc[t]);
    }
  }
  const int64_t first = tile * kTile + part * kLanes;
  const int64_t count = std::clamp<int64_t>(m.rows - first, 0, kLanes);
  for (int t = 0; t < T; ++t) std::memcpy(y + (token + t) * stride + first, &acc[t], count * sizeof(float));
}

template <Kind K, int G, Float F, bool O, int T>
inline void tile_product(const Matrix& m, const Activations& a, int64_t tile, int64_t token, float* y,
                         int64_t stride) {
  for (int part = 0; part < kParts; ++part) part_product<K, G, F, O, T>(m, a, tile, part, token, y, stride);
}

template <Kind K, int G, Float F, bool O, int T>
void rest(const Matrix& m, const Activations& a, int64_t tile, int64_t token, float* y, int64_t s) {
  if constexpr (T > 0) {
    if (a.num - token == T) tile_product<K, G, F, O, T>(m, a, tile, token, y, s);
    else rest<K, G, F, O, T - 1>(m, a, tile, token, y, s);
  }
}

template <Kind K, int G, Float F, bool O>
void quantised(const Matrix& m, const Activations& a, int64_t first, int64_t end, float* y,
               int64_t stride) {
  // Tokens outside, tiles inside: a block of tokens stays in the first cache, the tiles of one
  // chunk of work in the second.
  int64_t token = 0;
  for (; token + kBlock <= a.num; token += kBlock)
    for (int64_t tile = first; tile < end; ++tile)
      tile_product<K, G, F, O, kBlock>(m, a, tile, token, y, stride);
  if (token < a.num)
    for (int64_t tile = first; tile < end; ++tile) rest<K, G, F, O, kBlock - 1>(m, a, tile, token, y, stride);
}

template <Kind K, int G, Float F>
void by_offset(const Matrix& m, const Activations& a, int64_t f, int64_t e, float* y, int64_t s) {
  m.has_offset ? quantised<K, G, F, true>(m, a, f, e, y, s) : quantised<K, G, F, false>(m, a, f, e, y, s);
}

template <Kind K, int G>
void by_number(const Matrix& m, const Activations& a, int64_t f, int64_t e, float* y, int64_t s) {
  m.number == Float::kF16 ? by_offset<K, G, Float::kF16>(m, a, f, e, y, s)
                          : by_offset<K, G, Float::kF32>(m, a, f, e, y, s);
}

template <Kind K>
void by_group(const Matrix& m, const Activations& a, int64_t f, int64_t e, float* y, int64_t s) {
  m.group == 32 ? by_number<K, 32>(m, a, f, e, y, s) : by_number<K, 16>(m, a, f, e, y, s);
}

template <Float F>
inline F32 load_dense(const uint8_t* p, int64_t index) {
  if constexpr (F == Float::kF32) return load<F32>(p + 4 * index);
  if constexpr (F == Float::kF16) return load_f16(p + 2 * index);
  return load_bf16(p + 2 * index);
}

// R rows x T tokens; each pair is summed in 16 lanes in the order of columns, a short end padded
// with zeros, so the result depends neither on R and T nor on the register's size.
template <Float F, int R, int T>
inline void dense_block(const Matrix& m, const Activations& a, int64_t row, int64_t token, float* y,
                        int64_t stride) {
  constexpr int64_t kSize = F == Float::kF32 ? 4 : 2;
  F32 acc[R][T][kParts] = {};
  const int64_t whole = m.cols / 16 * 16, tail = m.cols - whole;
  const auto add = [&](const uint8_t* const* rows, const float* const* tokens) {
    for (int p = 0; p < kParts; ++p) {
      F32 w[R];
      for (int r = 0; r < R; ++r) w[r] = load_dense<F>(rows[r], p * kLanes);
      for (int t = 0; t < T; ++t) {
        const F32 x = load<F32>(tokens[t] + p * kLanes);
        for (int r = 0; r < R; ++r) acc[r][t][p] = fma(w[r], x, acc[r][t][p]);
      }
    }
  };
  const uint8_t* rows[R];
  const float* tokens[T];
  for (int64_t c = 0; c < whole; c += 16) {
    for (int r = 0; r < R; ++r) rows[r] = m.codes + ((row + r) * m.cols + c) * kSize;
    for (int t = 0; t < T; ++t) tokens[t] = a.x + (token + t) * a.cols + c;
    add(rows, tokens);
  }
  if (tail) {
    uint8_t row_end[R][64] = {};
    float token_end[T][16] = {};
    for (int r = 0; r < R; ++r) {
      std::memcpy(row_end[r], m.codes + ((row + r) * m.cols + whole) * kSize, tail * kSize);
      rows[r] = row_end[r];
    }
    for (int t = 0; t < T; ++t) {
      std::memcpy(token_end[t], a.x + (token + t) * a.cols + whole, tail * 4);
      tokens[t] = token_end[t];
    }
    add(rows, tokens);
  }
  for (int t = 0; t < T; ++t)
    for (int r = 0; r < R && row + r < m.rows; ++r)
      y[(token + t) * stride + row + r] = sum16(acc[r][t]);
}

template <Float F>
void dense(const Matrix& m, const Activations& a, int64_t first, int64_t end, float* y, int64_t stride) {
  constexpr int kRows = 4, kTokens = kLanes == 16 ? 4 : 2;
  for (int64_t row = first * kTile; row < std::min(end * kTile, m.rows); row += kRows) {
    int64_t token = 0;
    for (; token + kTokens <= a.num; token += kTokens) dense_block<F, kRows, kTokens>(m, a, row, token, y, stride);
    for (; token < a.num; ++token) dense_block<F, kRows, 1>(m, a, row, token, y, stride);
  }
}

inline void product(const Matrix& m, const Activations& a, int64_t f, int64_t e, float* y, int64_t s) {
  switch (m.kind) {
    case Kind::kQ4: return by_group<Kind::kQ4>(m, a, f, e, y, s);
    case Kind::kQ8: return by_group<Kind::kQ8>(m, a, f, e, y, s);
    case Kind::kDense:
      if (m.number == Float::kF32) return dense<Float::kF32>(m, a, f, e, y, s);
      if (m.number == Float::kF16) return dense<Float::kF16>(m, a, f, e, y, s);
      return dense<Float::kBf16>(m, a, f, e, y, s);
  }
}

inline float number_at(Float number, const uint8_t* p, int64_t index) {
  if (number == Float::kF32) {
    float f;
    std::memcpy(&f, p + 4 * index, 4);
    return f;
  }
  uint16_t half;
  std::memcpy(&half, p + 2 * index, 2);
  if (number == Float::kF16) return half_to_float(half);
  const uint32_t bits = (uint32_t)half << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

inline void decode_row(const Matrix& m, int64_t row, float* to) {
  if (m.kind == Kind::kDense) {
    for (int64_t c = 0; c < m.cols; ++c) to[c] = number_at(m.number, m.codes, row * m.cols + c);
    return;
  }
  const int64_t groups = m.cols / m.group, tile = row / kTile, lane = row % kTile;
  const bool is_q4 = m.kind == Kind::kQ4;
  const int64_t bytes = is_q4 ? 8 * m.group : 16 * m.group, half = m.group / 2;
  for (int64_t g = 0; g < groups; ++g) {
    const uint8_t* codes = m.codes + (tile * groups + g) * bytes + 4 * lane;
    const int64_t at = (tile * groups + g) * kTile + lane;
    const float scale = number_at(m.number, m.scales, at);
    const float offset = m.has_offset ? number_at(m.number, m.offsets, at) : 0.0f;
    for (int64_t i = 0; i < m.group; ++i) {
      const int64_t c = is_q4 ? i % half : i;
      const uint8_t byte = codes[c / 4 * 64 + c % 4];
      const int32_t code = is_q4 ? (i < half ? byte & 15 : byte >> 4) : (int32_t)byte - 128;
      to[g * m.group + i] = scale * (float)code + offset;
    }
  }
}

}  // namespace KVARTS_ISA
}  // namespace kvarts
