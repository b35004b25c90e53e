// Block exponents moved into the carrier: code * 2^(e_block - e_row + top), one scale a row (ops/reference.py fold).
#pragma once

#include "cpu/rows.h"

namespace lowprec {

// The exponent that a row's largest block takes in a carrier.
int fold_top(Format carrier);

// shift[i] = the power of two of block i; returns the row's scale.
float fold_scales(const float* scale, int64_t n, int top, float* shift);

// Codes times their scales, rounded to BF16.
Tensor dequantize_bf16(const Tensor& codes, const Tensor& scale);

}  // namespace lowprec
