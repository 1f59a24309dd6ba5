// Rows of GGUF blocks to the tiled planes of a layout: the bytes that engine/gguf/encode.py and
// tiles.py make, for the formats of which experts are read while a step waits. The block formats are
// ggml's (ggml-common.h), the order of a tile is that of engine/gguf/layouts.py.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>

#include "parallel.h"
#include "reading.h"

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

// The same of four rows at once, whose codes lie one behind another: whole words side by side.
void scatter_four(const uint8_t* codes, int64_t num_bytes, uint8_t* tile, int row) {
  using Words = uint32_t __attribute__((vector_size(16)));
  for (int64_t i = 0; i < num_bytes; i += 16) {
    Words a, b, c, d;
    std::memcpy(&a, codes + i, 16);
    std::memcpy(&b, codes + num_bytes + i, 16);
    std::memcpy(&c, codes + 2 * num_bytes + i, 16);
    std::memcpy(&d, codes + 3 * num_bytes + i, 16);
    for (int word = 0; word < 4; ++word) {
      const Words own = {a[word], b[word], c[word], d[word]};
      std::memcpy(tile + (i + 4 * word) * kRows + 4 * row, &own, 16);
    }
  }
}

// What a format does with a block of a row: `codes` are the row's own, `scales` and `offsets` begin
// with the block's part of the tile; false if a scale is not finite.
struct Q8_0 {
  static constexpr int64_t kColumns = 32, kBytes = 34, kCodeBytes = 32, kScaleBytes = 2, kOffsetBytes = 0;
  static bool encode(const uint8_t* b, int row, uint8_t* codes, uint8_t* scales, uint8_t*, int64_t) {
    for (int i = 0; i < 32; ++i) codes[i] = b[2 + i] ^ 0x80;
    std::memcpy(scales + 2 * row, b, 2);
    return is_finite_half(b);
  }
};

struct Mxfp4 {
  static constexpr int64_t kColumns = 32, kBytes = 17, kCodeBytes = 16, kScaleBytes = 1, kOffsetBytes = 0;
  static bool encode(const uint8_t* b, int row, uint8_t* codes, uint8_t* scales, uint8_t*, int64_t) {
    std::memcpy(codes, b + 1, 16);
    scales[row] = b[0];
    return b[0] <= 252;  // 255 is NaN, and six times 2 ** 126 is no float32
  }
};

