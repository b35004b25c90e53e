// Range expansion (numerics/expansion.h) with the same bits by fewer instructions, for kernels bound by instructions:
//
//   decoding   the power of two is added to the exponent field; `ordinary` is false for groups whose values
//              could leave the normal numbers of FP32
//   encoding   a code needs 3 bits of (|x| / A)^k M. The hardware's log2 and 2^x give y within d of it (below). If
//              y (1 - d) and y (1 + d) round to the same code, that is the code; otherwise, about once in a thousand,
//              the exact formula decides
//
// The bound d, in logarithms, u = 2^-24, |k log2(x / A)| <= P = 17 for E4M3 and 31 for E5M2: roundings of the exact
// formula, k (2 * 1.41 + 1) u + 2 P u; lg2.approx within 2^-22 absolutely or relatively, 4 k u + 4 P u; roundings of
// the sum and its constants, P u + 2 k u + 40 u; ex2.approx, the polynomial and the products, 10 u. The total times
// ln 2 is 0.7 (7 P + 10 k + 50) u, below 118 u + 7 k u and 187 u + 7 k u; d is 128 u + 8 k u and 256 u + 8 k u.
#pragma once

#include "numerics/expansion.h"

namespace lowprec {

#if defined(__CUDACC__)

__device__ __forceinline__ float hardware_log2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float hardware_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Codes of four scaled magnitudes a, b, c, d.
template <Format F>
__device__ __forceinline__ uint32_t four_codes(float a, float b, float c, float d) {
  uint32_t made;
  if constexpr (F == Format::E4M3) {
    asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\ncvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high};\n}" : "=r"(made) : "f"(a), "f"(b), "f"(c), "f"(d));
  } else {
    asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite.e5m2x2.f32 low, %2, %1;\ncvt.rn.satfinite.e5m2x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high};\n}" : "=r"(made) : "f"(a), "f"(b), "f"(c), "f"(d));
  }
  return made;
}

// log2 of the smallest and the largest code.
template <Format F>
constexpr float LOWEST = F == Format::E4M3 ? -9.0f : -16.0f;
template <Format F>
constexpr float HIGHEST = F == Format::E4M3 ? 8.807355f : 15.807355f;

// Decoding parameters of one moment of a group. plain: no value can be below 2^-126.
struct alignas(16) DecodeParams {
  float log_scale, inverse, center;
  uint32_t plain;

  // Whether exponents can be added in the exponent field.
  template <Format F>
  __device__ __forceinline__ bool ordinary(float scale) {
    const float top = (HIGHEST<F> + log_scale) * inverse, bottom = (LOWEST<F> + log_scale) * inverse;
    const float of_center = static_cast<float>(exponent(center));
    plain = bottom + of_center > -125.0f;
    return center >= 0x1p-120f && bottom > -240.0f && top + of_center < 125.0f && scale >= TINY;
  }
  // The value of byte `i`. lane4: 4 * lane, selects the lane's copy of the table. PLAIN: no zero, nothing below 2^-126.
  template <bool SIGNED, bool PLAIN>
  __device__ __forceinline__ float value(uint32_t codes, int i, const char* logs, uint32_t lane4) const {
    const uint32_t row = (i == 0 ? codes << 7 : codes >> (8 * i - 7)) & 0x3f80u;
    const float log_code = *reinterpret_cast<const float*>(logs + (row | lane4));
    const float power = (log_code + log_scale) * inverse;
    const float moved = __fadd_rd(power + 0.5f, 0x1.8p23f), f = power - (moved - 0x1.8p23f);
    const float part = (exp2_poly(f) * f + 1.0f) * center;
    uint32_t size = float_bits(part) + (float_bits(moved) << 23);
    if (!PLAIN) {
      const int bits = max(static_cast<int>(size), static_cast<int>(SMALLEST_NORMAL));
      size = row == 0 ? 0u : static_cast<uint32_t>(bits);
    }
    return bits_float(SIGNED ? size | ((codes << (24 - 8 * i)) & SIGN) : size);
  }
};

// Encoding parameters of one moment of a group. Values are expanded to y (1 - d); `rise` makes them y (1 + d).
struct alignas(16) EncodeParams {
  float k, offset, stretch_by, rise;
  float part;  // fractional part of log2 of the largest magnitude
  int whole;
  uint32_t doubtful;  // 1: every code by the exact formula; 3: all codes are zeros
  uint32_t unused;

  template <Format F>
  __device__ __forceinline__ void aim(const Expansion& to, uint32_t largest, uint32_t smallest) {
    k = to.exponent;
    whole = to.largest.whole;
    part = to.largest.part;
    const float d = (F == Format::E4M3 ? 0x1p-17f : 0x1p-16f) + k * 0x1p-21f;
    offset = (HIGHEST<F> - k * part) - 1.4427f * d;
    rise = 1.0f + 2.0f * d;
    const int span = static_cast<int>(largest >> 23) - static_cast<int>(smallest >> 23);
    const bool fits = whole >= -126 && whole <= 126 && (span <= 100 || smallest == INFINITE) && largest < INFINITE;
    stretch_by = exp2_int(fits ? -whole : 0);
    doubtful = fits ? 0u : largest < INFINITE ? 1u : 3u;
  }
};

// Codes of four magnitudes; `open` has the bytes that are still undecided.
template <Format F>
__device__ __forceinline__ uint32_t approx_encode(const float4& of, float k, float offset, float stretch_by, float rise,
                                                uint32_t& open) {
  const float x[4] = {of.x, of.y, of.z, of.w};
  float y[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) y[i] = hardware_exp2(__fmaf_rn(k, hardware_log2(fabsf(x[i]) * stretch_by), offset));
  const uint32_t made = four_codes<F>(y[0], y[1], y[2], y[3]);
  open = made ^ four_codes<F>(y[0] * rise, y[1] * rise, y[2] * rise, y[3] * rise);
  return made;
}

// Recomputes the undecided bytes by the exact formula. from: the four values.
template <Format F>
__device__ __noinline__ uint32_t exact_fallback(uint32_t made, uint32_t open, const float* from, const EncodeParams& to) {
  while (open != 0) {
    const int place = (__ffs(open) - 1) & ~7;
    uint32_t code = 0;
    if (to.doubtful != 3) {
      const float size = bits_float(magnitude_bits(from[place >> 3]));
      code = encode<F>(stretch<F>(size, to.k, Log2Parts{to.whole, to.part}));
    }
    made = (made & ~(0xffu << place)) | code << place;
    open &= ~(0xffu << place);
  }
  return made;
}

#endif

}  // namespace lowprec
