// Lanes of f32 and i32, and the few primitives that differ between instruction sets.
//
// Everything else is written on vector extensions of GCC and Clang. All arithmetic that reaches a
// result is one multiply-add per element in a fixed order, so that every instruction set with a
// fused multiply-add gives the same bits.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace kvarts {
namespace KVARTS_ISA {

// A tile of a matrix has 16 rows; where a register has fewer lanes, it is walked in parts.
#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float F32 __attribute__((vector_size(4 * kLanes)));
typedef int32_t I32 __attribute__((vector_size(4 * kLanes)));
typedef uint8_t U8 __attribute__((vector_size(4 * kLanes)));

template <typename V>
inline V load(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof(V));
  return v;
}

template <typename V>
inline void store(void* p, V v) {
  std::memcpy(p, &v, sizeof(V));
}

inline F32 splat(float x) { return x - F32{}; }

inline F32 to_f32(I32 v) { return __builtin_convertvector(v, F32); }

inline F32 fma(F32 a, F32 b, F32 c) {
#if defined(__AVX512F__)
  return (F32)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (F32)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
  return (F32)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  for (int i = 0; i < kLanes; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#endif
}

inline float half_to_float(uint16_t h) {
  const uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023;
  uint32_t bits;
  if (exponent == 31) {
    bits = sign | 0x7f800000u | (mantissa << 13);
  } else if (exponent) {
    bits = sign | ((exponent + 112) << 23) | (mantissa << 13);
  } else {
    const float subnormal = (float)mantissa * 0x1p-24f;
    std::memcpy(&bits, &subnormal, 4);
    bits |= sign;
  }
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

inline F32 load_f16(const void* p) {
#if defined(__AVX512F__)
  return (F32)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
  return (F32)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  F32 r;
  for (int i = 0; i < kLanes; ++i) r[i] = half_to_float(load<uint16_t>((const char*)p + 2 * i));
  return r;
#endif
}

inline F32 load_bf16(const void* p) {
#if defined(__AVX512F__)
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
  return (F32)_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
#elif defined(__AVX2__)
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
  return (F32)_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
#else
  I32 bits;
  for (int i = 0; i < kLanes; ++i) bits[i] = (int32_t)((uint32_t)load<uint16_t>((const char*)p + 2 * i) << 16);
  return (F32)bits;
#endif
}

// Whole numbers of one byte each, widened.
inline I32 load_i8(const uint8_t* p) {
#if defined(__AVX512F__)
  return (I32)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__)
  return (I32)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
  I32 r;
  for (int i = 0; i < kLanes; ++i) r[i] = (int8_t)p[i];
  return r;
#endif
}

// table[code] for codes below 16.
inline U8 lookup(const uint8_t* table, U8 codes) {
#if defined(__AVX512F__)
  return (U8)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table)), (__m512i)codes);
#elif defined(__AVX2__)
  return (U8)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table)), (__m256i)codes);
#elif defined(__ARM_NEON) && defined(__aarch64__)
  return (U8)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)codes);
#else
  for (int i = 0; i < 4 * kLanes; ++i) codes[i] = table[codes[i]];
  return codes;
#endif
}

// Four activations, repeated for every lane.
#if defined(__AVX512F__)
typedef __m512i Four;
inline Four four(const int8_t* x) {
  int32_t bits;
  std::memcpy(&bits, x, 4);
  return _mm512_set1_epi32(bits);
}
#elif defined(__AVX2__)
typedef __m256i Four;
inline Four four(const int8_t* x) {
  int32_t bits;
  std::memcpy(&bits, x, 4);
  return _mm256_set1_epi32(bits);
}
#else
typedef const int8_t* Four;
inline Four four(const int8_t* x) { return x; }
#endif

