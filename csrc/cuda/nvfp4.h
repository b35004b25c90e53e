// Common functions of the NVFP4 kernels: outer scales and block scales, codes of eight values.
#pragma once

#include <cuda_bf16.h>

#include "cuda/lines.h"

namespace lowprec {

#if defined(__CUDACC__)

struct Draw {
  const int64_t* seed;  // null: round to nearest
  const int64_t* origin;
};

// limit: 6 * headroom; `exact`: FP32 represents it.
struct HeadRoom {
  double limit;
  bool exact, raises;
};

inline HeadRoom head_room(double headroom) {
  const double limit = 6.0 * headroom;
  return {limit, static_cast<double>(static_cast<float>(limit)) == limit, headroom < 1.0};
}

struct Block {
  TileScale of;
  uint8_t code;
};

// Outer scale from an amax; reach: the value to which the amax is scaled, 6 times the largest block scale.
__device__ __forceinline__ float outer_scale(float top, float reach) {
  const float share = divide(top, reach);
  return share < 0x1p-117f ? 0x1p-117f : share;
}

// Code of a block scale relative to the outer scale, at least the smallest, because zero would flush the block.
__device__ __forceinline__ uint8_t block_code(float wanted) {
  return e4m3_code(wanted < 0x1p-9f ? 0x1p-9f : wanted);
}

__device__ __forceinline__ Block block_of(float amax, float tensor_scale, const HeadRoom& room) {
  const float share = room.exact ? divide(amax, static_cast<float>(room.limit))
                                 : static_cast<float>(static_cast<double>(amax) / room.limit);
  uint8_t code = block_code(divide(share, tensor_scale));
  float stored = e4m3_value(code), scale = stored * tensor_scale;
  if (room.raises && divide(amax, scale) > 6.0f && stored < 448.0f) scale = e4m3_value(++code) * tensor_scale;
  if (amax == 0.0f) scale = 1.0f;
  return {{scale, divide(1.0f, scale)}, code};
}

// inverse: that of the values' scale; 0 if they have different scales.
template <bool random>
__device__ __forceinline__ Codes<Format::E2M1> coded(const float (&v)[VECTOR], float inverse, const Draw& draw,
                                                     int64_t row, int64_t column) {
  Codes<Format::E2M1> codes;
  if constexpr (random) {
    const int64_t first = draw.origin == nullptr ? 0 : draw.origin[0];
    const int64_t group = draw.origin == nullptr ? 0 : draw.origin[1] >> 3;
    codes.encode_random(v, random_words(static_cast<uint64_t>(*draw.seed), row + first, (column >> 3) + group));
  } else {
    codes.encode_nearest(v, inverse);
  }
  return codes;
}

// Outputs: codes, their scales and codes of block scales; or `values`, dequantised codes without the outer scale.
struct Outputs {
  uint8_t *codes, *block;
  float *scale, *tensor_scale;
  uint16_t* values;
};

__device__ __forceinline__ void leave(const Outputs& to, int64_t tile, float scale, uint8_t code) {
  to.scale[tile] = scale;
  to.block[tile] = code;
}
// Writes a block of 16. stored: the code of its scale.
__device__ __forceinline__ void leave_line(const Outputs& to, int64_t line, float scale, uint8_t stored,
                                           const uint32_t (&words)[LINE / 4]) {
  if (to.values == nullptr) {
    reinterpret_cast<uint4*>(to.codes)[line] = make_uint4(words[0], words[1], words[2], words[3]);
    return leave(to, line, scale, stored);
  }
  const __half2 by = __half2half2(__half(__nv_cvt_fp8_to_halfraw(stored, __NV_E4M3)));
  uint32_t made[LINE / 2];
#pragma unroll
  for (int i = 0; i < LINE / 2; ++i) {  // FP16 and BF16 represent products of E2M1 and E4M3
    const uint32_t pair = words[i >> 1] >> (16 * (i & 1)) & 0xffffu;
    const __half2 codes = __half2(__nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(pair), __NV_E4M3));
    const float2 v = __half22float2(__hmul2_rn(codes, by));
    const __nv_bfloat162 both = __floats2bfloat162_rn(v.x, v.y);
    made[i] = *reinterpret_cast<const uint32_t*>(&both);
  }
  uint4* out = reinterpret_cast<uint4*>(to.values + line * LINE);
  out[0] = make_uint4(made[0], made[1], made[2], made[3]);
  out[1] = make_uint4(made[4], made[5], made[6], made[7]);
}

// Codes with given scales: eight elements of a row per thread. x is aligned to 16 bytes.
template <typename In, bool random>
static __global__ void __launch_bounds__(256)
    nvfp4_codes(const In* __restrict__ x, const float* __restrict__ scale, uint8_t* __restrict__ codes, int64_t rows,
                int64_t columns, Tile tile, Draw draw) {
  const int64_t vectors = (columns + VECTOR - 1) / VECTOR;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (index >= rows * vectors) return;
  const int64_t row = index / vectors, column = index % vectors * VECTOR;
  const int some = static_cast<int>(min(columns - column, int64_t{VECTOR}));
  Vector<In> held;
  const bool whole = columns % VECTOR == 0;
  if (whole) held.load(x + row * columns + column);
  else held.load_some(x + row * columns + column, some);
  const float* of_tile = scale + row / tile.rows * (columns / tile.columns) + column / tile.columns;
  float v[VECTOR];
  if (whole && tile.columns % VECTOR == 0) {  // one scale
    const TileScale of{*of_tile, divide(1.0f, *of_tile)};
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) v[i] = held[i];
    over_scale(v, of, true);
    return coded<random>(v, of.inverse, draw, row, column).store_all(codes + row * columns + column);
  }
  int64_t left = tile.columns - column % tile.columns;
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) {
    v[i] = i < some ? divide(held[i], *of_tile) : 0.0f;
    if (--left == 0) {
      ++of_tile;
      left = tile.columns;
    }
  }
  coded<random>(v, 0.0f, draw, row, column).store_some(codes + row * columns + column, some);
}

#endif

}  // namespace lowprec
