// transpose of codes, in blocks that fit the first-level cache.
#include "cpu/rows.h"

namespace lowprec {
namespace {

constexpr int64_t SIDE = 64;

LOWPREC_CLONES void transpose_block(const uint8_t* in, int64_t rows, int64_t columns, uint8_t* out, int64_t m, int64_t n) {
  for (int64_t j = 0; j < n; ++j) {
    for (int64_t i = 0; i < m; ++i) out[j * rows + i] = in[i * columns + j];
  }
}

Tensor transpose(const Tensor& codes, std::optional<Tensor>) {
  STD_TORCH_CHECK(codes.element_size() == 1, "transpose takes codes of one byte, not of ", codes.element_size());
  const Tensor source = dense(codes);
  const int64_t rows = rows_of(source), columns = source.size(1);
  const Tensor transposed = empty_like_device(codes, {columns, rows}, codes.scalar_type());
  const uint8_t* in = data_of<uint8_t>(source);
  uint8_t* out = mutable_data_of<uint8_t>(transposed);
  for_rows((columns + SIDE - 1) / SIDE, rows * SIDE, [&](int64_t first, int64_t last) {
    for (int64_t c = first * SIDE; c < std::min(last * SIDE, columns); c += SIDE) {
      for (int64_t r = 0; r < rows; r += SIDE) {
        transpose_block(in + r * columns + c, rows, columns, out + c * rows + r, std::min(SIDE, rows - r),
                        std::min(SIDE, columns - c));
      }
    }
  });
  return transposed;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(lowprec, CPU, m) { m.impl("transpose", TORCH_BOX(&transpose)); }

}  // namespace lowprec
