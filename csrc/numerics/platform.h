// Operations for host and device: bit casts, and correctly rounded operations that compilers might approximate.
//
// C++ and CUDA kernels compile numerics/ without contraction (-ffp-contract=off, --fmad=false), so that both round
// equally and have the same bits.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define LOWPREC_HD __host__ __device__ __forceinline__
#else
#define LOWPREC_HD inline __attribute__((always_inline))
#endif

namespace lowprec {

LOWPREC_HD uint32_t float_bits(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(x);
#else
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
#endif
}

LOWPREC_HD float bits_float(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
#endif
}

// Quotient rounded to nearest even.
LOWPREC_HD float divide(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

// a b + c, rounded once.
LOWPREC_HD float fused(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return std::fma(a, b, c);
#endif
}

// Root rounded to nearest even.
LOWPREC_HD float square_root(float x) {
#if defined(__CUDA_ARCH__)
  return __fsqrt_rn(x);
#else
  return std::sqrt(x);
#endif
}

constexpr uint32_t SIGN = 0x80000000u;
constexpr uint32_t MAGNITUDE = 0x7fffffffu;
constexpr uint32_t INFINITE = 0x7f800000u;  // bits of infinity; a magnitude above it is NaN
constexpr float TINY = 0x1p-126f;           // the smallest normal number

LOWPREC_HD uint32_t magnitude_bits(float x) { return float_bits(x) & MAGNITUDE; }
LOWPREC_HD bool is_nan(float x) { return magnitude_bits(x) > INFINITE; }
LOWPREC_HD bool is_finite(float x) { return magnitude_bits(x) < INFINITE; }
LOWPREC_HD float with_sign(float magnitude, float sign) {
  return bits_float((float_bits(magnitude) & MAGNITUDE) | (float_bits(sign) & SIGN));
}

}  // namespace lowprec
