// The kernels of attention.h for one instruction set (KVARTS_ISA). Included once per set.
//
// Keys are walked in blocks of kKeys fixed positions with a running softmax, and in spans of blocks that
// each start anew. Every sum has one fixed order, so what a token gets depends on its own keys alone: not
// on the batch, the chunk, the page size, the number of threads or the register's size.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <utility>

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
  const auto store_one = [&](const float* from, void* pool, int64_t n, int64_t size) {
    const int64_t at = ((int64_t)a.units[n] * a.page_tokens + a.offsets[n]) * size;
    if (a.is_half) to_half(from + n * size, (uint16_t*)pool + at, size);
    else std::memcpy((float*)pool + at, from + n * size, size * 4);
  };
  for (int64_t n = first; n < end; ++n) {
    store_one(a.keys, a.pool_keys, n, a.num_kv_heads * a.key_dim);
    if (a.value_dim) store_one(a.values, a.pool_values, n, a.num_kv_heads * a.value_dim);
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

// What some queries have seen so far: the weighted sum of values, the best score, the sum of weights.
struct Seen {
  float* outs;    // [queries, padded]
  float* bests;   // [queries]
  float* totals;  // [queries]

  void clear(int64_t num_queries, int64_t padded) const {
    std::fill(outs, outs + num_queries * padded, 0.0f);
    std::fill(bests, bests + num_queries, kMasked);
    std::fill(totals, totals + num_queries, 0.0f);
  }
};

// exp of one number, as exp_nonpositive gives it.
inline float exp_one(float x) { return exp_nonpositive(splat(x))[0]; }

// Adds what `later` saw to `seen`.
inline void merge(const Seen& seen, const Seen& later, int64_t num_queries, int64_t padded) {
  for (int64_t q = 0; q < num_queries; ++q) {
    const float best = std::max(seen.bests[q], later.bests[q]);
    const float fade = exp_one(seen.bests[q] - best), later_fade = exp_one(later.bests[q] - best);
    float* out = seen.outs + q * padded;
    const float* more = later.outs + q * padded;
    for (int64_t i = 0; i < padded; i += kLanes)
      store(out + i, fma(load<F32>(more + i), splat(later_fade), load<F32>(out + i) * fade));
    seen.totals[q] = __builtin_fmaf(later.totals[q], later_fade, seen.totals[q] * fade);
    seen.bests[q] = best;
  }
}

// Keys [begin, stop) of a block of kKeys positions that starts at `start`, for one K/V head.
struct Block {
  int64_t start, begin, stop;
  float* keys;    // [key_dim padded to 16, kKeys]: of one dimension after another
  float* values;  // [kKeys, mixed_dim padded to 16]
};

inline F32 load_held(const Attention& a, const void* from, int64_t i) {
  return a.is_half ? load_f16((const uint16_t*)from + i) : load<F32>((const float*)from + i);
}

// `dim` values of the pool, widened; `to` is [padded] and what lies behind them becomes 0.
inline void read_row(const Attention& a, const void* from, int64_t dim, float* to, int64_t padded) {
  int64_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) store(to + i, load_held(a, from, i));
  for (; i < dim; ++i) to[i] = a.is_half ? half_to_float(((const uint16_t*)from)[i]) : ((const float*)from)[i];
  for (; i < padded; ++i) to[i] = 0;
}

// `row` has room for one padded key.
inline void read_block(const Attention& a, const int32_t* table, int64_t kv_head, const Block& block, float* row,
                       int64_t key_padded, int64_t padded) {
  const int64_t size = a.is_half ? 2 : 4, key_size = a.key_dim * size, value_size = a.value_dim * size;
  const void* keys[kKeys];
  for (int64_t k = block.begin; k < block.stop;) {
    const int64_t page = k / a.page_tokens, end = std::min(block.stop, (page + 1) * a.page_tokens);
    int64_t at = ((int64_t)table[page] * a.page_tokens + k % a.page_tokens) * a.num_kv_heads + kv_head;
    for (; k < end; ++k, at += a.num_kv_heads) {
      const void* key = keys[k - block.start] = (const char*)a.pool_keys + at * key_size;
      const void* value = a.value_dim ? (const char*)a.pool_values + at * value_size : key;
      read_row(a, value, a.mixed_dim, block.values + (k - block.start) * padded, padded);
    }
  }
  const bool is_whole = a.key_dim == key_padded;
  for (int64_t first = (block.begin - block.start) / 16 * 16; first < block.stop - block.start; first += 16) {
    for (int64_t i = 0; i < key_padded; i += 16) {
      F32 rows[16][kParts16];
      for (int64_t k = 0; k < 16; ++k) {
        const int64_t at = block.start + first + k;
        const bool is_held = at >= block.begin && at < block.stop;
        if (is_held && !is_whole && i + 16 > a.key_dim) read_row(a, keys[first + k], a.key_dim, row, key_padded);
        for (int p = 0; p < kParts16; ++p) {
          if (!is_held) rows[k][p] = F32{};
          else if (is_whole || i + 16 <= a.key_dim) rows[k][p] = load_held(a, keys[first + k], i + p * kLanes);
          else rows[k][p] = load<F32>(row + i + p * kLanes);
        }
      }
      store_transposed(rows, block.keys + i * kKeys + first, kKeys);
    }
  }
}

