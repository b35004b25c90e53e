// rotate_fold_ladder of the transpose: a row of codes is a column of x; its rotations and blocks are along tokens.
//
// Rungs depend on the amax of a whole column, which no thread block has, but x is read and rotated once. Blocks draw
// tiles column by column. A block rotates a tile, writes the amax of its columns, and saves the rotated values in
// shared memory. After it has done so for the next tile, it waits until every amax of the first one's columns is
// written, and then writes its codes and adds integers to the columns' two sums, in any order.
//
// A block that waits has written the amax of all tiles that it has drawn. So blocks never wait for each other in a
// circle if those that run hold a whole column, two tiles each, and no others need to run at the same time. Columns
// with more tiles than there are blocks are read twice, first for their amax only.
//
// Of about 35 instructions per element in the machine code, 12 copy, unpack and rotate, 23 try rungs and emit codes.
#include "cuda/ladder.h"
#include "cuda/ladder_call.h"
#include "cuda/rotate_columns.h"

namespace lowprec {
namespace {

using Tiles = ColumnTiles<4>;  // faster than 8 warps, which wait for each other, and than 2
constexpr int WARPS = Tiles::WARPS, COLUMNS = Tiles::COLUMNS;
constexpr int LADDER_RESIDENT = 4;  // thread blocks per multiprocessor
constexpr int TILE_BLOCKS = HELD / LADDER_BLOCK;
// A warp's own bytes: codes before they are written, or decoded values of E4M3.
template <typename In>
constexpr size_t LADDER_OWN = sizeof(In) == 1 ? TOKENS * 16 : STAGED_CODES / 2;
// What the threads keep of a tile: their elements, amaxes and binades.
constexpr size_t SAVED_TILE = 32 * WARPS * 4 * (HELD / 2 + TILE_BLOCKS + 1);
template <typename In>
constexpr size_t LADDER_SHARED = Tiles::STAGE<In> + WARPS * LADDER_OWN<In> + SAVED_TILE;
static_assert(LADDER_SHARED<Bf16> <= TRANSPOSED_SHARED && LADDER_SHARED<Code8> <= TRANSPOSED_SHARED, "see fits");

// Whether E4M3 codes under this scale are halves times a power of two.
__device__ __forceinline__ bool is_power(const LadderInput& how) {
  if (how.scale == nullptr || how.scale_step != 0) return false;
  const float scale = *how.scale;
  return (float_bits(scale) & 0x7fffffu) == 0 && scale >= 0x1p-100f && scale <= 0x1p100f;
}

// A thread's 64 tokens of its column, and the amax of each block.
template <int rotation>
struct RotatedTile {
  std::conditional_t<(rotation > 0), RotatedPairs<HELD>, PlainPairs<HELD>> values;
  uint32_t amax[TILE_BLOCKS];
};

// What happens to BF16 before it is rotated: nothing; it is rounded to E4M3; it is an RMSNorm's input, is multiplied by
// rate and weight, rounded to BF16, and then rounded to E4M3.
enum class First { NOTHING, ROUND, NORM };

// Products of pairs of BF16 with the rates of their tokens and the weight of their column, rounded to BF16. rates: of
// the thread's tokens, of which `tokens` exist, a multiple of 8.
__device__ __forceinline__ void normalize_pairs(uint32_t (&pairs)[HELD / 2], const float* rates, int tokens, float weight) {
#pragma unroll
  for (int i = 0; i < HELD / 4; ++i) {
    const bool inside = 4 * i < tokens;
    const float4 rate = inside ? __ldg(reinterpret_cast<const float4*>(rates) + i) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const auto product = [&](uint32_t pair, float low, float high) {
      return bits_of_pair(__floats2bfloat162_rn(bits_float(pair << 16) * low * weight,
                                                bits_float(pair & 0xffff0000u) * high * weight));
    };
    pairs[2 * i] = product(pairs[2 * i], rate.x, rate.y);
    pairs[2 * i + 1] = product(pairs[2 * i + 1], rate.z, rate.w);
  }
}

// Values of E4M3 codes to which pairs of BF16 are rounded, as halves without the scale if it is a power of two, else in
// BF16.
__device__ __forceinline__ void round_pairs(uint32_t (&pairs)[HELD / 2], float scale, bool power) {
  const float inverse = 1.0f / scale;
#pragma unroll
  for (int i = 0; i < HELD / 2; ++i) {
    const float low = bits_float(pairs[i] << 16) * inverse, high = bits_float(pairs[i] & 0xffff0000u) * inverse;
    const uint32_t codes = __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, __NV_E4M3);
    pairs[i] = power ? coded_halves(codes) : decoded_pair(codes, scale);
  }
}

// power: `is_power`.
template <typename In, int rotation, First first>
__device__ __forceinline__ void rotate_tile(RotatedTile<rotation>& made, uint8_t* stage, uint8_t* own,
                                            const Share& mine, const GivenScale& given, const LadderInput& how,
                                            bool power, const uint32_t* signs) {
  uint32_t pairs[HELD / 2];
  constexpr bool coded = sizeof(In) == 1 || first != First::NOTHING;
  const int gain = how.gain;
  if (rotation > 0 && sizeof(In) == 1 && power) Tiles::take_codes(pairs, stage, own);
  else Tiles::take_pairs<In>(pairs, stage, own, given);
  if constexpr (first == First::NORM) {
    const float weight = mine.inside ? __ldg(how.weight + mine.column) : 0.0f;
    normalize_pairs(pairs, how.rate + mine.token, mine.inside ? given.rows - mine.token : 0, weight);
  }
  if constexpr (first != First::NOTHING) round_pairs(pairs, *given.scale, power);
  if constexpr (rotation > 0 && coded) {
    __half2 h[HELD / 2];
    const int shift = power ? enlarge_halves<HELD>(pairs, signs, *given.scale, h) : enlarge<HELD>(pairs, signs, h);
    made.values = rotated<HELD>(h, gain - shift);
  } else {
    made.values = values_of<rotation, HELD>(pairs, signs, gain);
  }
#pragma unroll
  for (int b = 0; b < TILE_BLOCKS; ++b) made.amax[b] = made.values.amax(b);
}

// Takes the thread's words from shared memory, and leaves others there.
template <bool leaves, int count>
__device__ __forceinline__ void exchange(uint32_t (&words)[count], const uint32_t (&others)[count], uint4* saved) {
#pragma unroll
  for (int c = 0; c < count / 4; ++c) {
    const uint4 old = saved[c * 32 * WARPS];
    if constexpr (leaves) {
      saved[c * 32 * WARPS] = make_uint4(others[4 * c], others[4 * c + 1], others[4 * c + 2], others[4 * c + 3]);
    }
    words[4 * c] = old.x, words[4 * c + 1] = old.y, words[4 * c + 2] = old.z, words[4 * c + 3] = old.w;
  }
}
template <bool leaves, int rotation>
__device__ __forceinline__ void exchange(RotatedTile<rotation>& tile, const RotatedTile<rotation>& other,
                                         uint4* saved) {
  exchange<leaves>(tile.values.v, other.values.v, saved + threadIdx.x);
  exchange<leaves>(tile.amax, other.amax, saved + HELD / 8 * 32 * WARPS + threadIdx.x);
  if constexpr (rotation > 0) {
    int& binades = reinterpret_cast<int*>(saved + (HELD / 8 + TILE_BLOCKS / 4) * 32 * WARPS)[threadIdx.x];
    const int old = binades;
    if constexpr (leaves) binades = other.values.binades;
    tile.values.binades = old;
  }
}

// Where a thread's elements of a tile are.
__device__ __forceinline__ Share share_of(const TileAt& at, int rows, int columns) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  Share mine{at.token + (lane & 3) * HELD, at.column + warp * 8 + (lane >> 2), false};
  mine.inside = mine.token < rows && mine.column < columns;
  return mine;
}

