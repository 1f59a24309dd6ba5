// Recurrent layers of a step: D rows of one token each, then one row of the other tokens. Every row
// carries a state of its own on, token by token, so that no bit depends on how tokens are split.
#pragma once
#include <cstdint>

namespace kvarts {

// Columns are walked 16 at a time.
constexpr int64_t kColumns = 16;

struct Rows {
  int64_t num_tokens, num_decodes;
  const int32_t* positions;  // [num_tokens], -1 for padding, whose result is 0 and changes nothing
  const int32_t* units;      // [rows], where each row's state lies; of one that begins, it is not read

  int64_t count() const { return num_decodes + (num_tokens > num_decodes); }
  int64_t end(int64_t row) const { return row < num_decodes ? row + 1 : num_tokens; }
};

// y = sum over taps of w[c, tap] * x[t - taps + 1 + tap, c], one filter per channel c.
struct Convolution {
  Rows rows;
  int64_t channels, taps;
  const float* x;       // [num_tokens, channels]
  const float* kernel;  // [channels, taps]
  float* y;             // [num_tokens, channels]
  float* states;        // [units, taps - 1, channels]

  int64_t blocks() const { return (channels + kColumns - 1) / kColumns; }
  int64_t work() const { return rows.count() * blocks(); }
};

// S = a S + k u^T, y = S^T q per head, with u = v or, for a delta net, b (v - a S^T k).
struct Recurrence {
  Rows rows;
  bool is_delta, is_interleaved;
  int64_t heads, groups, keys, values;  // keys and values: rows and columns of S
  const float *q, *k;                   // [num_tokens, groups, keys]
  const float* v;                       // [num_tokens, heads, values]
  const float *a, *b;                   // [num_tokens, heads]
  float* y;                             // [num_tokens, heads, values]
  float* states;                        // [units, heads, keys, values]

  int64_t group(int64_t head) const { return is_interleaved ? head / (heads / groups) : head % groups; }
  int64_t blocks() const { return (values + kColumns - 1) / kColumns; }
  int64_t work() const { return rows.count() * heads * blocks(); }
};

}  // namespace kvarts