// Registers of keys, or of values, that are multiplied at a time.
constexpr int kWide = kLanes == 16 ? 4 : 2;

// Scores of Q queries with all keys of a block: one multiply-add per dimension, in order.
template <int Q>
inline void block_scores(const float* queries, int64_t dim, const float* keys, float (*scores)[kKeys]) {
  for (int64_t k = 0; k < kKeys; k += kWide * kLanes) {
    F32 sums[Q][kWide] = {};
    for (int64_t i = 0; i < dim; ++i) {
      F32 key[kWide];
      for (int w = 0; w < kWide; ++w) key[w] = load<F32>(keys + i * kKeys + k + w * kLanes);
      for (int q = 0; q < Q; ++q) {
        const F32 query = splat(queries[q * dim + i]);
        for (int w = 0; w < kWide; ++w) sums[q][w] = fma(query, key[w], sums[q][w]);
      }
    }
    for (int q = 0; q < Q; ++q)
      for (int w = 0; w < kWide; ++w) store(scores[q] + k + w * kLanes, sums[q][w]);
  }
}

// tanh to about 1e-7.
inline F32 tanh_f32(F32 x) {
  const I32 is_negative = x < 0.0f;
  const F32 magnitude = is_negative ? -x : x;
  const F32 t = exp_nonpositive(magnitude * -2.0f);
  const F32 y = (1.0f - t) / (1.0f + t);
  return is_negative ? -y : y;
}

// Turns the scores of keys [from, to) into weights, those of other keys into 0.
// Returns by how much what was seen before counts less.
inline float weigh(const Attention& a, float* scores, int64_t from, int64_t to, float* best, float* total) {
  if (a.soft_cap > 0)
    for (int64_t k = 0; k < kKeys; k += kLanes)
      store(scores + k, tanh_f32(load<F32>(scores + k) / a.soft_cap) * a.soft_cap);
  if (from > 0) std::fill(scores, scores + from, kMasked);
  if (to < kKeys) std::fill(scores + to, scores + kKeys, kMasked);
  F32 most = load<F32>(scores);
  for (int64_t k = kLanes; k < kKeys; k += kLanes) most = select_max(load<F32>(scores + k), most);
  float new_best = *best;
  for (int i = 0; i < kLanes; ++i) new_best = std::max(new_best, most[i]);
  const float fade = exp_one(*best - new_best);
  F32 sums[kParts16] = {};
  for (int64_t k = 0; k < kKeys; k += 16)
    for (int p = 0; p < kParts16; ++p) {
      float* at = scores + k + p * kLanes;
      const F32 weight = exp_nonpositive(load<F32>(at) - new_best);
      sums[p] += weight;
      store(at, weight);
    }
  *best = new_best;
  *total = *total * fade + sum16(sums);
  return fade;
}

// Adds keys [from, to) to W registers of Q queries, keys in order.
template <int Q, int W>
inline void add_columns(const float (*weights)[kKeys], const float* values, int64_t padded, int64_t from, int64_t to,
                        float* outs) {
  F32 sums[Q][W];
  for (int q = 0; q < Q; ++q)
    for (int w = 0; w < W; ++w) sums[q][w] = load<F32>(outs + q * padded + w * kLanes);
  for (int64_t k = from; k < to; ++k) {
    F32 value[W];
    for (int w = 0; w < W; ++w) value[w] = load<F32>(values + k * padded + w * kLanes);
    for (int q = 0; q < Q; ++q) {
      const F32 weight = splat(weights[q][k]);
      for (int w = 0; w < W; ++w) sums[q][w] = fma(weight, value[w], sums[q][w]);
    }
  }
  for (int q = 0; q < Q; ++q)
    for (int w = 0; w < W; ++w) store(outs + q * padded + w * kLanes, sums[q][w]);
}

template <int Q>
inline void add_values(const float (*weights)[kKeys], const float* values, int64_t padded, int64_t from, int64_t to,
                       float* outs) {
  if (from >= to) return;
  int64_t i = 0;
  for (; i + kWide * kLanes <= padded; i += kWide * kLanes)
    add_columns<Q, kWide>(weights, values + i, padded, from, to, outs + i);
  for (; i < padded; i += kLanes) add_columns<Q, 1>(weights, values + i, padded, from, to, outs + i);
}

// The keys of a block that a query sees, from its start.
struct Range {
  int64_t from, to;
};

