// Formats and roundings of compiled kernels as data: mantissa bits, exponent of the smallest normal number, largest
// value, whether there is a scale, and the type of codes. E2M1 and INT4 are stored as E4M3. ops/kernels.py reads these
// numbers when it loads a library, and raises an error if they differ from ops/formats.py.
#pragma once

#include <cstdio>
#include <initializer_list>
#include <string>

#include "numerics/platform.h"

namespace lowprec {

enum class Format : int { E2M1, E4M3, E5M2, INT4, INT8, BF16, FP16, FP32 };
constexpr const char* FORMAT_NAMES[] = {"E2M1", "E4M3", "E5M2", "INT4", "INT8", "BF16", "FP16", "FP32"};

enum class Rounding : int { NEAREST, STOCHASTIC };
constexpr const char* ROUNDING_NAMES[] = {"nearest", "stochastic"};

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
struct Grid<Format::INT4> {
  static constexpr int mantissa = 2, low = 2;
  static constexpr float max = 7.0f;
  static constexpr bool unscaled = false;
  using Code = uint8_t;
};
template <>
struct Grid<Format::INT8> {
  static constexpr int mantissa = 6, low = 6;
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

template <Format F>
std::string served_format() {
  using G = Grid<F>;
  char line[128];
  std::snprintf(line, sizeof(line), "%s %d %d %a %d %d\n", FORMAT_NAMES[static_cast<int>(F)], G::mantissa, G::low,
                static_cast<double>(G::max), G::unscaled ? 0 : 1, static_cast<int>(sizeof(typename G::Code)));
  return line;
}

// One line per format with its name and numbers; one line per rounding and scale choice with its name.
inline std::string served_names(std::initializer_list<const char*> candidates) {
  std::string made = served_format<Format::E2M1>() + served_format<Format::E4M3>() + served_format<Format::E5M2>() +
                     served_format<Format::INT4>() + served_format<Format::INT8>() + served_format<Format::BF16>() + served_format<Format::FP16>() +
                     served_format<Format::FP32>();
  for (const char* name : ROUNDING_NAMES) made += std::string(name) + "\n";
  for (const char* name : candidates) made += std::string(name) + "\n";
  return made;
}

}  // namespace lowprec
