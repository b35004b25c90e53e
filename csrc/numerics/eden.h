// MS-EDEN's scales (ops/eden.py): NVFP4 blocks of 16 that leave room for the factor of a group of 128, which is rounded
// into them stochastically.
#pragma once

#include "numerics/rounding.h"

namespace lowprec {

constexpr int EDEN_BLOCK = 16, EDEN_GROUP = 128;
constexpr double EDEN_SHARE = 17.0 / 16.0 * 0.93 / 6.0;  // of a block's largest magnitude, its scale
constexpr double EDEN_LARGEST = 255.99;                  // block scale

// Of the whole matrix, from its largest magnitude.
LOWPREC_HD float eden_outer(float top) {
  const float outer = static_cast<float>(static_cast<double>(top) * EDEN_SHARE / EDEN_LARGEST);
  return outer < 0x1p-117f ? 0x1p-117f : outer;
}

// b of a block, an E4M3 value.
LOWPREC_HD float eden_block(float amax, float outer) {
  const float wanted = divide(static_cast<float>(static_cast<double>(amax) * EDEN_SHARE), outer);
  return decode<Format::E4M3>(encode<Format::E4M3>(wanted < 0x1p-9f ? 0x1p-9f : wanted));
}

// c of a group from its sums.
LOWPREC_HD float eden_factor(float own, float made) { return made == 0.0f ? 1.0f : divide(own, made); }

// The code of b'. bits: uniform in [0, 65536).
LOWPREC_HD uint8_t eden_stored(float block, float factor, uint32_t bits) {
  return encode_stochastic<Format::E4M3>(block * factor, bits);
}

LOWPREC_HD float eden_scale(float amax, uint8_t stored, float outer) {
  return amax == 0.0f ? 1.0f : decode<Format::E4M3>(stored) * outer;
}

}  // namespace lowprec