inline Range visible(const Attention& a, const Block& block, int64_t position) {
  const int64_t from = std::max(block.begin, position - a.window + 1) - block.start;
  const int64_t to = std::min(block.stop, position + 1) - block.start;
  return position < 0 || from >= to ? Range{0, 0} : Range{from, to};
}

// Q neighbouring queries and one block. A key that one of them does not see is not multiplied by 0 for
// it, but left out: it may hold anything.
template <int Q>
inline void attend_block(const Attention& a, const Block& block, const Range* ranges, const float* queries,
                         int64_t padded, float* outs, float* bests, float* totals) {
  Range common{0, kKeys}, any{kKeys, 0};
  for (int q = 0; q < Q; ++q) {
    common = {std::max(common.from, ranges[q].from), std::min(common.to, ranges[q].to)};
    if (ranges[q].from < ranges[q].to) any = {std::min(any.from, ranges[q].from), std::max(any.to, ranges[q].to)};
  }
  if (any.from >= any.to) return;
  if (common.from >= common.to) common = {kKeys, kKeys};
  float scores[Q][kKeys];
  block_scores<Q>(queries, a.key_dim, block.keys, scores);
  for (int q = 0; q < Q; ++q) {
    const Range own = ranges[q];
    if (own.from >= own.to) continue;
    float* out = outs + q * padded;
    const float fade = weigh(a, scores[q], own.from, own.to, bests + q, totals + q);
    if (fade != 1.0f)
      for (int64_t i = 0; i < padded; i += kLanes) store(out + i, load<F32>(out + i) * fade);
    add_values<1>(scores + q, block.values, padded, own.from, std::min(own.to, common.from), out);
  }
  add_values<Q>(scores, block.values, padded, common.from, common.to, outs);
  for (int q = 0; q < Q; ++q)
    add_values<1>(scores + q, block.values, padded, std::max(ranges[q].from, common.to), ranges[q].to, outs + q * padded);
}

// Queries that are multiplied at a time.
constexpr int kQueries = 4;

template <int Q>
inline void attend_rest(int64_t count, const Attention& a, const Block& block, const Range* ranges,
                        const float* queries, int64_t padded, const Seen& seen, int64_t first) {
  if constexpr (Q > 0) {
    if (count != Q) return attend_rest<Q - 1>(count, a, block, ranges, queries, padded, seen, first);
    attend_block<Q>(a, block, ranges, queries, padded, seen.outs + first * padded, seen.bests + first, seen.totals + first);
  }
}

// Tokens [first, end) of one row, which share one K/V head: their queries, and memory to work in.
struct Unit {
  const Attention& a;
  int64_t first, end, kv_head, group, num_queries, key_padded, padded;
  const int32_t* table;
  int64_t low, latest;  // the keys that any of them sees
  float *keys, *values, *row, *queries;
  Range* ranges;
  Seen seen, span;

  Unit(const Attention& attention, int64_t row_first, int64_t row_end, const int32_t* row_table, int64_t head)
      : a(attention), first(row_first), end(row_end), kv_head(head), group(a.num_heads / a.num_kv_heads),
        num_queries((end - first) * group), key_padded((a.key_dim + 15) / 16 * 16), padded((a.mixed_dim + 15) / 16 * 16),
        table(row_table), low(0), latest(-1) {
    int64_t earliest = INT64_MAX;
    for (int64_t n = first; n < end; ++n) {
      if (a.positions[n] < 0) continue;
      earliest = std::min<int64_t>(earliest, a.positions[n]);
      latest = std::max<int64_t>(latest, a.positions[n]);
    }
    if (latest >= 0) low = std::max<int64_t>(0, earliest - a.window + 1);
  }

  // False if memory is out.
  bool prepare(Scratch& scratch) {
    const int64_t sizes = kKeys * (key_padded + padded) + key_padded + num_queries * (a.key_dim + 2 * padded + 4 + 4);
    float* at = scratch.floats(sizes);
    if (!at) return false;
    const auto take = [&](int64_t count) { return std::exchange(at, at + count); };
    ranges = (Range*)take(num_queries * sizeof(Range) / sizeof(float));
    keys = take(kKeys * key_padded);
    values = take(kKeys * padded);
    row = take(key_padded);
    queries = take(num_queries * a.key_dim);
    seen = {take(num_queries * padded), take(num_queries), take(num_queries)};
    span = {take(num_queries * padded), take(num_queries), take(num_queries)};
    for (int64_t n = first; n < end; ++n)
      for (int64_t h = 0; h < group; ++h) {
        const float* q = a.queries + (n * a.num_heads + kv_head * group + h) * a.key_dim;
        float* to = queries + ((n - first) * group + h) * a.key_dim;
        for (int64_t i = 0; i < a.key_dim; ++i) to[i] = q[i] * a.scale;
      }
    return true;
  }

