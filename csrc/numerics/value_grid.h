// Stochastic rounding to E2M1 in four instructions, and carrier codes by a table of eight bytes.
//
// A magnitude on the grid of E2M1 has one of eight places: 0 .5 1 1.5 2 3 4 6. |v| * 2^-126 has the exponent range of
// the grid: values below 1 become subnormal numbers, in fixed point. Its bits >> 22 are the place below |v|, and the
// lower 22 bits are the distance to it in units of 2^-22 steps. round_stochastic (numerics/rounding.h) rounds up if
// distance * 65536 > bits + 1/2, that is if the 22 bits, rounded up, exceed 64 * bits + 32. One byte permutation makes
// four times that, negated, from the two random bytes, and a sum leaves the rounded place in the top byte. Equal to
// round_stochastic for all magnitudes up to 6, also for random bits next to each threshold.
#pragma once

#include "numerics/rounding.h"

namespace lowprec {

// Byte i of the result is the byte of (b, a) that nibble i of `select` selects; the top bits of nibbles are not used.
LOWPREC_HD uint32_t permute(uint32_t a, uint32_t b, uint32_t select) {
#if defined(__CUDA_ARCH__)
  uint32_t made;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(made) : "r"(a), "r"(b), "r"(select));
  return made;
#else
  const uint64_t both = static_cast<uint64_t>(b) << 32 | a;
  uint32_t made = 0;
  for (int i = 0; i < 4; ++i) made |= static_cast<uint32_t>(both >> (8 * (select >> 4 * i & 7)) & 0xff) << 8 * i;
  return made;
#endif
}

// |v| * 2^-126 rounded up, as bits; 0 for NaN. |v| < 8.
LOWPREC_HD uint32_t place_bits(float v) {
#if defined(__CUDA_ARCH__)
  float made;
  asm("mul.rp.sat.f32 %0, %1, 0f00800000;" : "=f"(made) : "f"(fabsf(v)));
  return __float_as_uint(made);
#else
  const float size = bits_float(magnitude_bits(v));
  if (is_nan(v)) return 0;
  if (size >= 1.0f) return float_bits(size) - (126u << 23);
  return static_cast<uint32_t>(std::ceil(static_cast<double>(size) * 0x1p23));
#endif
}

// The stochastically rounded place of v, |v| <= 6, in the top byte; other bytes are undefined. half: 16 bits of `word`.
LOWPREC_HD uint32_t random_place(float v, uint32_t word, int half) {
  return place_bits(v) * 4u - permute(word, 0xff81u, half == 0 ? 0x5104u : 0x5324u);
}

// The place rounded to nearest even, in the top byte.
LOWPREC_HD uint32_t nearest_place(float v) {
  const float size = bits_float(magnitude_bits(v));
  const uint32_t binade = float_bits(size) & INFINITE, least = 127u << 23;
  const float magic = bits_float((binade > least ? binade : least) + (22u << 23 | 0x400000u));
  return place_bits((size + magic) - magic) * 4u;
}

struct PlaceCodes {
  uint32_t low, high;  // carrier codes of places 0..3 and 4..7
};

// Carrier codes of four values: magnitudes by `table` from their places, signs from the values.
LOWPREC_HD uint32_t carrier_codes(const float (&v)[4], const uint32_t (&place)[4], const PlaceCodes& table) {
  const uint32_t select = permute(place[0], place[2], 0x73u) + 16u * permute(place[1], place[3], 0x73u);
  const uint32_t signs = permute(permute(float_bits(v[0]), float_bits(v[1]), 0x73u),
                                 permute(float_bits(v[2]), float_bits(v[3]), 0x73u), 0x5410u);
  return permute(table.low, table.high, select) | (signs & 0x80808080u);
}

// Cast as torch's .to(float8): nearest even; overflow gives infinity (NaN in E4M3).
template <Format F>
LOWPREC_HD uint8_t cast_ieee(float v) {
  float rounded = is_finite(v) ? round_nearest<F>(v) : v;
  rounded = bits_float(magnitude_bits(rounded)) > Grid<F>::max ? with_sign(bits_float(INFINITE), rounded) : rounded;
  return store<F>(rounded);
}

// Smallest exponent of a block in its carrier: below it all codes are zeros.
constexpr int LEAST_SHIFT = -24;

// Carrier codes of the eight places times 2^shift.
LOWPREC_HD PlaceCodes place_codes(bool e5m2, int shift) {
  PlaceCodes made{0, 0};
  for (int place = 0; place < 8; ++place) {
    const float value = place < 2 ? 0.5f * place : bits_float(static_cast<uint32_t>(place + 252) << 22);
    const float shifted = value * exp2_int(shift);
    const uint32_t code = e5m2 ? cast_ieee<Format::E5M2>(shifted) : cast_ieee<Format::E4M3>(shifted);
    (place < 4 ? made.low : made.high) |= code << 8 * (place & 3);
  }
  return made;
}

}  // namespace lowprec
