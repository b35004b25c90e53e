// The general quantiser, for kernels that hand a rare tiling over to it.
#pragma once

#include "cuda/launch.h"

namespace lowprec {

std::tuple<Tensor, Tensor> quantize(const Tensor& x, std::string format, std::vector<int64_t> tile, std::string rule,
                                    double headroom, int64_t span, std::optional<Tensor> seed,
                                    std::optional<Tensor> origin);

}  // namespace lowprec
