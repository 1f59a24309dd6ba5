// The kernels of lora.h for one instruction set (KVARTS_ISA). Included once per set.
//
// A token's result depends on its own list alone: each inner product is summed in 16 lanes in the
// order of columns, ranks are added in order, and adapters in the order of the list. Tokens of one
// row go several at a time only to share the loads.
#include <algorithm>
#include <cstring>

#include "kernels.h"
#include "simd.h"

namespace kvarts {
namespace KVARTS_ISA {

constexpr int kShared = 4;  // tokens that share a pass over a pair

template <Float F>
inline F32 load_pair(const uint8_t* p, int64_t index) {
  if constexpr (F == Float::kF32) return load<F32>(p + 4 * index);
  if constexpr (F == Float::kF16) return load_f16(p + 2 * index);
  return load_bf16(p + 2 * index);
}

// Pairs are read once per step from main memory, in runs too short for the processor to see them coming.
// So they are read in blocks of neighbouring ranks, and while one is worked on the next comes: `ahead` is
// where it begins, and this asks for as much of it as one vector of each rank is.
template <Float F, int R>
inline void fetch(const uint8_t* ahead, int64_t column) {
  constexpr int64_t kSize = F == Float::kF32 ? 4 : 2;
  for (int64_t at = 0; at < R * kLanes * kSize; at += 64) __builtin_prefetch(ahead + column * R * kSize + at);
}

// inner[t * kMaxRank + j] = down[j] . x[t] for the first R ranks of `down`.
template <Float F, int R, int T>
inline void inner_products(const uint8_t* down, int64_t cols, const float* x, float* inner, const uint8_t* ahead) {
  constexpr int64_t kSize = F == Float::kF32 ? 4 : 2;
  F32 acc[R][T][kParts16] = {};
  const int64_t whole = cols / 16 * 16, tail = cols - whole;
  const auto add = [&](const uint8_t* const* rows, const float* const* tokens) {
    for (int p = 0; p < kParts16; ++p) {
      F32 own[R];
      for (int r = 0; r < R; ++r) own[r] = load_pair<F>(rows[r], p * kLanes);
      for (int t = 0; t < T; ++t) {
        const F32 value = load<F32>(tokens[t] + p * kLanes);
        for (int r = 0; r < R; ++r) acc[r][t][p] = fma(own[r], value, acc[r][t][p]);
      }
    }
  };
  const uint8_t* rows[R];
  const float* tokens[T];
  for (int64_t c = 0; c < whole; c += 16) {
    for (int p = 0; p < kParts16; ++p) fetch<F, R>(ahead, c + p * kLanes);
    for (int r = 0; r < R; ++r) rows[r] = down + (r * cols + c) * kSize;
    for (int t = 0; t < T; ++t) tokens[t] = x + t * cols + c;
    add(rows, tokens);
  }
  if (tail) {
    uint8_t row_end[R][64] = {};
    float token_end[T][16] = {};
    for (int r = 0; r < R; ++r) {
      std::memcpy(row_end[r], down + (r * cols + whole) * kSize, tail * kSize);
      rows[r] = row_end[r];
    }
    for (int t = 0; t < T; ++t) {
      std::memcpy(token_end[t], x + t * cols + whole, tail * sizeof(float));
      tokens[t] = token_end[t];
    }
    add(rows, tokens);
  }
  for (int t = 0; t < T; ++t)
    for (int r = 0; r < R; ++r) inner[t * kMaxRank + r] = sum16(acc[r][t]);
}

template <Float F>
inline float pair_number(const uint8_t* p, int64_t index) {
  if constexpr (F == Float::kF32) return load<float>(p + 4 * index);
  const uint16_t half = load<uint16_t>(p + 2 * index);
  if constexpr (F == Float::kF16) return half_to_float(half);
  const uint32_t bits = (uint32_t)half << 16;
  return load<float>(&bits);
}

// y[t] += the sum of inner[t][j] * up[j] over the first R ranks of `up`, in their order.
template <Float F, int R, int T>
inline void add_ranks(const uint8_t* up, int64_t rows, const float* inner, float* y, int64_t stride,
                      const uint8_t* ahead) {
  constexpr int64_t kSize = F == Float::kF32 ? 4 : 2;
  F32 values[R][T];
  for (int r = 0; r < R; ++r)
    for (int t = 0; t < T; ++t) values[r][t] = splat(inner[t * kMaxRank + r]);
  int64_t c = 0;
  for (; c + kLanes <= rows; c += kLanes) {
    fetch<F, R>(ahead, c);
    F32 acc[T];
    for (int t = 0; t < T; ++t) acc[t] = load<F32>(y + t * stride + c);
    for (int r = 0; r < R; ++r) {
      const F32 own = load_pair<F>(up + r * rows * kSize, c);
      for (int t = 0; t < T; ++t) acc[t] = fma(own, values[r][t], acc[t]);
    }
    for (int t = 0; t < T; ++t) store(y + t * stride + c, acc[t]);
  }
  for (; c < rows; ++c)
    for (int t = 0; t < T; ++t) {
      float sum = y[t * stride + c];
      for (int r = 0; r < R; ++r) sum = __builtin_fmaf(pair_number<F>(up, r * rows + c), inner[t * kMaxRank + r], sum);
      y[t * stride + c] = sum;
    }
}

// T tokens of one row, through one pair; `next` is what follows it.
template <Float F, int T>
void through_pair(const Adaptation& a, const AdaptedWeight& w, int64_t place, int64_t rank, float scale, int64_t token,
                  const uint8_t* next) {
  constexpr int64_t kSize = F == Float::kF32 ? 4 : 2;
  const uint8_t* down = w.down + place * w.down_bytes;
  const uint8_t* up = w.up + place * w.up_bytes;
  const int64_t whole = rank / 4 * 4;
  float inner[T * kMaxRank];
  if (a.tokens) {
    for (int t = 0; t < T; ++t)
      for (int64_t j = 0; j < rank; ++j)
        inner[t * kMaxRank + j] = pair_number<F>(down, (int64_t)a.tokens[token + t] * rank + j);
  } else {
    const float* x = a.x + token * w.cols;
    const auto block = [&](int64_t j) { return j < rank ? down + j * w.cols * kSize : up; };
    for (int64_t j = 0; j < whole; j += 4) inner_products<F, 4, T>(block(j), w.cols, x, inner + j, block(j + 4));
    for (int64_t j = whole; j < rank; ++j) inner_products<F, 1, T>(block(j), w.cols, x, inner + j, block(j + 1));
  }
  for (int t = 0; t < T; ++t)
    for (int64_t j = 0; j < rank; ++j) inner[t * kMaxRank + j] *= scale;
  float* y = w.y + token * w.stride;
  const auto block = [&](int64_t j) { return j < rank ? up + j * w.rows * kSize : next; };
  for (int64_t j = 0; j < whole; j += 4) add_ranks<F, 4, T>(block(j), w.rows, inner + j, y, w.stride, block(j + 4));
  for (int64_t j = whole; j < rank; ++j) add_ranks<F, 1, T>(block(j), w.rows, inner + j, y, w.stride, block(j + 1));
}

// What comes after entry k of weight i, so that it can be on its way: of the same list, then of the next.
inline const uint8_t* next_pair(const Adaptation& a, int64_t row, int64_t i, int64_t k) {
  for (++k; row < std::min(a.num_decodes, a.num_tokens); ++row, i = 0)
    for (; i < a.num_weights; ++i, k = 0)
      for (; k < a.list_length; ++k) {
        const int64_t place = a.places[row * a.list_length + k];
        const AdaptedWeight& w = a.weights[i];
        if (place >= 0 && w.entries[place]) return w.down + place * w.down_bytes;
      }
  return nullptr;  // asking for what is not there is no error
}

template <int T>
inline void adapt_tokens(const Adaptation& a, int64_t token) {
  const int64_t row = std::min(token, a.num_decodes);
  for (int64_t i = 0; i < a.num_weights; ++i) {
    const AdaptedWeight& w = a.weights[i];
    for (int64_t k = 0; k < a.list_length; ++k) {
      const int64_t place = a.places[row * a.list_length + k];
      if (place < 0 || !w.entries[place]) continue;
      const int64_t rank = w.entries[place] >> 2;
      const float scale = a.scales[row * a.list_length + k] * w.factors[place];
      const uint8_t* next = next_pair(a, row, i, k);
      switch ((Float)(w.entries[place] & 3)) {
        case Float::kF32: through_pair<Float::kF32, T>(a, w, place, rank, scale, token, next); break;
        case Float::kF16: through_pair<Float::kF16, T>(a, w, place, rank, scale, token, next); break;
        default: through_pair<Float::kBf16, T>(a, w, place, rank, scale, token, next);
      }
    }
  }
}

inline void adapt(const Adaptation& a, int64_t first, int64_t end) {
  int64_t token = first;
  for (; token < std::min(end, a.num_decodes); ++token) adapt_tokens<1>(a, token);
  for (; token + kShared <= end; token += kShared) adapt_tokens<kShared>(a, token);
  for (; token < end; ++token) adapt_tokens<1>(a, token);
}

}  // namespace KVARTS_ISA
}  // namespace kvarts
