// Common functions of rotate_fold in both orientations: a thread's 32 or 64 elements from words to rotated values, and
// to codes once the row's exponent is known.
#pragma once

#include <cuda_bf16.h>

#include "cuda/vectors.h"
#include "numerics/hadamard.h"
#include "numerics/value_grid.h"

namespace lowprec {

// Ops fold and hadamard, for cases that the fused kernels do not support.
std::tuple<Tensor, Tensor> fold(const Tensor& codes, const Tensor& scale, std::string carrier);
Tensor hadamard(const Tensor& x, std::optional<Tensor> seed, int64_t block);

constexpr int MX_BLOCK = 32;
constexpr int HELD = 64;          // elements per thread: a rotation, two MX blocks; half of it if `count` says so
constexpr int LOST = 256;         // added to the key of a block with Inf or NaN
constexpr int LOST_BYTE = 255;    // byte for such a key
constexpr int TOP_SHIFT = 13;     // of the wider carrier
constexpr int NAN_TABLE = TOP_SHIFT - LEAST_SHIFT + 1;
constexpr int TABLES = NAN_TABLE + 1;
constexpr int SIGN_WORDS = 128;   // pairs of BF16 sign bits for 256 elements

struct Code8 {
  uint8_t bits;  // E4M3
};

// Constants of a call, computed on the host.
struct Rotation {
  int block;                 // 0: none
  float factor;              // block^-1/2
  uint32_t carry;            // added to amax bits: carries a mantissa above the threshold into the exponent
  int offset, span;          // exponent of the format's limit minus one; binades below the row's largest exponent
  float headroom, quotient;  // factor of x; 1 / headroom, factor of scales
  int lift, top;             // exponent of `quotient`; exponent of the row's largest block in the carrier
  bool e5m2;
  const int64_t* signs;
  const int64_t* seed;
  const int64_t* origin;
  const float* scale;        // scale of E4M3 codes
  int scale_step;            // 0: one scale; 1: one per row of x
};

// Calls the body with the element type of x.
template <typename Body>
auto with_operand(const Tensor& x, Body&& body) {
  if (x.scalar_type() == ScalarType::Float8_e4m3fn) return body(InputTag<Code8>{});
  return with_input(x, body);
}

// One call: the matrix [rows, columns], its codes in either orientation.
struct RotateCall {
  const void* x;
  int64_t rows, columns;
  uint8_t* codes;
  float* scale;
  Rotation how;
  bool plain;  // blocks of 64; factor and headroom in one product; values are at most 6 (rotate.cu)
  int device;
  cudaStream_t stream;
};

// rotate.cu: x or its transpose in FP32; with one scale (step 0) or one per row (1), x is decoded to BF16 first.
Tensor plain_matrix(const Tensor& x, const float* scale, int step, bool transposed);

// rotate_transposed.cu: codes of the transpose. keys: int32 [columns], zeros; saved: uint16 [ceil(rows / 64), columns].
template <typename In>
void launch_transposed(const RotateCall& call, uint32_t* keys, uint16_t* saved);
// Number of blocks that the GPU can run at once, at most `most`.
template <typename Kernel>
int64_t resident_blocks(Kernel kernel, int threads, size_t shared, int64_t most, int device) {
  int each = 0, multiprocessors = 0;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, threads, shared);
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  const int64_t all = static_cast<int64_t>(each < 1 ? 1 : each) * multiprocessors;
  return all < most ? all : most;
}

#if defined(__CUDACC__)

// --- asynchronous copies ---------------------------------------------------------------------------------------------

// Copies 8 or 16 `bytes` from global to shared memory.
template <int bytes>
__device__ __forceinline__ void copy_async(void* to, const void* from) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(address), "l"(from), "n"(bytes) : "memory");
}
// Copies, or writes zeros if `inside` is false.
template <int bytes>
__device__ __forceinline__ void copy_async(void* to, const void* from, bool inside) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  const int taken = inside ? bytes : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(address), "l"(from), "n"(bytes), "r"(taken)
               : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }

// Index of chunk c of thread r, `chunks` of 16 bytes per thread: eight neighbouring threads have no bank conflicts.
template <int chunks>
__device__ __forceinline__ int swizzled(int r, int c) {
  return r * chunks + (chunks >= 8 ? c ^ (r & 7) : chunks == 4 ? c ^ (r >> 1 & 3) : c ^ (r >> 2 & 1));
}

