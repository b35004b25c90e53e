// AdamW's update of one element in FP32, every operation rounded, in the order of ops/adamw.py `AdamWRule`.
#pragma once

#include "numerics/rounding.h"

namespace lowprec {

// Constants of a call, for all tensors.
struct AdamConstants {
  float share1;         // 1 - beta1
  float beta2, share2;  // 1 - beta2
  float eps;
  float twice1;         // 2 beta1
  float least1, most1;  // beta1 -+ (1 - beta1) / 64: of the old first moment, with a gradient of 1/64 of it
};

inline AdamConstants adam_constants(double beta1, double beta2, double eps) {
  return {static_cast<float>(1.0 - beta1), static_cast<float>(beta2), static_cast<float>(1.0 - beta2),
          static_cast<float>(eps), static_cast<float>(2.0 * beta1),
          static_cast<float>(beta1 - (1.0 - beta1) / 64), static_cast<float>(beta1 + (1.0 - beta1) / 64)};
}

// Constants of a tensor: lr / (1 - beta1^t), 1 - lr weight_decay, sqrt(1 - beta2^t), rounded from FP64.
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

// The new weight from the new moments.
LOWPREC_HD float next_weight(float w, float m, float v, const AdamConstants& of, const AdamRate& rate) {
  const float denominator = divide(square_root(v), rate.root) + of.eps;
  return w * rate.decay - divide(m * rate.step_size, denominator);
}

// Whether x is `old` after a step whose gradient is at most 1/64 of it, up to rounding (ops/codecs.py
// `by_decay_alone`).
LOWPREC_HD bool by_decay_alone(float x, float old, const AdamConstants& of) {
  const float now = bits_float(magnitude_bits(x)), size = bits_float(magnitude_bits(old));
  return now >= size * of.least1 && now <= size * of.most1 && float_bits(x) >> 31 == float_bits(old) >> 31;
}

// The code of a first moment x, rounded to nearest with `scale`, or the next one towards zero if rounding would keep it
// at or above `old` because the grid is coarse and the code is subnormal or there is hardly a gradient (ops/codecs.py
// `decaying`).
template <Format F>
LOWPREC_HD typename Grid<F>::Code decaying(typename Grid<F>::Code code, float x, float old, float scale,
                                           const AdamConstants& of) {
  using Code = typename Grid<F>::Code;
  const float size = bits_float(magnitude_bits(old));
  if (!(bits_float(magnitude_bits(x)) < size)) return code;
  const Code lower = static_cast<Code>(code - 1);  // unused for code zero, which is below `size`
  const float here = bits_float(magnitude_bits(decode<F>(code) * scale));
  const float below = bits_float(magnitude_bits(decode<F>(lower) * scale));
  if (!(here >= size && here + below <= size * of.twice1)) return code;
  constexpr int bits = 8 * sizeof(Code);
  const uint32_t steps = static_cast<uint32_t>(code) & ((1u << (bits - 1)) - 1u);
  return steps < 1u << Grid<F>::mantissa || by_decay_alone(x, old, of) ? lower : code;
}

// Largest code, without sign, that `decaying` may change: above it a step of the grid is less than 2 (1 - beta1) of the
// value. Codes below 2^(mantissa + 1) count steps; from there on a step is at most 2^-mantissa of the value.
template <Format F>
inline uint32_t slowest_code(double beta1) {
  const double decay = 2.0 * (1.0 - beta1) * (1.0 - 1e-6);
  return decay * (1 << Grid<F>::mantissa) <= 1.0 ? UINT32_MAX : static_cast<uint32_t>(1.0 / decay);
}

// g^2 / max(v^, eps^2), whose mean over a tensor is the square of the update's RMS (StableAdamW).
LOWPREC_HD float update_square(float g, float v, float correction2, float floor) {
  const float second = divide(v, correction2);
  return divide(g * g, second < floor ? floor : second);
}

}  // namespace lowprec
