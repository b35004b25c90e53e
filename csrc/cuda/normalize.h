// What ops do with the result of an RMSNorm, of which they have the input x [m, k], BF16 or FP32, its rates [m] and its
// weight [k], FP32 and dense (ops/reference.py normalized).
#pragma once

#include "cuda/launch.h"

namespace lowprec {

// The result, in the dtype of x.
Tensor normalized(const Tensor& x, const Tensor& rate, const Tensor& weight);

// E4M3 codes of the result to nearest, under one scale from its amax, in one kernel; `norm_fits`: where that exists.
bool norm_fits(const Tensor& x, const Tensor& weight);
std::tuple<Tensor, Tensor> quantize_norm(const Tensor& x, const Tensor& rate, const Tensor& weight, const Tensor& amax,
                                         const std::string& rule, double headroom);

}  // namespace lowprec
