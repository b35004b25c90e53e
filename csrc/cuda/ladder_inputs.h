// Rows that rotate_fold_ladder rounds (ladder.cu): of a matrix, or of a gradient that is computed, written and rounded.
//
// chunks: 16-byte chunks in shared memory per thread and row. table: such chunks for all rows, which `prepare` fills; a
// barrier follows. fetch: starts copies of the warp's part of a row. take: the thread's elements in BF16.
#pragma once

#include "cuda/ladder_call.h"
#include "cuda/rotate_rows.h"
#include "numerics/activations.h"

namespace lowprec {

#if defined(__CUDACC__)

constexpr int ROW = 32;  // elements per thread

// A thread block has no table.
struct WithoutTable {
  LOWPREC_HD int table(int) const { return 0; }
  __device__ __forceinline__ void prepare(uint4*, int) const {}
};

// The thread's words to its part of a row, through the warp's stage.
__device__ __forceinline__ void write_row(const uint32_t (&pairs)[ROW / 2], Bf16* row, int columns, uint4* stage) {
  const int first = (threadIdx.x >> 5) * 32 * ROW;
  write_codes(pairs, stage, [&](int piece, const uint4& of) {  // a barrier follows before the stage is used again
    if (first + piece * 8 < columns) *reinterpret_cast<uint4*>(row + first + piece * 8) = of;
  });
}

// Rows of x in memory.
template <typename In>
struct StoredRows : WithoutTable {
  static constexpr int chunks = CHUNKS<In, ROW>;
  const In* x;

  __device__ __forceinline__ void fetch(int64_t row, int columns, uint4* to, const uint4*) const {
    lowprec::fetch<In, ROW>(x + row * columns, columns, to);
  }
  __device__ __forceinline__ void take(uint32_t (&pairs)[ROW / 2], int64_t row, int, uint4* stage, const uint4*,
                                       const LadderInput& how) const {
    take_pairs<In, ROW>(pairs, stage, sizeof(In) == 1 ? how.scale[row * how.scale_step] : 1.0f);
  }
};

// Rows of the result of an RMSNorm, from its input, its rates and its weight (ops/reference.py normalized).
struct NormRows {
  static constexpr int chunks = CHUNKS<Bf16, ROW>, each = ROW / 4;  // each: chunks of a thread's weights
  const Bf16* x;
  const float *rate, *weight;

  LOWPREC_HD int table(int columns) const { return (columns + 32 * ROW - 1) / (32 * ROW) * 32 * each; }

  // The weight, for each warp as its part of a row is.
  __device__ __forceinline__ void prepare(uint4* table, int columns) const {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
    for (int j = 0; j < each; ++j) {
      const int chunk = j * 32 + lane, column = warp * 32 * ROW + chunk * 4;
      uint4* to = table + warp * 32 * each + swizzled<each>(chunk / each, chunk % each);
      *to = column < columns ? *reinterpret_cast<const uint4*>(weight + column) : make_uint4(0, 0, 0, 0);
    }
  }
  __device__ __forceinline__ void fetch(int64_t row, int columns, uint4* to, const uint4*) const {
    lowprec::fetch<Bf16, ROW>(x + row * columns, columns, to);
  }
  __device__ __forceinline__ void take(uint32_t (&pairs)[ROW / 2], int64_t row, int, uint4* stage, const uint4* table,
                                       const LadderInput&) const {
    const float times = __ldg(rate + row);
    take_pairs<Bf16, ROW>(pairs, stage, 1.0f);
    table += (threadIdx.x >> 5) * 32 * each;
#pragma unroll
    for (int j = 0; j < each; ++j) {
      const uint4 by = table[swizzled<each>(threadIdx.x & 31, j)];
      const auto product = [&](uint32_t pair, uint32_t low, uint32_t high) {
        return bits_of_pair(__floats2bfloat162_rn(bits_float(pair << 16) * times * bits_float(low),
                                                  bits_float(pair & 0xffff0000u) * times * bits_float(high)));
      };
      pairs[2 * j] = product(pairs[2 * j], by.x, by.y);
      pairs[2 * j + 1] = product(pairs[2 * j + 1], by.z, by.w);
    }
  }
};

// Rows of the gradient of SwiGLU (gated.cu), computed here and written to dx. A pair of elements is one gate and one up.
// Codes of a row may be written over its dy, which a warp has read for the same bytes.
struct GatedRows : WithoutTable {
  static constexpr int own = CHUNKS<Bf16, ROW>, chunks = own + CHUNKS<Bf16, ROW / 2>;
  const Bf16 *dy, *gate_up;
  Bf16* dx;

