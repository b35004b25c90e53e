// quantize_nvfp4: E2M1 codes with E4M3 block scales and one FP32 scale of the tensor (ops/reference.py).
#include "cpu/nvfp4.h"

#include "cpu/fold.h"
#include "cpu/rotate.h"

namespace lowprec {
namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor> quantize_nvfp4(const Tensor& x, std::vector<int64_t> tile, double headroom,
                                                          std::string rounding, std::optional<Tensor> seed,
                                                          std::optional<Tensor> origin, std::optional<Tensor> signs,
                                                          int64_t rotation) {
  const int64_t rows = rows_of(x), columns = x.size(1);
  const Tile shape = resolve_tile(rows, columns, tile);
  const int64_t bands = rows / shape.rows, tiles = columns / shape.columns;
  const Tensor codes = empty_like_device(x, {rows, columns}, ScalarType::Float8_e4m3fn);
  const Tensor scale = empty_like_device(x, {bands, tiles}, ScalarType::Float);
  const Tensor block = empty_like_device(x, {bands, tiles}, ScalarType::Float8_e4m3fn);
  const Tensor whole = empty_like_device(x, {1, 1}, ScalarType::Float);
  const Rotated rotated(x, signs, rotation);

  std::vector<uint32_t> of_rows(rows * tiles, 0u);
  for_rows(rows, columns, [&](int64_t first, int64_t last) {
    std::vector<float> v(columns), spare(columns);
    for (int64_t r = first; r < last; ++r) {
      rotated.row(r, v.data(), spare.data());
      tile_amax(v.data(), columns, shape.columns, of_rows.data() + r * tiles);
    }
  });
  uint32_t most = 0;
  for (uint32_t each : of_rows) most = larger(most, each);
  const float tensor_scale = outer_scale(magnitude_of(most), 6.0 * 448.0);
  *mutable_data_of<float>(whole) = tensor_scale;

  float* out_scale = mutable_data_of<float>(scale);
  uint8_t* out_block = mutable_data_of<uint8_t>(block);
  for_rows(bands, shape.rows * columns, [&](int64_t first, int64_t last) {
    for (int64_t band = first; band < last; ++band) {
      uint32_t* amax = of_rows.data() + band * shape.rows * tiles;
      for (int64_t r = 1; r < shape.rows; ++r) {
        for (int64_t i = 0; i < tiles; ++i) amax[i] = larger(amax[i], amax[r * tiles + i]);
      }
      for (int64_t i = 0; i < tiles; ++i) {
        const BlockScale made = block_scale(magnitude_of(amax[i]), tensor_scale, headroom);
        out_scale[band * tiles + i] = made.scale;
        out_block[band * tiles + i] = made.code;
      }
    }
  });
  const Draws draws = draws_of(seed_of(rounding, seed), origin);
  uint8_t* out = mutable_data_of<uint8_t>(codes);
  for_rows(rows, columns, [&](int64_t first, int64_t last) {
    std::vector<float> v(columns), spare(columns);
    std::vector<uint16_t> bits;
    for (int64_t r = first; r < last; ++r) {
      rotated.row(r, v.data(), spare.data());
      divide_tiles(v.data(), columns, shape.columns, out_scale + r / shape.rows * tiles);
      encode_row(Format::E2M1, v.data(), draws.of_row(r, columns, bits), columns, out + r * columns);
    }
  });
  return {codes, scale, block, whole};
}

std::tuple<Tensor, Tensor> round_nvfp4(const Tensor& x, double headroom, std::string rounding, std::optional<Tensor> seed,
                                       std::optional<Tensor> origin, std::optional<Tensor> signs, int64_t rotation) {
  const auto [codes, scale, block, outer] = quantize_nvfp4(x, {1, 16}, headroom, rounding, seed, origin, signs, rotation);
  return {dequantize_bf16(codes, block), outer};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(lowprec, CPU, m) {
  m.impl("quantize_nvfp4", TORCH_BOX(&quantize_nvfp4));
  m.impl("round_nvfp4", TORCH_BOX(&round_nvfp4));
}

}  // namespace lowprec