// --- from words to rotated values ------------------------------------------------------------------------------------

// Tables in shared memory, filled by `make_tables`.
struct Tables {
  PlaceCodes codes[TABLES];
  alignas(16) uint32_t signs[SIGN_WORDS];
};

// Computes signs of 256 elements for rotations of `block`, by the first 32 threads of a block.
__device__ __forceinline__ void make_signs(uint32_t* signs, int block, const int64_t* seed) {
  if (threadIdx.x >= 32) return;
  const bool drawn = block > 0 && seed != nullptr;
  const uint32_t bits = drawn ? sign_bits(static_cast<uint64_t>(*seed), threadIdx.x, block) : 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    signs[threadIdx.x * 4 + i] = (bits >> (2 * i) & 1u) << 15 | (bits >> (2 * i + 1) & 1u) << 31;
  }
}

// For blocks of 32 threads or more; ends with a barrier.
__device__ __forceinline__ void make_tables(Tables& tables, const Rotation& how) {
  for (int i = threadIdx.x; i < TABLES; i += blockDim.x) {
    const int shift = i + LEAST_SHIFT;
    tables.codes[i] = i == NAN_TABLE ? PlaceCodes{0x7f7f7f7fu, 0x7f7f7f7fu} : place_codes(how.e5m2, shift);
  }
  make_signs(tables.signs, how.block, how.signs);
  __syncthreads();
}

// Two E4M3 codes as halves.
__device__ __forceinline__ uint32_t coded_halves(uint32_t codes) {
  const __half2 both = __half2(__nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes), __NV_E4M3));
  return *reinterpret_cast<const uint32_t*>(&both);
}

// Decodes two E4M3 codes with a scale to BF16.
__device__ __forceinline__ uint32_t decoded_pair(uint32_t codes, float scale) {
  const uint32_t halves = coded_halves(codes);
  const float2 v = __half22float2(*reinterpret_cast<const __half2*>(&halves));
  const __nv_bfloat162 made = __floats2bfloat162_rn(v.x * scale, v.y * scale);
  return *reinterpret_cast<const uint32_t*>(&made);
}

// Applies signs to pairs of BF16 and converts to FP32.
template <int count>
__device__ __forceinline__ void signed_values(float (&v)[count], const uint32_t (&pairs)[count / 2],
                                              const uint32_t* signs) {
#pragma unroll
  for (int i = 0; i < count / 8; ++i) {
    const uint4 flip = reinterpret_cast<const uint4*>(signs)[i];
    const uint32_t of[4] = {flip.x, flip.y, flip.z, flip.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t pair = pairs[i * 4 + j];
      v[(i * 4 + j) * 2] = bits_float((pair ^ of[j]) << 16);
      v[(i * 4 + j) * 2 + 1] = bits_float((pair ^ of[j]) & 0xffff0000u);
    }
  }
}
template <int count>
__device__ __forceinline__ void flip_signs(float (&v)[count], const uint32_t* signs) {
#pragma unroll
  for (int i = 0; i < count / 2; ++i) {
    v[2 * i] = bits_float(float_bits(v[2 * i]) ^ signs[i] << 16);
    v[2 * i + 1] = bits_float(float_bits(v[2 * i + 1]) ^ (signs[i] & 0xffff0000u));
  }
}

// Signs of the thread's elements: a rotation of more than `count` elements spans lanes.
template <int count = HELD>
__device__ __forceinline__ const uint32_t* signs_of_lane(const uint32_t* signs, int block) {
  return signs + (block > count ? (threadIdx.x & (block / count - 1)) * (count / 2) : 0);
}

// All stages without the factor, which is part of later products. fixed: block known at compile time; 0: from the call.
template <int fixed, int count>
__device__ __forceinline__ void rotate(float (&v)[count], const Rotation& how) {
  const int block = fixed > 0 ? fixed : how.block;
  butterflies(v, block);
  if (block > count) butterflies_across(v, block);
}

LOWPREC_HD float larger_size(float a, float b) {  // NaN propagates
#if defined(__CUDA_ARCH__)
  float made;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(made) : "f"(fabsf(a)), "f"(fabsf(b)));
  return made;
