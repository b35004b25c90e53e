// quantize_expanded, dequantize_expanded: COAT's dynamic range expansion (arXiv 2410.19313), group by group
// (ops/states.py has the formulas).
#include "cpu/rows.h"

#include <array>
#include <cmath>

#include "numerics/expansion.h"

namespace lowprec {
namespace {

struct Extremes {
  uint32_t largest;
  float smallest;
};

LOWPREC_CLONES Extremes extremes(const float* v, int64_t n) {
  uint32_t largest = 0, smallest = INFINITE;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = magnitude_bits(v[i]), present = bits >= (1u << 23) ? bits : INFINITE;
    largest = larger(largest, bits);
    smallest = present < smallest ? present : smallest;
  }
  return {largest, bits_float(smallest)};
}

// Expands the values of a finite group, without rounding.
template <Format F>
LOWPREC_CLONES void stretch_all(float* v, int64_t n, float k, Log2Parts largest) {
  for (int64_t i = 0; i < n; ++i) v[i] = stretch<F>(v[i], k, largest);
}

// Computes a group's parameters, and expands v in place.
template <Format F>
Expansion expand(float* v, int64_t n) {
  const Extremes found = extremes(v, n);
  const Expansion made = expansion_of<F>(found.largest, float_bits(found.smallest));
  if (found.largest < INFINITE) {
    stretch_all<F>(v, n, made.exponent, made.largest);
  } else {
    for (int64_t i = 0; i < n; ++i) v[i] = with_sign(0.0f, v[i]);
  }
  return made;
}

// Calls body(index of the group, first element, elements) for the groups of a row.
template <typename Body>
void for_groups(int64_t columns, int64_t group, int64_t segments, const Body& body) {
  const int64_t length = columns / segments;
  int64_t index = 0;
  for (int64_t start = 0; start < columns; start += length) {
    for (int64_t first = 0; first < length; first += group) {
      body(index++, start + first, std::min(group, length - first));
    }
  }
}

int64_t groups_of(int64_t columns, int64_t group, int64_t segments) {
  STD_TORCH_CHECK(group >= 1 && segments >= 1 && columns % segments == 0, segments, " segments of groups of ", group,
                  " do not fit a row of ", columns);
  return segments * ((columns / segments + group - 1) / group);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> quantize_expanded(const Tensor& x, std::string format, int64_t group,
                                                             int64_t segments) {
  const int64_t rows = rows_of(x), columns = x.size(1), groups = groups_of(columns, group, segments);
  const Format to = parse_format(format);
  STD_TORCH_CHECK(to == Format::E4M3 || to == Format::E5M2, "expanded codes are E4M3 or E5M2");
  const auto expand_group = to == Format::E4M3 ? expand<Format::E4M3> : expand<Format::E5M2>;
  const Tensor codes = empty_like_device(x, {rows, columns}, carrier_of(to));
  const Tensor scale = empty_like_device(x, {rows, groups}, ScalarType::Float);
  const Tensor exponents = empty_like_device(x, {rows, groups}, ScalarType::Float);
  const Tensor center = empty_like_device(x, {rows, groups}, ScalarType::Float);
  const Source source = source_of(x);
  uint8_t* out = mutable_data_of<uint8_t>(codes);
  float *out_scale = mutable_data_of<float>(scale), *out_exponent = mutable_data_of<float>(exponents),
        *out_center = mutable_data_of<float>(center);
  for_rows(rows, columns, [&](int64_t begin, int64_t end) {
    std::vector<float> v(columns);
    for (int64_t r = begin; r < end; ++r) {
      load(source, r * columns, columns, v.data());
      for_groups(columns, group, segments, [&](int64_t index, int64_t first, int64_t n) {
        const Expansion made = expand_group(v.data() + first, n);
        out_scale[r * groups + index] = made.scale;
        out_exponent[r * groups + index] = made.exponent;
        out_center[r * groups + index] = made.center;
      });
      encode_row(to, v.data(), nullptr, columns, out + r * columns);
    }
  });
  return {codes, scale, exponents, center};
}

using CodeLogs = std::array<float, 128>;

template <Format F>
const CodeLogs& code_logs() {
  static const CodeLogs logs = [] {
    CodeLogs made{};
    for (int code = 0; code < 128; ++code) made[code] = code_log2<F>(static_cast<uint32_t>(code));
    return made;
  }();
  return logs;
}

// Decodes one group. On entry `out` has the logarithms of codes, looked up in a separate loop so that this one
// vectorises.
LOWPREC_CLONES void contract(const uint8_t* codes, int64_t n, float log_scale, float inverse, float center,
                             float* out) {
  for (int64_t i = 0; i < n; ++i) {
    const float value = expanded_value(out[i], log_scale, inverse, center);
    const float magnitude = (codes[i] & 0x7fu) == 0 ? 0.0f : value;
    out[i] = bits_float(float_bits(magnitude) ^ static_cast<uint32_t>(codes[i] & 0x80u) << 24);
  }
}

Tensor dequantize_expanded(const Tensor& codes, const Tensor& scale, const Tensor& exponents, const Tensor& center,
                           std::string format, int64_t group, int64_t segments) {
  const int64_t rows = rows_of(codes), columns = codes.size(1), groups = groups_of(columns, group, segments);
  STD_TORCH_CHECK(scale.size(0) == rows && scale.size(1) == groups, "a scale for each group of each row");
  const Format from = parse_format(format);
  const float* logs = from == Format::E4M3 ? code_logs<Format::E4M3>().data() : code_logs<Format::E5M2>().data();
  const Tensor values = empty_like_device(codes, {rows, columns}, ScalarType::Float);
  const Tensor source = dense(codes);
  const Source scales = source_of(scale), powers = source_of(exponents), centers = source_of(center);
  const uint8_t* in = data_of<uint8_t>(source);
  float* out = mutable_data_of<float>(values);
  for_rows(rows, columns, [&](int64_t begin, int64_t end) {
    std::vector<float> s(groups), k(groups), c(groups);
    for (int64_t r = begin; r < end; ++r) {
      load(scales, r * groups, groups, s.data());
      load(powers, r * groups, groups, k.data());
      load(centers, r * groups, groups, c.data());
      for_groups(columns, group, segments, [&](int64_t index, int64_t first, int64_t n) {
        const uint8_t* of = in + r * columns + first;
        float* to = out + r * columns + first;
        if (!is_finite(c[index])) return static_cast<void>(std::fill_n(to, n, bits_float(0x7fc00000u)));
        for (int64_t i = 0; i < n; ++i) to[i] = logs[of[i] & 0x7fu];
        contract(of, n, log2_float(s[index]), divide(1.0f, k[index]), c[index], to);
      });
    }
  });
  return values;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(lowprec, CPU, m) {
  m.impl("quantize_expanded", TORCH_BOX(&quantize_expanded));
  m.impl("dequantize_expanded", TORCH_BOX(&dequantize_expanded));
}

}  // namespace lowprec
