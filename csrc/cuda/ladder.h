// A thread's blocks of 16 with ladder scales (ops/ladder.py): the best of four rungs, carrier codes, sums of the row.
//
// All arithmetic of a block is in half precision, two elements per instruction, in the reference's order. Sums of blocks
// are converted to integers, which are added in any order.
#pragma once

#include "cuda/rotate_half.h"

namespace lowprec {

#if defined(__CUDACC__)

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

// tries, weights: by the place of the first rung. Inverses of the rungs above, at and below it in half precision, twice
// per word; factors of their errors: their scales in units of 2^step, squared for squared errors.
// chosen: by `candidate`, the place plus 0 (below) to 3 (two above). The inverse and the scale in half precision, twice
// per word, and the scale in FP32; all at step 0.
struct LadderTables {
  uint4 tries[3];
  float4 weights[3];
  uint4 chosen[6];
};

// Called by a block's first threads; the caller adds a barrier.
template <Candidates by = Candidates::MSE>
__device__ __forceinline__ void make_ladder_tables(LadderTables& tables) {
  const int at = threadIdx.x;
  const auto twice = [](float value) { return bits_of_pair(__float2half2_rn(value)); };
  if (at < 6) {
    const int place = (at + 2) % 3, shift = (at + 2) / 3 - 1;
    const float scale = rung_times(place, shift);
    tables.chosen[at] = make_uint4(twice(inverse_times(place, shift)), twice(scale), float_bits(scale), 0);
  }
  if (at < 3) {
    const auto inverse = [&](int candidate) { return twice(inverse_times((candidate + 2) % 3, (candidate + 2) / 3 - 1)); };
    const auto weight = [](int candidate) {
      const float scale = rung_times((candidate + 2) % 3, (candidate + 2) / 3 - 1);
      return by == Candidates::MSE ? scale * scale : scale;
    };
    tables.tries[at] = make_uint4(inverse(at + 2), inverse(at + 1), inverse(at), 0);
    tables.weights[at] = make_float4(weight(at + 2), weight(at + 1), weight(at), 0.0f);
  }
}

// Two numbers rounded to the grid of E2M1 without a limit, ties to even; on a grid `wide` times as wide, 1 or 2. With
// m the larger of |v| and 1.5, the last bit of 512 m is a step of the grid, and 512 m an even number of steps where v is
// a tie. v - 512 m, rounded, loses what is below a step. Zeros are positive.
template <int wide = 1>
__device__ __forceinline__ __half2 on_grid(__half2 v) {
  const __half2 m = larger_halves_signed(v, __float2half2_rn(1.5f * wide));
  return __hfma2(m, __float2half2_rn(512.0f), __hfma2(m, __float2half2_rn(-512.0f), v));
}

// E2M1 values of two numbers v in units of 2^step, from the inverse of a rung.
__device__ __forceinline__ __half2 e2m1_pair(__half2 v, uint32_t inverse) {
  return smaller_halves(on_grid(__hmul2_rn(v, pair_of_bits(inverse))), __float2half2_rn(6.0f));
}

// E4M3 codes of two numbers, in the lower half of a word.
__device__ __forceinline__ uint32_t code_pair(__half2 value) {
  return __nv_cvt_halfraw2_to_fp8x2(value, __NV_SATFINITE, __NV_E4M3);
}

// Sum of products over a block: along even and odd elements, then both.
struct Chain {
  __half2 total = __float2half2_rn(0.0f);
  __device__ __forceinline__ void add(__half2 a, __half2 b) { total = __hfma2(a, b, total); }
  __device__ __forceinline__ float sum() const { return __half2float(__hadd_rn(__low2half(total), __high2half(total))); }
};

// Error of a block: the sum of squares or of magnitudes, or the largest magnitude.
template <Candidates by>
struct BlockError {
  Chain of;
  __device__ __forceinline__ void add(__half2 off) {
    if constexpr (by == Candidates::MSE) of.add(off, off);
    else if constexpr (by == Candidates::MAE) of.total = __hadd2_rn(of.total, __habs2(off));
    else of.total = __hmax2_nan(of.total, __habs2(off));
  }
  __device__ __forceinline__ float value() const {
    if constexpr (by != Candidates::MAX) return of.sum();
    else return __half2float(__hmax_nan(__low2half(of.total), __high2half(of.total)));
  }
};

// The candidate with the least error: the rung's place plus 0 (the rung below) to 3 (two above); without a choice the
// rung itself. v[i]: pair i of a block.
template <Candidates by, typename Values>
__device__ __forceinline__ int chosen_candidate(const Values& v, int pairs, const BlockRung& rung,
                                                const LadderTables& tables) {
  if constexpr (by == Candidates::NONE) return rung.place + 1;
  const uint4 inverse = tables.tries[rung.place];
  const float4 weight = tables.weights[rung.place];
  const __half2 six = __float2half2_rn(6.0f);
  BlockError<by> below, own, above, twice;
#pragma unroll 8
  for (int i = 0; i < pairs; ++i) {
    const __half2 each = v[i];
    const auto off_of = [&](uint32_t factor) {
      const __half2 value = __hmul2_rn(each, pair_of_bits(factor));
      return __hsub2_rn(on_grid(value), value);
    };
    above.add(off_of(inverse.x)), own.add(off_of(inverse.y));
    const __half2 value = __hmul2_rn(each, pair_of_bits(inverse.z));
    below.add(__hsub2_rn(smaller_halves(on_grid(value), six), value));
    twice.add(__hsub2_rn(on_grid<2>(value), value));
  }
  float least = twice.value() * weight.z;
  int found = rung.place + 3;
  float error = above.value() * weight.x;
  if (error < least) least = error, found = rung.place + 2;
  error = own.value() * weight.y;
  if (error < least) least = error, found = rung.place + 1;
  error = below.value() * weight.z;
  return !rung.lowest && error < least ? rung.place : found;
}

// A thread's part of a row's sums, in units of 2^-16: up to eight blocks fit.
struct RowSums {
  int own = 0, made = 0;
};

// Carrier codes of a block, four per word, and its contribution to the row's sums. v: in units of 2^step.
template <bool corrected, Candidates by = Candidates::MSE>
__device__ __forceinline__ void emit_block(const __half2 (&v)[8], const BlockRung& rung, const LadderRow& row,
                                           const LadderTables& tables, uint32_t* words, RowSums& sums) {
  const uint4 of = tables.chosen[chosen_candidate<by>(v, LADDER_BLOCK / 2, rung, tables)];
  const int down = rung.step - row.step;  // -11 to 0
  uint32_t shift = of.y + static_cast<uint32_t>(down + LADDER_TOP) * 0x04000400u;
  if (row.lost) shift = 0x7e007e00u;
  Chain own, made;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    uint32_t codes[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const __half2 each = v[2 * w + i], code = e2m1_pair(each, of.x);
      if constexpr (corrected) own.add(each, each), made.add(each, code);
      codes[i] = code_pair(__hmul2_rn(code, pair_of_bits(shift)));
    }
    words[w] = codes[0] | codes[1] << 16;
  }
  if constexpr (corrected) {
    const float units = SUM_UNITS * exp2_int(2 * down);
    sums.own += __float2int_rz(own.sum() * units);
    sums.made += __float2int_rz(made.sum() * (units * bits_float(of.z)));
  }
}

