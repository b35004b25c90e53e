// Wire format of gradients (ops/gradients.py): positions of a range's elements, codes and block exponents in a row.
//
//   row = [plain elements of every range without codes | codes of every coded range | their block exponents]
#pragma once

#include "numerics/scale.h"

namespace lowprec {

constexpr uint8_t NAN_CODE = 0x7f;  // of E4M3 and of E5M2

// A range in all rows: its elements in memory, and its bytes in a row of the wire format.
struct WireRange {
  char* data;
  Format held;        // FP32, BF16 or FP16
  int64_t stride;     // elements between its rows
  int64_t count;      // elements of all rows; those beyond count as zeros and are not written
  int64_t size;       // elements of a row
  int64_t bytes;      // offset of its plain elements or codes in a row
  int64_t exponents;  // offset of its block exponents; -1 for a plain range
};

// Position of row r of `rows` in memory.
template <typename Int>
LOWPREC_HD Int place_of_row(Int r, Int rows, Int inner) {
  return r % inner * (rows / inner) + r / inner;
}

// Number of elements of row r from element `first` on, at most `most`.
LOWPREC_HD int64_t elements_left(const WireRange& range, int64_t r, int64_t first, int64_t most) {
  const int64_t in_row = range.size - first, in_all = range.count - r * range.size - first;
  const int64_t left = in_row < in_all ? in_row : in_all;
  return left < 0 ? 0 : left < most ? left : most;
}

// Exponent byte of a block scale: 2^(e - 127), or NaN.
LOWPREC_HD uint8_t e8m0_bits(float scale) { return static_cast<uint8_t>(is_nan(scale) ? 255u : float_bits(scale) >> 23); }

LOWPREC_HD float e8m0_value(uint8_t e) {
  return bits_float(e == 255 ? 0x7fc00000u : e == 0 ? 0x00400000u : static_cast<uint32_t>(e) << 23);
}

}  // namespace lowprec
