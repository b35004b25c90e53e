// rotated_amax, quantize_eden (ops/eden.py): each row is rotated, rounded and corrected while it is in the cache.
#include "numerics/eden.h"

#include "cpu/fold.h"
#include "cpu/rotate.h"

namespace lowprec {
namespace {

// Sum of 16 products: each eight elements by halving, then the two halves.
LOWPREC_HD float block_sum(const float* a, const float* b) {
  float half[2];
  for (int i = 0; i < 2; ++i) {
    float p[8];
    for (int j = 0; j < 8; ++j) p[j] = a[8 * i + j] * b[8 * i + j];
    for (int j = 0; j < 4; ++j) p[j] += p[j + 4];
    half[i] = (p[0] + p[2]) + (p[1] + p[3]);
  }
  return half[0] + half[1];
}

LOWPREC_HD float pairs_sum(const float* v) {
  return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
}

// c of a group from its scaled values, its dequantised codes and its eight block scales.
LOWPREC_CLONES float factor_of(const float* place, const float* codes, const float* block) {
  constexpr int blocks = EDEN_GROUP / EDEN_BLOCK;
  float own[blocks], made[blocks];
  for (int j = 0; j < blocks; ++j) {
    const float square = block[j] * block[j];
    own[j] = block_sum(place + j * EDEN_BLOCK, place + j * EDEN_BLOCK) * square;
    made[j] = block_sum(place + j * EDEN_BLOCK, codes + j * EDEN_BLOCK) * square;
  }
  return eden_factor(pairs_sum(own), pairs_sum(made));
}

Tensor rotated_amax(const Tensor& x, std::optional<Tensor> signs, int64_t rotation) {
  const int64_t rows = rows_of(x), columns = x.size(1);
  STD_TORCH_CHECK(rows > 0 && columns > 0, "rotated_amax of a ", rows, " by ", columns, " matrix: it has no elements");
  const Tensor found = empty_like_device(x, {1, 1}, ScalarType::Float);
  const Rotated rotated(x, signs, rotation);
  std::vector<uint32_t> of_rows(rows, 0u);
  for_rows(rows, columns, [&](int64_t first, int64_t last) {
    std::vector<float> v(columns), spare(columns);
    for (int64_t r = first; r < last; ++r) {
      rotated.row(r, v.data(), spare.data());
      tile_amax(v.data(), columns, columns, &of_rows[r]);
    }
  });
  uint32_t most = 0;
  for (const uint32_t each : of_rows) most = larger(most, each);
  *mutable_data_of<float>(found) = magnitude_of(most);
  return found;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> quantize_eden(const Tensor& x, const Tensor& top, std::optional<Tensor> signs,
                                                         int64_t rotation, const Tensor& seed,
                                                         std::optional<Tensor> origin) {
  const int64_t rows = rows_of(x), columns = x.size(1), tiles = columns / EDEN_BLOCK;
  resolve_tile(rows, columns, {1, EDEN_GROUP});
  STD_TORCH_CHECK(top.numel() == 1, "the amax of a matrix is one number, not ", top.numel());
  const Tensor codes = empty_like_device(x, {rows, columns}, ScalarType::Float8_e4m3fn);
  const Tensor scale = empty_like_device(x, {rows, tiles}, ScalarType::Float);
  const Tensor block = empty_like_device(x, {rows, tiles}, ScalarType::Float8_e4m3fn);
  const Tensor whole = empty_like_device(x, {1, 1}, ScalarType::Float);
  const float outer = eden_outer(*data_of<float>(top));
  *mutable_data_of<float>(whole) = outer;
  const Rotated rotated(x, signs, rotation);
  Draws draws = draws_of(data_of<int64_t>(seed), origin);
  draws.group /= EDEN_BLOCK;
  uint8_t *out = mutable_data_of<uint8_t>(codes), *out_block = mutable_data_of<uint8_t>(block);
  float* out_scale = mutable_data_of<float>(scale);
  for_rows(rows, columns, [&](int64_t first, int64_t last) {
    std::vector<float> v(columns), q(columns), own(tiles), wide(tiles);
    std::vector<uint32_t> amax(tiles);
    std::vector<uint16_t> buffer;
    for (int64_t r = first; r < last; ++r) {
      rotated.row(r, v.data(), q.data());
      std::fill(amax.begin(), amax.end(), 0u);
      tile_amax(v.data(), columns, EDEN_BLOCK, amax.data());
      for (int64_t j = 0; j < tiles; ++j) {
        own[j] = eden_block(magnitude_of(amax[j]), outer);
        wide[j] = own[j] * outer;
      }
      divide_tiles(v.data(), columns, EDEN_BLOCK, wide.data());
      std::copy(v.begin(), v.end(), q.begin());
      round_e2m1(q.data(), nullptr, columns);
      encode_row(Format::E2M1, v.data(), nullptr, columns, out + r * columns);
      const uint16_t* bits = draws.of_row(r, tiles, buffer);
      for (int64_t j = 0; j < tiles; j += EDEN_GROUP / EDEN_BLOCK) {
        const float factor = factor_of(v.data() + j * EDEN_BLOCK, q.data() + j * EDEN_BLOCK, own.data() + j);
        for (int64_t i = j; i < j + EDEN_GROUP / EDEN_BLOCK; ++i) {
          const uint8_t stored = out_block[r * tiles + i] = eden_stored(own[i], factor, bits[i]);
          out_scale[r * tiles + i] = eden_scale(magnitude_of(amax[i]), stored, outer);
        }
      }
    }
  });
  return {codes, scale, block, whole};
}

std::tuple<Tensor, Tensor> round_eden(const Tensor& x, const Tensor& top, std::optional<Tensor> signs, int64_t rotation,
                                      const Tensor& seed, std::optional<Tensor> origin) {
  const auto [codes, scale, block, outer] = quantize_eden(x, top, signs, rotation, seed, origin);
  return {dequantize_bf16(codes, block), outer};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(lowprec, CPU, m) {
  m.impl("rotated_amax", TORCH_BOX(&rotated_amax));
  m.impl("quantize_eden", TORCH_BOX(&quantize_eden));
  m.impl("round_eden", TORCH_BOX(&round_eden));
}

}  // namespace lowprec