#else
  return bits_float(larger_magnitude(magnitude_bits(a), b));
#endif
}

// Key of a block before its row is known: exponent + 127, plus LOST if its maximum is not finite. A product with the
// factor keeps the order of magnitudes, so it is applied after the maximum.
LOWPREC_HD int block_key(const float* v, const Rotation& how) {
  float most[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) most[i] = larger_size(v[i], v[i + 4]);
#pragma unroll
  for (int i = 8; i < MX_BLOCK; ++i) most[i & 3] = larger_size(most[i & 3], v[i]);
  const float amax = larger_size(larger_size(most[0], most[1]), larger_size(most[2], most[3])) * how.factor;
  uint32_t bits = float_bits(amax);
  const bool finite = bits < INFINITE;
  if (bits > INFINITE) bits = 0x7fc00000u;
  const int e = static_cast<int>((bits + how.carry) >> 23) - how.offset;
  return min(max(e, 1), 254) + (finite ? 0 : LOST);
}

// --- from rotated values to codes ------------------------------------------------------------------------------------

// Scale of a row from its largest key.
LOWPREC_HD float row_scale(int row, const Rotation& how) {
  if (row >= LOST) return bits_float(0x7fc00000u);
  return how.quotient * exp2_int(row - 127) * exp2_int(-how.top);
}

struct BlockCodes {
  float inverse;
  PlaceCodes table;
};

// key, row: from block_key.
LOWPREC_HD BlockCodes block_codes(int key, int row, const Tables& tables, const Rotation& how) {
  const int row_e = row & 255, e = max(key, row_e - how.span);
  const int largest = row >= LOST ? 255 : min(row_e + how.lift, 255);
  const int shift = min(e + how.lift, 255) - largest + how.top;
  const bool lost = key >= LOST;
  const int entry = lost ? NAN_TABLE : max(shift, LEAST_SHIFT) - LEAST_SHIFT;
  const float power = bits_float(e == 254 ? 0x400000u : static_cast<uint32_t>(254 - e) << 23);  // 2^(127 - e)
  return {lost ? bits_float(0x7fc00000u) : power * how.headroom, tables.codes[entry]};
}

// Codes of a block of 32; group: the first global column >> 3.
template <bool random, bool plain>
LOWPREC_HD void emit(const float* v, const BlockCodes& of, const Rotation& how, uint64_t seed, uint32_t row,
                     uint32_t group, uint32_t* words) {
  const float product = how.factor * of.inverse;
#pragma unroll
  for (int g = 0; g < MX_BLOCK / 8; ++g) {
    Words drawn;
    if constexpr (random) drawn = random_words(seed, row, group + g);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float scaled[4];
      uint32_t place[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float x = v[g * 8 + half * 4 + i];
        scaled[i] = plain ? x * product : x * how.factor * of.inverse;
        // NaN in a block with LOST becomes 6 or 0: its table has NaN codes only.
        const float bounded = plain ? scaled[i] : fminf(fabsf(scaled[i]), 6.0f);
        if constexpr (random) place[i] = random_place(bounded, drawn.w[half * 2 + (i >> 1)], i & 1);
        else place[i] = nearest_place(bounded);
      }
      words[g * 2 + half] = carrier_codes(scaled, place, of.table);
    }
  }
}

// Stages a warp's codes in shared memory, and writes them in 16-byte pieces: put(piece, codes).
template <int words_each, typename Put>
__device__ __forceinline__ void write_codes(const uint32_t (&words)[words_each], uint4* staged, Put&& put) {
  const int lane = threadIdx.x & 31;
  constexpr int pieces = words_each / 4;
#pragma unroll
  for (int c = 0; c < pieces; ++c) {
    staged[swizzled<pieces>(lane, c)] = make_uint4(words[4 * c], words[4 * c + 1], words[4 * c + 2], words[4 * c + 3]);
  }
  __syncwarp();
#pragma unroll
  for (int j = 0; j < pieces; ++j) {
    const int piece = j * 32 + lane;
    put(piece, staged[swizzled<pieces>(piece / pieces, piece % pieces)]);
  }
}

#endif

}  // namespace lowprec
