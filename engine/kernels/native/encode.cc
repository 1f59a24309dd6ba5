// Rows of GGUF blocks to the tiled planes of a layout: the bytes that engine/gguf/encode.py and
// tiles.py make, for the formats of which experts are read while a step waits. The block formats are
// ggml's (ggml-common.h), the order of a tile is that of engine/gguf/layouts.py.
#include <algorithm>
#include <cstdint>
#include <cstring>

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

template <typename F>
int64_t encode(const uint8_t* raw, int64_t rows, int64_t cols, uint8_t* codes, uint8_t* scales, uint8_t* offsets) {
  const int64_t blocks = cols / F::kColumns, row_bytes = blocks * F::kBytes;
  const int64_t tile_codes = kRows * blocks * F::kCodeBytes;
  const int64_t tile_scales = kRows * blocks * (F::kScaleBytes + factor_bytes<F>());
  const int64_t tile_offsets = F::kOffsetBytes ? tile_scales : 0;
  for (int64_t first = 0; first < rows; first += kRows) {
    const int64_t count = std::min<int64_t>(kRows, rows - first);
    if (count < kRows) {
      std::memset(codes, 0, tile_codes);
      std::memset(scales, 0, tile_scales);
      if (tile_offsets) std::memset(offsets, 0, tile_offsets);
    }
    // Of a block the parts of all rows lie side by side, so it is written whole before the next.
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t half = b * kRows * F::kScaleBytes;
      const int64_t rest = kRows * (blocks * F::kScaleBytes + b * factor_bytes<F>()) - half;
      for (int64_t r = 0; r < count; ++r) {
        const uint8_t* block = raw + (first + r) * row_bytes + b * F::kBytes;
        if (!F::encode(block, (int)r, codes + kRows * b * F::kCodeBytes, scales + half,
                       tile_offsets ? offsets + half : nullptr, rest))
          return first + r;
      }
    }
    codes += tile_codes;
    scales += tile_scales;
    offsets += tile_offsets;
  }
  return -1;
}

}  // namespace
}  // namespace kvarts

#pragma GCC visibility push(default)

// Fills the planes of `rows` rows, the first of which starts a tile. Returns -1, or a row with a scale
// that is not finite, or -2 if there is no such format.
extern "C" int64_t kvarts_encode(int32_t format, const uint8_t* raw, int64_t rows, int64_t cols, uint8_t* codes,
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

#pragma GCC visibility pop
