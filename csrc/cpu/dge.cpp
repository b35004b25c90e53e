// dge: the gradient times the slope of the differentiable estimator (arXiv 2501.17116, eq. 8; ops/reference.py dge).
#include "cpu/rows.h"

#include <cmath>

#include "numerics/powers.h"

namespace lowprec {
namespace {

struct Slope {
  float power, share, cap;  // 1/k - 1, 1/k
};

// grad *= slope(weight), for scaled weights.
LOWPREC_CLONES void correct(float* grad, const float* weight, int64_t n, Slope how) {
  for (int64_t i = 0; i < n; ++i) {
    const float size = bits_float(magnitude_bits(weight[i]));
    const float v = size > 6.0f ? 6.0f : size;
    const int e = exponent(v) < 0 ? 0 : exponent(v);
    const float steps = v * exp2_int(1 - e);
    const float place = bits_float(magnitude_bits(2.0f * (steps - std::floor(steps)) - 1.0f));
    const float centred = place < TINY ? TINY : place;
    const float slope = (is_nan(centred) ? centred : exp2_float(log2_float(centred) * how.power)) * how.share;
    grad[i] *= slope > how.cap ? how.cap : slope;
  }
}

Tensor dge(const Tensor& grad, const Tensor& weight, const Tensor& scale, double k, double cap,
           std::optional<ScalarType> dtype) {
  const int64_t rows = rows_of(weight), columns = weight.size(1);
  STD_TORCH_CHECK(grad.size(0) == rows && grad.size(1) == columns, "a gradient of the weight's shape");
  const ScalarType wanted = dtype.value_or(ScalarType::Float);
  if (rows == 0 || columns == 0) return empty_like_device(grad, {rows, columns}, wanted);
  const Tile tile = scaled_tile(rows, columns, scale);
  const int64_t tiles = columns / tile.columns;
  const Slope how{static_cast<float>(1.0 / k - 1.0), static_cast<float>(1.0 / k), static_cast<float>(cap)};
  const Tensor corrected = empty_like_device(grad, {rows, columns}, ScalarType::Float);
  const Source grads = source_of(grad), weights = source_of(weight), scales = source_of(scale);
  float* out = mutable_data_of<float>(corrected);
  for_rows(rows, columns, [&](int64_t first, int64_t last) {
    std::vector<float> v(columns), inverse(tiles);
    for (int64_t r = first; r < last; ++r) {
      load(grads, r * columns, columns, out + r * columns);
      load(weights, r * columns, columns, v.data());
      load(scales, r / tile.rows * tiles, tiles, inverse.data());
      for (float& each : inverse) each = divide(1.0f, each);
      scale_tiles(v.data(), columns, tile.columns, inverse.data());
      correct(out + r * columns, v.data(), columns, how);
    }
  });
  return wanted == ScalarType::Float ? corrected : torch::stable::to(corrected, wanted);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(lowprec, CPU, m) { m.impl("dge", TORCH_BOX(&dge)); }

}  // namespace lowprec
