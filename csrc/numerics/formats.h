// Number formats as data (ops/reference.py GRIDS): mantissa bits, exponent of the smallest normal number, largest value,
// and what a code is stored in. E2M1 rides as E4M3.
#pragma once

#include "numerics/platform.h"

namespace lowprec {

enum class Format : int { E2M1, E4M3, E5M2, INT8, BF16, FP16, FP32 };

template <Format F>
struct Grid;

template <>
struct Grid<Format::E2M1> {
  static constexpr int mantissa = 1, low = 0;
  static constexpr float max = 6.0f;
  static constexpr bool unscaled = false;
  using Code = uint8_t;
};
template <>
struct Grid<Format::E4M3> {
  static constexpr int mantissa = 3, low = -6;
  static constexpr float max = 448.0f;
  static constexpr bool unscaled = false;
  using Code = uint8_t;
};
template <>
struct Grid<Format::E5M2> {
  static constexpr int mantissa = 2, low = -14;
  static constexpr float max = 57344.0f;
  static constexpr bool unscaled = false;
  using Code = uint8_t;
};
template <>
struct Grid<Format::INT8> {
  static constexpr int mantissa = 0, low = 0;
  static constexpr float max = 127.0f;
  static constexpr bool unscaled = false;
  using Code = int8_t;
};
template <>
struct Grid<Format::BF16> {
  static constexpr int mantissa = 7, low = -126;
  static constexpr float max = 0x1.fep127f;
  static constexpr bool unscaled = true;
  using Code = uint16_t;
};
template <>
struct Grid<Format::FP16> {
  static constexpr int mantissa = 10, low = -14;
  static constexpr float max = 65504.0f;
  static constexpr bool unscaled = false;
  using Code = uint16_t;
};
template <>
struct Grid<Format::FP32> {
  static constexpr int mantissa = 23, low = -126;
  static constexpr float max = 0x1.fffffep127f;
  static constexpr bool unscaled = true;
  using Code = float;
};

}  // namespace lowprec
