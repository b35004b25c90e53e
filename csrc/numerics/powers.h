// log2 and 2^x from + - x and the exponent field (ops/powers.py): minimax polynomials by Horner's rule, with each
// product rounded before its sum.
#pragma once

#include "numerics/rounding.h"

namespace lowprec {

LOWPREC_HD float log2_poly(float t) {
  float q = 0.07444677501916885f;
  q = q * t + -0.17190004885196686f;
  q = q * t + 0.21712137758731842f;
  q = q * t + -0.24336443841457367f;
  q = q * t + 0.28816312551498413f;
  q = q * t + -0.36052969098091125f;
  q = q * t + 0.48090195655822754f;
  q = q * t + -0.7213494181632996f;
  q = q * t + 1.4426950216293335f;
  return q;
}

LOWPREC_HD float exp2_poly(float t) {
  float q = 0.00015353361959569156f;
  q = q * t + 0.0013398875016719103f;
  q = q * t + 0.00961843691766262f;
  q = q * t + 0.055503323674201965f;
  q = q * t + 0.24022647738456726f;
  q = q * t + 0.6931471824645996f;
  return q;
}

struct Log2Parts {
  int whole;
  float part;  // log2(x 2^-whole), in [-0.42, 0.59)
};

LOWPREC_HD Log2Parts log2_parts(float x) {
  const uint32_t bits = float_bits(x);
  const float mantissa = bits_float((bits & 0x7fffffu) | 0x3f800000u);
  const bool high = mantissa >= 1.5f;
  const float t = (high ? mantissa * 0.5f : mantissa) - 1.0f;
  return {static_cast<int>(bits >> 23) - 127 + (high ? 1 : 0), log2_poly(t) * t};
}

// log2 of a normal positive number.
LOWPREC_HD float log2_float(float x) {
  const Log2Parts parts = log2_parts(x);
  return static_cast<float>(parts.whole) + parts.part;
}

struct Exp2Parts {
  int whole;
  float part;  // 2^(x - whole), in [0.70, 1.42]
};

LOWPREC_HD Exp2Parts exp2_parts(float x) {
#if defined(__CUDA_ARCH__)
  const float whole = floorf(x + 0.5f);
#else
  const float whole = std::floor(x + 0.5f);
#endif
  const float f = x - whole;
  return {static_cast<int>(whole), exp2_poly(f) * f + 1.0f};
}

// 2^x for x in [-126, 127].
LOWPREC_HD float exp2_float(float x) {
  const Exp2Parts parts = exp2_parts(x);
  return parts.part * exp2_int(parts.whole);
}

}  // namespace lowprec
