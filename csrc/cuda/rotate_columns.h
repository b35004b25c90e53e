// Tiles of a matrix with neighbouring tokens of a column in one thread: rows of the transpose, without transposing x.
//
// A tile of 256 tokens x 64 or 32 columns is copied to shared memory while the previous one is processed. Each warp has
// 8 columns; the four lanes of a column have 64 consecutive tokens each, so that a rotation of 64 needs no exchange.
// ldmatrix transposes 8x8 numbers on the way to registers; each lane gives the address of a row, so any eight tokens
// can form a matrix.
#pragma once

#include "cuda/rotate.h"

namespace lowprec {

#if defined(__CUDACC__)

constexpr int TOKENS = 256;              // of a tile
constexpr int STAGED_CODES = 32 * HELD;  // bytes per warp

struct TileAt {
  int token, column;
};

// Index of the lane of a column that has the token; tokens of different lanes must be in different banks.
__device__ __forceinline__ int lane_of_token(int token) { return token >> 6 & 3; }

// Word j of lane (column, t): tokens 64 t + 2 j and the next one. Row r of matrix j is token 64 (r / 2) + 2 j + r % 2;
// `from` is the address of this lane's row in the first four matrices, and `step` bytes further in the next four.
__device__ __forceinline__ int first_token() {
  const int lane = threadIdx.x & 31;
  return HELD * (lane >> 1 & 3) + 2 * (lane >> 3) + (lane & 1);
}
template <int step>
__device__ __forceinline__ void turn(uint32_t (&pairs)[HELD / 2], const uint8_t* from) {
  const uint32_t first = static_cast<uint32_t>(__cvta_generic_to_shared(from));
#pragma unroll
  for (int n = 0; n < HELD / 8; ++n) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(pairs[4 * n]), "=r"(pairs[4 * n + 1]), "=r"(pairs[4 * n + 2]), "=r"(pairs[4 * n + 3])
                 : "r"(first + n * step)
                 : "memory");
  }
}

// Address of the warp's 8 columns of a token, decoded to BF16: 16 bytes per token.
__device__ __forceinline__ uint8_t* decoded_at(uint8_t* own, int token) {
  return own + ((token & ~7) | ((token & 7) ^ lane_of_token(token) << 1)) * 16;
}

// Scales of E4M3 codes: one, or one per token.
struct GivenScale {
  const float* scale;
  int step, token, rows;
  __device__ __forceinline__ float of(int i) const { return scale[step == 0 ? 0 : min(token + i, rows - 1)]; }
};

// Elements of a thread: a column of x, 64 tokens from `token` on.
struct Share {
  int token, column;
  bool inside;
};

// Tiles of thread blocks of 8 warps or 4, each with 8 columns.
template <int warps>
struct ColumnTiles {
  static constexpr int WARPS = warps, COLUMNS = 8 * warps;
  static_assert(warps == 8 || warps == 4, "see place");
  template <typename In>
  static constexpr size_t STAGE = TOKENS * COLUMNS * sizeof(In);

  template <typename In>
  static __device__ __forceinline__ int place(int token, int chunk) {  // in chunks of 16 bytes, for E4M3 of 8
    if constexpr (sizeof(In) == 4) return token * 2 * WARPS + (chunk ^ lane_of_token(token) << 1);
    if constexpr (sizeof(In) == 1) return token * WARPS + (chunk ^ (token / (16 / WARPS) & (WARPS - 1)));
    if constexpr (WARPS == 4) return token * 4 + (chunk ^ lane_of_token(token));
    return token * 8 + (chunk ^ ((token & 1) | lane_of_token(token) << 1));
  }

  template <typename In, bool unrolled>
  static __device__ __forceinline__ void fetch(const In* x, const TileAt& at, int rows, int columns, uint8_t* to) {
    constexpr int bytes = sizeof(In) == 1 ? 8 : 16, each = bytes / sizeof(In), across = COLUMNS / each;
    constexpr int step = 32 * WARPS / across;  // tokens; `first` is below it, so later places are at constant distances
    const int first = threadIdx.x / across % step, chunk = threadIdx.x % across, column = at.column + chunk * each;
    const In* from = x + static_cast<int64_t>(at.token + first) * columns + column;
    if (at.token + TOKENS <= rows && at.column + COLUMNS <= columns) {
#pragma unroll(unrolled ? 8 : 1)
      for (int j = 0; j < TOKENS / step; ++j) {
        copy_async<bytes>(to + place<In>(first + j * step, chunk) * bytes, from);
        from += static_cast<int64_t>(step) * columns;
      }
      return;
    }
#pragma unroll 1
    for (int token = first; token < TOKENS; token += step) {
      const bool inside = at.token + token < rows && column < columns;
      copy_async<bytes>(to + place<In>(token, chunk) * bytes, inside ? from : x, inside);
      from += static_cast<int64_t>(step) * columns;
    }
  }