// The amax of each column in each tile, [columns, pitch], in 16 bits: the upper half of an FP32 number, its last bit
// set if the lower half is not 0, as no more decides a row's rung; and a sign for "written". So a maximum is its own
// flag and needs no fence.
struct ColumnAmax {
  uint16_t* of;
  int tiles, pitch;  // of a column; the pitch is a multiple of 8
  uint32_t inverse;  // of `tiles`, times 2^32 - 1

  // A tile by its number, column by column.
  __device__ __forceinline__ TileAt place_of(uint32_t number) const {
    const uint32_t of_column = tiles;
    uint32_t across = __umulhi(number, inverse), down = number - across * of_column;
    if (down >= of_column) ++across, down -= of_column;  // the product can be too small by 1
    return {static_cast<int>(down) * TOKENS, static_cast<int>(across) * COLUMNS};
  }

  // Of the thread's column in a tile; the last tile fills the pitch.
  __device__ __forceinline__ void write(const uint32_t (&amax)[TILE_BLOCKS], int column, int tile) const {
    uint32_t most = 0;
#pragma unroll
    for (int b = 0; b < TILE_BLOCKS; ++b) most = larger(most, amax[b]);
    most = larger(most, __shfl_xor_sync(0xffffffffu, most, 1));
    most = larger(most, __shfl_xor_sync(0xffffffffu, most, 2));
    if ((threadIdx.x & 3) != 0) return;
    const uint32_t made = most >> 16 | ((most & 0xffffu) != 0) | 0x8000u;
    uint16_t* to = of + static_cast<int64_t>(column) * pitch;
    const int end = tile + 1 == tiles ? pitch : tile + 1;
#pragma unroll 1
    for (; tile < end; ++tile) {
      asm volatile("st.relaxed.gpu.global.u16 [%0], %1;" ::"l"(to + tile), "h"(static_cast<uint16_t>(made)) : "memory");
    }
  }

