// Largest magnitude on bit patterns: non-negative floats order as their bits do, infinity lies above every number and
// NaN above infinity, so an integer maximum keeps both visible, in any order of the elements.
#pragma once

#include "numerics/platform.h"

namespace lowprec {

LOWPREC_HD uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }
LOWPREC_HD uint32_t larger_magnitude(uint32_t bits, float x) { return larger(bits, magnitude_bits(x)); }

}  // namespace lowprec
