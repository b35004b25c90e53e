// Scale of a group of saved codes (ops/activations.py): a power of two that never saturates, its reciprocal, and the
// stored byte, its biased exponent. numerics/scale.h computes the same for any rule, by a division.
#pragma once

#include "numerics/formats.h"

namespace lowprec {

struct SavedScale {
  float scale, inverse;
  uint8_t exponent;
};

// Exponent and mantissa bits of a format's largest value.
template <Format F>
constexpr uint32_t top_exponent = F == Format::E2M1 ? 2 : F == Format::E4M3 ? 8 : 15;
template <Format F>
constexpr uint32_t top_mantissa = F == Format::E2M1 ? 0x400000u : 0x600000u;

// amax: bits of the group's largest magnitude. A mantissa above that of the format's maximum carries into the exponent.
template <Format F>
LOWPREC_HD SavedScale saved_scale(uint32_t amax) {
  static_assert(F == Format::E2M1 || F == Format::E4M3 || F == Format::E5M2, "eight bits or fewer, with an exponent");
  const uint32_t carried = (amax + (0x7fffffu - top_mantissa<F>)) >> 23;
  uint32_t biased = carried > top_exponent<F> + 1 ? carried - top_exponent<F> : 1;
  const float inverse = bits_float(amax >= INFINITE ? 0x7fc00000u : (254u - biased) << 23);
  biased = amax == 0 ? 127u : amax >= INFINITE ? 255u : biased;
  return {bits_float(amax >= INFINITE ? 0x7fc00000u : biased << 23), inverse, static_cast<uint8_t>(biased)};
}

}  // namespace lowprec
