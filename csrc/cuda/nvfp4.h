// What the kernels of NVFP4 share: scales of the outer tile and of blocks, codes of eight values.
#pragma once

#include "cuda/vectors.h"

namespace lowprec {

#if defined(__CUDACC__)

struct Draw {
  const int64_t* seed;  // null: to nearest
  const int64_t* origin;
};

// limit: 6 * headroom; `exact` where FP32 holds it.
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

// Of the largest magnitude that it serves; reach: what that becomes, 6 times the largest block scale.
__device__ __forceinline__ float outer_scale(float top, float reach) {
  const float share = divide(top, reach);
  return share < 0x1p-117f ? 0x1p-117f : share;
}

// The code of a block's scale in units of the outer one; of zero, which would lose the block, the smallest.
__device__ __forceinline__ uint8_t block_code(float wanted) {
  return encode<Format::E4M3>(wanted < 0x1p-9f ? 0x1p-9f : wanted);
}

__device__ __forceinline__ Block block_of(float amax, float tensor_scale, const HeadRoom& room) {
  const float share = room.exact ? divide(amax, static_cast<float>(room.limit))
                                 : static_cast<float>(static_cast<double>(amax) / room.limit);
  uint8_t code = block_code(divide(share, tensor_scale));
  float stored = decode<Format::E4M3>(code), scale = stored * tensor_scale;
  if (room.raises && divide(amax, scale) > 6.0f && stored < 448.0f) scale = decode<Format::E4M3>(++code) * tensor_scale;
  if (amax == 0.0f) scale = 1.0f;
  return {{scale, divide(1.0f, scale)}, code};
}

// inverse: that of the values' scale; 0 where they differ in it.
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

struct Outputs {
  uint8_t *codes, *block;
  float *scale, *tensor_scale;
};

__device__ __forceinline__ void leave(const Outputs& to, int64_t tile, float scale, uint8_t code) {
  to.scale[tile] = scale;
  to.block[tile] = code;
}

// Codes under scales that are there: a thread takes eight elements of a row. x is 16-byte aligned.
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
