// Block scales on the ladder {1, 1.25, 1.5} 2^e (ops/ladder.py). Rungs are numbered from 2^-121 on: number / 3 is the
// exponent, the remainder is the place of the mantissa. The bits of a rung are its exponent and two mantissa bits.
#pragma once

#include "numerics/rounding.h"

namespace lowprec {

constexpr int LADDER_LOW = -121;                      // exponent of rung 0
constexpr int LADDER_HIGH = 3 * (125 - LADDER_LOW) + 2;  // the last one with two rungs above it
constexpr int LADDER_TOP = 5;                         // exponent of a row's largest rung in a carrier
constexpr int LADDER_BLOCK = 16;
constexpr int LADDER_WIDEST = 256;                    // elements of a block whose sums fit half precision
constexpr float SUM_UNITS = 0x1p16f;                  // sums of blocks are multiples of its inverse
constexpr int ROTATED_TOP = 6;   // exponent of the largest magnitude before butterflies in half precision
constexpr int MOST_SHIFT = 110;  // binades by which a group is enlarged before them
constexpr int HALF_GROUP = 256;  // elements of the longest group whose sums fit half precision

enum class Candidates : int { NONE, MSE, MAE, MAX };
constexpr const char* CANDIDATE_NAMES[] = {"none", "mse", "mae", "max"};

// The first rung L with 6 L >= amax: 6 L has the mantissas 1.125, 1.5 and 1.875.
LOWPREC_HD int first_rung(uint32_t amax_bits) {
  const uint32_t mantissa = amax_bits & 0x7fffffu;
  const int rung = 3 * (static_cast<int>(amax_bits >> 23 & 255u) - 129 - LADDER_LOW) - 1 + (mantissa > 0x100000u) +
                   (mantissa > 0x400000u) + (mantissa > 0x700000u);
  return rung < 0 ? 0 : rung > LADDER_HIGH ? LADDER_HIGH : rung;
}

LOWPREC_HD int rung_step(int rung) { return static_cast<int>(static_cast<uint32_t>(rung) / 3u); }  // - LADDER_LOW

// 2^shift times the mantissa of a rung.
LOWPREC_HD float rung_times(int place, int shift) {
  return bits_float((static_cast<uint32_t>(shift + 127) << 23) + (static_cast<uint32_t>(place) << 21));
}
LOWPREC_HD float rung_scale(int rung) {
  const int step = rung_step(rung);
  return rung_times(rung - 3 * step, step + LADDER_LOW);
}

// 2^-shift times the inverse of a mantissa, 1, 0.8 or 2/3, rounded to nearest.
LOWPREC_HD float inverse_times(int place, int shift) {
  const uint32_t below = place == 0 ? 0u : place == 1 ? 0x333333u : 0x555555u;
  return bits_float((static_cast<uint32_t>(127 - shift) << 23) - below);
}

// Binades by which a group of this largest magnitude is enlarged before butterflies in half precision.
LOWPREC_HD int rotation_shift(float amax) {
  const int shift = ROTATED_TOP - exponent(amax);
  return shift < MOST_SHIFT ? shift : MOST_SHIFT;
}

// Parameters of a row.
struct LadderRow {
  int step;   // e_row, relative to LADDER_LOW
  int floor;  // exponent of the lowest rung, which has place 0
  bool lost;  // the row has NaN or Inf
};
LOWPREC_HD LadderRow ladder_row(uint32_t amax_bits, int span) {
  const int step = rung_step(first_rung(amax_bits)), floor = step - span;
  return {step, span == 0 || floor < 0 ? 0 : floor, amax_bits >= INFINITE};
}

// 2^(e_row - 5), NaN for a row with NaN or Inf.
LOWPREC_HD float ladder_scale(const LadderRow& row) {
  return row.lost ? bits_float(0x7fc00000u) : exp2_int(row.step + LADDER_LOW - LADDER_TOP);
}

// Correction factor c of a row from its sums in units of 2^-16.
LOWPREC_HD float row_factor(double own, double made) {
  return made == 0.0 ? 1.0f : static_cast<float>(own / made);
}

}  // namespace lowprec
