// Blocks of 16 elements, one per thread (NVFP4): load, rotate, amax, rounding to E2M1's grid, packing.
#pragma once

#include "cuda/amax.h"
#include "numerics/hadamard.h"
#include "numerics/value_grid.h"

namespace lowprec {

#if defined(__CUDACC__)

constexpr int LINE = 16;  // elements of a block

// Hardware conversions of non-negative numbers, with the bits of `encode` and `decode`.
__device__ __forceinline__ uint8_t e4m3_code(float v) { return __nv_cvt_float_to_fp8(v, __NV_SATFINITE, __NV_E4M3); }
__device__ __forceinline__ float e4m3_value(uint8_t code) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3)));
}

// The E2M1 value nearest to |v|, at most 6.
__device__ __forceinline__ float e2m1_size(float v) {
  constexpr uint32_t lift = 0x0b400000u;  // from a binade's bits to 1.5 times the number whose last bit is a step
  const float size = fminf(fabsf(v), 6.0f);
  const float magic = bits_float(__viaddmax_u32(float_bits(size) & INFINITE, lift, 0x3f800000u + lift));
  return (size + magic) - magic;
}

// Rotation of contiguous blocks across neighbouring threads: signs, and a Hadamard transform.
struct Turn {
  const int64_t* signs;  // null: all +1
  int block;             // 0: none
  float factor;
};
constexpr int LONGEST = 256;  // rotation block

// Sign bits of the sixteen elements of each thread of a warp; they repeat every `block` elements. Ends with a barrier.
__device__ __forceinline__ void make_flips(uint16_t (&flips)[32], const Turn& turn) {
  if (threadIdx.x < 32) {
    const bool drawn = turn.signs != nullptr && turn.block > 0;
    const uint64_t seed = drawn ? static_cast<uint64_t>(*turn.signs) : 0;
    const int group = 2 * threadIdx.x;
    flips[threadIdx.x] =
        drawn ? static_cast<uint16_t>(sign_bits(seed, group, turn.block) | sign_bits(seed, group + 1, turn.block) << 8) : 0;
  }
  __syncthreads();
}

template <typename In>
struct Line {
  Vector<In> held[2];

  __device__ __forceinline__ void load(const In* x) {
    held[0].load(x);
    held[1].load(x + VECTOR);
  }
  __device__ __forceinline__ void clear() {
    held[0].clear();
    held[1].clear();
  }
  __device__ __forceinline__ void values(float (&v)[LINE]) const {
#pragma unroll
    for (int i = 0; i < LINE; ++i) v[i] = held[i / VECTOR][i % VECTOR];
  }
  // Must be called by whole warps.
  __device__ __forceinline__ void rotated(float (&v)[LINE], uint32_t flips, const Turn& turn) const {
    values(v);
    if (turn.block == 0) return;
#pragma unroll
    for (int i = 0; i < LINE; ++i) v[i] = bits_float(float_bits(v[i]) ^ (flips << (31 - i) & SIGN));
    butterflies(v, turn.block);
    butterflies_across(v, turn.block);
#pragma unroll
    for (int i = 0; i < LINE; ++i) v[i] *= turn.factor;
  }
};

// Bits of the largest magnitude; NaN propagates.
__device__ __forceinline__ uint32_t line_amax(const float (&v)[LINE]) {
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < LINE; ++i) most = larger_magnitude(most, v[i]);
  return most;
}

constexpr int LINES_EACH = 2;

// Loads the blocks of a thread: `first`, and others at a distance of THREADS.
template <typename In>
__device__ __forceinline__ void fetch(const In* __restrict__ x, int64_t first, int64_t blocks, Line<In> (&held)[LINES_EACH]) {
#pragma unroll
  for (int i = 0; i < LINES_EACH; ++i) {
    const int64_t at = first + i * THREADS;
    if (at < blocks) held[i].load(x + at * LINE);
    else held[i].clear();
  }
}

// amax: must be zero before.
template <typename In>
static __global__ void __launch_bounds__(THREADS)
    largest_rotated(const In* __restrict__ x, uint32_t* __restrict__ amax, int64_t blocks, Turn turn) {
  __shared__ uint16_t flips[32];
  __shared__ uint32_t scratch[THREADS / 32];
  make_flips(flips, turn);
  const uint32_t mine = flips[threadIdx.x & 31];
  const int64_t stride = static_cast<int64_t>(gridDim.x) * THREADS * LINES_EACH;
  uint32_t found = 0;
  for (int64_t base = static_cast<int64_t>(blockIdx.x) * THREADS * LINES_EACH; base < blocks; base += stride) {
    Line<In> held[LINES_EACH];
    fetch(x, base + threadIdx.x, blocks, held);
#pragma unroll
    for (int i = 0; i < LINES_EACH; ++i) {
      float v[LINE];
      held[i].rotated(v, mine, turn);
      found = larger(found, line_amax(v));
    }
  }
  found = block_largest(found, scratch);
  if (threadIdx.x == 0 && found > *reinterpret_cast<volatile uint32_t*>(amax)) atomicMax(amax, found);
}

