// dequantize, fold: codes times their scale, and block exponents moved into a wider carrier.
#include "cpu/fold.h"

namespace lowprec {

int fold_top(Format carrier) {
  STD_TORCH_CHECK(carrier == Format::E4M3 || carrier == Format::E5M2, "codes fold into E4M3 or E5M2");
  return carrier == Format::E4M3 ? 6 : 13;
}

float fold_scales(const float* scale, int64_t n, int top, float* shift) {
  int row = -127;
  float most = scale[0];
  for (int64_t i = 0; i < n; ++i) {
    row = std::max(row, exponent(scale[i]));
    if (is_nan(scale[i]) || scale[i] > most) most = scale[i];  // nothing is greater than NaN
  }
  for (int64_t i = 0; i < n; ++i) shift[i] = exp2_int(bounded(exponent(scale[i]) - row + top));
  return most * exp2_int(-top);
}

namespace {

std::tuple<Tensor, Tensor> fold(const Tensor& codes, const Tensor& scale, std::string carrier) {
  const int64_t rows = codes.size(0), columns = codes.size(1), tiles = scale.size(1);
  const Format format = parse_format(carrier);
  const int top = fold_top(format);
  STD_TORCH_CHECK(scale.size(0) == rows && tiles > 0 && columns % tiles == 0, "a scale for each block of each row");
  const Tensor folded = empty_like_device(codes, {rows, columns}, carrier_of(format));
  const Tensor row_scale = empty_like_device(scale, {rows, 1}, ScalarType::Float);
  const Source source = source_of(codes), scales = source_of(scale);
  uint8_t* out = mutable_data_of<uint8_t>(folded);
  float* out_scale = mutable_data_of<float>(row_scale);
  for_rows(rows, columns, [&](int64_t first, int64_t last) {
    std::vector<float> v(columns), given(tiles), shift(tiles);
    for (int64_t r = first; r < last; ++r) {
      load(source, r * columns, columns, v.data());
      load(scales, r * tiles, tiles, given.data());
      out_scale[r] = fold_scales(given.data(), tiles, top, shift.data());
      cast_tiles(format, v.data(), columns, columns / tiles, shift.data(), out + r * columns);
    }
  });
  return {folded, row_scale};
}

Tensor dequantize(const Tensor& codes, const Tensor& scale) {
  const int64_t rows = codes.size(0), columns = codes.size(1);
  const int64_t bands = scale.size(0), tiles = scale.size(1);
  STD_TORCH_CHECK(rows % bands == 0 && columns % tiles == 0, "scales [", bands, ", ", tiles, "] of codes [", rows,
                  ", ", columns, "]");
  const Tensor values = empty_like_device(codes, {rows, columns}, ScalarType::Float);
  const Source source = source_of(codes), scales = source_of(scale);
  float* out = mutable_data_of<float>(values);
  for_rows(rows, columns, [&](int64_t first, int64_t last) {
    std::vector<float> factor(tiles);
    for (int64_t r = first; r < last; ++r) {
      load(source, r * columns, columns, out + r * columns);
      load(scales, r / (rows / bands) * tiles, tiles, factor.data());
      scale_tiles(out + r * columns, columns, columns / tiles, factor.data());
    }
  });
  return values;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(lowprec, CPU, m) {
  m.impl("fold", TORCH_BOX(&fold));
  m.impl("dequantize", TORCH_BOX(&dequantize));
}

}  // namespace lowprec
