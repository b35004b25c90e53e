// Scales of MS-EDEN (ops/eden.py): NVFP4 block scales of 16 elements with room for the correction factor of a group of
// 128, which is multiplied in with stochastic rounding.
#pragma once

#include "numerics/rounding.h"

namespace lowprec {

constexpr int EDEN_BLOCK = 16, EDEN_GROUP = 128;
constexpr double EDEN_SHARE = 17.0 / 16.0 * 0.93 / 6.0;  // scale of a block / its largest magnitude
constexpr double EDEN_LARGEST = 255.99;                  // largest block scale

// Outer scale from the largest magnitude of the whole matrix.
LOWPREC_HD float eden_outer(float top) {
  const float outer = static_cast<float>(static_cast<double>(top) * EDEN_SHARE / EDEN_LARGEST);
  return outer < 0x1p-117f ? 0x1p-117f : outer;
}

// Block scale b, an E4M3 value.
LOWPREC_HD float eden_block(float amax, float outer) {
  const float wanted = divide(static_cast<float>(static_cast<double>(amax) * EDEN_SHARE), outer);
  return decode<Format::E4M3>(encode<Format::E4M3>(wanted < 0x1p-9f ? 0x1p-9f : wanted));
}

// Correction factor c of a group from its sums.
LOWPREC_HD float eden_factor(float own, float made) { return made == 0.0f ? 1.0f : divide(own, made); }

// Code of the corrected block scale b'. bits: uniform in [0, 65536).
LOWPREC_HD uint8_t eden_stored(float block, float factor, uint32_t bits) {
  return encode_stochastic<Format::E4M3>(block * factor, bits);
}

LOWPREC_HD float eden_scale(float amax, uint8_t stored, float outer) {
  return amax == 0.0f ? 1.0f : decode<Format::E4M3>(stored) * outer;
}

}  // namespace lowprec
