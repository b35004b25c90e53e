// What the rotating ops share: random signs, and rows of a matrix or of its transpose, decoded where they are codes.
#pragma once

#include "cpu/rows.h"

namespace lowprec {

// Random signs from the lowest bits of the draws of row 0; all +1 without a seed.
std::vector<float> signs_of(const std::optional<Tensor>& seed, int64_t block);

void check_block(int64_t columns, int64_t block);

// x [m, k], or E4M3 codes of it under one scale or one a row, which are decoded to BF16; as it lies or transposed.
class Decoded {
 public:
  Decoded(const Tensor& x, const std::optional<Tensor>& scale, bool transpose);
  // Row r of what was asked for, `columns` numbers.
  void row(int64_t r, int64_t columns, float* out) const;

 private:
  Source source_;
  std::vector<float> factors_, turned_;
};

// The rows of x, rotated.
class Rotated {
 public:
  Rotated(const Tensor& x, const std::optional<Tensor>& signs, int64_t rotation)
      : source_(source_of(x)), columns_(x.size(1)), rotation_(rotation), signs_(signs_of(signs, rotation)) {
    if (rotation != 0) check_block(columns_, rotation);
  }
  void row(int64_t r, float* out, float* spare) const {
    load(source_, r * columns_, columns_, out);
    if (rotation_ != 0) rotate_row(out, columns_, signs_.data(), rotation_, spare);
  }

 private:
  Source source_;
  int64_t columns_, rotation_;
  std::vector<float> signs_;
};

}  // namespace lowprec
