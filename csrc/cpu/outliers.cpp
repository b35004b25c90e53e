// outlier_bounds, quantize_carrier, quantize_outliers: values of a row within its (clipped + 1)-th smallest and largest
// values are rounded to E2M1, values outside are rounded once to E4M3, both in one carrier (ops/reference.py).
#include "cpu/rows.h"
#include "numerics/selection.h"

#include <cmath>

namespace lowprec {
namespace {

struct Bounds {
  float low, high, amax;
};

// Integer keys in the order of the numbers; their complements have the opposite order. Returns the bits of the amax.
LOWPREC_CLONES uint32_t keys_of(const float* v, int64_t n, int32_t* keys, int32_t* complements) {
  uint32_t most = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int32_t bits = static_cast<int32_t>(float_bits(v[i]));
    keys[i] = bits ^ ((bits >> 31) & 0x7fffffff);
    complements[i] = ~keys[i];
    most = larger_magnitude(most, v[i]);
  }
  return most;
}

LOWPREC_CLONES int32_t count_from(const int32_t* keys, int64_t n, int32_t low) {
  int32_t count = 0;
  for (int64_t i = 0; i < n; ++i) count += keys[i] >= low ? 1 : 0;
  return count;
}

LOWPREC_CLONES int32_t least_from(const int32_t* keys, int64_t n, int32_t low) {
  int32_t least = INT32_MAX;
  for (int64_t i = 0; i < n; ++i) least = keys[i] >= low && keys[i] < least ? keys[i] : least;
  return least;
}

LOWPREC_CLONES int32_t greatest(const int32_t* keys, int64_t n) {
  int32_t most = INT32_MIN;
  for (int64_t i = 0; i < n; ++i) most = keys[i] > most ? keys[i] : most;
  return most;
}

// The `place`-th largest key, counted from one: an interval below the largest grows until it has enough keys, then
// bisection. About six vectorised counts of a row, while a selection would move single elements.
int32_t select(const int32_t* keys, int64_t n, int64_t place) {
  int64_t low = INT32_MIN, high = greatest(keys, n);
  for (int64_t step = 1 << 24; low < high; step *= 4) {  // two binades, then more
    const int64_t start = std::max<int64_t>(high - step, INT32_MIN);
    if (count_from(keys, n, static_cast<int32_t>(start)) >= place) {
      low = start;
      break;
    }
    high = start;  // fewer than `place` keys are at or above it
  }
  while (low < high) {
    const int64_t middle = low + (high - low + 1) / 2;
    const int32_t count = count_from(keys, n, static_cast<int32_t>(middle));
    if (count == place) return least_from(keys, n, static_cast<int32_t>(middle));
    (count > place ? low : high) = count > place ? middle : middle - 1;
  }
  return static_cast<int32_t>(low);
}

float value_of(int32_t key) { return bits_float(static_cast<uint32_t>(key ^ ((key >> 31) & 0x7fffffff))); }

// Bounds of a row; NaN if the row has a NaN.
Bounds bounds_of(const float* v, int64_t n, int64_t clipped, std::vector<int32_t>& spare) {
  spare.resize(2 * n);
  const uint32_t most = keys_of(v, n, spare.data(), spare.data() + n);
  if (most > INFINITE) return {bits_float(0x7fc00000u), bits_float(0x7fc00000u), bits_float(most)};
  return {value_of(~select(spare.data() + n, n, clipped + 1)), value_of(select(spare.data(), n, clipped + 1)),
          bits_float(most)};
}

LOWPREC_CLONES void carrier_row(float* v, int64_t n, Bounds bounds, float scale, uint8_t* codes) {
  for (int64_t i = 0; i < n; ++i) {
    const float x = v[i], scaled = x / scale;
    const bool outside = (x < bounds.low) | (x > bounds.high);
    const float code = (outside ? scaled : round_nearest<Format::E2M1>(clamp(scaled, 6.0f))) * CARRIER_SHIFT;
    const bool visible = !is_finite(x) | is_nan(scaled);  // Inf becomes NaN instead of saturating
    codes[i] = encode<Format::E4M3>(visible ? bits_float(0x7fc00000u) : code);
  }
}

// Codes of the row in v; returns its scale.
float quantize_row(float* v, int64_t n, Bounds bounds, uint8_t* codes) {
  const CarrierScale by = carrier_scale(bounds.low, bounds.high, bounds.amax);
  carrier_row(v, n, bounds, by.scale, codes);
  return by.of_carrier;
}

void check_clipped(int64_t columns, int64_t clipped) {
  STD_TORCH_CHECK(clipped >= 0 && clipped < columns, clipped, " outliers on a side of a row of ", columns);
}

std::tuple<Tensor, Tensor> outlier_bounds(const Tensor& x, int64_t clipped) {
  const int64_t rows = rows_of(x), columns = x.size(1);
  check_clipped(columns, clipped);
  const Tensor low = empty_like_device(x, {rows, 1}, ScalarType::Float);
  const Tensor high = empty_like_device(x, {rows, 1}, ScalarType::Float);
  const Source source = source_of(x);
  float *out_low = mutable_data_of<float>(low), *out_high = mutable_data_of<float>(high);
  for_rows(rows, columns, [&](int64_t first, int64_t last) {
    std::vector<float> v(columns);
    std::vector<int32_t> spare;
    for (int64_t r = first; r < last; ++r) {
      load(source, r * columns, columns, v.data());
      const Bounds bounds = bounds_of(v.data(), columns, clipped, spare);
      out_low[r] = bounds.low;
      out_high[r] = bounds.high;
    }
  });
  return {low, high};
}

// Quantises rows with the bounds from bounds_of_row(r, v), v the values of row r.
template <typename BoundsOfRow>
std::tuple<Tensor, Tensor> quantize_rows(const Tensor& x, const BoundsOfRow& bounds_of_row) {
  const int64_t rows = rows_of(x), columns = x.size(1);
  const Tensor codes = empty_like_device(x, {rows, columns}, ScalarType::Float8_e4m3fn);
  const Tensor scale = empty_like_device(x, {rows, 1}, ScalarType::Float);
  const Source source = source_of(x);
  uint8_t* out = mutable_data_of<uint8_t>(codes);
  float* out_scale = mutable_data_of<float>(scale);
  for_rows(rows, columns, [&](int64_t first, int64_t last) {
    std::vector<float> v(columns);
    std::vector<int32_t> spare;
    for (int64_t r = first; r < last; ++r) {
      load(source, r * columns, columns, v.data());
      out_scale[r] = quantize_row(v.data(), columns, bounds_of_row(r, v.data(), spare), out + r * columns);
    }
  });
  return {codes, scale};
}

std::tuple<Tensor, Tensor> quantize_carrier(const Tensor& x, const Tensor& low, const Tensor& high,
                                            const Tensor& amax) {
  const int64_t rows = x.size(0);
  STD_TORCH_CHECK(low.numel() == rows && high.numel() == rows && amax.numel() == rows, "two bounds and an amax for ",
                  "each of ", rows, " rows, not ", low.numel(), ", ", high.numel(), " and ", amax.numel());
  const Source lows = source_of(low), highs = source_of(high), largest = source_of(amax);
  return quantize_rows(x, [&](int64_t r, const float*, std::vector<int32_t>&) {
    Bounds bounds;
    load(lows, r, 1, &bounds.low);
    load(highs, r, 1, &bounds.high);
    load(largest, r, 1, &bounds.amax);
    return bounds;
  });
}

std::tuple<Tensor, Tensor> quantize_outliers(const Tensor& x, int64_t clipped) {
  const int64_t columns = x.size(1);
  check_clipped(columns, clipped);
  return quantize_rows(x, [&](int64_t, const float* v, std::vector<int32_t>& spare) {
    return bounds_of(v, columns, clipped, spare);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(lowprec, CPU, m) {
  m.impl("outlier_bounds", TORCH_BOX(&outlier_bounds));
  m.impl("quantize_carrier", TORCH_BOX(&quantize_carrier));
  m.impl("quantize_outliers", TORCH_BOX(&quantize_outliers));
}

}  // namespace lowprec
