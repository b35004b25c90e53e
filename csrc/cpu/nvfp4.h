// Scales of NVFP4 (ops/reference.py quantize_nvfp4_by).
#pragma once

#include "cpu/rows.h"

namespace lowprec {

struct BlockScale {
  float scale;
  uint8_t code;
};

// Outer scale from an amax; reach: the value to which the amax is scaled, 6 times the largest block scale.
inline float outer_scale(float top, double reach) {
  const float share = static_cast<float>(static_cast<double>(top) / reach);
  return share < 0x1p-117f ? 0x1p-117f : share;
}

// Code of a block scale relative to the outer scale, at least the smallest, because zero would flush the block.
inline uint8_t block_code(float wanted) { return encode<Format::E4M3>(wanted < 0x1p-9f ? 0x1p-9f : wanted); }

inline BlockScale block_scale(float amax, float outer, double headroom) {
  const float share = static_cast<float>(static_cast<double>(amax) / (6.0 * headroom));
  uint8_t code = block_code(divide(share, outer));
  float scale = decode<Format::E4M3>(code) * outer;
  if (headroom < 1.0 && divide(amax, scale) > 6.0f && decode<Format::E4M3>(code) < 448.0f) {
    scale = decode<Format::E4M3>(++code) * outer;
  }
  return {amax == 0.0f ? 1.0f : scale, code};
}

}  // namespace lowprec
