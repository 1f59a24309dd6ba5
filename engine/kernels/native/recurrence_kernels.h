// The recurrences of recurrence.h for one instruction set (KVARTS_ISA). Included once per set.
//
// A unit of work is 16 columns of one row's state, which nothing else reads or writes. Sums go over
// taps, or over the rows of a state, in their order.
#include <algorithm>
#include <memory>
#include <new>

#include "kernels.h"
#include "simd.h"

namespace kvarts {
namespace KVARTS_ISA {

// 16 columns, or fewer with zeros behind.
struct Columns {
  F32 parts[kParts16];
};

inline Columns load_columns(const float* from, int64_t count) {
  Columns c;
  if (count == kColumns) {
    std::memcpy(&c, from, sizeof(c));
  } else {
    float all[kColumns] = {};
    std::memcpy(all, from, count * sizeof(float));
    std::memcpy(&c, all, sizeof(c));
  }
  return c;
}

inline void store_columns(float* to, const Columns& c, int64_t count) { std::memcpy(to, &c, count * sizeof(float)); }

inline Columns fma(const Columns& a, float b, const Columns& c) {
  Columns r;
  for (int p = 0; p < kParts16; ++p) r.parts[p] = fma(a.parts[p], splat(b), c.parts[p]);
  return r;
}

inline Columns scaled(const Columns& a, float b) {
  Columns r;
  for (int p = 0; p < kParts16; ++p) r.parts[p] = a.parts[p] * splat(b);
  return r;
}

inline Columns difference(const Columns& a, const Columns& b) {
  Columns r;
  for (int p = 0; p < kParts16; ++p) r.parts[p] = a.parts[p] - b.parts[p];
  return r;
}

// Results of padding from `token` on.
inline void clear_rest(const Rows& rows, int64_t row, int64_t token, float* y, int64_t stride, int64_t count) {
  for (; token < rows.end(row); ++token) std::memset(y + token * stride, 0, count * sizeof(float));
}

inline bool convolve(const Convolution& a, int64_t first, int64_t end) {
  const int64_t taps = a.taps, kept = taps - 1, blocks = a.blocks();
  // A ring of the last inputs and the filters, [taps][16] each.
  const std::unique_ptr<Columns[]> memory(new (std::nothrow) Columns[2 * taps]);
  if (!memory) return false;
  Columns *ring = memory.get(), *filters = ring + taps;
  for (int64_t unit = first; unit < end; ++unit) {
    const int64_t row = unit / blocks, column = unit % blocks * kColumns;
    const int64_t count = std::min(kColumns, a.channels - column);
    const Rows& rows = a.rows;
    int64_t token = row;
    if (rows.positions[token] >= 0) {
      float* state = a.states + rows.units[row] * kept * a.channels + column;
      const bool is_fresh = rows.positions[token] == 0;
      for (int64_t tap = 0; tap < taps; ++tap) {
        float filter[kColumns] = {};
        for (int64_t c = 0; c < count; ++c) filter[c] = a.kernel[(column + c) * taps + tap];
        filters[tap] = load_columns(filter, kColumns);
        if (tap < kept) ring[tap] = is_fresh ? Columns{} : load_columns(state + tap * a.channels, count);
      }
      int64_t oldest = 0;
      for (; token < rows.end(row) && rows.positions[token] >= 0; ++token) {
        ring[(oldest + kept) % taps] = load_columns(a.x + token * a.channels + column, count);
        Columns sum{};
        for (int64_t tap = 0; tap < taps; ++tap) {
          const Columns& input = ring[(oldest + tap) % taps];
          for (int p = 0; p < kParts16; ++p) sum.parts[p] = fma(input.parts[p], filters[tap].parts[p], sum.parts[p]);
        }
        store_columns(a.y + token * a.channels + column, sum, count);
        oldest = (oldest + 1) % taps;
      }
      for (int64_t tap = 0; tap < kept; ++tap) store_columns(state + tap * a.channels, ring[(oldest + tap) % taps], count);
    }
    clear_rest(rows, row, token, a.y + column, a.channels, count);
  }
  return true;
}

// One token of one block of columns; `state` is [keys][16].
inline Columns recur_token(const Recurrence& a, Columns* state, const float* q, const float* k, Columns u, float decay,
                           float strength) {
  if (a.is_delta) {
    Columns known{};
    for (int64_t i = 0; i < a.keys; ++i) {
      state[i] = scaled(state[i], decay);
      known = fma(state[i], k[i], known);
    }
    u = scaled(difference(u, known), strength);
  }
  Columns y{};
  for (int64_t i = 0; i < a.keys; ++i) {
    state[i] = fma(u, k[i], a.is_delta ? state[i] : scaled(state[i], decay));
    y = fma(state[i], q[i], y);
  }
  return y;
}

inline bool recur(const Recurrence& a, int64_t first, int64_t end) {
  const int64_t blocks = a.blocks(), stride = a.heads * a.values;
  const std::unique_ptr<Columns[]> memory(new (std::nothrow) Columns[a.keys]);
  if (!memory) return false;
  Columns* state = memory.get();
  for (int64_t unit = first; unit < end; ++unit) {
    const int64_t row = unit / (a.heads * blocks), head = unit / blocks % a.heads, column = unit % blocks * kColumns;
    const int64_t count = std::min(kColumns, a.values - column), group = a.group(head);
    const Rows& rows = a.rows;
    const int64_t own = head * a.values + column;  // of a token's values and results
    int64_t token = row;
    if (rows.positions[token] >= 0) {
      float* held = a.states + ((rows.units[row] * a.heads + head) * a.keys) * a.values + column;
      const bool is_fresh = rows.positions[token] == 0;
      for (int64_t i = 0; i < a.keys; ++i) state[i] = is_fresh ? Columns{} : load_columns(held + i * a.values, count);
      for (; token < rows.end(row) && rows.positions[token] >= 0; ++token) {
        const int64_t shared = (token * a.groups + group) * a.keys, one = token * a.heads + head;
        const Columns u = load_columns(a.v + token * stride + own, count);
        store_columns(a.y + token * stride + own, recur_token(a, state, a.q + shared, a.k + shared, u, a.a[one], a.b[one]), count);
      }
      for (int64_t i = 0; i < a.keys; ++i) store_columns(held + i * a.values, state[i], count);
    }
    clear_rest(rows, row, token, a.y + own, stride, count);
  }
  return true;
}

}  // namespace KVARTS_ISA
}  // namespace kvarts