  __device__ __forceinline__ void fetch(int64_t row, int columns, uint4* to, const uint4*) const {
    lowprec::fetch<Bf16, ROW>(gate_up + row * columns, columns, to);
    lowprec::fetch<Bf16, ROW / 2>(dy + row * (columns / 2), columns / 2, to + 32 * own);
  }
  __device__ __forceinline__ void take(uint32_t (&pairs)[ROW / 2], int64_t row, int columns, uint4* stage,
                                       const uint4*, const LadderInput&) const {
    uint32_t upstream[ROW / 4];
    take_pairs<Bf16, ROW>(pairs, stage, 1.0f);
    take_pairs<Bf16, ROW / 2>(upstream, stage + 32 * own, 1.0f);
#pragma unroll
    for (int i = 0; i < ROW / 2; ++i) {
      const float of = bits_float(i % 2 ? upstream[i / 2] & 0xffff0000u : upstream[i / 2] << 16);
      const GatedGradients g = gated_silu_gradients(of, bits_float(pairs[i] << 16), bits_float(pairs[i] & 0xffff0000u));
      pairs[i] = bits_of_pair(__float22bfloat162_rn(make_float2(g.gate, g.up)));
    }
    write_row(pairs, dx + row * columns, columns, stage);
  }
};

// Where a head's gradient is: its first row, the distance of rows, and whether it was rotated.
struct alignas(16) HeadAt {
  const Bf16* of;
  int step, rotated;
};

// Rows of the gradient of queries, keys and values, whose columns are in groups: the query heads of a key-value head, its
// key, its value (model/attention.py). Those of queries and keys are rotated back by the angles of their token, here,
// and the row is written to dx. A head has 64, 128 or 256 columns, 2^bits; tokens: of a sequence.
struct RotaryRows {
  static constexpr int own = CHUNKS<Bf16, ROW>, chunks = own + 2;  // 2: cosines and sines, for 256 columns
  const Bf16 *dq, *dk, *dv;
  const float *cosines, *sines;
  Bf16* dx;
  int bits, queries, groups, tokens;

  LOWPREC_HD int table(int columns) const { return columns >> bits; }

  __device__ __forceinline__ void prepare(uint4* heads, int columns) const {
    for (int head = threadIdx.x; head < columns >> bits; head += blockDim.x) {
      const int group = head / (queries + 2), place = head % (queries + 2);
      const Bf16* of = (place == queries ? dk : dv) + (group << bits);
      if (place < queries) of = dq + ((group * queries + place) << bits);
      const int step = (place < queries ? groups * queries : groups) << bits;
      reinterpret_cast<HeadAt*>(heads)[head] = {of, step, place <= queries};
    }
  }

  // Where a chunk of angles is: a warp's threads read those of up to four parts of a head at once, from other banks.
  __device__ static __forceinline__ int spread(int chunk) { return chunk ^ (chunk >> 3 & 7); }

