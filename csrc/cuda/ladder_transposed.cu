// rotate_fold_ladder of the transpose: a row of codes is a column of x; its rotations and blocks are along tokens.
//
// x is read twice, as in rotate_transposed.cu: the first read computes the amax of each column by an atomic maximum;
// the second rotates again, tries the rungs, writes codes and adds integers to the column's two sums, in any order.
#include "cuda/ladder.h"
#include "cuda/ladder_call.h"
#include "cuda/rotate_columns.h"

namespace lowprec {
namespace {

constexpr int LADDER_RESIDENT = 2;  // thread blocks per multiprocessor
// A warp's own bytes: codes before they are written, or decoded values of E4M3.
template <typename In, bool emits>
constexpr size_t LADDER_OWN = sizeof(In) == 1 ? TOKENS * 16 : emits ? STAGED_CODES / 2 : 0;

// Whether E4M3 codes under this scale are halves times a power of two.
__device__ __forceinline__ bool is_power(const LadderInput& how) {
  if (how.scale == nullptr || how.scale_step != 0) return false;
  const float scale = *how.scale;
  return (float_bits(scale) & 0x7fffffu) == 0 && scale >= 0x1p-100f && scale <= 0x1p100f;
}

// The thread's 64 tokens of its column. power: `is_power`.
template <typename In, int rotation>
__device__ __forceinline__ auto column_values(uint8_t* stage, uint8_t* own, const GivenScale& given, bool power,
                                              const uint32_t* signs, int gain) {
  uint32_t pairs[HELD / 2];
  if constexpr (rotation > 0 && sizeof(In) == 1) {
    __half2 h[HELD / 2];
    int shift;
    if (power) {
      take_codes(pairs, stage, own);
      shift = enlarge_halves<HELD>(pairs, signs, *given.scale, h);
    } else {
      take_pairs<In>(pairs, stage, own, given);
      shift = enlarge<HELD>(pairs, signs, h);
    }
    return rotated<HELD>(h, gain - shift);
  } else {
    take_pairs<In>(pairs, stage, own, given);
    return values_of<rotation, HELD>(pairs, signs, gain);
  }
}

template <typename In, int rotation>
__global__ void __launch_bounds__(32 * WARPS, LADDER_RESIDENT)
    column_amax(const In* __restrict__ x, int rows, int columns, LadderInput how, uint32_t* __restrict__ keys) {
  extern __shared__ uint4 dynamic[];
  __shared__ alignas(16) uint32_t drawn[SIGN_WORDS];
  make_signs(drawn, rotation, how.signs);
  __syncthreads();
  const uint32_t* signs = signs_of_lane(drawn, rotation);
  const bool power = sizeof(In) == 1 && is_power(how);
  each_tile<In, LADDER_OWN<In, false>, true>(x, rows, columns, how.scale, how.scale_step, reinterpret_cast<uint8_t*>(dynamic),
                             [&](const TileAt&, const Share& mine, uint8_t* stage, const GivenScale& given, uint8_t* own) {
    const auto values = column_values<In, rotation>(stage, own, given, power, signs, how.gain);
    uint32_t most = 0;
#pragma unroll
    for (int b = 0; b < HELD / LADDER_BLOCK; ++b) most = larger(most, values.amax(b));
    most = larger(most, __shfl_xor_sync(0xffffffffu, most, 1));
    most = larger(most, __shfl_xor_sync(0xffffffffu, most, 2));
    if (mine.inside && (threadIdx.x & 3) == 0) atomicMax(keys + mine.column, most);
  });
}

template <typename In, int rotation, bool corrected>
__global__ void __launch_bounds__(32 * WARPS, LADDER_RESIDENT)
    column_ladder(const In* __restrict__ x, int rows, int columns, LadderInput how, LadderRule rule, RowLeft left,
                  uint8_t* __restrict__ codes) {
  extern __shared__ uint4 dynamic[];
  __shared__ alignas(16) uint32_t drawn[SIGN_WORDS];
  __shared__ LadderTables tables;
  make_signs(drawn, rotation, how.signs);
  make_ladder_tables(tables);
  __syncthreads();
  const uint32_t* signs = signs_of_lane(drawn, rotation);
  const bool power = sizeof(In) == 1 && is_power(how);
  each_tile<In, LADDER_OWN<In, true>, true>(x, rows, columns, how.scale, how.scale_step, reinterpret_cast<uint8_t*>(dynamic),
                            [&](const TileAt& at, const Share& mine, uint8_t* stage, const GivenScale& given, uint8_t* own) {
    const LadderRow row = ladder_row(mine.inside ? left.keys[mine.column] : 0, rule.span);
    const auto values = column_values<In, rotation>(stage, own, given, power, signs, how.gain);
    uint32_t amax[HELD / LADDER_BLOCK];
#pragma unroll
    for (int b = 0; b < HELD / LADDER_BLOCK; ++b) amax[b] = values.amax(b);
    RowSums of;
    emit_blocks<corrected, HELD>(values, amax, row, rule.chooses, tables, of,
                                 [&](int n, const uint32_t (&words)[LADDER_BLOCK / 2]) {
      write_codes(words, reinterpret_cast<uint4*>(own), [&](int piece, const uint4& made) {
        const int lane = piece / 2, column = at.column + (threadIdx.x >> 5) * 8 + lane / 4;
        const int token = at.token + lane % 4 * HELD + n * 32 + piece % 2 * 16;
        uint8_t* to = codes + static_cast<int64_t>(column) * rows + token;
        if (column < columns && token < rows) *reinterpret_cast<uint4*>(to) = made;
      });
      __syncwarp();  // before the warp's own bytes are overwritten
    });
    if constexpr (corrected) {
#pragma unroll
      for (int lanes = 1; lanes < 4; lanes *= 2) {  // sixteen blocks fit an int
        of.own += __shfl_xor_sync(0xffffffffu, of.own, lanes);
        of.made += __shfl_xor_sync(0xffffffffu, of.made, lanes);
      }
      if (mine.inside && (threadIdx.x & 3) == 0) left.add(mine.column, of.own, of.made);
    }
  });
}

template <typename In, int rotation>
void launch_all(const LadderCall& call) {
  const In* x = static_cast<const In*>(call.x);
  const int rows = static_cast<int>(call.rows), columns = static_cast<int>(call.columns), threads = 32 * WARPS;
  const int64_t tiles = ceil_div(rows, TOKENS) * ceil_div(columns, COLUMNS);
  size_t shared = 2 * STAGE<In> + WARPS * LADDER_OWN<In, false>;
  int64_t blocks = resident_blocks(column_amax<In, rotation>, threads, shared, tiles, call.device);
  column_amax<In, rotation><<<blocks, threads, shared, call.stream>>>(x, rows, columns, call.how, call.left.keys);
  shared = 2 * STAGE<In> + WARPS * LADDER_OWN<In, true>;
  const auto kernel = call.corrected ? column_ladder<In, rotation, true> : column_ladder<In, rotation, false>;
  blocks = resident_blocks(kernel, threads, shared, tiles, call.device);
  kernel<<<blocks, threads, shared, call.stream>>>(x, rows, columns, call.how, call.rule, call.left, call.codes);
}

}  // namespace

template <typename In>
void launch_ladder_transposed(const LadderCall& call) {
  call.rotation == 0 ? launch_all<In, 0>(call) : launch_all<In, HALF_ROTATION>(call);
}

template void launch_ladder_transposed<Bf16>(const LadderCall&);
template void launch_ladder_transposed<Code8>(const LadderCall&);

}  // namespace lowprec