// Of these a tile's scales are all halves [blocks, 16], then all bytes [groups, 16]: `rest` is where
// the block's bytes begin, counted from its half.
struct Q4_K {
  static constexpr int64_t kColumns = 256, kBytes = 144, kCodeBytes = 128, kScaleBytes = 2, kOffsetBytes = 2;
  static bool encode(const uint8_t* b, int row, uint8_t* codes, uint8_t* scales, uint8_t* offsets, int64_t rest) {
    for (int pair = 0; pair < 4; ++pair) {
      const uint8_t* q = b + 16 + 32 * pair;
      uint8_t* to = codes + 32 * pair;
      for (int i = 0; i < 16; ++i) {
        to[i] = (q[i] & 15) | (uint8_t)(q[i + 16] << 4);
        to[16 + i] = (q[i] >> 4) | (q[i + 16] & 0xf0);
      }
    }
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
    for (int half = 0; half < 2; ++half) {
      const uint8_t *low = b + 64 * half, *high = b + 128 + 32 * half;
      uint8_t* to = codes + 128 * half;
      for (int i = 0; i < 32; ++i) {
        // A code is 32 less than its bits; signed codes are stored plus 128.
        to[i] = ((low[i] & 15) | (high[i] & 3) << 4) + 96;
        to[32 + i] = ((low[32 + i] & 15) | (high[i] >> 2 & 3) << 4) + 96;
        to[64 + i] = ((low[i] >> 4) | (high[i] >> 4 & 3) << 4) + 96;
        to[96 + i] = ((low[32 + i] >> 4) | (high[i] >> 6) << 4) + 96;
      }
    }
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
      uint8_t* const tile = codes + kRows * b * F::kCodeBytes;
      for (int64_t r = 0; r < count; r += 4) {
        uint8_t own[4 * F::kCodeBytes];
        const int64_t few = std::min<int64_t>(4, count - r);
        for (int64_t i = 0; i < few; ++i) {
          const uint8_t* block = raw + (first + r + i) * row_bytes + b * F::kBytes;
          if (!F::encode(block, (int)(r + i), own + i * F::kCodeBytes, scales + half,
                         offsets_step ? offsets + half : nullptr, rest))
            return first + r + i;
        }
        if (few == 4) {
          scatter_four(own, F::kCodeBytes, tile, (int)r);
        } else {
          for (int64_t i = 0; i < few; ++i) scatter(own + i * F::kCodeBytes, F::kCodeBytes, tile, (int)(r + i));
        }
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

// Rows of a part that are read at a time: whole tiles.
int64_t piece_rows(const Part& p) {
  return std::max<int64_t>(kRows, kPieceBytes / (p.nbytes / p.rows) / kRows * kRows);
}

int64_t num_pieces(const Part& p) { return (p.rows + piece_rows(p) - 1) / piece_rows(p); }

template <typename F>
int64_t read_piece(const Part& p, int64_t expert, int64_t piece, uint8_t* slot, int64_t* detail) {
  const int64_t row_bytes = p.nbytes / p.rows, step = piece_rows(p);
  thread_local std::unique_ptr<uint8_t[]> scratch;
  thread_local int64_t scratch_bytes = 0;
  if (scratch_bytes < step * row_bytes) {
    scratch_bytes = 0;
    scratch.reset(new (std::nothrow) uint8_t[step * row_bytes]);
    if (!scratch) return kNoMemory;
    scratch_bytes = step * row_bytes;
  }
  const int64_t first = piece * step, count = std::min(step, p.rows - first), tile = first / kRows;
  const int64_t at = p.offset + expert * p.nbytes + first * row_bytes;
  if (const int64_t wrong = read_fully((int)p.descriptor, scratch.get(), count * row_bytes, at, detail)) return wrong;
  const int64_t scales = tile * tile_scales<F>(p.cols);
  const int64_t bad = encode<F>(scratch.get(), count, p.cols, slot + p.codes + tile * tile_codes<F>(p.cols),
                                slot + p.scales + scales, F::kOffsetBytes ? slot + p.offsets + scales : nullptr);
  if (bad < 0) return 0;
  *detail = first + bad;
  return kNotFinite;
}

int64_t read_any(const Part& p, int64_t expert, int64_t piece, uint8_t* slot, int64_t* detail) {
  switch (p.format) {
    case kQ8_0: return read_piece<Q8_0>(p, expert, piece, slot, detail);
    case kQ4_K: return read_piece<Q4_K>(p, expert, piece, slot, detail);
    case kQ6_K: return read_piece<Q6_K>(p, expert, piece, slot, detail);
    default: return read_piece<Mxfp4>(p, expert, piece, slot, detail);
  }
}

// What went wrong with the first piece of those that did, whichever thread had it.
struct Failure {
  std::mutex mutex;
  int64_t piece = INT64_MAX, what = 0, detail = 0;

  void note(int64_t where, int64_t wrong, int64_t more) {
    std::lock_guard<std::mutex> lock(mutex);
    if (where >= piece) return;
    piece = where, what = wrong, detail = more;
  }
};

thread_local const xla::ffi::ThreadPool* sharing = nullptr;

}  // namespace

SharedReads::SharedReads(const xla::ffi::ThreadPool& threads) { sharing = &threads; }
SharedReads::~SharedReads() { sharing = nullptr; }

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

// Reads an expert's record into a slot, with the help of the threads that `SharedReads` names.
// Returns 0, or 8 times the part that failed plus what is wrong; `detail` is then an errno or a row.
extern "C" int64_t kvarts_read_record(const int64_t* parts, int64_t count, int64_t expert, uint8_t* slot,
                                      int64_t* detail) {
  using namespace kvarts;
  static_assert(sizeof(Part) == 9 * sizeof(int64_t), "as encode.py writes it");
  const auto part_at = [parts](int64_t i) {
    Part part;
    std::memcpy(&part, parts + 9 * i, sizeof part);
    return part;
  };
  int64_t pieces = 0;
  for (int64_t i = 0; i < count; ++i) pieces += num_pieces(part_at(i));
  Failure failure;
  const auto run = [&failure, &part_at, expert, slot](int64_t begin, int64_t end) noexcept {
    for (int64_t piece = begin; piece < end; ++piece) {
      int64_t i = 0, own = piece;
      Part part = part_at(0);
      while (own >= num_pieces(part)) own -= num_pieces(part), part = part_at(++i);
      int64_t more = 0;
      if (const int64_t wrong = read_any(part, expert, own, slot, &more)) {
        failure.note(piece, 8 * i + wrong, more);
        return;
      }
    }
  };
  try {
    if (sharing) {
      parallel_for(*sharing, pieces, 1, run);
    } else {
      run(0, pieces);
    }
  } catch (const std::bad_alloc&) {  // before any of it was begun
    return kNoMemory;
  }
  *detail = failure.detail;
  return failure.what;
}

#pragma GCC visibility pop
