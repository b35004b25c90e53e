// AdamW's update of one element in FP32, each operation rounded by itself, in the order of ops/updates.py `update`.
#pragma once

#include "numerics/platform.h"

namespace lowprec {

// What all tensors of a call share.
struct AdamConstants {
  float share1;         // 1 - beta1
  float beta2, share2;  // 1 - beta2
  float eps;
};

inline AdamConstants adam_constants(double beta1, double beta2, double eps) {
  return {static_cast<float>(1.0 - beta1), static_cast<float>(beta2), static_cast<float>(1.0 - beta2),
          static_cast<float>(eps)};
}

// What all elements of a tensor share: lr / (1 - beta1^t), 1 - lr weight_decay, sqrt(1 - beta2^t), rounded from FP64.
struct AdamRate {
  float step_size, decay, root;
};

LOWPREC_HD AdamRate adam_rate(double rate, double weight_decay, double correction1, double correction2) {
  AdamRate made;
  made.step_size = static_cast<float>(rate / correction1);
  made.decay = static_cast<float>(1.0 - rate * weight_decay);
#if defined(__CUDA_ARCH__)
  made.root = static_cast<float>(__dsqrt_rn(correction2));
#else
  made.root = static_cast<float>(std::sqrt(correction2));
#endif
  return made;
}

LOWPREC_HD float next_first(float m, float g, const AdamConstants& of) { return m + (g - m) * of.share1; }

LOWPREC_HD float next_second(float v, float g, const AdamConstants& of) { return v * of.beta2 + g * g * of.share2; }

// The weight from the new moments.
LOWPREC_HD float next_weight(float w, float m, float v, const AdamConstants& of, const AdamRate& rate) {
  const float denominator = divide(square_root(v), rate.root) + of.eps;
  return w * rate.decay - divide(m * rate.step_size, denominator);
}

// g^2 / max(v^, eps^2), whose mean over a tensor is the square of the update's RMS (StableAdamW).
LOWPREC_HD float update_square(float g, float v, float correction2, float floor) {
  const float second = divide(v, correction2);
  return divide(g * g, second < floor ? floor : second);
}

}  // namespace lowprec
