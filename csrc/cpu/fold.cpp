// dequantize, fold: codes times their scale, and block exponents multiplied into a wider carrier.
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
    if (is_nan(scale[i]) || scale[i] > most) most = scale[i];  // NaN stays: no comparison with it is true
  }
  for (int64_t i = 0; i < n; ++i) shift[i] = exp2_int(bounded(exponent(scale[i]) - row + top));
  return most * exp2_int(-top);
}

namespace {

std::tuple<Tensor, Tensor> fold(const Tensor& codes, const Tensor& scale, std::string carrier) {
  const int64_t rows = rows_of(codes), columns = codes.size(1), tiles = scale.size(1);
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

// Decodes one row of codes times their scales at a time, and calls `write`(row, values).
template <typename Write>
void decode_rows(const Tensor& codes, const Tensor& scale, const Write& write) {
  const int64_t rows = rows_of(codes), columns = codes.size(1);
  if (rows == 0 || columns == 0) return;
  const Tile tile = scaled_tile(rows, columns, scale);
  const int64_t tiles = columns / tile.columns;
  const Source source = source_of(codes), scales = source_of(scale);
  for_rows(rows, columns, [&](int64_t first, int64_t last) {
    std::vector<float> factor(tiles), v(columns);
    for (int64_t r = first; r < last; ++r) {
      load(source, r * columns, columns, v.data());
      load(scales, r / tile.rows * tiles, tiles, factor.data());
      scale_tiles(v.data(), columns, tile.columns, factor.data());
      write(r, v);
    }
  });
}

Tensor dequantize(const Tensor& codes, const Tensor& scale) {
  const Tensor values = empty_like_device(codes, {codes.size(0), codes.size(1)}, ScalarType::Float);
  float* out = mutable_data_of<float>(values);
  decode_rows(codes, scale, [&](int64_t r, const std::vector<float>& v) { std::copy(v.begin(), v.end(), out + r * v.size()); });
  return values;
}

}  // namespace

Tensor dequantize_bf16(const Tensor& codes, const Tensor& scale) {
  const Tensor values = empty_like_device(codes, {codes.size(0), codes.size(1)}, ScalarType::BFloat16);
  uint16_t* out = mutable_data_of<uint16_t>(values);
  decode_rows(codes, scale, [&](int64_t r, const std::vector<float>& v) {
    encode_row(Format::BF16, v.data(), nullptr, v.size(), out + r * v.size());
  });
  return values;
}

STABLE_TORCH_LIBRARY_IMPL(lowprec, CPU, m) {
  m.impl("fold", TORCH_BOX(&fold));
  m.impl("dequantize", TORCH_BOX(&dequantize));
  m.impl("dequantize_bf16", TORCH_BOX(&dequantize_bf16));
}

}  // namespace lowprec
