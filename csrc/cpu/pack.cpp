// E2M1 codes two a byte (ops/reference.py pack_e2m1): bit 3 of a nibble is the sign, bits 0..2 the place in the grid
// 0 .5 1 1.5 2 3 4 6, whose E4M3 bytes are 00 30 38 3c 40 44 48 4c.
#include "binding.h"

namespace lowprec {
namespace {

constexpr int64_t GRAIN = 1 << 16;  // bytes of packed codes for a thread

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
  torch::stable::parallel_for(0, packed.numel(), GRAIN, [=](int64_t begin, int64_t end) {
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
  torch::stable::parallel_for(0, packed.numel(), GRAIN, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      out[2 * i] = code_of(in[i] & 15);
      out[2 * i + 1] = code_of(in[i] >> 4);
    }
  });
  return codes;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(lowprec, CPU, m) {
  m.impl("pack_e2m1", TORCH_BOX(&pack_e2m1));
  m.impl("unpack_e2m1", TORCH_BOX(&unpack_e2m1));
}

}  // namespace lowprec
