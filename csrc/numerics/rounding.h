// Rounding rules (ops/rounding.py), to nearest even or stochastic, and codes of the result. Values are clamped before
// they are rounded; NaN stays NaN.
#pragma once

#include "numerics/formats.h"

namespace lowprec {

// floor(log2 |x|); -127 for zeros and subnormals, 128 for Inf and NaN.
LOWPREC_HD int exponent(float x) { return static_cast<int>((float_bits(x) >> 23) & 255u) - 127; }

// 2^e for e in [-126, 127], exactly.
LOWPREC_HD float exp2_int(int e) { return bits_float(static_cast<uint32_t>(e + 127) << 23); }

// Exponent of the binade whose grid step applies to `v`.
template <Format F>
LOWPREC_HD int step_exponent(float v) {
  constexpr bool uniform = Grid<F>::low >= 0 && Grid<F>::max < static_cast<float>(2u << (Grid<F>::low & 31));
  if (uniform) return Grid<F>::low;
  constexpr int floor_exponent = Grid<F>::low > Grid<F>::mantissa - 125 ? Grid<F>::low : Grid<F>::mantissa - 125;
  const int e = exponent(v);
  return e > floor_exponent ? e : floor_exponent;
}

// Round a finite value in range to the nearest grid value, ties to even: the sum's last bit is one step, so it rounds.
template <Format F>
LOWPREC_HD float round_nearest(float v) {
  const float magic = exp2_int(step_exponent<F>(v) + (23 - Grid<F>::mantissa)) * 1.5f;
  return with_sign((v + magic) - magic, v);
}

// Round stochastically: up with a probability equal to the distance. bits: uniform in [0, 65536).
template <Format F>
LOWPREC_HD float round_stochastic(float v, uint32_t bits) {
  const int e = step_exponent<F>(v);
  const float steps = bits_float(magnitude_bits(v)) * exp2_int(Grid<F>::mantissa - e);
#if defined(__CUDA_ARCH__)
  float whole = floorf(steps);
#else
  float whole = std::floor(steps);
#endif
  whole += (steps - whole) * 65536.0f > static_cast<float>(bits) + 0.5f ? 1.0f : 0.0f;
  return with_sign(whole * exp2_int(e - Grid<F>::mantissa), v);
}

// torch.clamp(v, -limit, limit); NaN is kept.
LOWPREC_HD float clamp(float v, float limit) {
  const float low = v < -limit ? -limit : v;
  return low > limit ? limit : low;
}

// Bits of a value on the grid of E4M3 (which includes those of E2M1 and INT4) or E5M2; NaN keeps its sign.
template <int mantissa, int low>
LOWPREC_HD uint8_t fp8_bits(float v) {
  const uint32_t bits = float_bits(v), size = bits & MAGNITUDE;
  const uint32_t normal = (size >> (23 - mantissa)) - (static_cast<uint32_t>(low - 1 + 127) << mantissa);
  const uint32_t subnormal = static_cast<uint32_t>(bits_float(size) * exp2_int(mantissa - low));
  uint32_t code = size < (static_cast<uint32_t>(low + 127) << 23) ? subnormal : normal;
  code = size > INFINITE ? 0x7fu : size == INFINITE ? (mantissa == 3 ? 0x7fu : 0x7cu) : code;
  return static_cast<uint8_t>(code | (bits >> 24 & 0x80u));
}

LOWPREC_HD uint16_t bf16_bits(float v) {
  const uint32_t bits = float_bits(v);
  if ((bits & MAGNITUDE) > INFINITE) return 0x7fc0u;
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

LOWPREC_HD float bf16_value(uint16_t code) { return bits_float(static_cast<uint32_t>(code) << 16); }

// Requires |v| <= 65504, or NaN.
LOWPREC_HD uint16_t fp16_bits(float v) {
  const uint32_t sign = float_bits(v) >> 16 & 0x8000u;
  if (is_nan(v)) return static_cast<uint16_t>(sign | 0x7e00u);
  const float rounded = round_nearest<Format::FP16>(v);
  const uint32_t size = magnitude_bits(rounded);
  if (size >= (143u << 23)) return static_cast<uint16_t>(sign | 0x7c00u);
  const uint32_t subnormal = static_cast<uint32_t>(bits_float(size) * 0x1p24f);
  const uint32_t normal = (size >> 13) - (112u << 10);
  return static_cast<uint16_t>(sign | (size < (113u << 23) ? subnormal : normal));
}

LOWPREC_HD float fp16_value(uint16_t code) {
  const uint32_t sign = static_cast<uint32_t>(code & 0x8000u) << 16, size = code & 0x7fffu;
  if (size >= 0x7c00u) return bits_float(sign | INFINITE | (size & 0x3ffu) << 13);
  if (size < 0x400u) return with_sign(static_cast<float>(size) * 0x1p-24f, bits_float(sign));
  return bits_float(sign | ((size << 13) + (112u << 23)));
}

// The carrier code of a value that is on the format's grid, or NaN.
template <Format F>
LOWPREC_HD typename Grid<F>::Code store(float v) {
  if constexpr (F == Format::E5M2) {
    return fp8_bits<2, -14>(v);
  } else if constexpr (F == Format::E4M3 || F == Format::E2M1 || F == Format::INT4) {
    return fp8_bits<3, -6>(v);
  } else if constexpr (F == Format::INT8) {
    return is_nan(v) ? int8_t{0} : static_cast<int8_t>(v);
  } else if constexpr (F == Format::BF16) {
    return bf16_bits(v);
  } else if constexpr (F == Format::FP16) {
    return fp16_bits(v);
  } else {
    return v;
  }
}

// The code of a scaled value: clamped, then rounded to nearest even.
template <Format F>
LOWPREC_HD typename Grid<F>::Code encode(float v) {
  if constexpr (F == Format::FP32 || F == Format::BF16) {
    return store<F>(v);
  } else {
    v = clamp(v, Grid<F>::max);
    if constexpr (F == Format::FP16) return store<F>(v);
    return store<F>(is_finite(v) ? round_nearest<F>(v) : v);
  }
}

// Whether BF16 differs from v only in the 16 bits that it drops, which are then v's distance to its grid in steps of
// 2^-16: for smaller numbers round_stochastic has a coarser grid.
LOWPREC_HD bool drops_half(float v) { return magnitude_bits(v) - (9u << 23) < 246u << 23; }

// round_stochastic<Format::BF16> of a number for which that holds, as the upper half of the result.
LOWPREC_HD uint32_t bf16_stochastic(float v, uint32_t bits) { return float_bits(v) + (0xffffu - bits); }

template <Format F>
LOWPREC_HD typename Grid<F>::Code encode_stochastic(float v, uint32_t bits) {
  if constexpr (F == Format::FP32) {
    return v;
  } else {
    if constexpr (F == Format::BF16) {
      if (drops_half(v)) return static_cast<uint16_t>(bf16_stochastic(v, bits) >> 16);
    }
    if constexpr (F != Format::BF16) v = clamp(v, Grid<F>::max);
    return store<F>(is_finite(v) ? round_stochastic<F>(v, bits) : v);
  }
}

// The value of a code.
template <Format F>
LOWPREC_HD float decode(typename Grid<F>::Code code) {
  if constexpr (F == Format::E4M3 || F == Format::E2M1 || F == Format::INT4 || F == Format::E5M2) {
    constexpr int mantissa = F == Format::E5M2 ? 2 : 3, low = F == Format::E5M2 ? -14 : -6;
    const uint32_t size = code & 0x7fu, sign = static_cast<uint32_t>(code & 0x80u) << 24;
    const float subnormal = static_cast<float>(size) * exp2_int(low - mantissa);
    const uint32_t normal = (size << (23 - mantissa)) + (static_cast<uint32_t>(low - 1 + 127) << 23);
    uint32_t bits = size < (1u << mantissa) ? float_bits(subnormal) : normal;
    if (mantissa == 3 && size == 0x7fu) bits = 0x7fc00000u;
    if (mantissa == 2 && size >= 0x7cu) bits = size == 0x7cu ? INFINITE : 0x7fc00000u;
    return bits_float(bits | sign);
  } else if constexpr (F == Format::INT8) {
    return static_cast<float>(code);
  } else if constexpr (F == Format::BF16) {
    return bf16_value(code);
  } else if constexpr (F == Format::FP16) {
    return fp16_value(code);
  } else {
    return code;
  }
}

}  // namespace lowprec
