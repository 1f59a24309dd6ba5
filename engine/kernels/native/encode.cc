// Rows of GGUF blocks to the tiled planes of a layout: the bytes that engine/gguf/encode.py and
// tiles.py make, for the formats of which experts are read while a step waits. The block formats are
// ggml's (ggml-common.h), the order of a tile is that of engine/gguf/layouts.py.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>

namespace kvarts {
namespace {

constexpr int kRows = 16;  // of a tile

// Numbers of encode.py.
enum Format : int32_t { kQ8_0 = 0, kQ4_K = 1, kQ6_K = 2, kMxfp4 = 3 };

bool is_finite_half(const uint8_t* p) { return ((p[1] & 0x7f) << 8 | p[0]) < 0x7c00; }

// The codes of one row's group, four columns at a time into the runs of its tile.
void scatter(const uint8_t* codes, int64_t num_bytes, uint8_t* tile, int row) {
  for (int64_t i = 0; i < num_bytes; i += 4) std::memcpy(tile + i * kRows + 4 * row, codes + i, 4);
}

// What a format does with a block of a row: `codes`, `scales` and `offsets` begin with the block's
// part of the tile; false if a scale is not finite.
struct Q8_0 {
  static constexpr int64_t kColumns = 32, kBytes = 34, kCodeBytes = 32, kScaleBytes = 2, kOffsetBytes = 0;
  static bool encode(const uint8_t* b, int row, uint8_t* codes, uint8_t* scales, uint8_t*, int64_t) {
    uint8_t own[32];
    for (int i = 0; i < 32; ++i) own[i] = b[2 + i] ^ 0x80;
    scatter(own, 32, codes, row);
    std::memcpy(scales + 2 * row, b, 2);
    return is_finite_half(b);
  }
};

struct Mxfp4 {
  static constexpr int64_t kColumns = 32, kBytes = 17, kCodeBytes = 16, kScaleBytes = 1, kOffsetBytes = 0;
  static bool encode(const uint8_t* b, int row, uint8_t* codes, uint8_t* scales, uint8_t*, int64_t) {
    scatter(b + 1, 16, codes, row);
    scales[row] = b[0];
    return b[0] <= 252;  // 255 is NaN, and six times 2 ** 126 is no float32
  }
};

// Of these a tile's scales are all halves [blocks, 16], then all bytes [groups, 16]: `rest` is where
// the block's bytes begin, counted from its half.
struct Q4_K {
  static constexpr int64_t kColumns = 256, kBytes = 144, kCodeBytes = 128, kScaleBytes = 2, kOffsetBytes = 2;
  static bool encode(const uint8_t* b, int row, uint8_t* codes, uint8_t* scales, uint8_t* offsets, int64_t rest) {
    uint8_t own[128];
    for (int pair = 0; pair < 4; ++pair) {
      const uint8_t* q = b + 16 + 32 * pair;
      uint8_t* to = own + 32 * pair;
      for (int i = 0; i < 16; ++i) {
        to[i] = (q[i] & 15) | (uint8_t)(q[i + 16] << 4);
        to[16 + i] = (q[i] >> 4) | (q[i + 16] & 0xf0);
      }
    }
    scatter(own, 128, codes, row);
    std::memcpy(scales + 2 * row, b, 2);
    const uint8_t least[2] = {b[2], (uint8_t)(b[3] ^ 0x80)};
    std::memcpy(offsets + 2 * row, least, 2);
    const uint8_t* s = b + 4;
    for (int i = 0; i < 4; ++i) {
      scales[rest + kRows * i + row] = s[i] & 63;
      offsets[rest + kRows * i + row] = s[4 + i] & 63;
      scales[rest + kRows * (4 + i) + row] = (s[8 + i] & 15) | (s[i] >> 2 & 48);
      offsets[rest + kRows * (4 + i) + row] = (s[8 + i] >> 4) | (s[4 + i] >> 2 & 48);
    }
    return is_finite_half(b) && is_finite_half(b + 2);
  }
};

struct Q6_K {
  static constexpr int64_t kColumns = 256, kBytes = 210, kCodeBytes = 256, kScaleBytes = 2, kOffsetBytes = 0;
  static bool encode(const uint8_t* b, int row, uint8_t* codes, uint8_t* scales, uint8_t*, int64_t rest) {
    uint8_t own[256];
    for (int half = 0; half < 2; ++half) {
      const uint8_t *low = b + 64 * half, *high = b + 128 + 32 * half;
      uint8_t* to = own + 128 * half;
      for (int i = 0; i < 32; ++i) {
        // A code is 32 less than its bits; signed codes are stored plus 128.
        to[i] = ((low[i] & 15) | (high[i] & 3) << 4) + 96;
        to[32 + i] = ((low[32 + i] & 15) | (high[i] >> 2 & 3) << 4) + 96;
        to[64 + i] = ((low[i] >> 4) | (high[i] >> 4 & 3) << 4) + 96;
        to[96 + i] = ((low[32 + i] >> 4) | (high[i] >> 6) << 4) + 96;
      }
    }
    scatter(own, 256, codes, row);
    std::memcpy(scales + 2 * row, b + 208, 2);
    for (int i = 0; i < 16; ++i) scales[rest + kRows * i + row] = b[192 + i];
    return is_finite_half(b + 208);
  }
};

// Bytes of 8-bit factors that a block has per row, beside its half.
template <typename F>
constexpr int64_t factor_bytes() {
  return F::kColumns == 256 ? (F::kCodeBytes == 256 ? 16 : 8) : 0;
}

// Bytes of a tile's codes, and of its scales.
template <typename F>
int64_t tile_codes(int64_t cols) {
  return kRows * cols / F::kColumns * F::kCodeBytes;
}

template <typename F>
int64_t tile_scales(int64_t cols) {
  return kRows * cols / F::kColumns * (F::kScaleBytes + factor_bytes<F>());
}

template <typename F>
int64_t encode(const uint8_t* raw, int64_t rows, int64_t cols, uint8_t* codes, uint8_t* scales, uint8_t* offsets) {
  const int64_t blocks = cols / F::kColumns, row_bytes = blocks * F::kBytes;
  const int64_t codes_step = tile_codes<F>(cols), scales_step = tile_scales<F>(cols);
  const int64_t offsets_step = F::kOffsetBytes ? scales_step : 0;
  for (int64_t first = 0; first < rows; first += kRows) {
    const int64_t count = std::min<int64_t>(kRows, rows - first);
    if (count < kRows) {
      std::memset(codes, 0, codes_step);
      std::memset(scales, 0, scales_step);
      if (offsets_step) std::memset(offsets, 0, offsets_step);
    }
    // Of a block the parts of all rows lie side by side, so it is written whole before the next.
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t half = b * kRows * F::kScaleBytes;
      const int64_t rest = kRows * (blocks * F::kScaleBytes + b * factor_bytes<F>()) - half;
      for (int64_t r = 0; r < count; ++r) {
        const uint8_t* block = raw + (first + r) * row_bytes + b * F::kBytes;
        if (!F::encode(block, (int)r, codes + kRows * b * F::kCodeBytes, scales + half,
                       offsets_step ? offsets + half : nullptr, rest))
          return first + r;
      }
    }
    codes += codes_step;
    scales += scales_step;
    offsets += offsets_step;
  }
  return -1;
}

// A matrix of a record: where it is in the file for the first expert, and its planes in a slot.
struct Part {
  int64_t descriptor, format, offset, nbytes, rows, cols, codes, scales, offsets;
};

enum Wrong : int64_t { kEnded = 1, kErrno = 2, kNotFinite = 3, kNoMemory = 4 };

// Of the file at a time, so that what was read is still in the second cache when it is encoded.
constexpr int64_t kPieceBytes = 1 << 16;

// Reads all of it; 0, kEnded or kErrno with the number in `detail`.
int64_t read_fully(int descriptor, uint8_t* to, int64_t count, int64_t at, int64_t* detail) {
  while (count > 0) {
    const ssize_t got = pread(descriptor, to, count, at);
    if (got == 0) return kEnded;
    if (got < 0) {
      if (errno == EINTR) continue;
      *detail = errno;
      return kErrno;
    }
    to += got;
    at += got;
    count -= got;
  }
  return 0;
}

template <typename F>
int64_t read_part(const Part& p, int64_t expert, uint8_t* slot, int64_t* detail) {
  const int64_t row_bytes = p.nbytes / p.rows;
  const int64_t step = std::max<int64_t>(kRows, kPieceBytes / row_bytes / kRows * kRows);
  thread_local std::unique_ptr<uint8_t[]> scratch;
  thread_local int64_t scratch_bytes = 0;
  if (scratch_bytes < step * row_bytes) {
    scratch_bytes = 0;
    scratch.reset(new (std::nothrow) uint8_t[step * row_bytes]);
    if (!scratch) return kNoMemory;
    scratch_bytes = step * row_bytes;
  }
  for (int64_t first = 0; first < p.rows; first += step) {
    const int64_t count = std::min(step, p.rows - first), tile = first / kRows;
    const int64_t at = p.offset + expert * p.nbytes + first * row_bytes;
    if (const int64_t wrong = read_fully((int)p.descriptor, scratch.get(), count * row_bytes, at, detail)) return wrong;
    const int64_t scales = tile * tile_scales<F>(p.cols);
    const int64_t bad = encode<F>(scratch.get(), count, p.cols, slot + p.codes + tile * tile_codes<F>(p.cols),
                                  slot + p.scales + scales, F::kOffsetBytes ? slot + p.offsets + scales : nullptr);
    if (bad >= 0) {
      *detail = first + bad;
      return kNotFinite;
    }
  }
  return 0;
}

int64_t read_any(const Part& p, int64_t expert, uint8_t* slot, int64_t* detail) {
  switch (p.format) {
    case kQ8_0: return read_part<Q8_0>(p, expert, slot, detail);
    case kQ4_K: return read_part<Q4_K>(p, expert, slot, detail);
    case kQ6_K: return read_part<Q6_K>(p, expert, slot, detail);
    default: return read_part<Mxfp4>(p, expert, slot, detail);
  }
}

}  // namespace
}  // namespace kvarts