  // Bits of the amax of the thread's column, once those of all tiles are written. Each of its four lanes reads a part.
  __device__ __forceinline__ uint32_t wait(int column) const {
    const uint16_t* from = of + static_cast<int64_t>(column) * pitch;
    uint32_t most, all;
    do {
      most = 0, all = 0x80008000u;
#pragma unroll 2
      for (int i = (threadIdx.x & 3) * 8; i < pitch; i += 32) {
        uint4 found;
        asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(found.x), "=r"(found.y), "=r"(found.z), "=r"(found.w) : "l"(from + i) : "memory");
        all &= found.x & found.y & found.z & found.w;
        most = __vmaxu2(__vmaxu2(most, __vmaxu2(found.x, found.y)), __vmaxu2(found.z, found.w));
      }
    } while (!__all_sync(0xffffffffu, all == 0x80008000u));
    most = larger(most << 16, most & 0xffff0000u);
    most = larger(most, __shfl_xor_sync(0xffffffffu, most, 1));
    return larger(most, __shfl_xor_sync(0xffffffffu, most, 2)) & MAGNITUDE;
  }
};

// key: bits of the amax of the thread's column. between() is called after half of the codes.
template <int rotation, bool corrected, typename Between>
__device__ __forceinline__ void emit_tile(const RotatedTile<rotation>& tile, const TileAt& at, int rows, int columns,
                                          uint32_t key, int span, const LadderTables& tables,
                                          const RowLeft& left, uint8_t* own, uint8_t* codes, Between&& between) {
  const Share mine = share_of(at, rows, columns);
  if (mine.token == 0 && mine.inside) left.keys[mine.column] = key;
  const LadderRow row = ladder_row(key, span);
  RowSums of;
  emit_blocks<corrected, HELD>(tile.values, tile.amax, row, tables, of,
                               [&](int n, const uint32_t (&words)[LADDER_BLOCK / 2]) {
    write_codes(words, reinterpret_cast<uint4*>(own), [&](int piece, const uint4& made) {
      const int lane = piece / 2, column = at.column + (threadIdx.x >> 5) * 8 + lane / 4;
      const int token = at.token + lane % 4 * HELD + n * 32 + piece % 2 * 16;
      uint8_t* to = codes + static_cast<int64_t>(column) * rows + token;
      if (column < columns && token < rows) *reinterpret_cast<uint4*>(to) = made;
    });
    __syncwarp();  // before the warp's own bytes are overwritten
    if (n == 0) between();
  });
  if constexpr (corrected) {
#pragma unroll
    for (int lanes = 1; lanes < 4; lanes *= 2) {  // sixteen blocks fit an int
      of.own += __shfl_xor_sync(0xffffffffu, of.own, lanes);
      of.made += __shfl_xor_sync(0xffffffffu, of.made, lanes);
    }
    if (mine.inside && (threadIdx.x & 3) == 0) left.add(mine.column, of.own, of.made);
  }
}