// Sums of a group's products, as each instruction set takes them best. `add_low` is for unsigned codes
// below 16, `add` for signed ones, which are stored plus 128:
//   acc[r] += sum over i in 0..3 of code[4r + i] * x[i]
// `finish` turns an accumulator of one group into its exact sums. kSmall: a group's number of
// columns times its largest magnitude is at most 512.
// kIsPlus128: `add` leaves the 128 in; 128 times the sum of x is to be taken off.
// kSumsAreExact: accumulators are exact sums all along, and `finish` does nothing.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(__ARM_FEATURE_MATMUL_INT8)
constexpr bool kIsPlus128 = true, kSumsAreExact = true;
typedef U8 Codes;
inline Codes signed_codes(U8 stored) { return stored; }
inline I32 add_low(I32 acc, U8 codes, Four x) {
#if defined(__AVX512VNNI__)
  return (I32)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)codes, x);
#elif defined(__ARM_FEATURE_MATMUL_INT8)
  return (I32)vusdotq_s32((int32x4_t)acc, (uint8x16_t)codes, vreinterpretq_s8_s32(vld1q_dup_s32((const int32_t*)x)));
#else
  return (I32)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)codes, x);
#endif
}
template <bool kSmall>
inline I32 add(I32 acc, Codes codes, Four x) { return add_low(acc, codes, x); }
inline I32 finish_low(I32 acc) { return acc; }
template <bool kSmall>
inline I32 finish(I32 acc) { return acc; }

#elif defined(__AVX2__)
constexpr bool kIsPlus128 = false, kSumsAreExact = false;
struct Codes {
  __m256i values, magnitudes;
};
inline Codes signed_codes(U8 stored) {
  const __m256i values = _mm256_xor_si256((__m256i)stored, _mm256_set1_epi8((char)0x80));
  return {values, _mm256_abs_epi8(values)};
}
inline __m256i widened(__m256i pairs) { return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)); }
// Eight of these, each at most 2 * 15 * 127, fit in 16 bits: a group of 32 is summed there.
inline I32 add_low(I32 acc, U8 codes, Four x) {
  return (I32)_mm256_add_epi16((__m256i)acc, _mm256_maddubs_epi16((__m256i)codes, x));
}
inline I32 finish_low(I32 acc) { return (I32)widened((__m256i)acc); }
// A code of -128 has a magnitude of 128, unsigned; two products are at most 2 * 128 * 127, which fits in
// 16 bits; of small ones, those of a whole group do.
template <bool kSmall>
inline I32 add(I32 acc, Codes codes, Four x) {
  const __m256i pairs = _mm256_maddubs_epi16(codes.magnitudes, _mm256_sign_epi8(x, codes.values));
  return (I32)(kSmall ? _mm256_add_epi16((__m256i)acc, pairs) : _mm256_add_epi32((__m256i)acc, widened(pairs)));
}
template <bool kSmall>
inline I32 finish(I32 acc) { return kSmall ? finish_low(acc) : acc; }

#else
constexpr bool kIsPlus128 = false, kSumsAreExact = true;
typedef int8_t Codes __attribute__((vector_size(4 * kLanes)));
inline Codes signed_codes(U8 stored) { return (Codes)(stored ^ 0x80); }
#if defined(__ARM_FEATURE_DOTPROD)
template <bool kSmall>
inline I32 add(I32 acc, Codes codes, Four x) {
  return (I32)vdotq_s32((int32x4_t)acc, (int8x16_t)codes, vreinterpretq_s8_s32(vld1q_dup_s32((const int32_t*)x)));
}
#else
template <bool kSmall>
inline I32 add(I32 acc, Codes codes, Four x) {
  for (int r = 0; r < kLanes; ++r)
    for (int i = 0; i < 4; ++i) acc[r] += (int32_t)codes[4 * r + i] * x[i];
  return acc;
}
#endif
inline I32 add_low(I32 acc, U8 codes, Four x) { return add<false>(acc, (Codes)codes, x); }
inline I32 finish_low(I32 acc) { return acc; }
template <bool kSmall>
inline I32 finish(I32 acc) { return acc; }
#endif

inline int32_t sum(I32 v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)v);
#else
  int32_t total = 0;
  for (int i = 0; i < kLanes; ++i) total += v[i];
  return total;
#endif
}

// Lanes from -128 to 127 as bytes.
inline void store_bytes(int8_t* to, I32 v) {
#if defined(__AVX512F__)
  _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)v));
#elif defined(__AVX2__)
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
  _mm_storel_epi64((__m128i*)to, _mm_packs_epi16(words, words));
