// rotate_fold_ladder of the transpose: a row of codes is a column of x; its rotations and blocks are along tokens.
//
// x is read twice, as in rotate_transposed.cu: the first read computes the amax of each column by an atomic maximum;
// the second rotates again, tries the rungs, writes codes and adds integers to the column's two sums, in any order.
#include "cuda/ladder.h"
#include "cuda/ladder_call.h"
#include "cuda/rotate_columns.h"

namespace lowprec {
namespace {

template <typename In, int fixed>
__global__ void __launch_bounds__(32 * WARPS, RESIDENT<In>)
    column_amax(const In* __restrict__ x, int rows, int columns, Rotation how, uint32_t* __restrict__ keys) {
  extern __shared__ uint4 dynamic[];
  __shared__ alignas(16) uint32_t drawn[SIGN_WORDS];
  make_signs(drawn, how);
  __syncthreads();
  each_tile<In, false, fixed>(x, rows, columns, how, drawn, reinterpret_cast<uint8_t*>(dynamic),
                              [&](const TileAt&, const Share& mine, const float (&v)[HELD], uint8_t*) {
    uint32_t most = 0;
#pragma unroll
    for (int b = 0; b < HELD / LADDER_BLOCK; ++b) most = larger(most, block_amax(v + b * LADDER_BLOCK));
    most = larger(most, __shfl_xor_sync(0xffffffffu, most, 1));
    most = larger(most, __shfl_xor_sync(0xffffffffu, most, 2));
    // A product with the factor keeps the order of magnitudes, so it is applied after the maximum.
    if (mine.inside && (threadIdx.x & 3) == 0) atomicMax(keys + mine.column, float_bits(bits_float(most) * how.factor));
  });
}

template <typename In, int fixed, bool corrected>
__global__ void __launch_bounds__(32 * WARPS, RESIDENT<In>)
    column_ladder(const In* __restrict__ x, int rows, int columns, Rotation how, LadderRule rule, RowLeft left,
                  uint8_t* __restrict__ codes) {
  extern __shared__ uint4 dynamic[];
  __shared__ alignas(16) uint32_t drawn[SIGN_WORDS];
  __shared__ LadderTables tables;
  make_signs(drawn, how);
  make_ladder_tables(tables);
  __syncthreads();
  each_tile<In, true, fixed>(x, rows, columns, how, drawn, reinterpret_cast<uint8_t*>(dynamic),
                             [&](const TileAt& at, const Share& mine, float (&v)[HELD], uint8_t* own) {
    const LadderRow row = ladder_row(mine.inside ? left.keys[mine.column] : 0, rule.span);
    uint32_t words[HELD / 4];
    RowSums of;
#pragma unroll
    for (int i = 0; i < HELD; ++i) v[i] *= how.factor;
#pragma unroll
    for (int b = 0; b < HELD / LADDER_BLOCK; ++b) {
      const float* block = v + b * LADDER_BLOCK;
      emit_block<corrected>(block, block_amax(block), row, rule.chooses, tables, words + b * (LADDER_BLOCK / 4), of);
    }
    if constexpr (corrected) {
#pragma unroll
      for (int lanes = 1; lanes < 4; lanes *= 2) {
        of.own += __shfl_xor_sync(0xffffffffu, of.own, lanes);
        of.made += __shfl_xor_sync(0xffffffffu, of.made, lanes);
      }
      if (mine.inside && (threadIdx.x & 3) == 0) left.add(mine.column, of.own, of.made);
    }
    write_codes(words, reinterpret_cast<uint4*>(own), [&](int piece, const uint4& made) {
      const int column = at.column + (threadIdx.x >> 5) * 8 + (piece >> 4), token = at.token + (piece & 15) * 16;
      uint8_t* to = codes + static_cast<int64_t>(column) * rows + token;
      if (column < columns && token < rows) *reinterpret_cast<uint4*>(to) = made;
    });
    __syncwarp();  // before the warp's own bytes are overwritten
  });
}

template <typename In, int fixed>
void launch_all(const LadderCall& call) {
  const In* x = static_cast<const In*>(call.x);
  const int rows = static_cast<int>(call.rows), columns = static_cast<int>(call.columns), threads = 32 * WARPS;
  const int64_t tiles = ceil_div(rows, TOKENS) * ceil_div(columns, COLUMNS);
  size_t shared = 2 * STAGE<In> + WARPS * OWN<In, false>;
  int64_t blocks = resident_blocks(column_amax<In, fixed>, threads, shared, tiles, call.device);
  column_amax<In, fixed><<<blocks, threads, shared, call.stream>>>(x, rows, columns, call.how, call.left.keys);
  shared = 2 * STAGE<In> + WARPS * OWN<In, true>;
  const auto kernel = call.corrected ? column_ladder<In, fixed, true> : column_ladder<In, fixed, false>;
  blocks = resident_blocks(kernel, threads, shared, tiles, call.device);
  kernel<<<blocks, threads, shared, call.stream>>>(x, rows, columns, call.how, call.rule, call.left, call.codes);
}

}  // namespace

template <typename In>
void launch_ladder_transposed(const LadderCall& call) {
  if constexpr (sizeof(In) < 4) {
    if (call.how.block == 128) return launch_all<In, 128>(call);
  }
  launch_all<In, 0>(call);
}

template void launch_ladder_transposed<Bf16>(const LadderCall&);
template void launch_ladder_transposed<Fp32>(const LadderCall&);
template void launch_ladder_transposed<Code8>(const LadderCall&);

}  // namespace lowprec