// drawn: the number of tiles that blocks have drawn. emits: otherwise only column_amax is written.
template <typename In, int rotation, bool corrected, First first>
__global__ void __launch_bounds__(32 * WARPS, LADDER_RESIDENT)
    column_ladder(const In* __restrict__ x, int rows, int columns, LadderInput how, int span,
                  ColumnAmax column_amax, uint32_t* __restrict__ drawn, RowLeft left, uint8_t* __restrict__ codes,
                  bool emits) {
  extern __shared__ uint4 saved[];
  __shared__ alignas(16) uint32_t sign_words[HALF_SIGN_WORDS];
  __shared__ LadderTables tables;
  __shared__ TileAt next;
  make_half_signs(sign_words, rotation, how.signs);
  make_ladder_tables(tables);
  if (threadIdx.x == 0) next = column_amax.place_of(atomicAdd(drawn, 1u));
  __syncthreads();
  const uint32_t* signs = signs_of_lane(sign_words, rotation);
  const bool power = (sizeof(In) == 1 || first != First::NOTHING) && is_power(how);
  uint8_t* stage = reinterpret_cast<uint8_t*>(saved) + SAVED_TILE;
  uint8_t* own = stage + Tiles::STAGE<In> + (threadIdx.x >> 5) * LADDER_OWN<In>;
  TileAt at = next, before{0, columns};
  if (at.column < columns) Tiles::fetch<In, true>(x, at, rows, columns, stage);
  commit_copies();
  while (true) {
    const bool more = at.column < columns;
    uint32_t number = 0;
    const auto draw = [&] {
      if (more && threadIdx.x == 0) number = atomicAdd(drawn, 1u);
    };
    const auto fetch_next = [&] {
      if (!more) return;
      if (threadIdx.x == 0) next = column_amax.place_of(number);
      __syncthreads();  // the next tile is known, and the stage is free
      if (next.column < columns) Tiles::fetch<In, true>(x, next, rows, columns, stage);
      commit_copies();
    };
    RotatedTile<rotation> tile;  // the one before, which is emitted
    if (more) {
      wait_copies();
      __syncthreads();  // the stage is filled
      const GivenScale given{how.scale, how.scale_step, at.token, rows};
      RotatedTile<rotation> made;
      const Share mine = share_of(at, rows, columns);
      rotate_tile<In, rotation, first>(made, stage, own, mine, given, how, power, signs);
      column_amax.write(made.amax, mine.column, at.token / TOKENS);
      if (emits) exchange<true>(tile, made, saved);
    } else if (emits) {
      exchange<false>(tile, tile, saved);
    }
    if (emits && before.column < columns) {
      const uint32_t key = column_amax.wait(share_of(before, rows, columns).column);
      draw();
      emit_tile<rotation, corrected>(tile, before, rows, columns, key, span, tables, left, own, codes, fetch_next);
    } else {
      draw(), fetch_next();
    }
    if (!more) break;
    before = at, at = next;
  }
}

constexpr int64_t COUNTERS = 8;  // 16 bytes before column_amax, in units of these, for the numbers of drawn tiles
int64_t amax_pitch(int64_t rows) { return ceil_div(ceil_div(rows, TOKENS), 8) * 8; }

template <typename In, int rotation, First first = First::NOTHING>
void launch_all(const LadderCall& call) {
  const auto kernel = call.corrected ? column_ladder<In, rotation, true, first> : column_ladder<In, rotation, false, first>;
  const int64_t down = ceil_div(call.rows, TOKENS), tiles = down * ceil_div(call.columns, COLUMNS);
  const int64_t blocks = resident_blocks(kernel, 32 * WARPS, LADDER_SHARED<In>, tiles, call.device);
  const int pitch = static_cast<int>(amax_pitch(call.rows));
  const ColumnAmax column_amax{call.column_amax + COUNTERS, static_cast<int>(down), pitch,
                               0xffffffffu / static_cast<uint32_t>(down)};
  uint32_t* drawn = reinterpret_cast<uint32_t*>(call.column_amax);
  const auto launch = [&](uint32_t* number, bool emits) {
    kernel<<<blocks, 32 * WARPS, LADDER_SHARED<In>, call.stream>>>(
        static_cast<const In*>(call.x), static_cast<int>(call.rows), static_cast<int>(call.columns), call.how,
        call.span, column_amax, number, call.left, call.codes, emits);
  };
  if (down > blocks) launch(drawn + 1, false);
  launch(drawn, true);
}

}  // namespace

int64_t column_amax_size(int64_t rows, int64_t columns) {
  return COUNTERS + ceil_div(columns, COLUMNS) * COLUMNS * amax_pitch(rows);
}

template <typename In>
void launch_ladder_transposed(const LadderCall& call) {
  if constexpr (sizeof(In) == 2) {
    if (call.how.rate != nullptr) return launch_all<In, HALF_ROTATION, First::NORM>(call);
    if (call.how.scale != nullptr) return launch_all<In, HALF_ROTATION, First::ROUND>(call);
  }
  call.rotation == 0 ? launch_all<In, 0>(call) : launch_all<In, HALF_ROTATION>(call);
}

template void launch_ladder_transposed<Bf16>(const LadderCall&);
template void launch_ladder_transposed<Code8>(const LadderCall&);

}  // namespace lowprec
