// Common functions of the rotating ops: random signs, and rows of a matrix (or its codes) or of its transpose.
#pragma once

#include "cpu/rows.h"

namespace lowprec {

// Random signs from the lowest random bits of row 0; all +1 without a seed.
std::vector<float> signs_of(const std::optional<Tensor>& seed, int64_t block);

void check_block(int64_t columns, int64_t block);
// For rotations in half precision.
void check_half_block(int64_t columns, int64_t block);

// Rows of x [m, k] or its transpose; with one scale or one per row, x is E4M3 codes, which are decoded to BF16.
class Decoded {
 public:
  // rounds: x has values, which are rounded to codes under the one scale.
  Decoded(const Tensor& x, const std::optional<Tensor>& scale, bool transpose, bool rounds = false);
  // Row r of x or its transpose, `columns` numbers.
  void row(int64_t r, int64_t columns, float* out) const;

 private:
  Source source_;
  std::vector<float> factors_, turned_;
  bool rounds_;
};

// Rows of x after rotation.
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
