// COAT's dynamic range expansion (arXiv 2410.19313, section 4; ops/states.py has the formulas): exponent, scale and
// center of a group from its extremes, and encoding and decoding of a value.
//
// For finite groups and non-zero values only: callers handle magnitudes below 2^-126, which count as zeros, and the NaN
// of groups with Inf or NaN.
#pragma once

#include "numerics/powers.h"

namespace lowprec {

constexpr float EXPANSION_STEPS = 16.0f;  // exponents are multiples of 1 / EXPANSION_STEPS
constexpr float LARGEST_EXPONENT = 64.0f;
constexpr uint32_t SMALLEST_NORMAL = 1u << 23;  // bits of 2^-126

// log2 of M^2 / 2, the ratio to which a group is expanded.
template <Format F>
constexpr double EXPANSION_BOUND = F == Format::E4M3 ? 16.614709844115207 : 30.614709844115207;

// log2(a / b) of normal positive numbers; exactly 0 if they are equal.
LOWPREC_HD float log2_quotient(Log2Parts a, Log2Parts b) {
  return static_cast<float>(a.whole - b.whole) + (a.part - b.part);
}

// 2^power * factor; the power of two is applied in halves, which overflow only if the product does.
LOWPREC_HD float exp2_times(float power, float factor) {
  const Exp2Parts made = exp2_parts(power);
  const int half = made.whole >> 1;
  return made.part * factor * exp2_int(half) * exp2_int(made.whole - half);
}

// Decoding parameters of a group, and log2 of its largest magnitude, for encoding.
struct Expansion {
  float scale, exponent, center;
  Log2Parts largest;
};

// largest: bits of the largest magnitude. smallest: bits of the smallest one that is at least 2^-126, INFINITE if there
// is none. A group with Inf or NaN has scale and center NaN, and all its codes are zeros.
template <Format F>
LOWPREC_HD Expansion expansion_of(uint32_t largest, uint32_t smallest) {
  const float nan = bits_float(0x7fc00000u);
  if (largest >= INFINITE) return {nan, 1.0f, nan, {0, 0.0f}};
  const bool any = largest >= SMALLEST_NORMAL;
  const float amax = any ? bits_float(largest) : 1.0f;
  const float amin = any ? bits_float(smallest) : 1.0f;
  const Log2Parts log_amax = log2_parts(amax);
  const float span = log2_quotient(log_amax, log2_parts(amin));
  const float steps = divide(static_cast<float>(16 * EXPANSION_BOUND<F>), span < TINY ? TINY : span);
#if defined(__CUDA_ARCH__)
  float k = floorf(steps);
#else
  float k = std::floor(steps);
#endif
  k = k < 1.0f ? 1.0f : k > EXPANSION_STEPS * LARGEST_EXPONENT ? EXPANSION_STEPS * LARGEST_EXPONENT : k;
  k *= 1 / EXPANSION_STEPS;
  const float center = amin == amax ? amax : square_root(amax) * square_root(amin);
  return {divide(exp2_times(k * span * 0.5f, 1.0f), Grid<F>::max), any ? k : 1.0f, center, log_amax};
}

// M (|x| / A)^k with the sign of x, before rounding.
template <Format F>
LOWPREC_HD float stretch(float x, float k, Log2Parts largest) {
  const float size = bits_float(magnitude_bits(x));
  const bool present = size >= TINY;
  const float power = k * log2_quotient(log2_parts(present ? size : 1.0f), largest);
  return with_sign(present ? exp2_times(power, Grid<F>::max) : 0.0f, x);
}

// The code of an element; `finite`: of a finite group.
template <Format F>
LOWPREC_HD uint8_t encode_expanded(float x, const Expansion& how, bool finite) {
  return encode<F>(finite ? stretch<F>(x, how.exponent, how.largest) : with_sign(0.0f, x));
}

// log2 of a code without its sign, rounded to nearest: 0 at zero, NaN if the code is not finite.
template <Format F>
LOWPREC_HD float code_log2(uint32_t code) {
  // log2(1 + m / 8)
  constexpr double fraction[8] = {0.0,
                                  0.16992500144231237,
                                  0.32192809488736235,
                                  0.45943161863729726,
                                  0.5849625007211562,
                                  0.7004397181410922,
                                  0.8073549220576041,
                                  0.9068905956085185};
  const float value = decode<F>(static_cast<uint8_t>(code & 0x7fu));
  if (value == 0.0f) return 0.0f;
  if (!is_finite(value)) return bits_float(0x7fc00000u);
  return static_cast<float>(exponent(value) + fraction[float_bits(value) >> 20 & 7u]);
}

// The magnitude of a non-zero code. log_code: its code_log2; log_scale: log2_float of the group's scale;
// inverse: 1 / k.
LOWPREC_HD float expanded_value(float log_code, float log_scale, float inverse, float center) {
  const float value = exp2_times((log_code + log_scale) * inverse, center);
  return value < TINY ? TINY : value;
}

LOWPREC_HD float decode_expanded(uint8_t code, float log_code, float log_scale, float inverse, float center) {
  const uint32_t sign = static_cast<uint32_t>(code & 0x80u) << 24;
  if (!is_finite(center)) return bits_float(0x7fc00000u | sign);
  const float value = (code & 0x7fu) == 0 ? 0.0f : expanded_value(log_code, log_scale, inverse, center);
  return bits_float(float_bits(value) | sign);
}

}  // namespace lowprec
