// SiLU and tanh-GELU with their derivatives, FP32 (ops/activations.py). Both are x times a sigmoid:
//
//     silu(x) = x s(x)        gelu(x) = x (1 + tanh u) / 2 = x s(2 u)        s(z) = 1 / (1 + 2^(-z log2 e))
//
// If 2^(-z log2 e) overflows, s = 0; if it underflows, s = 1. Rounding of the exponent costs |z| half steps of FP32
// where s is small. Results are not bit-exact: the device has its own exponential and reciprocal.
#pragma once

#include "numerics/platform.h"

namespace lowprec {

LOWPREC_HD float multiply_add(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return a * b + c;
#endif
}

// s(z) and s(-z).
struct Sigmoid {
  float open, shut;
};

// t = -z log2 e.
LOWPREC_HD Sigmoid sigmoid_of_power(float t) {
#if defined(__CUDA_ARCH__)
  float e, open;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(t));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(open) : "f"(1.0f + e));
#else
  const float e = std::exp2(t);
  const float open = 1.0f / (1.0f + e);
#endif
  return {open, t > 0.0f ? 1.0f - open : e * open};  // no cancellation, and never infinity times zero
}

constexpr double LOG2_E = 1.4426950408889634;
constexpr float POWER_OF_SILU = static_cast<float>(-LOG2_E);

LOWPREC_HD float silu(float x) { return x * sigmoid_of_power(x * POWER_OF_SILU).open; }

struct GatedGradients {
  float gate, up;
};

// Gradients of silu(gate) up.
LOWPREC_HD GatedGradients gated_silu_gradients(float dy, float gate, float up) {
  const Sigmoid s = sigmoid_of_power(gate * POWER_OF_SILU);
  return {dy * up * (s.open * multiply_add(gate, s.shut, 1.0f)), dy * (gate * s.open)};
}

constexpr double GELU_SLOPE = 2 * 0.7978845608028654;  // 2 sqrt(2 / pi)
constexpr double GELU_CUBIC = GELU_SLOPE * 0.044715;
constexpr float GELU_FLAT = 100.0f;  // limit of x^2, against overflow times zero: the sigmoid is 0 or 1 beyond

LOWPREC_HD float gelu_power(float x, float square) {
  return x * multiply_add(static_cast<float>(-LOG2_E * GELU_CUBIC), square, static_cast<float>(-LOG2_E * GELU_SLOPE));
}

LOWPREC_HD float tanh_gelu(float x) { return x * sigmoid_of_power(gelu_power(x, x * x)).open; }

LOWPREC_HD float tanh_gelu_gradient(float dy, float x) {
  const float whole = x * x, square = whole > GELU_FLAT ? GELU_FLAT : whole;
  const Sigmoid s = sigmoid_of_power(gelu_power(x, square));
  const float slope = multiply_add(static_cast<float>(3 * GELU_CUBIC), square, static_cast<float>(GELU_SLOPE));
  return dy * multiply_add(x * slope, s.open * s.shut, s.open);
}

}  // namespace lowprec
