// The gradient of queries, keys and values before a rotary embedding (ops/rotary.py): its columns, and the step by step
// form, which supports every head size and dtype.
#pragma once

#include "cuda/launch.h"

namespace lowprec {

// queries: per key-value head, of which there are `groups`. tokens: of a sequence. columns: of the result.
struct RotaryShape {
  int64_t rows, columns, head, queries, groups, tokens;
};

// Checks the gradients [rows, heads x head] and the FP32 tables [tokens, head / 2] of cosines and sines.
RotaryShape rotary_shape(const Tensor& dq, const Tensor& dk, const Tensor& dv, const Tensor& cosines, const Tensor& sines);

Tensor rotary_backward(const Tensor& dq, const Tensor& dk, const Tensor& dv, const Tensor& cosines, const Tensor& sines);

}  // namespace lowprec
