// Selection of the n-th smallest and largest value: floats as unsigned keys of the same order, searched bit by bit.
//
//     key(x) = bits ^ (x < 0 ? all ones : the sign bit)       -inf .. -0 +0 .. +inf ascending
//     d(x)   = key(largest) - key(x)                          distance below the largest, in units in the last place
//
// The (clipped + 1)-th smallest distance is the largest T with count(d < T) <= clipped: each bit of T, from the highest
// on, needs one count. Both ends of a row are processed in the two halves of a word, the low end negated, so that one
// comparison serves both. Distances of 16-bit floats are limited to FAR; as patterns of FP16 numbers they have the same
// order as integers, and one instruction compares a pair of FP16 numbers.
#pragma once

#include "numerics/amax.h"
#include "numerics/scale.h"

#if defined(__CUDACC__)
#include <cuda_fp16.h>
#endif

namespace lowprec {

constexpr uint32_t FAR = 0x7bffu;  // the largest finite pattern
constexpr uint32_t BOTH = 0x00010001u;

LOWPREC_HD uint32_t ordered(uint32_t bits) { return bits ^ (bits & SIGN ? 0xffffffffu : SIGN); }
LOWPREC_HD uint32_t unordered(uint32_t key) { return key ^ (key & SIGN ? SIGN : 0xffffffffu); }

// `ordered` for the two 16-bit halves of a word, and the inverse for one half.
LOWPREC_HD uint32_t ordered_pair(uint32_t bits) { return bits ^ (0x80008000u + (bits >> 15 & BOTH) * 0x7fffu); }
LOWPREC_HD uint32_t unordered_half(uint32_t key) { return key ^ (key & 0x8000u ? 0x8000u : 0xffffu); }

LOWPREC_HD uint32_t smaller_pair(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  return __vminu2(a, b);
#else
  const uint32_t low = (a & 0xffffu) < (b & 0xffffu) ? a : b, high = a >> 16 < b >> 16 ? a : b;
  return (low & 0xffffu) | (high & 0xffff0000u);
#endif
}

// All ones in halves with d < limit; neither may exceed the pattern of FP16 infinity.
LOWPREC_HD uint32_t below_pair(uint32_t d, uint32_t limit) {
#if defined(__CUDA_ARCH__)
  __half2 a, b;
  memcpy(&a, &d, 4);
  memcpy(&b, &limit, 4);
  return __hlt2_mask(a, b);
#else
  return ((d & 0xffffu) < (limit & 0xffffu) ? 0xffffu : 0u) | (d >> 16 < limit >> 16 ? 0xffff0000u : 0u);
#endif
}

// Two counts from the negated sum of masks, which are added as words of 65536 high + low.
LOWPREC_HD uint32_t counts_of(uint32_t negated) { return negated + (negated << 16); }

// Distances to both ends: `word` has x in its low half and -x in its high half, `top` the keys of the row's largest x
// and largest -x.
LOWPREC_HD uint32_t distances(uint32_t top, uint32_t word) {
  return smaller_pair(top - ordered_pair(word), FAR * BOTH);
}

// Bits `first` .. `last` of the distances for both ends. below(limits): counts of smaller distances, each below 2^15.
template <typename Below>
LOWPREC_HD uint32_t descend(int first, int last, uint32_t clipped, Below&& below) {
  uint32_t found = 0;
  for (int bit = first; bit >= last; --bit) {
    const uint32_t few = ((clipped | 0x8000u) * BOTH - below(found | BOTH << bit)) & 0x80008000u;
    found |= few >> (15 - bit);
  }
  return found;
}

// `descend` for keys of any width and one end. below(limit): count of smaller distances.
template <typename Below>
LOWPREC_HD uint32_t descend_wide(int first, uint32_t clipped, Below&& below) {
  uint32_t found = 0;
  for (int bit = first; bit >= 0; --bit) {
    if (below(found | 1u << bit) <= clipped) found |= 1u << bit;
  }
  return found;
}

// --- carrier codes (ops/reference.py quantize_carrier) ---------------------------------------------------------------

constexpr float CARRIER_SHIFT = 0x1p-8f;

// of_carrier: scale of the carrier, which is shifted by 2^-8. scale: divisor of values.
struct CarrierScale {
  float of_carrier, scale, inverse;
};

// amax: of the row; if it is finite, the scale leaves room for it. Magnitudes are compared as bits: NaN is the largest.
LOWPREC_HD CarrierScale carrier_scale(float low, float high, float amax) {
  const uint32_t bound = larger(magnitude_bits(low), magnitude_bits(high));
  const uint32_t reach = is_finite(amax) ? magnitude_bits(amax) : 0;
  const float of_body = divide(bits_float(bound), 6.0f), of_largest = divide(bits_float(reach), 448.0f * 256.0f);
  float scale = bits_float(larger(float_bits(of_body), float_bits(of_largest)));
  scale = scale < TINY ? TINY : scale;
  if (larger(bound, reach) == 0) scale = 1.0f;
  return {scale * 256.0f, scale, divide(1.0f, scale)};
}

// The code for any x and any bounds.
LOWPREC_HD uint8_t carrier_code(float x, float low, float high, float scale) {
  const float v = divide(x, scale);
  if (!is_finite(x) || is_nan(v)) return 0x7f;
  const bool outlier = x < low || x > high;
  return encode<Format::E4M3>((outlier ? v : round_nearest<Format::E2M1>(clamp(v, 6.0f))) * CARRIER_SHIFT);
}

// Whether `carrier_size` gives the same codes: no infinities, and a scale with regular quotients.
LOWPREC_HD bool carrier_plain(float low, float high, const CarrierScale& by) {
  return is_finite(low) && is_finite(high) && regular(by.of_carrier);
}

// |value| from which the carrier code of a finite x is rounded, with the carrier's shift: scale 2^8, inverse 2^-8.
// Values within the bounds need no clamp: they are at most 6. Outliers whose quotient overflows get the largest code.
LOWPREC_HD float carrier_size(float x, float low, float high, float scale, float inverse) {
  const float over = bits_float(magnitude_bits(quotient(x, scale, inverse)));
#if defined(__CUDA_ARCH__)
  const float v = fminf(over, 448.0f);  // fminf(NaN, a number) is the number
#else
  const float v = over <= 448.0f ? over : 448.0f;
#endif
  constexpr uint32_t up = 22u << 23 | 0x400000u;
#if defined(__CUDA_ARCH__)
  const float magic = bits_float(__viaddmax_u32(float_bits(v) & INFINITE, up, (119u << 23) + up));
#else
  const uint32_t raised = (float_bits(v) & INFINITE) + up, least = (119u << 23) + up;
  const float magic = bits_float(raised > least ? raised : least);
#endif
  const float body = (v + magic) - magic;
  return x < low || x > high ? v : body;
}

}  // namespace lowprec
