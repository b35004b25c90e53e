// Checks of the arguments of ladder ops (ops/ladder.py), for C++ and CUDA.
#pragma once

#include "binding.h"

namespace lowprec {

// Checks for scales [rows, tiles] of codes [rows, columns], and one number per row.
inline void check_scales(const Tensor& codes, const Tensor& scale, const Tensor& row) {
  const int64_t rows = rows_of(codes), columns = codes.size(1);
  STD_TORCH_CHECK(scale.dim() == 2 && scale.size(0) == rows && scale.size(1) > 0 && columns % scale.size(1) == 0,
                  "scales of ", rows, " x ", columns, " codes are [", rows, ", a divisor of ", columns, "], not ",
                  scale.numel(), " numbers in ", scale.size(0), " rows");
  STD_TORCH_CHECK(row.numel() == rows, rows, " rows have as many scales, not ", row.numel());
}

inline void check_tops(const std::optional<Tensor>& given, int64_t rows) {
  STD_TORCH_CHECK(!given.has_value() || given->numel() == rows, rows, " rows take one number each, not ",
                  given.has_value() ? given->numel() : 0);
}

inline void check_sums(const Tensor& x, const Tensor& codes, const Tensor& scale, const Tensor& row) {
  check_scales(codes, scale, row);
  STD_TORCH_CHECK(x.size(0) == codes.size(0) && x.size(1) == codes.size(1), "codes of ", x.size(0), " x ", x.size(1),
                  " values, not ", codes.size(0), " x ", codes.size(1));
}

}  // namespace lowprec
