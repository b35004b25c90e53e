// A thread's blocks of 16 with ladder scales (ops/ladder.py): the best of three rungs, carrier codes, sums of the row.
//
// Errors of candidates are computed in half precision, two elements per instruction, in the reference's order of
// summation; so are the FP32 sums of blocks. These are converted to integers, which are added in any order.
#pragma once

#include <cuda_fp16.h>

#include "cuda/rotate.h"
#include "numerics/ladder.h"

namespace lowprec {

#if defined(__CUDACC__)

__device__ __forceinline__ uint32_t block_amax(const float* v) {
  float most[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) most[i] = larger_size(v[i], v[i + 4]);
#pragma unroll
  for (int i = 8; i < LADDER_BLOCK; ++i) most[i & 3] = larger_size(most[i & 3], v[i]);
  return float_bits(larger_size(larger_size(most[0], most[1]), larger_size(most[2], most[3])));
}

__device__ __forceinline__ uint32_t bits_of_pair(__half2 pair) { return *reinterpret_cast<const uint32_t*>(&pair); }
__device__ __forceinline__ __half2 pair_of_bits(uint32_t bits) { return *reinterpret_cast<const __half2*>(&bits); }

// First rung of a block, by its exponent and the place of its mantissa; `lowest`: no rung below it is allowed.
struct BlockRung {
  int step, place;
  bool lowest;
};

// `first_rung` of numerics/ladder.h, but not below the row's floor. Mantissas of 6 L are 1.125, 1.5 and 1.875: the
// excess above 1.125 is divided into thirds of .375.
__device__ __forceinline__ BlockRung block_rung(uint32_t amax_bits, int floor) {
  const int over = static_cast<int>(amax_bits - 0x100001u), step = (over >> 23) - 129 - LADDER_LOW;
  const int place = static_cast<int>((static_cast<uint32_t>(over) >> 20 & 7u) * 11u >> 5);
  const bool under = step < floor;
  return {max(step, floor), under ? 0 : place, step < floor || (step == floor && place == 0)};
}

// Indexed by place: inverses of the rungs above, at and below in half precision, twice per word, and squares of their
// scales in units of 2^step. Indexed by `candidate`, the place plus 0 (below), 1 (at) or 2 (above): inverse and scale
// of the rung at step 0. The last words convert a binade's bits to 1.5 times the number whose last bit is a grid step:
// as constants, ptxas would move them to a register before each use.
struct LadderTables {
  uint4 inverses[3];
  float4 weights[3];
  uint4 rungs[5];
};

constexpr uint32_t LIFT = 0x0b400000u, LIFT_OF_PAIR = 0x26002600u;

// Called by a block's first threads; the caller adds a barrier.
__device__ __forceinline__ void make_ladder_tables(LadderTables& tables) {
  const int at = threadIdx.x;
  if (at < 3) {
    const int up = at == 2 ? 0 : at + 1, up_shift = at == 2, low = at == 0 ? 2 : at - 1, low_shift = at == 0 ? -1 : 0;
    const auto twice = [](int place, int shift) {
      const __half2 both = __float2half2_rn(inverse_times(place, shift));
      return *reinterpret_cast<const uint32_t*>(&both);
    };
    const float above = rung_times(up, up_shift), own = rung_times(at, 0), under = rung_times(low, low_shift);
    tables.inverses[at] = make_uint4(twice(up, up_shift), twice(at, 0), twice(low, low_shift), LIFT_OF_PAIR);
    tables.weights[at] = make_float4(above * above, own * own, under * under, 0.0f);
  }
  if (at < 5) {
    const int place = at == 0 ? 2 : at == 4 ? 0 : at - 1, shift = at == 0 ? -1 : at == 4;
    tables.rungs[at] = make_uint4(float_bits(inverse_times(place, shift)), float_bits(rung_times(place, shift)), LIFT, 0);
  }
}

// Sum of squared errors of eight pairs with a scale, in units of its square. factor: its inverse, twice.
template <bool clips>
__device__ __forceinline__ float squared_error(const __half2 (&size)[8], uint32_t factor, uint32_t lift) {
  const auto square = [&](__half2 value) {
    const __half2 place = __hmul2_rn(value, pair_of_bits(factor));
    const __half2 magic = pair_of_bits(__viaddmax_u16x2(bits_of_pair(place) & 0x7c007c00u, lift, 0x3c003c00u + LIFT_OF_PAIR));
    __half2 rounded = __hsub2_rn(__hadd2_rn(place, magic), magic);
    if constexpr (clips) rounded = __hmin2(rounded, __float2half2_rn(6.0f));
    const __half2 off = __hsub2_rn(rounded, place);
    return __hmul2_rn(off, off);
  };
  __half2 part[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const __half2 first = __hadd2_rn(square(size[i]), square(size[i + 4]));
    part[i] = __hadd2_rn(first, __hadd2_rn(square(size[i + 2]), square(size[i + 6])));
  }
  const __half2 sum = __hadd2_rn(part[0], part[1]);
  return __half2float(__hadd_rn(__low2half(sum), __high2half(sum)));
}

// The candidate with the least error: 2 + place, 1 + place or place.
__device__ __forceinline__ int chosen_candidate(const float* v, const BlockRung& rung, const LadderTables& tables) {
  const float unit = exp2_int(-(rung.step + LADDER_LOW));
  __half2 size[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) size[i] = __floats2half2_rn(fabsf(v[2 * i]) * unit, fabsf(v[2 * i + 1]) * unit);
  const uint4 inverse = tables.inverses[rung.place];
  const float4 weight = tables.weights[rung.place];
  float least = squared_error<false>(size, inverse.x, inverse.w) * weight.x;
  int found = rung.place + 2;
  float error = squared_error<false>(size, inverse.y, inverse.w) * weight.y;
  if (error < least) least = error, found = rung.place + 1;
  error = squared_error<true>(size, inverse.z, inverse.w) * weight.z;
  return !rung.lowest && error < least ? rung.place : found;
}

struct RowSums {
  int64_t own = 0, made = 0;
};

// |v| rounded to the nearest value of E2M1's grid, ties to even, at most 6.
__device__ __forceinline__ float size_on_grid(float v, uint32_t lift) {
  const float size = fminf(fabsf(v), 6.0f);
  const float magic = bits_float(__viaddmax_u32(float_bits(size) & INFINITE, lift, 0x3f800000u + LIFT));
  return (size + magic) - magic;
}

// Carrier codes of a block of 16, four per word, and its contribution to the row's sums.
template <bool corrected>
__device__ __forceinline__ void emit_block(const float* v, uint32_t amax_bits, const LadderRow& row, bool chooses,
                                           const LadderTables& tables, uint32_t* words, RowSums& sums) {
  const BlockRung rung = block_rung(amax_bits, row.floor);
  const uint4 of = tables.rungs[chooses ? chosen_candidate(v, rung, tables) : rung.place + 1];
  const float inverse = bits_float(of.x - (static_cast<uint32_t>(rung.step + LADDER_LOW) << 23));
  float shift = bits_float(of.y + (static_cast<uint32_t>(rung.step - row.step + LADDER_TOP) << 23));
  if (row.lost) shift = bits_float(0x7fc00000u);
  const float unit = exp2_int(-(row.step + LADDER_LOW));
  float own[4], made[4];  // sums by halving: of elements 4 apart
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    float square[2][4], product[2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int w = part + 2 * half;
      float carrier[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float x = v[4 * w + i], size = size_on_grid(x * inverse, of.z) * shift, in_units = fabsf(x) * unit;
        carrier[i] = with_sign(size, x);
        square[half][i] = in_units * in_units;
        product[half][i] = in_units * size;
      }
      const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(carrier[0], carrier[1]), __NV_SATFINITE, __NV_E4M3);
      const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(carrier[2], carrier[3]), __NV_SATFINITE, __NV_E4M3);
      words[w] = low | high << 16;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float squares = square[0][i] + square[1][i], products = product[0][i] + product[1][i];
      own[i] = part == 0 ? squares : own[i] + squares;
      made[i] = part == 0 ? products : made[i] + products;
    }
  }
  if constexpr (corrected) {
    sums.own += __float2ll_rz(((own[0] + own[2]) + (own[1] + own[3])) * SUM_UNITS);
    sums.made += __float2ll_rz(((made[0] + made[2]) + (made[1] + made[3])) * (SUM_UNITS * exp2_int(-LADDER_TOP)));
  }
}

// Sum over a warp, in every lane: by parts of 24 bits, so that the sum of 32 fits a word.
__device__ __forceinline__ int64_t warp_sum(int64_t value) {
  const uint32_t low = __reduce_add_sync(0xffffffffu, static_cast<uint32_t>(value & 0xffffff));
  const uint32_t high = __reduce_add_sync(0xffffffffu, static_cast<uint32_t>(value >> 24));
  return static_cast<int64_t>(high) * (1 << 24) + low;
}

#endif

}  // namespace lowprec
