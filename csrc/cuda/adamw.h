// Common definitions of the fused AdamW: the table of tensors that a call updates, and reads and writes of state in
// every codec. The tensors of a call have the same codecs; their table is in device memory, written by kernels that
// take it as parameters, so that nothing is copied from the host.
#pragma once

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "cuda/groups.h"
#include "cuda/vectors.h"
#include "numerics/adamw.h"

namespace lowprec {

// Storage of a moment: a cast, codes with one power-of-two scale (FP16, E4M3, E5M2), or range expansion.
enum class Store : int { FP32, BF16, FP16, E4M3, E5M2, EXPANDED_E4M3, EXPANDED_E5M2 };
// Storage of a weight: the FP32 parameter, FP16 codes with one power-of-two scale, or the BF16 parameter.
enum class Master : int { FP32, FP16, FP16_STOCHASTIC, BF16 };

LOWPREC_HD bool expanded(Store store) { return store >= Store::EXPANDED_E4M3; }
LOWPREC_HD bool scaled(Store store) { return store >= Store::FP16 && store <= Store::E5M2; }
LOWPREC_HD bool scaled(Master master) { return master == Master::FP16 || master == Master::FP16_STOCHASTIC; }

// scale: of the tensor or of its groups. exponent, center: of groups.
struct StateTensors {
  void* codes;
  float *scale, *exponent, *center;
};

struct Item {
  void* parameter;
  const void* gradient;
  StateTensors moments[2];
  uint16_t* master;
  float *master_scale, *step;
  const float* found_inf;  // 1: nothing of this tensor changes; may be null
  int64_t numbers, columns;
  int64_t length;        // elements of a segment
  int64_t first;         // index of its first unit of work among those of all tensors
  int32_t per_segment;   // groups of a segment
  int32_t per_row;       // groups of a row
  int32_t aligned;       // every array is aligned to 16 bytes
  int32_t place;         // index among the parameters of the call
};

// Constants of a tensor in this step, and statistics from the first passes.
struct Numbers {
  AdamRate rate;
  float correction2;
  uint64_t seed;
  double correction1, correction2_wide;
  uint32_t amax[3];  // bits of the amax of new moments and new weights
  int64_t origin[2];   // row and column of a shard's first element in the whole tensor
};

struct How {
  Store stores[2];
  Master master;
  int32_t bf16_gradient;
  int32_t fp32_parameter;  // also if it has BF16 values, as FSDP2 needs
  AdamConstants constants;
  uint32_t slowest;  // the largest code of a first moment that `decaying` may change
  float floor;       // eps^2
  int64_t group;
  const float* grad_scale;
};

enum class Pass : int { SQUARES, AMAX, UPDATE };

#if defined(__CUDACC__)

__device__ __forceinline__ bool skipped(const Item& item) { return item.found_inf != nullptr && *item.found_inf == 1.0f; }

__device__ __forceinline__ float divisor(const How& how) { return how.grad_scale == nullptr ? 1.0f : *how.grad_scale; }

// Index of the item that contains `unit`.
__device__ __forceinline__ int item_of(const Item* items, int count, int64_t unit) {
  int low = 0, high = count;
  while (high - low > 1) {
    const int middle = (low + high) >> 1;
    if (items[middle].first <= unit) low = middle;
    else high = middle;
  }
  return low;
}

// Power-of-two scale for a largest magnitude; its rule has literals only, which the compiler can fold.
template <Format F>
__device__ __forceinline__ TileScale power_scale(float amax) {
  constexpr int offset = F == Format::E4M3 ? 8 : 15;
  constexpr float threshold = Grid<F>::max / (F == Format::E4M3 ? 256.0f : 32768.0f);
  return tile_scale(amax, ScaleRule{Rule::POW2, false, Grid<F>::max, 1.0, offset, threshold, 0});
}

__device__ __forceinline__ TileScale scale_of(Store store, uint32_t bits) {
  const float amax = bits_float(bits);
  if (store == Store::E4M3) return power_scale<Format::E4M3>(amax);
  return store == Store::E5M2 ? power_scale<Format::E5M2>(amax) : power_scale<Format::FP16>(amax);
}

__device__ __forceinline__ float read_fp8(uint32_t code, __nv_fp8_interpretation_t kind) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(static_cast<__nv_fp8_storage_t>(code), kind)));
}

// FP16 of a scaled value, clamped to the largest number.
__device__ __forceinline__ uint16_t write_fp16(float v) {
  return __half_as_ushort(__float2half_rn(clamp(v, Grid<Format::FP16>::max)));
}

