// E2M1 codes, two per byte (ops/reference.py pack_e2m1): bit 3 of a nibble is the sign, bits 0..2 the place in the grid
// 0 .5 1 1.5 2 3 4 6, whose E4M3 bytes are 00 30 38 3c 40 44 48 4c. pack_ladder (ops/ladder.py): carriers as such codes
// and a scale for each 16 of them.
#include "cpu/rows.h"
#include "numerics/ladder.h"

namespace lowprec {
namespace {

constexpr int64_t BYTES = 1 << 16;  // packed bytes per thread
constexpr float PLACES[] = {0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};

inline uint8_t nibble(uint8_t code) {
  const uint8_t magnitude = code & 0x7f;
  const uint8_t small = magnitude >> 5, normal = static_cast<uint8_t>((static_cast<uint8_t>(magnitude - 0x38) >> 2) + 2);
  return ((magnitude < 0x38 ? small : normal) & 7) | ((code >> 4) & 8);
}

inline uint8_t code_of(uint8_t nibble) {
  const uint8_t place = nibble & 7;
  const uint8_t magnitude = place == 0 ? 0 : place == 1 ? 0x30 : 0x30 + (place << 2);
  return magnitude | ((nibble & 8) << 4);
}

std::vector<int64_t> with_last(const Tensor& x, int64_t last) {
  std::vector<int64_t> shape;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) shape.push_back(x.size(d));
  shape.push_back(last);
  return shape;
}

Tensor pack_e2m1(const Tensor& codes) {
  STD_TORCH_CHECK(codes.element_size() == 1 && codes.dim() > 0, "pack_e2m1 takes codes of one byte");
  const int64_t columns = codes.size(codes.dim() - 1);
  STD_TORCH_CHECK(columns % 2 == 0, "two E2M1 codes make a byte; the last dimension ", columns, " is odd");
  const Tensor from = dense(codes);
  Tensor packed = empty_like_device(codes, with_last(codes, columns / 2), ScalarType::Byte);
  const uint8_t* in = data_of<uint8_t>(from);
  uint8_t* out = mutable_data_of<uint8_t>(packed);
  torch::stable::parallel_for(0, packed.numel(), BYTES, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) out[i] = nibble(in[2 * i]) | nibble(in[2 * i + 1]) << 4;
  });
  return packed;
}

Tensor unpack_e2m1(const Tensor& packed) {
  STD_TORCH_CHECK(packed.scalar_type() == ScalarType::Byte && packed.dim() > 0, "unpack_e2m1 takes bytes");
  const Tensor from = dense(packed);
  Tensor codes = empty_like_device(packed, with_last(packed, 2 * packed.size(packed.dim() - 1)),
                                   ScalarType::Float8_e4m3fn);
  const uint8_t* in = data_of<uint8_t>(from);
  uint8_t* out = mutable_data_of<uint8_t>(codes);
  torch::stable::parallel_for(0, packed.numel(), BYTES, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      out[2 * i] = code_of(in[i] & 15);
      out[2 * i + 1] = code_of(in[i] >> 4);
    }
  });
  return codes;
}

// Computes E2M1 codes whose products with `scale` are v; returns false if there are none.
bool codes_under(const float* v, float scale, uint8_t* codes) {
  bool serves = true;
  for (int64_t i = 0; i < LADDER_BLOCK; ++i) {
    codes[i] = encode<Format::E2M1>(divide(v[i], scale));
    serves &= decode<Format::E2M1>(codes[i]) * scale == v[i];
  }
  return serves;
}

std::tuple<Tensor, Tensor> pack_ladder(const Tensor& carriers) {
  const int64_t rows = rows_of(carriers), columns = carriers.size(1), blocks = columns / LADDER_BLOCK;
  STD_TORCH_CHECK(carriers.scalar_type() == ScalarType::Float8_e4m3fn && columns % LADDER_BLOCK == 0,
                  "carriers are E4M3 in blocks of ", LADDER_BLOCK, ", not rows of ", columns);
  const Tensor packed = empty_like_device(carriers, {rows, columns / 2}, ScalarType::Byte);
  const Tensor scale = empty_like_device(carriers, {rows, blocks}, ScalarType::Float8_e4m3fn);
  const Source source = source_of(carriers);
  uint8_t *out = mutable_data_of<uint8_t>(packed), *out_scale = mutable_data_of<uint8_t>(scale);
  for_rows(rows * blocks, LADDER_BLOCK, [&](int64_t first, int64_t last) {
    for (int64_t block = first; block < last; ++block) {
      float v[LADDER_BLOCK];
      uint8_t codes[LADDER_BLOCK], found[LADDER_BLOCK] = {};
      uint32_t top = 0;
      load(source, block * LADDER_BLOCK, LADDER_BLOCK, v);
      for (const float each : v) top = larger_magnitude(top, each);
      out_scale[block] = 0x7f;
      for (const float place : PLACES) {  // code of the largest magnitude; the last match has the smallest scale
        const uint8_t code = encode<Format::E4M3>(top == 0 ? 1.0f : divide(magnitude_of(top), place));
        if (!codes_under(v, decode<Format::E4M3>(code), codes)) continue;
        out_scale[block] = code;
        std::copy_n(codes, LADDER_BLOCK, found);
      }
      for (int64_t i = 0; i < LADDER_BLOCK / 2; ++i) {
        out[block * LADDER_BLOCK / 2 + i] = nibble(found[2 * i]) | nibble(found[2 * i + 1]) << 4;
      }
    }
  });
  return {packed, scale};
}

Tensor unpack_ladder(const Tensor& packed, const Tensor& scale) {
  const int64_t rows = packed.size(0), columns = 2 * packed.size(1);
  STD_TORCH_CHECK(packed.scalar_type() == ScalarType::Byte && scale.numel() * LADDER_BLOCK == rows * columns,
                  "a scale for each ", LADDER_BLOCK, " codes of ", rows, " x ", columns, ", not ", scale.numel());
  const Tensor carriers = empty_like_device(packed, {rows, columns}, ScalarType::Float8_e4m3fn);
  const Tensor from = dense(packed);
  const Source scales = source_of(scale);
  const uint8_t* in = data_of<uint8_t>(from);
  uint8_t* out = mutable_data_of<uint8_t>(carriers);
  for_rows(rows, columns, [&](int64_t first, int64_t last) {
    std::vector<float> v(columns), of(columns / LADDER_BLOCK);
    for (int64_t r = first; r < last; ++r) {
      for (int64_t i = 0; i < columns; ++i) {
        v[i] = decode<Format::E2M1>(code_of(in[(r * columns + i) / 2] >> (i % 2 * 4) & 15));
      }
      load(scales, r * columns / LADDER_BLOCK, columns / LADDER_BLOCK, of.data());
      scale_tiles(v.data(), columns, LADDER_BLOCK, of.data());
      encode_row(Format::E4M3, v.data(), nullptr, columns, out + r * columns);
    }
  });
  return carriers;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(lowprec, CPU, m) {
  m.impl("pack_e2m1", TORCH_BOX(&pack_e2m1));
  m.impl("unpack_e2m1", TORCH_BOX(&unpack_e2m1));
  m.impl("pack_ladder", TORCH_BOX(&pack_ladder));
  m.impl("unpack_ladder", TORCH_BOX(&unpack_ladder));
}

}  // namespace lowprec
