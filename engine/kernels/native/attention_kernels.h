// The kernels of attention.h for one instruction set (KVARTS_ISA). Included once per set.
//
// Keys are walked in blocks of kKeys fixed positions with a running softmax, every sum in one fixed
// order, so what a token gets depends on its own keys alone: not on the batch, the chunk, the page
// size or the register's size.
#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "attention.h"
#include "simd.h"

namespace kvarts {
namespace KVARTS_ISA {

constexpr int64_t kKeys = 64;
constexpr float kMasked = -1e30f;

inline F32 select_max(F32 a, F32 b) { return a > b ? a : b; }

// exp for arguments up to 0, to about one unit in the last place; below -87 it is 0.
// Source: Cephes expf (range reduction by ln 2 in two parts, degree 5).
inline F32 exp_nonpositive(F32 x) {
  const F32 low = splat(-87.0f);
  const I32 tiny = x < low;
  x = tiny ? low : x;
  const F32 shifted = fma(x, splat(1.44269504088896341f), splat(12582912.0f));  // 1.5 * 2^23 rounds
  const F32 n = shifted - 12582912.0f;
  F32 r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440e-4f), r);
  F32 p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r + 1.0f);
  const I32 exponent = (__builtin_convertvector(n, I32) + 127) << 23;
  const F32 result = p * (F32)exponent;
  return tiny ? F32{} : result;
}

inline void to_half(const float* from, uint16_t* to, int64_t count) {
  int64_t i = 0;
#if defined(__F16C__)
  for (; i + 8 <= count; i += 8) {
    const __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
    std::memcpy(to + i, &half, 16);
  }
  for (; i < count; ++i) to[i] = (uint16_t)_mm_extract_epi16(_mm_cvtps_ph(_mm_set_ss(from[i]), 0), 0);
#else
  for (; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, from + i, 4);
    const uint32_t sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
    uint32_t half;
    if (magnitude >= 0x7f800000) half = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
    else if (magnitude >= 0x477ff000) half = 0x7c00;
    else if (magnitude >= 0x38800000) {
      const uint32_t odd = (magnitude >> 13) & 1;
      half = (magnitude - 0x38000000 + 0xfff + odd) >> 13;
    } else {
      float f;
      std::memcpy(&f, &magnitude, 4);
      half = (uint32_t)std::nearbyintf(f * 0x1p24f);
    }
    to[i] = (uint16_t)(sign | half);
  }
#endif
}

// Stores keys and values of tokens [first, end) in the pool.
inline void store_tokens(const Attention& a, int64_t first, int64_t end) {
  const int64_t size = a.num_kv_heads * a.dim;
  for (int64_t n = first; n < end; ++n) {
    const int64_t at = ((int64_t)a.units[n] * a.page_tokens + a.offsets[n]) * size;
    if (a.is_half) {
      to_half(a.keys + n * size, (uint16_t*)a.pool_keys + at, size);
      to_half(a.values + n * size, (uint16_t*)a.pool_values + at, size);
    } else {
      std::memcpy((float*)a.pool_keys + at, a.keys + n * size, size * 4);
      std::memcpy((float*)a.pool_values + at, a.values + n * size, size * 4);
    }
  }
}

// Memory of one thread. Not a standard container: those throw, and the linker would merge their
// functions across instruction sets, into whichever it saw first.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  ~Scratch() { std::free(floats_); }

  // `count` floats of any value, zeros when new; null if memory is out.
  float* floats(int64_t count) {
    if (count > size_) {
      std::free(floats_);
      floats_ = (float*)std::calloc(count, sizeof(float));
      size_ = floats_ ? count : 0;
    }
    return floats_;
  }

 private:
  float* floats_ = nullptr;
  int64_t size_ = 0;
};

inline void read_row(const Attention& a, const void* pool, int64_t at, float* to, int64_t padded) {
  int64_t i = 0;
  if (a.is_half) {
    const uint16_t* from = (const uint16_t*)pool + at;
    for (; i + kLanes <= a.dim; i += kLanes) store(to + i, load_f16(from + i));
    for (; i < a.dim; ++i) to[i] = half_to_float(from[i]);
  } else {
    std::memcpy(to, (const float*)pool + at, a.dim * 4);
    i = a.dim;
  }
  for (; i < padded; ++i) to[i] = 0;
}

// Accumulators of values that are kept at a time, 16 lanes each: enough to hide a multiply-add.
constexpr int kDims = 4;

// out = out * fade + the weighted sum of 16 D columns of values, keys in order.
template <int D>
inline void add_values(const float* weights, const float* values, int64_t stride, int64_t from, int64_t to,
                       float fade, float* out) {
  F32 sum[D * kParts16];
  for (int d = 0; d < D * kParts16; ++d) sum[d] = load<F32>(out + d * kLanes) * fade;
  for (int64_t k = from; k < to; ++k) {
    const F32 weight = splat(weights[k]);
    for (int d = 0; d < D * kParts16; ++d) sum[d] = fma(weight, load<F32>(values + k * stride + d * kLanes), sum[d]);
  }
  for (int d = 0; d < D * kParts16; ++d) store(out + d * kLanes, sum[d]);
}

