// Block exponents multiplied into the carrier: code * 2^(e_block - e_row + top), a scale per row (ops/reference.py).
#pragma once

#include "cpu/rows.h"

namespace lowprec {

// Exponent of a row's largest block in a carrier.
int fold_top(Format carrier);

// shift[i] = power-of-two factor of block i; returns the scale of the row.
float fold_scales(const float* scale, int64_t n, int top, float* shift);

// Codes times their scales, rounded to BF16.
Tensor dequantize_bf16(const Tensor& codes, const Tensor& scale);

}  // namespace lowprec
