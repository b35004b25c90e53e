// The general quantiser, for kernels that do not support a tiling.
#pragma once

#include "cuda/launch.h"

namespace lowprec {

std::tuple<Tensor, Tensor> quantize(const Tensor& x, std::string format, std::vector<int64_t> tile, std::string rule,
                                    double headroom, int64_t span, std::string rounding, std::optional<Tensor> seed,
                                    std::optional<Tensor> origin);

// Rounds x to nearest with one scale from `amax` (FP32), the amax of a tensor of which x may be a part.
std::tuple<Tensor, Tensor> quantize_whole(const Tensor& x, const Tensor& amax, std::string format, std::string rule,
                                          double headroom);

}  // namespace lowprec
