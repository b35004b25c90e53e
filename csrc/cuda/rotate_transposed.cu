// rotate_fold of the transpose: a row of codes is a column of x; its rotations and blocks are along tokens.
//
// No thread block has a whole column, so x is read twice: the first read writes the exponent of each block (a byte for
// 32 elements) and, by an atomic maximum, that of each column; the second rotates again, rounds and writes codes.
// Memory traffic: two reads, one write, and 1/16 byte per element for the exponents.
//
// Both reads are bound by instructions: about 13 per element in the first (6 butterflies, 1.8 unpack, 1 amax, 1.5
// copy), 26 in the second (rotate.cu), for 5 bytes: at most 3.8 to 4.3 TB/s.
#include "cuda/rotate_columns.h"

namespace lowprec {
namespace {

using Tiles = ColumnTiles<8>;
// Blocks per multiprocessor: the stages of FP32 fill its shared memory.
template <typename In>
constexpr int RESIDENT = sizeof(In) == 4 ? 1 : 2;
// A warp's own bytes: codes before they are written, or decoded values of E4M3.
template <typename In, bool emits>
constexpr size_t OWN = sizeof(In) == 1 ? TOKENS * 16 : emits ? STAGED_CODES : 0;

__device__ __forceinline__ uint32_t byte_of_key(int key) { return key >= LOST ? LOST_BYTE : key; }
__device__ __forceinline__ int key_of(uint32_t saved) { return saved == LOST_BYTE ? LOST : static_cast<int>(saved); }

template <typename In, bool plain>
__global__ void __launch_bounds__(32 * Tiles::WARPS, RESIDENT<In>)
    column_keys(const In* __restrict__ x, int rows, int columns, Rotation how, uint32_t* __restrict__ keys,
                uint16_t* __restrict__ saved) {
  extern __shared__ uint4 dynamic[];
  __shared__ Tables tables;
  make_tables(tables, how);
  const uint32_t* signs = signs_of_lane(tables.signs, plain ? HELD : how.block);
  Tiles::each_tile<In, OWN<In, false>, plain>(
      x, rows, columns, how.scale, how.scale_step, reinterpret_cast<uint8_t*>(dynamic),
      [&](const TileAt&, const Share& mine, uint8_t* stage, const GivenScale& given, uint8_t* own) {
    float v[HELD];
    Tiles::take<In>(v, stage, own, signs, given);
    rotate<plain ? HELD : 0>(v, how);
    const int low = block_key(v, how), high = block_key(v + MX_BLOCK, how);
    int largest = max(low, high);
    largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
    if (!mine.inside) return;
    const uint32_t both = byte_of_key(low) | byte_of_key(high) << 8;
    saved[static_cast<int64_t>(mine.token / HELD) * columns + mine.column] = static_cast<uint16_t>(both);
    if ((threadIdx.x & 3) == 0) atomicMax(keys + mine.column, static_cast<uint32_t>(largest));
  });
}

template <typename In, bool random, bool plain>
__global__ void __launch_bounds__(32 * Tiles::WARPS, RESIDENT<In>)
    column_codes(const In* __restrict__ x, int rows, int columns, Rotation how, const uint32_t* __restrict__ keys,
                 const uint16_t* __restrict__ saved, uint8_t* __restrict__ codes, float* __restrict__ scale) {
  extern __shared__ uint4 dynamic[];
  __shared__ Tables tables;
  make_tables(tables, how);
  uint64_t seed = 0;
  uint32_t first_row = 0, first_group = 0;
  if constexpr (random) {
    seed = static_cast<uint64_t>(*how.seed);
    if (how.origin != nullptr) {
      first_row = static_cast<uint32_t>(how.origin[0]);
      first_group = static_cast<uint32_t>(how.origin[1] >> 3);
    }
  }
  const uint32_t* signs = signs_of_lane(tables.signs, plain ? HELD : how.block);
  Tiles::each_tile<In, OWN<In, true>, plain>(
      x, rows, columns, how.scale, how.scale_step, reinterpret_cast<uint8_t*>(dynamic),
      [&](const TileAt& at, const Share& mine, uint8_t* stage, const GivenScale& given, uint8_t* own) {
    float v[HELD];
    Tiles::take<In>(v, stage, own, signs, given);
    rotate<plain ? HELD : 0>(v, how);
    const int row = mine.inside ? static_cast<int>(keys[mine.column]) : 1;
    const uint32_t both = mine.inside ? saved[static_cast<int64_t>(mine.token / HELD) * columns + mine.column] : 0x0101u;
    if (mine.inside && mine.token == 0) scale[mine.column] = row_scale(row, how);
    uint32_t words[HELD / 4];
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      emit<random, plain>(v + b * MX_BLOCK, block_codes(key_of(both >> 8 * b & 255u), row, tables, how), how, seed,
                          first_row + mine.column, first_group + mine.token / 8 + b * (MX_BLOCK / 8),
                          words + b * (MX_BLOCK / 4));
    }
    write_codes(words, reinterpret_cast<uint4*>(own), [&](int piece, const uint4& of) {
      const int column = at.column + (threadIdx.x >> 5) * 8 + (piece >> 4), token = at.token + (piece & 15) * 16;
      uint8_t* to = codes + static_cast<int64_t>(column) * rows + token;
      if (column < columns && token < rows) *reinterpret_cast<uint4*>(to) = of;
    });
    __syncwarp();  // before the warp's own bytes are overwritten
  });
}

template <typename In, bool plain>
void launch_both(const RotateCall& call, uint32_t* keys, uint16_t* saved) {
  const In* x = static_cast<const In*>(call.x);
  const int rows = static_cast<int>(call.rows), columns = static_cast<int>(call.columns), threads = 32 * Tiles::WARPS;
  const int64_t tiles = ceil_div(rows, TOKENS) * ceil_div(columns, Tiles::COLUMNS);
  size_t shared = 2 * Tiles::STAGE<In> + Tiles::WARPS * OWN<In, false>;
  int64_t blocks = resident_blocks(column_keys<In, plain>, threads, shared, tiles, call.device);
  column_keys<In, plain><<<blocks, threads, shared, call.stream>>>(x, rows, columns, call.how, keys, saved);
  shared = 2 * Tiles::STAGE<In> + Tiles::WARPS * OWN<In, true>;
  const auto codes = call.how.seed != nullptr ? column_codes<In, true, plain> : column_codes<In, false, plain>;
  blocks = resident_blocks(codes, threads, shared, tiles, call.device);
  codes<<<blocks, threads, shared, call.stream>>>(x, rows, columns, call.how, keys, saved, call.codes, call.scale);
}

}  // namespace

template <typename In>
void launch_transposed(const RotateCall& call, uint32_t* keys, uint16_t* saved) {
  if constexpr (sizeof(In) < 4) {
    if (call.plain) return launch_both<In, true>(call, keys, saved);
  }
  launch_both<In, false>(call, keys, saved);
}

template void launch_transposed<Bf16>(const RotateCall&, uint32_t*, uint16_t*);
template void launch_transposed<Fp32>(const RotateCall&, uint32_t*, uint16_t*);
template void launch_transposed<Code8>(const RotateCall&, uint32_t*, uint16_t*);

}  // namespace lowprec
