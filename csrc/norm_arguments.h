// Checks of the arguments of ops that normalise x first (ops/reference.py normalized), for C++ and CUDA.
#pragma once

#include "binding.h"

namespace lowprec {

// Whether x is the input of an RMSNorm, with a rate per row and a weight per column.
inline bool has_norm(const Tensor& x, const std::optional<Tensor>& rate, const std::optional<Tensor>& weight) {
  if (!rate.has_value() && !weight.has_value()) return false;
  const ScalarType type = x.scalar_type();
  STD_TORCH_CHECK(rate.has_value() && weight.has_value(), "a norm has a rate and a weight, both");
  STD_TORCH_CHECK(type == ScalarType::BFloat16 || type == ScalarType::Float, "the input of a norm is BF16 or FP32");
  STD_TORCH_CHECK(rate->numel() == x.size(0) && weight->numel() == x.size(1), "[", x.size(0), ", ", x.size(1),
                  "] values take a rate per row and a weight per column, not ", rate->numel(), " and ", weight->numel());
  return true;
}

}  // namespace lowprec
