// Eight neighbouring elements at a time: 16-byte loads of 16-bit inputs, codes packed into words by hardware
// conversions where these round as numerics/rounding.h.
#pragma once

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <type_traits>

#include "cuda/launch.h"
#include "numerics/scale.h"
#include "numerics/philox.h"

namespace lowprec {

#if defined(__CUDACC__)

constexpr int VECTOR = 8;

// Rounds one number to the dtype of `data`.
template <typename In>
__device__ __forceinline__ void write_one(In* data, float v) {
  if constexpr (std::is_same_v<In, Bf16>) data->bits = bf16_bits(v);
  else if constexpr (std::is_same_v<In, Fp16>) data->bits = __half_as_ushort(__float2half_rn(v));
  else data->bits = v;
}

// Element i of eight in words; i is a constant once loops are unrolled.
template <typename In>
__device__ __forceinline__ float element(const uint32_t* words, int i);
template <>
__device__ __forceinline__ float element<Bf16>(const uint32_t* words, int i) {
  return bits_float(i & 1 ? words[i >> 1] & 0xffff0000u : words[i >> 1] << 16);
}
template <>
__device__ __forceinline__ float element<Fp16>(const uint32_t* words, int i) {
  return __half2float(__ushort_as_half(static_cast<uint16_t>(i & 1 ? words[i >> 1] >> 16 : words[i >> 1])));
}
template <>
__device__ __forceinline__ float element<Fp32>(const uint32_t* words, int i) {
  return bits_float(words[i]);
}

template <typename In>
struct Vector {
  static constexpr int WORDS = VECTOR * sizeof(In) / 4;
  uint32_t words[WORDS];

  __device__ __forceinline__ float operator[](int i) const { return element<In>(words, i); }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < WORDS; ++i) words[i] = 0;
  }
  // `data` must be aligned to 16 bytes.
  __device__ __forceinline__ void load(const In* data) {
#pragma unroll
    for (int i = 0; i < WORDS / 4; ++i) {
      const uint4 part = __ldg(reinterpret_cast<const uint4*>(data) + i);
      words[4 * i] = part.x, words[4 * i + 1] = part.y, words[4 * i + 2] = part.z, words[4 * i + 3] = part.w;
    }
  }
  // Loads the first `count` elements one by one; the rest are zeros.
  __device__ __forceinline__ void load_some(const In* data, int count) {
    clear();
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
      if (i >= count) continue;
      if constexpr (sizeof(In) == 4) {
        words[i] = reinterpret_cast<const uint32_t*>(data)[i];
      } else {
        words[i >> 1] |= static_cast<uint32_t>(reinterpret_cast<const uint16_t*>(data)[i]) << (i & 1 ? 16 : 0);
      }
    }
  }
  // Largest magnitude, as bits of an FP32 number; BF16 patterns have the order of magnitudes, two per word.
  __device__ __forceinline__ uint32_t largest() const {
    if constexpr (std::is_same_v<In, Bf16>) {
      uint32_t both = words[0] & 0x7fff7fffu;
#pragma unroll
      for (int i = 1; i < WORDS; ++i) both = __vmaxu2(both, words[i] & 0x7fff7fffu);
      return larger(both << 16, both & 0x7fff0000u);
    } else {
      uint32_t bits = 0;
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) bits = larger_magnitude(bits, (*this)[i]);
      return bits;
    }
  }
};

// Divides eight values by the scale of their tile: by the inverse, or by division if the rule `divides`.
__device__ __forceinline__ void over_scale(float (&v)[VECTOR], const TileScale& of, bool divides) {
  if (!divides) {
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) v[i] *= of.inverse;
  } else if (regular(of.scale)) {
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) v[i] = quotient(v[i], of.scale, of.inverse);
  } else {
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) v[i] = divide(v[i], of.scale);
  }
}

// E2M1 of a finite value, nearest even, by integer steps: |v| is limited to 6; the sum with 1.5 * 2^(23 - 1 + e)
// rounds, because its last bit is one step of the grid.
__device__ __forceinline__ float round_e2m1(float v) {
  const uint32_t size = min(magnitude_bits(v), 0x40c00000u);
  const float magic = bits_float(max(size & INFINITE, 0x3f800000u) + 0x0b400000u);
  return with_sign((bits_float(size) + magic) - magic, v);
}

// Codes of two scaled values, the first one in the low byte. NaN becomes 0x7f; E2M1 needs finite values.
template <Format F>
__device__ __forceinline__ uint32_t encode_fp8_pair(float a, float b) {
  if constexpr (F == Format::E2M1) {
    a = round_e2m1(a);
    b = round_e2m1(b);
  }
  return __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, F == Format::E5M2 ? __NV_E5M2 : __NV_E4M3);
}

template <Format F>
constexpr bool is_fp8 = F == Format::E2M1 || F == Format::E4M3 || F == Format::E5M2;

// Codes of eight scaled values, in words.
template <Format F>
struct Codes {
  using Code = typename Grid<F>::Code;
  static constexpr int WORDS = VECTOR * sizeof(Code) / 4;
  uint32_t words[WORDS];

  __device__ __forceinline__ void put(int i, Code code) {
    if constexpr (sizeof(Code) == 4) {
      words[i] = float_bits(code);
    } else {
      constexpr int each = 4 / sizeof(Code), bits = 8 * sizeof(Code);
      const uint32_t raw = static_cast<uint32_t>(code) & ((1u << bits) - 1u);
      words[i / each] = i % each ? words[i / each] | raw << (bits * (i % each)) : raw;
    }
  }
  // `inverse`: of the tile's scale. If it is positive and finite, so are the tile's amax and its values.
  __device__ __forceinline__ void encode_nearest(const float (&v)[VECTOR], float inverse = 0.0f) {
    const bool finite = F != Format::E2M1 || (inverse > 0.0f && inverse < bits_float(INFINITE));
    if (is_fp8<F> && finite) {
      words[0] = encode_fp8_pair<F>(v[0], v[1]) | encode_fp8_pair<F>(v[2], v[3]) << 16;
      words[1] = encode_fp8_pair<F>(v[4], v[5]) | encode_fp8_pair<F>(v[6], v[7]) << 16;
    } else {
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) put(i, encode<F>(v[i]));
    }
  }
  __device__ __forceinline__ void encode_random(const float (&v)[VECTOR], const Words& random) {
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) put(i, encode_stochastic<F>(v[i], bits_of(random, i)));
  }
  // `data` must be aligned to min(16, 8 codes).
  __device__ __forceinline__ void store_all(Code* data) const {
    if constexpr (WORDS == 2) {
      *reinterpret_cast<uint2*>(data) = make_uint2(words[0], words[1]);
    } else {
#pragma unroll
      for (int i = 0; i < WORDS; i += 4) {
        reinterpret_cast<uint4*>(data)[i / 4] = make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]);
      }
    }
  }
  __device__ __forceinline__ void store_some(Code* data, int count) const {
    constexpr int each = 4 / sizeof(Code), bits = 8 * sizeof(Code);
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
      if (i >= count) continue;
      if constexpr (sizeof(Code) == 4) {
        data[i] = bits_float(words[i]);
      } else {
        data[i] = static_cast<Code>(words[i / each] >> (bits * (i % each)));
      }
    }
  }
};

#endif

}  // namespace lowprec