#else
  for (int i = 0; i < kLanes; ++i) to[i] = (int8_t)v[i];
#endif
}

// Sums of 16 lanes go as a tree: lane i and i + 8, then i + 4, + 2, + 1, whatever the register.
constexpr int kParts16 = 16 / kLanes;

inline float sum16(const F32* parts) {
  float t[16];
  std::memcpy(t, parts, 64);
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; ++i) t[i] += t[i + width];
  return t[0];
}

// Writes 16 vectors of 16 lanes as columns: to[i * stride + k] is lane i of v[k].
inline void store_transposed(const F32 (*v)[kParts16], float* to, int64_t stride) {
#if defined(__AVX512F__)
  __m512 a[16], b[16];
  for (int k = 0; k < 16; k += 2) {  // within 128 bits, pairs of vectors
    a[k] = _mm512_unpacklo_ps((__m512)v[k][0], (__m512)v[k + 1][0]);
    a[k + 1] = _mm512_unpackhi_ps((__m512)v[k][0], (__m512)v[k + 1][0]);
  }
  for (int k = 0; k < 16; k += 4) {  // b[k + j]: lanes j, j + 4, j + 8, j + 12 of vectors k to k + 3
    b[k] = (__m512)_mm512_unpacklo_pd((__m512d)a[k], (__m512d)a[k + 2]);
    b[k + 1] = (__m512)_mm512_unpackhi_pd((__m512d)a[k], (__m512d)a[k + 2]);
    b[k + 2] = (__m512)_mm512_unpacklo_pd((__m512d)a[k + 1], (__m512d)a[k + 3]);
    b[k + 3] = (__m512)_mm512_unpackhi_pd((__m512d)a[k + 1], (__m512d)a[k + 3]);
  }
  for (int j = 0; j < 4; ++j) {
    const __m512 even = _mm512_shuffle_f32x4(b[j], b[j + 4], 0x88), odd = _mm512_shuffle_f32x4(b[j], b[j + 4], 0xdd);
    const __m512 even2 = _mm512_shuffle_f32x4(b[j + 8], b[j + 12], 0x88);
    const __m512 odd2 = _mm512_shuffle_f32x4(b[j + 8], b[j + 12], 0xdd);
    _mm512_storeu_ps(to + j * stride, _mm512_shuffle_f32x4(even, even2, 0x88));
    _mm512_storeu_ps(to + (j + 4) * stride, _mm512_shuffle_f32x4(odd, odd2, 0x88));
    _mm512_storeu_ps(to + (j + 8) * stride, _mm512_shuffle_f32x4(even, even2, 0xdd));
    _mm512_storeu_ps(to + (j + 12) * stride, _mm512_shuffle_f32x4(odd, odd2, 0xdd));
  }
#elif defined(__AVX2__)
  for (int k = 0; k < 16; k += 8)
    for (int p = 0; p < 2; ++p) {
      __m256 a[8], b[8];
      for (int i = 0; i < 8; i += 2) {
        a[i] = _mm256_unpacklo_ps((__m256)v[k + i][p], (__m256)v[k + i + 1][p]);
        a[i + 1] = _mm256_unpackhi_ps((__m256)v[k + i][p], (__m256)v[k + i + 1][p]);
      }
      for (int i = 0; i < 8; i += 4) {
        b[i] = _mm256_shuffle_ps(a[i], a[i + 2], 0x44);
        b[i + 1] = _mm256_shuffle_ps(a[i], a[i + 2], 0xee);
        b[i + 2] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0x44);
        b[i + 3] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0xee);
      }
      for (int j = 0; j < 4; ++j) {
        float* at = to + (8 * p + j) * stride + k;
        _mm256_storeu_ps(at, _mm256_permute2f128_ps(b[j], b[j + 4], 0x20));
        _mm256_storeu_ps(at + 4 * stride, _mm256_permute2f128_ps(b[j], b[j + 4], 0x31));
      }
    }
#else
  for (int k = 0; k < 16; ++k)
    for (int i = 0; i < 16; ++i) to[i * stride + k] = v[k][i / kLanes][i % kLanes];
#endif
}

}  // namespace KVARTS_ISA
}  // namespace kvarts
