// transpose: codes transposed in blocks that fit the first-level cache.
#include "cpu/rows.h"

namespace lowprec {
namespace {

constexpr int64_t SIDE = 64;

template <typename Code>
LOWPREC_CLONES void turn_block(const Code* in, int64_t rows, int64_t columns, Code* out, int64_t m, int64_t n) {
  for (int64_t j = 0; j < n; ++j) {
    for (int64_t i = 0; i < m; ++i) out[j * rows + i] = in[i * columns + j];
  }
}

template <typename Code>
void transpose_blocks(const Tensor& source, const Tensor& transposed) {
  const int64_t rows = source.size(0), columns = source.size(1);
  const Code* in = data_of<Code>(source);
  Code* out = mutable_data_of<Code>(transposed);
  for_rows((columns + SIDE - 1) / SIDE, rows * SIDE, [&](int64_t first, int64_t last) {
    for (int64_t c = first * SIDE; c < std::min(last * SIDE, columns); c += SIDE) {
      for (int64_t r = 0; r < rows; r += SIDE) {
        turn_block(in + r * columns + c, rows, columns, out + c * rows + r, std::min(SIDE, rows - r),
                   std::min(SIDE, columns - c));
      }
    }
  });
}

Tensor transpose(const Tensor& codes) {
  const Tensor source = dense(codes);
  const Tensor transposed = empty_like_device(codes, {codes.size(1), codes.size(0)}, codes.scalar_type());
  const size_t bytes = codes.element_size();
  STD_TORCH_CHECK(bytes <= 4, "transpose takes codes of one, two or four bytes");
  (bytes == 1 ? transpose_blocks<uint8_t> : bytes == 2 ? transpose_blocks<uint16_t> : transpose_blocks<uint32_t>)(source, transposed);
  return transposed;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(lowprec, CPU, m) { m.impl("transpose", TORCH_BOX(&transpose)); }

}  // namespace lowprec
