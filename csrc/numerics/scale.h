// Scale of a tile from its largest magnitude (ops/reference.py tile_scale): FP32 quotients, powers of two by exponent
// fields (a logarithm errs just below powers of two), OCP MX floors, and block exponents limited to a span.
#pragma once

#include "numerics/rounding.h"

namespace lowprec {

enum class Rule : int { FP32, POW2, E8M0_FLOOR, E8M0_CEIL };

// scale: factor of codes. inverse: factor of values before rounding if the rule gives powers of two; with FP32 scales
// values are divided by the scale, because a product with the rounded inverse moves ties off the midpoint.
struct TileScale {
  float scale, inverse;
};

// Whether `quotient` is correctly rounded for all |x| up to 2^60 scales whose code is not zero.
LOWPREC_HD bool regular(float scale) { return scale >= 0x1p-60f && scale <= 0x1p60f; }

// x / scale from the correctly rounded inverse: the product is corrected by the remainder, which is exact (Markstein,
// IBM Journal of Research and Development 34, 1990). Below 2^-42 scales it may be inexact, but all codes are zeros
// there. The remainder is subtracted, not added: adding a remainder of +0 would turn a quotient of -0 into +0.
LOWPREC_HD float quotient(float x, float scale, float inverse) {
  const float q = x * inverse;
  return fused(fused(scale, q, -x), -inverse, q);
}

// Constants of a format, a rule and a headroom, computed once on the host.
struct ScaleRule {
  Rule rule;
  bool unscaled;
  double share;      // limit * headroom
  double headroom;
  int offset;        // exponent of the limit, minus one
  float threshold;   // larger mantissas use the next power of two
  int span;

  // Whether values are divided by their scale.
  LOWPREC_HD bool divides() const { return rule == Rule::FP32 && !unscaled; }
};

inline ScaleRule scale_rule(float limit, bool unscaled, Rule rule, double headroom, int span) {
  ScaleRule made{rule, unscaled, static_cast<double>(limit) * headroom, headroom, 0, 4.0f, 0};
  if (rule != Rule::FP32 && !unscaled) made.span = span;
  int e = 0;
  const double fraction = std::frexp(rule == Rule::E8M0_FLOOR ? static_cast<double>(limit) : made.share, &e);
  made.offset = e - 1;
  if (rule != Rule::E8M0_FLOOR) made.threshold = static_cast<float>(2 * fraction);
  return made;
}

// floor or ceil of log2(amax / limit), unbounded.
LOWPREC_HD int wanted_exponent(float amax, const ScaleRule& how) {
  const float mantissa = bits_float((float_bits(amax) & 0x7fffffu) | 0x3f800000u);
  return exponent(amax) - how.offset + (mantissa > how.threshold && !is_nan(amax) ? 1 : 0);
}

LOWPREC_HD int bounded(int e) { return e < -126 ? -126 : e > 127 ? 127 : e; }

// Exponent of a tile before that of its row is known (span > 0).
LOWPREC_HD int block_exponent(float amax, const ScaleRule& how) { return bounded(wanted_exponent(amax, how)); }

// 1 / 2^e, exactly; NaN for NaN.
LOWPREC_HD float inverse_of_power(float power) {
  const uint32_t bits = float_bits(power);
  return bits > INFINITE ? power : bits_float(bits == 254u << 23 ? 1u << 22 : (254u << 23) - bits);
}

LOWPREC_HD TileScale of_power(float power, const ScaleRule& how) {
  TileScale made{power, inverse_of_power(power)};
  if (how.rule == Rule::E8M0_FLOOR && how.headroom != 1.0) {
    made.scale = static_cast<float>(static_cast<double>(power) / how.headroom);
    made.inverse = made.inverse * static_cast<float>(how.headroom);
  }
  return made;
}

// row: the largest block exponent of the tile's row. A zero block gets the smallest exponent of the row.
LOWPREC_HD TileScale spanned_scale(float amax, int block, int row, const ScaleRule& how) {
  const int e = block > row - how.span ? block : row - how.span;
  return of_power(is_finite(amax) ? exp2_int(e) : bits_float(0x7fc00000u), how);
}

LOWPREC_HD TileScale tile_scale(float amax, const ScaleRule& how) {
  if (how.unscaled) return {1.0f, 1.0f};
  if (how.rule == Rule::FP32) {
    float scale = static_cast<float>(static_cast<double>(amax) / how.share);
    scale = scale < TINY ? TINY : scale;
    if (amax == 0.0f) scale = 1.0f;
    return {scale, divide(1.0f, scale)};
  }
  const float power = is_finite(amax) ? exp2_int(bounded(wanted_exponent(amax, how))) : bits_float(0x7fc00000u);
  TileScale made = of_power(power, how);
  if (amax == 0.0f) made.scale = 1.0f;
  return made;
}

}  // namespace lowprec