// The blocks of a thread, two at a time: put(number, codes of 32 elements).
template <bool corrected, int held, typename Values, typename Put>
__device__ __forceinline__ void emit_blocks(const Values& values, const uint32_t (&amax)[held / LADDER_BLOCK],
                                            const LadderRow& row, const LadderTables& tables, RowSums& sums, Put&& put) {
#pragma unroll
  for (int n = 0; n < held / LADDER_BLOCK / 2; ++n) {
    uint32_t words[LADDER_BLOCK / 2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int b = 2 * n + half;
      const BlockRung rung = block_rung(amax[b], row.floor);
      __half2 v[LADDER_BLOCK / 2];
      values.scaled(b, rung.step + LADDER_LOW, v);
      emit_block<corrected>(v, rung, row, tables, words + half * (LADDER_BLOCK / 4), sums);
    }
    put(n, words);
  }
}

// Sum over a warp, in every lane: by halves, so that each sum of 32 fits a word.
__device__ __forceinline__ int64_t warp_sum(int value) {
  const uint32_t low = __reduce_add_sync(0xffffffffu, static_cast<uint32_t>(value) & 0xffffu);
  const uint32_t high = __reduce_add_sync(0xffffffffu, static_cast<uint32_t>(value) >> 16);
  return static_cast<int64_t>(high) * (1 << 16) + low;
}

#endif

}  // namespace lowprec