  static __device__ __forceinline__ void decode_columns(const uint8_t* stage, uint8_t* own, const GivenScale& given) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
    for (int i = 0; i < TOKENS / 32; ++i) {
      const int token = i * 32 + lane;
      const uint2 codes = *reinterpret_cast<const uint2*>(stage + place<Code8>(token, warp) * 8);
      const float scale = given.of(token);
      *reinterpret_cast<uint4*>(decoded_at(own, token)) =
          make_uint4(decoded_pair(codes.x & 0xffffu, scale), decoded_pair(codes.x >> 16, scale),
                     decoded_pair(codes.y & 0xffffu, scale), decoded_pair(codes.y >> 16, scale));
    }
    __syncwarp();
  }

  // Decodes the warp's 8 columns of a token from E4M3 to halves, without a scale.
  static __device__ __forceinline__ void take_codes(uint32_t (&pairs)[HELD / 2], const uint8_t* stage, uint8_t* own) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
    for (int i = 0; i < TOKENS / 32; ++i) {
      const int token = i * 32 + lane;
      const uint2 codes = *reinterpret_cast<const uint2*>(stage + place<Code8>(token, warp) * 8);
      *reinterpret_cast<uint4*>(decoded_at(own, token)) =
          make_uint4(coded_halves(codes.x & 0xffffu), coded_halves(codes.x >> 16),
                     coded_halves(codes.y & 0xffffu), coded_halves(codes.y >> 16));
    }
    __syncwarp();
    turn<8 * 16>(pairs, decoded_at(own, first_token()));
    __syncwarp();
  }

  // Reads the thread's 64 tokens of its column as pairs of BF16.
  template <typename In>
  static __device__ __forceinline__ void take_pairs(uint32_t (&pairs)[HELD / 2], const uint8_t* stage, uint8_t* own,
                                                    const GivenScale& given) {
    const int warp = threadIdx.x >> 5;
    if constexpr (sizeof(In) == 2) {
      turn<8 * COLUMNS * 2>(pairs, stage + place<In>(first_token(), warp) * 16);
    } else {
      decode_columns(stage, own, given);
      turn<8 * 16>(pairs, decoded_at(own, first_token()));
      __syncwarp();
    }
  }

  // Reads the thread's 64 tokens of its column, with their signs.
  template <typename In>
  static __device__ __forceinline__ void take(float (&v)[HELD], uint8_t* stage, uint8_t* own, const uint32_t* signs,
                                              const GivenScale& given) {
    if constexpr (sizeof(In) == 4) {
      const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
      const int column = warp * 8 + (lane >> 2);
#pragma unroll
      for (int i = 0; i < HELD; ++i) {
        const int token = (lane & 3) * HELD + i;
        v[i] = reinterpret_cast<const float*>(stage)[place<In>(token, column >> 2) * 4 + (column & 3)];
      }
      flip_signs(v, signs);
    } else {
      uint32_t pairs[HELD / 2];
      take_pairs<In>(pairs, stage, own, given);
      signed_values(v, pairs, signs);
    }
  }

  // Calls body(tile, share, its elements in shared memory, scales of codes, the warp's own bytes) for each tile of this
  // block. own_bytes: of a warp. unrolled: copies are.
  template <typename In, size_t own_bytes, bool unrolled, typename Body>
  static __device__ __forceinline__ void each_tile(const In* x, int rows, int columns, const float* scale,
                                                   int scale_step, uint8_t* shared, Body&& body) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int across = (columns + COLUMNS - 1) / COLUMNS, tiles = across * ((rows + TOKENS - 1) / TOKENS);
    uint8_t* own = shared + 2 * STAGE<In> + warp * own_bytes;
    const auto place_of = [&](int tile) { return TileAt{tile / across * TOKENS, tile % across * COLUMNS}; };
    int turn = 0;
    int tile = blockIdx.x;
    if (tile < tiles) fetch<In, unrolled>(x, place_of(tile), rows, columns, shared);
    commit_copies();
    for (; tile < tiles; tile += gridDim.x, turn ^= 1) {
      wait_copies();
      __syncthreads();  // this stage is filled, and all threads have finished with the other one
      if (tile + gridDim.x < tiles) {
        fetch<In, unrolled>(x, place_of(tile + gridDim.x), rows, columns, shared + (turn ^ 1) * STAGE<In>);
      }
      commit_copies();
      const TileAt at = place_of(tile);
      Share mine{at.token + (lane & 3) * HELD, at.column + warp * 8 + (lane >> 2), false};
      mine.inside = mine.token < rows && mine.column < columns;
      body(at, mine, shared + turn * STAGE<In>, GivenScale{scale, scale_step, at.token, rows}, own);
    }
  }
};

#endif

}  // namespace lowprec