#pragma GCC visibility push(default)

// Fills the planes of `rows` rows, the first of which starts a tile. Returns -1, or a row with a scale
// that is not finite, or -2 if there is no such format.
extern "C" int64_t kvarts_encode(int64_t format, const uint8_t* raw, int64_t rows, int64_t cols, uint8_t* codes,
                                 uint8_t* scales, uint8_t* offsets) {
  using namespace kvarts;
  switch (format) {
    case kQ8_0: return encode<Q8_0>(raw, rows, cols, codes, scales, offsets);
    case kQ4_K: return encode<Q4_K>(raw, rows, cols, codes, scales, offsets);
    case kQ6_K: return encode<Q6_K>(raw, rows, cols, codes, scales, offsets);
    case kMxfp4: return encode<Mxfp4>(raw, rows, cols, codes, scales, offsets);
    default: return -2;
  }
}

// Reads an expert's record into a slot. Returns 0, or 8 times the part that failed plus what is wrong;
// `detail` is then an errno or a row.
extern "C" int64_t kvarts_read_record(const int64_t* parts, int64_t count, int64_t expert, uint8_t* slot,
                                      int64_t* detail) {
  for (int64_t i = 0; i < count; ++i) {
    kvarts::Part part;
    std::memcpy(&part, parts + 9 * i, sizeof part);
    if (const int64_t wrong = kvarts::read_any(part, expert, slot, detail)) return 8 * i + wrong;
  }
  return 0;
}

#pragma GCC visibility pop
