// The kernels of qmatmul.h for one instruction set (KVARTS_ISA). Included once per set.
#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "kernels.h"
#include "simd.h"

namespace kvarts {
namespace KVARTS_ISA {

constexpr int64_t kTile = 16;
constexpr int64_t kGroup = kActivationGroup;
constexpr int kBlock = kLanes == 16 ? 8 : 4;  // tokens that share one pass over a tile
constexpr int kParts = kTile / kLanes;

// How far ahead of their use codes are asked for, in bytes. The processor's own guesses end with each 4 KiB
// page and leave a third to a half of the memory's rate unused.
constexpr int64_t kAhead = 4096;

// 127 over a magnitude below this is no finite number: such a group is as good as zero.
constexpr float kLeast = 0x1p-120f;

// Adding 1.5 * 2^23 rounds to a whole number, half to even, and leaves it in the low bits.
inline I32 rounded(F32 x) { return (I32)(x + 12582912.0f) - 0x4b400000; }

// A group becomes codes of round(x * (127 / most)), half to even, and the scale most / 127; fine codes are
// what that leaves, in 256ths, up to 127. A group with a value that is not finite gets a scale that is not either,
// so that its products show it.
inline void quantise(const Activations& a, int64_t first, int64_t end) {
  const int64_t groups = a.cols / kGroup;
  for (int64_t at = first * groups; at < end * groups; ++at) {
    const float* x = a.x + at * kGroup;
    I32 bits = {};  // of the largest magnitude: they order as the numbers do, NaN above all
    for (int i = 0; i < kGroup; i += kLanes) {
      const I32 magnitude = load<I32>(x + i) & 0x7fffffff;
      bits = magnitude > bits ? magnitude : bits;
    }
    int32_t most_bits = 0;
    for (int i = 0; i < kLanes; ++i) most_bits = std::max(most_bits, bits[i]);
    const float most = load<float>(&most_bits);
    const bool is_finite = most_bits < 0x7f800000;
    const float inverse = is_finite && most >= kLeast ? 127.0f / most : 0.0f;
    for (int half = 0; half < 2; ++half) {
      I32 total = {};
      for (int i = 16 * half; i < 16 * (half + 1); i += kLanes) {
        const F32 exact = load<F32>(x + i) * inverse;
        const I32 code = is_finite ? rounded(exact) : I32{};
        store_bytes(a.codes + at * kGroup + i, code);
        total += code;
        if (!a.fine_codes) continue;
        const I32 rest = is_finite ? rounded((exact - to_f32(code)) * 256.0f) : I32{};
        // -128 has no opposite among bytes, which some instruction sets need.
        const I32 most_fine = I32{} + 127, low = rest > 127 ? most_fine : rest, fine = low < -127 ? -most_fine : low;
        store_bytes(a.fine_codes + at * kGroup + i, fine);
        total += 255 * code + fine;
      }
      a.sums[2 * at + half] = sum(total);
    }
    const float scale = a.fine_codes ? most / 127.0f / 256.0f : most / 127.0f;
    a.scales[at] = is_finite ? scale : std::numeric_limits<float>::quiet_NaN();
  }
}

// What codes of the table kinds stand for, plus 128 as q8 codes are stored. Source: ggml-common.h
// (kvalues_iq4nl, kvalues_mxfp4).
constexpr uint8_t kIq4Values[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
constexpr uint8_t kMx4Values[16] = {128, 129, 130, 131, 132, 134, 136, 140, 128, 127, 126, 125, 124, 122, 120, 116};

// Scales of kE8 are held four times as large, so that none is denormal, and MXFP4's codes are doubled.
template <Float F>
constexpr float kScaleUnit = F == Float::kE8 ? 0.25f : 1.0f;

// Part of a tile's scales or offsets of one group, to be multiplied by kScaleUnit.
template <Float F, int G>
inline F32 load_numbers(const uint8_t* plane, int64_t cols, int64_t tile, int64_t g, int part) {
  const int64_t groups = cols / G, lane = part * kLanes;
  if constexpr (F == Float::kF16x8) {
    const int64_t blocks = (cols + kSuperBlock - 1) / kSuperBlock;
    const uint8_t* at = plane + tile * (32 * blocks + 16 * groups);
    return load_f16(at + g * G / kSuperBlock * 32 + 2 * lane) * to_f32(load_i8(at + 32 * blocks + 16 * g + lane));
  } else if constexpr (F == Float::kE8) {
    return (F32)(((load_i8(plane + (tile * groups + g) * kTile + lane) & 255) + 1) << 23);
  } else {
    return load_f16(plane + 2 * ((tile * groups + g) * kTile + lane));
  }
}

// Adds the products of one group of a part of a tile with the codes of T tokens.
template <size_t I, int T>
inline void add_group(const uint8_t* codes, const int8_t* x, int64_t cols, I32* sum) {
  constexpr Kind K = kFormats[I].kind;
  constexpr int G = kFormats[I].group;
  constexpr bool kIsSmall = kFormats[I].bound * G <= 512;          // see `add`
  constexpr int kRuns = (K == Kind::kQ8 ? 16 * G : 8 * G) / 64;  // of 16 rows x 4 columns
  for (int j = 0; j < kRuns; ++j) {
    const U8 code = load<U8>(codes + 64 * j);
    const auto at = [&](int t) { return x + t * cols + 4 * j; };
    if constexpr (K == Kind::kQ8) {
      const Codes whole = signed_codes(code);
      for (int t = 0; t < T; ++t) sum[t] = add<kIsSmall>(sum[t], whole, four(at(t)));
    } else if constexpr (K == Kind::kQ4) {
      const U8 low = code & 15, high = code >> 4;
      for (int t = 0; t < T; ++t) {
        sum[t] = add_low(sum[t], low, four(at(t)));
        sum[t] = add_low(sum[t], high, four(at(t) + G / 2));
      }
    } else {
      constexpr const uint8_t* table = K == Kind::kIq4 ? kIq4Values : kMx4Values;
      const Codes low = signed_codes(lookup(table, code & 15)), high = signed_codes(lookup(table, code >> 4));
      for (int t = 0; t < T; ++t) {
        sum[t] = add<kIsSmall>(sum[t], low, four(at(t)));
        sum[t] = add<kIsSmall>(sum[t], high, four(at(t) + G / 2));
      }
    }
  }
}

// Turns what `add_group` left into exact sums.
template <size_t I, int T>
inline void finish_group(I32* sum) {
  constexpr bool kIsSmall = kFormats[I].bound * kFormats[I].group <= 512;
  for (int t = 0; t < T; ++t) sum[t] = kFormats[I].kind == Kind::kQ4 ? finish_low(sum[t]) : finish<kIsSmall>(sum[t]);
}

// One part of a tile, T tokens, of a matrix of format I. The sums of a group are exact integers and
// groups are added in order, one multiply-add each, so the result depends neither on T nor on the
// register's size.
template <size_t I, int T>
inline void part_product(const Matrix& m, const Activations& a, int64_t tile, int part, int64_t token,
                         float* y, int64_t stride) {
  constexpr Kind K = kFormats[I].kind;
  constexpr Float F = kFormats[I].number;
  constexpr int G = kFormats[I].group;
  constexpr bool O = kFormats[I].has_offset;
  constexpr int kBytes = K == Kind::kQ8 ? 16 * G : 8 * G;  // of a tile and group
  const int64_t groups = m.cols / G, x_groups = m.cols / kGroup;
  const uint8_t* codes = m.codes + tile * groups * kBytes + part * 4 * kLanes;
  const int8_t* x = a.codes + token * a.cols;
  const int8_t* fine = a.fine_codes ? a.fine_codes + token * a.cols : nullptr;
  F32 acc[T];
  for (int t = 0; t < T; ++t) acc[t] = F32{};
  for (int64_t g = 0; g < groups; ++g, codes += kBytes) {
    for (int line = 0; line < kBytes; line += 64) __builtin_prefetch(codes + kAhead + line);
    I32 sum[T];
    for (int t = 0; t < T; ++t) sum[t] = I32{};
    add_group<I, T>(codes, x + g * G, a.cols, sum);
    finish_group<I, T>(sum);
    if (fine) {
      I32 coarse[T];
      for (int t = 0; t < T; ++t) {
        coarse[t] = 256 * sum[t];
        sum[t] = kSumsAreExact ? coarse[t] : I32{};
      }
      add_group<I, T>(codes, fine + g * G, a.cols, sum);
      finish_group<I, T>(sum);
      for (int t = 0; !kSumsAreExact && t < T; ++t) sum[t] += coarse[t];
    }
    const F32 scale = load_numbers<F, G>(m.scales, m.cols, tile, g, part);
    F32 offset;
    if constexpr (O) offset = load_numbers<F, G>(m.offsets, m.cols, tile, g, part);
    for (int t = 0; t < T; ++t) {
      const int64_t xg = (token + t) * x_groups + g * G / kGroup;
      const float x_scale = a.scales[xg] * kScaleUnit<F>;
      const int32_t* halves = a.sums + 2 * xg;
      const int32_t x_sum = G == kGroup ? halves[0] + halves[1] : halves[g & 1];
      if constexpr (K != Kind::kQ4 && kIsPlus128) sum[t] -= 128 * x_sum;
      acc[t] = fma(scale * x_scale, to_f32(sum[t]), acc[t]);
      if constexpr (O) acc[t] = fma(offset, splat(x_scale * (float)x_sum), acc[t]);
    }
  }
  const int64_t first = tile * kTile + part * kLanes;
  const int64_t count = std::clamp<int64_t>(m.rows - first, 0, kLanes);
  for (int t = 0; t < T; ++t) std::memcpy(y + (token + t) * stride + first, &acc[t], count * sizeof(float));
}

template <size_t I, int T>
inline void tile_product(const Matrix& m, const Activations& a, int64_t tile, int64_t token, float* y, int64_t stride) {
  for (int part = 0; part < kParts; ++part) part_product<I, T>(m, a, tile, part, token, y, stride);
}

template <size_t I, int T>
void rest(const Matrix& m, const Activations& a, int64_t tile, int64_t token, float* y, int64_t s) {
  if constexpr (T > 0) {
    if (a.num - token == T) tile_product<I, T>(m, a, tile, token, y, s);
    else rest<I, T - 1>(m, a, tile, token, y, s);
  }
}

template <size_t I>
void quantised(const Matrix& m, const Activations& a, int64_t first, int64_t end, float* y, int64_t stride) {
  // Tokens outside, tiles inside: a block of tokens stays in the first cache, the tiles of one
  // chunk of work in the second.
  int64_t token = 0;
  for (; token + kBlock <= a.num; token += kBlock)
    for (int64_t tile = first; tile < end; ++tile) tile_product<I, kBlock>(m, a, tile, token, y, stride);
  if (token < a.num)
    for (int64_t tile = first; tile < end; ++tile) rest<I, kBlock - 1>(m, a, tile, token, y, stride);
}

using Product = void (*)(const Matrix&, const Activations&, int64_t, int64_t, float*, int64_t);

template <size_t... I>
inline Product quantised_product(int64_t index, std::index_sequence<I...>) {
  static constexpr Product products[] = {quantised<I>...};
  return products[index];
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
  if (m.index >= 0) return quantised_product(m.index, std::make_index_sequence<kNumFormats>())(m, a, f, e, y, s);
  if (m.format.number == Float::kF32) return dense<Float::kF32>(m, a, f, e, y, s);
  if (m.format.number == Float::kF16) return dense<Float::kF16>(m, a, f, e, y, s);
  return dense<Float::kBf16>(m, a, f, e, y, s);
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

// The scale or offset of one row and group.
inline float scale_at(const Format& f, const uint8_t* plane, int64_t cols, int64_t row, int64_t g) {
  const int64_t groups = cols / f.group, tile = row / kTile, lane = row % kTile, at = (tile * groups + g) * kTile + lane;
  if (f.number == Float::kF16) return number_at(f.number, plane, at);
  if (f.number == Float::kE8) {
    const uint32_t bits = (plane[at] + 1u) << 23;
    return kScaleUnit<Float::kE8> * load<float>(&bits);
  }
  const uint8_t* of_tile = plane + tile * tile_scale_bytes(f, cols);
  const int8_t factor = (int8_t)of_tile[tile_scale_bytes(f, cols) - 16 * groups + 16 * g + lane];
  return number_at(Float::kF16, of_tile, g * f.group / kSuperBlock * 16 + lane) * (float)factor;
}

inline void decode_row(const Matrix& m, int64_t row, float* to) {
  if (m.index < 0) {
    for (int64_t c = 0; c < m.cols; ++c) to[c] = number_at(m.format.number, m.codes, row * m.cols + c);
    return;
  }
  const Kind kind = m.format.kind;
  const int64_t group = m.format.group, groups = m.cols / group, tile = row / kTile, lane = row % kTile;
  const bool is_whole = kind == Kind::kQ8;
  const int64_t bytes = is_whole ? 16 * group : 8 * group, half = group / 2;
  for (int64_t g = 0; g < groups; ++g) {
    const uint8_t* codes = m.codes + (tile * groups + g) * bytes + 4 * lane;
    const float scale = scale_at(m.format, m.scales, m.cols, row, g);
    const float offset = m.format.has_offset ? scale_at(m.format, m.offsets, m.cols, row, g) : 0.0f;
    for (int64_t i = 0; i < group; ++i) {
      const int64_t c = is_whole ? i : i % half;
      const uint8_t byte = codes[c / 4 * 64 + c % 4], nibble = i < half ? byte & 15 : byte >> 4;
      int32_t code = nibble;
      if (is_whole) code = byte - 128;
      else if (kind == Kind::kIq4) code = kIq4Values[nibble] - 128;
      else if (kind == Kind::kMx4) code = kMx4Values[nibble] - 128;
      to[g * group + i] = scale * (float)code + offset;
    }
  }
}

}  // namespace KVARTS_ISA
}  // namespace kvarts