  // What is seen before the first key: nothing, or a sink, a score whose weight is 1 so far.
  void begin() const {
    seen.clear(num_queries, padded);
    if (!a.sinks) return;
    for (int64_t q = 0; q < num_queries; ++q) seen.bests[q] = a.sinks[kv_head * group + q % group];
    std::fill(seen.totals, seen.totals + num_queries, 1.0f);
  }

  // What the keys of one span give, from scratch.
  void walk(int64_t number, const Seen& to) const {
    to.clear(num_queries, padded);
    const int64_t from = std::max(low, number * kSpan), stop = std::min(latest + 1, (number + 1) * kSpan);
    for (int64_t start = from / kKeys * kKeys; start < stop; start += kKeys) {
      const Block block{start, std::max(start, from), std::min(start + kKeys, stop), keys, values};
      read_block(a, table, kv_head, block, row, key_padded, padded);
      for (int64_t q = 0; q < num_queries; ++q) ranges[q] = visible(a, block, a.positions[first + q / group]);
      for (int64_t q = 0; q < num_queries; q += kQueries)
        attend_rest<kQueries>(std::min<int64_t>(kQueries, num_queries - q), a, block, ranges + q, queries + q * a.key_dim,
                              padded, to, q);
    }
  }

  void finish() const {
    for (int64_t n = first; n < end; ++n)
      for (int64_t h = 0; h < group; ++h) {
        const int64_t q = (n - first) * group + h;
        const float inverse = seen.totals[q] > 0 ? 1.0f / seen.totals[q] : 0.0f;
        float* to = a.out + (n * a.num_heads + kv_head * group + h) * a.mixed_dim;
        for (int64_t i = 0; i < a.mixed_dim; ++i) to[i] = seen.outs[q * padded + i] * inverse;
      }
  }
};

inline Unit decode_unit(const Attention& a, int64_t row, int64_t kv_head) {
  return Unit(a, row, row + 1, a.tables + row * a.table_pages, kv_head);
}

inline Seen partial(const Attention& a, int64_t row, int64_t kv_head, int64_t span, const Unit& unit) {
  float* outs = a.partials + ((row * a.num_kv_heads + kv_head) * a.num_spans + span) * partial_size(a);
  float* bests = outs + unit.num_queries * unit.padded;
  return {outs, bests, bests + unit.num_queries};
}

// A thread keeps its scratch: filling fresh memory costs more than a short attention. The model's head
// size and group bound it.
inline Scratch& thread_scratch() {
  thread_local Scratch scratch;
  return scratch;
}

inline bool attend_whole(Unit unit) {
  if (!unit.prepare(thread_scratch())) return false;
  unit.begin();
  for (int64_t span = unit.low / kSpan; span * kSpan <= unit.latest; ++span) {
    unit.walk(span, unit.span);
    merge(unit.seen, unit.span, unit.num_queries, unit.padded);
  }
  unit.finish();
  return true;
}

// One of attend_units.
inline bool attend_unit(const Attention& a, int64_t number) {
  const int64_t kv_head = number % a.num_kv_heads, block = number / a.num_kv_heads, blocks = chunk_blocks(a);
  if (block < blocks) {
    const int64_t first = a.num_decodes + block * a.block_tokens;
    const int64_t end = std::min(first + a.block_tokens, a.num_tokens);
    return attend_whole(Unit(a, first, end, a.tables + a.num_decodes * a.table_pages, kv_head));
  }
  const int64_t row = (block - blocks) / a.num_spans, span = (block - blocks) % a.num_spans;
  Unit unit = decode_unit(a, row, kv_head);
  if (!a.partials) return attend_whole(unit);
  if (span < unit.low / kSpan || span * kSpan > unit.latest) return true;
  if (!unit.prepare(thread_scratch())) return false;
  unit.walk(span, partial(a, row, kv_head, span, unit));
  return true;
}

inline bool attend_units(const Attention& a, int64_t first, int64_t end) {
  for (int64_t unit = first; unit < end; ++unit)
    if (!attend_unit(a, unit)) return false;
  return true;
}

// Puts the spans of decode rows [first, end) together, in order.
inline bool merge_rows(const Attention& a, int64_t first, int64_t end) {
  for (int64_t row = first; row < end; ++row)
    for (int64_t kv_head = 0; kv_head < a.num_kv_heads; ++kv_head) {
      Unit unit = decode_unit(a, row, kv_head);
      if (!unit.prepare(thread_scratch())) return false;
      unit.begin();
      for (int64_t span = unit.low / kSpan; span * kSpan <= unit.latest; ++span)
        merge(unit.seen, partial(a, row, kv_head, span, unit), unit.num_queries, unit.padded);
      unit.finish();
    }
  return true;
}

}  // namespace KVARTS_ISA
}  // namespace kvarts