__device__ __forceinline__ uint8_t write_fp8(float v, __nv_fp8_interpretation_t kind) {
  return __nv_cvt_float_to_fp8(v, __NV_SATFINITE, kind);
}

// The value at one index, for moments that are cast or have one scale.
__device__ __forceinline__ float read_one(Store store, const void* codes, int64_t at, float scale) {
  switch (store) {
    case Store::FP32:
      return static_cast<const float*>(codes)[at];
    case Store::BF16:
      return bf16_value(static_cast<const uint16_t*>(codes)[at]);
    case Store::FP16:
      return __half2float(__ushort_as_half(static_cast<const uint16_t*>(codes)[at])) * scale;
    case Store::E4M3:
      return read_fp8(static_cast<const uint8_t*>(codes)[at], __NV_E4M3) * scale;
    default:
      return read_fp8(static_cast<const uint8_t*>(codes)[at], __NV_E5M2) * scale;
  }
}

__device__ __forceinline__ void write_one(Store store, void* codes, int64_t at, float x, float inverse) {
  switch (store) {
    case Store::FP32:
      static_cast<float*>(codes)[at] = x;
      return;
    case Store::BF16:
      static_cast<uint16_t*>(codes)[at] = bf16_bits(x);
      return;
    case Store::FP16:
      static_cast<uint16_t*>(codes)[at] = write_fp16(x * inverse);
      return;
    case Store::E4M3:
      static_cast<uint8_t*>(codes)[at] = write_fp8(x * inverse, __NV_E4M3);
      return;
    default:
      static_cast<uint8_t*>(codes)[at] = write_fp8(x * inverse, __NV_E5M2);
      return;
  }
}

// Applies `decaying` to the code of a first moment that was written to nearest.
template <Format F>
__device__ __forceinline__ void decay_at(void* codes, int64_t at, float x, float old, float scale, const How& how) {
  auto* of = static_cast<typename Grid<F>::Code*>(codes) + at;
  *of = decaying<F>(*of, x, old, scale, how.constants);
}

__device__ __forceinline__ void decay_one(Store store, void* codes, int64_t at, float x, float old, float scale,
                                          const How& how) {
  if (store == Store::BF16) decay_at<Format::BF16>(codes, at, x, old, scale, how);
  else if (store == Store::FP16) decay_at<Format::FP16>(codes, at, x, old, scale, how);
  else if (store == Store::E4M3) decay_at<Format::E4M3>(codes, at, x, old, scale, how);
  else if (store == Store::E5M2) decay_at<Format::E5M2>(codes, at, x, old, scale, how);
}

__device__ __forceinline__ float read_master(const How& how, const Item& item, int64_t at, float scale) {
  if (scaled(how.master)) return __half2float(__ushort_as_half(item.master[at])) * scale;
  if (how.fp32_parameter) return static_cast<const float*>(item.parameter)[at];
  return bf16_value(static_cast<const uint16_t*>(item.parameter)[at]);
}

// bits: in [0, 65536), for stochastic rounding.
__device__ __forceinline__ void write_master(const How& how, const Item& item, int64_t at, float w, TileScale to,
                                             uint32_t bits) {
  if (how.master == Master::FP32) {
    static_cast<float*>(item.parameter)[at] = w;
    return;
  }
  uint16_t value;
  if (how.master == Master::BF16) {
    value = encode_stochastic<Format::BF16>(w, bits);
  } else {
    const uint16_t code = how.master == Master::FP16 ? write_fp16(w * to.inverse)
                                                     : encode_stochastic<Format::FP16>(w * to.inverse, bits);
    item.master[at] = code;
    value = bf16_bits(__half2float(__ushort_as_half(code)) * to.scale);
  }
  if (how.fp32_parameter) static_cast<float*>(item.parameter)[at] = bf16_value(value);
  else static_cast<uint16_t*>(item.parameter)[at] = value;
}

__device__ __forceinline__ float read_gradient(const How& how, const Item& item, int64_t at, float scale) {
  const float g = how.bf16_gradient ? bf16_value(static_cast<const uint16_t*>(item.gradient)[at])
                                    : static_cast<const float*>(item.gradient)[at];
  return scale == 1.0f ? g : divide(g, scale);
}

__device__ __forceinline__ uint32_t draw_of(const Numbers& numbers, int64_t at, int64_t columns) {
  const int64_t row = at / columns, column = at - row * columns + numbers.origin[1];
  return bits_of(random_words(numbers.seed, row + numbers.origin[0], column >> 3), column & 7);
}

#endif

}  // namespace lowprec