template <typename In>
void launch_largest_rotated(const In* x, uint32_t* amax, int64_t lines, const Turn& turn, cudaStream_t stream) {
  const int64_t blocks = ceil_div(lines, THREADS * LINES_EACH);
  largest_rotated<In><<<blocks < 132 * 8 ? blocks : 132 * 8, THREADS, 0, stream>>>(x, amax, lines, turn);
}

inline Turn lines_turn(const Tensor& x, const std::optional<Tensor>& signs, int64_t rotation) {
  STD_TORCH_CHECK(rotation >= 0 && rotation <= LONGEST && (rotation & (rotation - 1)) == 0 &&
                      (rotation == 0 || x.size(1) % rotation == 0),
                  "blocks of ", rotation, " do not fit a row of ", x.size(1));
  return {seed_of(signs), static_cast<int>(rotation), hadamard_factor(rotation)};
}

// Reduction of sixteen values in the order of halving.
template <typename Join>
__device__ __forceinline__ float halved(const float (&p)[LINE], const Join& join) {
  float of[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) of[i] = join(join(p[i], p[i + 8]), join(p[i + 4], p[i + 12]));
  return join(join(of[0], of[2]), join(of[1], of[3]));
}

// E4M3 codes of values on the E4M3 grid.
__device__ __forceinline__ void pack_fp8(const float (&v)[LINE], uint32_t (&words)[LINE / 4]) {
#pragma unroll
  for (int i = 0; i < LINE / 4; ++i) {
    const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(v[4 * i], v[4 * i + 1]), __NV_SATFINITE, __NV_E4M3);
    const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(v[4 * i + 2], v[4 * i + 3]), __NV_SATFINITE, __NV_E4M3);
    words[i] = low | high << 16;
  }
}

// Whether codes of a block can be computed without special cases. A non-finite scale of the matrix makes this false for
// all blocks.
__device__ __forceinline__ bool plain(float most, const TileScale& of) {
  return is_finite(most) && of.inverse > 0.0f && of.inverse < bits_float(INFINITE);
}

// Divides values by a scale, correctly rounded where the code is not zero.
__device__ __forceinline__ void places(float (&v)[LINE], const TileScale& of) {
  if (regular(of.scale)) {
#pragma unroll
    for (int i = 0; i < LINE; ++i) v[i] = quotient(v[i], of.scale, of.inverse);
  } else {
#pragma unroll
    for (int i = 0; i < LINE; ++i) v[i] = divide(v[i], of.scale);
  }
}

// Codes of values that may not be finite; of_place(i): code of the i-th value.
template <typename Code>
__device__ __forceinline__ void each_code(uint32_t (&words)[LINE / 4], const Code& of_place) {
#pragma unroll
  for (int i = 0; i < LINE; ++i) {
    const uint32_t code = static_cast<uint32_t>(of_place(i)) << (8 * (i & 3));
    words[i >> 2] = i & 3 ? words[i >> 2] | code : code;
  }
}

// E2M1 codes of finite scaled values: to nearest, or stochastic with the random bits `drawn`.
__device__ __forceinline__ void nearest_codes(const float (&place)[LINE], uint32_t (&words)[LINE / 4]) {
  float v[LINE];
#pragma unroll
  for (int i = 0; i < LINE; ++i) v[i] = with_sign(e2m1_size(place[i]), place[i]);
  pack_fp8(v, words);
}
__device__ __forceinline__ void random_codes(const float (&place)[LINE], const Words (&drawn)[2], uint32_t (&words)[LINE / 4]) {
  constexpr PlaceCodes table{0x3c383000u, 0x4c484440u};
#pragma unroll
  for (int w = 0; w < LINE / 4; ++w) {
    float v[4];
    uint32_t at[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[i] = place[4 * w + i];
      at[i] = random_place(fminf(fabsf(v[i]), 6.0f), drawn[w >> 1].w[(w & 1) * 2 + (i >> 1)], i & 1);
    }
    words[w] = carrier_codes(v, at, table);
  }
}

#endif

}  // namespace lowprec