// Block `block` of query_blocks, one K/V head; false if memory is out.
inline bool attend(const Attention& a, int64_t block, int64_t kv_head, Scratch& scratch) {
  const bool is_decode = block < a.num_decodes;
  const int64_t first = is_decode ? block : a.num_decodes + (block - a.num_decodes) * kQueryBlock;
  const int64_t end = is_decode ? first + 1 : std::min(first + kQueryBlock, a.num_tokens);
  const int64_t group = a.num_heads / a.num_kv_heads, padded = (a.dim + 15) / 16 * 16;
  const int32_t* table = a.tables + (is_decode ? block : a.num_decodes) * a.table_pages;
  const int64_t num_queries = (end - first) * group;
  float* const keys = scratch.floats(2 * (kKeys + num_queries) * padded + 2 * num_queries);
  if (!keys) return false;
  float* const values = keys + kKeys * padded;
  float* const queries = values + kKeys * padded;
  float* const outs = queries + num_queries * padded;
  float* const bests = outs + num_queries * padded;
  float* const totals = bests + num_queries;
  std::fill(queries, bests, 0.0f);
  std::fill(bests, totals, kMasked);
  std::fill(totals, totals + num_queries, 0.0f);
  int32_t latest = -1, earliest = INT32_MAX;
  for (int64_t n = first; n < end; ++n) {
    if (a.positions[n] >= 0) earliest = std::min(earliest, a.positions[n]);
    latest = std::max(latest, a.positions[n]);
    for (int64_t h = 0; h < group; ++h) {
      const float* q = a.queries + (n * a.num_heads + kv_head * group + h) * a.dim;
      float* to = queries + ((n - first) * group + h) * padded;
      for (int64_t i = 0; i < a.dim; ++i) to[i] = q[i] * a.scale;
    }
  }
  const int64_t low = latest < 0 ? 0 : std::max<int64_t>(0, (int64_t)earliest - a.window + 1);
  for (int64_t start = low / kKeys * kKeys; start <= latest; start += kKeys) {
    const int64_t begin = std::max(start, low), stop = std::min<int64_t>(start + kKeys, (int64_t)latest + 1);
    for (int64_t k = begin; k < stop; ++k) {
      const int64_t unit = table[k / a.page_tokens];
      const int64_t at = ((unit * a.page_tokens + k % a.page_tokens) * a.num_kv_heads + kv_head) * a.dim;
      read_row(a, a.pool_keys, at, keys + (k - start) * padded, padded);
      read_row(a, a.pool_values, at, values + (k - start) * padded, padded);
    }
    for (int64_t n = first; n < end; ++n) {
      const int64_t position = a.positions[n];
      const int64_t from = std::max<int64_t>(start, position - a.window + 1) - start;
      const int64_t to = std::min<int64_t>(start + kKeys, position + 1) - start;
      if (position < 0 || from >= to) continue;
      for (int64_t h = 0; h < group; ++h) {
        const int64_t q = (n - first) * group + h;
        const float* query = queries + q * padded;
        float scores[kKeys];
        float most = kMasked;
        for (int64_t k = from / 16 * 16; k < to; k += 16) {
          F32 parts[16][kParts16] = {};
          for (int64_t i = 0; i < padded; i += 16)
            for (int p = 0; p < kParts16; ++p) {
              const F32 part = load<F32>(query + i + p * kLanes);
              for (int64_t key = 0; key < 16; ++key)
                parts[key][p] = fma(part, load<F32>(keys + (k + key) * padded + i + p * kLanes), parts[key][p]);
            }
          sums16(parts, scores + k);
        }
        for (int64_t k = 0; k < kKeys; ++k) {
          if (k < from || k >= to) scores[k] = kMasked;
          else if (a.soft_cap > 0) scores[k] = a.soft_cap * std::tanh(scores[k] / a.soft_cap);
          most = std::max(most, scores[k]);
        }
        const float best = std::max(bests[q], most), fade = std::exp(bests[q] - best);
        F32 sums[kParts16] = {};
        for (int64_t k = 0; k < kKeys; k += 16)
          for (int p = 0; p < kParts16; ++p) {
            float* at = scores + k + p * kLanes;
            const F32 weight = exp_nonpositive(load<F32>(at) - best);
            sums[p] += weight;
            store(at, weight);
          }
        bests[q] = best;
        totals[q] = totals[q] * fade + sum16(sums);
        float* out = outs + q * padded;
        for (int64_t i = 0; i < padded; i += 16 * kDims) {
          const int dims = (int)std::min<int64_t>(kDims, (padded - i) / 16);
          if (dims == kDims) add_values<kDims>(scores, values + i, padded, from, to, fade, out + i);
          else for (int d = 0; d < dims; ++d) add_values<1>(scores, values + i + 16 * d, padded, from, to, fade, out + i + 16 * d);
        }
      }
    }
  }
  for (int64_t n = first; n < end; ++n)
    for (int64_t h = 0; h < group; ++h) {
      const int64_t q = (n - first) * group + h;
      const float inverse = totals[q] > 0 ? 1.0f / totals[q] : 0.0f;
      float* to = a.out + (n * a.num_heads + kv_head * group + h) * a.dim;
      for (int64_t i = 0; i < a.dim; ++i) to[i] = outs[q * padded + i] * inverse;
    }
  return true;
}

inline bool attend_blocks(const Attention& a, int64_t first, int64_t end) {
  // A thread keeps its scratch: filling fresh memory costs more than a short attention. The model's
  // head size and group bound it.
  thread_local Scratch scratch;
  for (int64_t unit = first; unit < end; ++unit)
    if (!attend(a, unit / a.num_kv_heads, unit % a.num_kv_heads, scratch)) return false;
  return true;
}

}  // namespace KVARTS_ISA
}  // namespace kvarts