  __device__ __forceinline__ void fetch(int64_t row, int columns, uint4* to, const uint4* heads) const {
    const int lane = threadIdx.x & 31, first = (threadIdx.x >> 5) * 32 * ROW, inner = (1 << bits) - 1;
#pragma unroll
    for (int j = 0; j < own; ++j) {
      const int chunk = j * 32 + lane, column = first + chunk * 8;
      const bool inside = column < columns;
      const HeadAt at = reinterpret_cast<const HeadAt*>(heads)[inside ? column >> bits : 0];
      copy_async<16>(to + swizzled<own>(chunk / own, chunk % own), at.of + row * at.step + (column & inner), inside);
    }
    const int64_t token = row % tokens;
    const int of_table = 1 << (bits - 3);  // chunks
    for (int chunk = lane; chunk < 2 * of_table; chunk += 32) {
      const float* table = chunk < of_table ? cosines : sines;
      copy_async<16>(to + 32 * own + spread(chunk), table + ((token * of_table + (chunk & (of_table - 1))) << 2));
    }
  }

  // A thread rotates 16 columns of a head's lower half with those of its upper half, in the warp's stage.
  __device__ __forceinline__ void take(uint32_t (&pairs)[ROW / 2], int64_t row, int columns, uint4* stage,
                                       const uint4* heads, const LadderInput&) const {
    const int lane = threadIdx.x & 31, first = (threadIdx.x >> 5) * 32 * ROW, column = first + lane * ROW;
    const int lanes = 1 << (bits - 5), part = lane & (lanes - 1);
    if (reinterpret_cast<const HeadAt*>(heads)[column < columns ? column >> bits : 0].rotated) {
      const float4* angles = reinterpret_cast<const float4*>(stage + 32 * own);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int chunk = 2 * part + n, across = chunk + 2 * lanes;  // of eight columns, in the head
        uint4* at[2] = {stage + swizzled<own>(lane - part + chunk / own, chunk % own),
                        stage + swizzled<own>(lane - part + across / own, across % own)};
        const uint4 old[2] = {*at[0], *at[1]};
        const uint32_t lows[4] = {old[0].x, old[0].y, old[0].z, old[0].w}, highs[4] = {old[1].x, old[1].y, old[1].z, old[1].w};
        uint32_t made[2][4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float4 c = angles[spread(2 * chunk + i)], s = angles[spread(4 * lanes + 2 * chunk + i)];
          rotate_back(lows[2 * i], highs[2 * i], c.x, c.y, s.x, s.y, made[0][2 * i], made[1][2 * i]);
          rotate_back(lows[2 * i + 1], highs[2 * i + 1], c.z, c.w, s.z, s.w, made[0][2 * i + 1], made[1][2 * i + 1]);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) *at[half] = make_uint4(made[half][0], made[half][1], made[half][2], made[half][3]);
      }
    }
    __syncwarp();
    Bf16* out = dx + row * columns + first;
#pragma unroll
    for (int j = 0; j < own; ++j) {
      const int piece = j * 32 + lane;
      const uint4 of = stage[swizzled<own>(piece / own, piece % own)];
      if (first + piece * 8 < columns) *reinterpret_cast<uint4*>(out + piece * 8) = of;
    }
    take_pairs<Bf16, ROW>(pairs, stage, 1.0f);
  }

  // Two pairs of a column of the lower half and one of the upper.
  __device__ static __forceinline__ void rotate_back(uint32_t low, uint32_t high, float c0, float c1, float s0,
                                                     float s1, uint32_t& new_low, uint32_t& new_high) {
    const float l0 = bits_float(low << 16), l1 = bits_float(low & 0xffff0000u);
    const float h0 = bits_float(high << 16), h1 = bits_float(high & 0xffff0000u);
    new_low = bits_of_pair(__float22bfloat162_rn(make_float2(l0 * c0 + h0 * s0, l1 * c1 + h1 * s1)));
    new_high = bits_of_pair(__float22bfloat162_rn(make_float2(h0 * c0 - l0 * s0, h1 * c1 - l1 * s1)));
  }
};

#endif

}  // namespace lowprec
