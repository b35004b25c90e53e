// The general quantiser, for kernels that hand a rare tiling over to it.
#pragma once

#include "cuda/launch.h"

namespace lowprec {

std::tuple<Tensor, Tensor> quantize(const Tensor& x, std::string format, std::vector<int64_t> tile, std::string rule,
                                    double headroom, int64_t span, std::string rounding, std::optional<Tensor> seed,
                                    std::optional<Tensor> origin);

// One scale for everything, to nearest, from amax (FP32) that was left: x may be a part of what it is of.
std::tuple<Tensor, Tensor> quantize_whole(const Tensor& x, const Tensor& amax, std::string format, std::string rule,
                                          double headroom);

}  // namespace lowprec
