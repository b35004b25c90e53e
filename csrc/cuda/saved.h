// Eight neighbouring values of a saved group: encoding, dequantising, rounding to the dtype of the op's input.
//
// A group of 16 to 256 is in 2 to 32 neighbouring lanes, which exchange their amax. E4M3 and E5M2 use hardware
// conversions: scaled values are within the format's range or NaN, so these round as numerics/rounding.h.
#pragma once

#include <cuda_bf16.h>

#include "cuda/vectors.h"
#include "numerics/saved.h"

namespace lowprec {

constexpr int64_t SMALLEST_GROUP = 16, LARGEST_GROUP = 256;

// log2 of the number of vectors in a group. Raises an error for unsupported groups or widths.
inline int group_shift(int64_t columns, int64_t group) {
  const bool power = group >= SMALLEST_GROUP && group <= LARGEST_GROUP && (group & (group - 1)) == 0;
  STD_TORCH_CHECK(power && columns % group == 0, "groups of saved codes are 16, 32, 64, 128 or 256 columns ",
                  "and divide a row, not ", group, " of ", columns);
  int shift = 0;
  while ((8 << shift) < group) ++shift;
  return shift;
}

// A matrix that kernels can read: row-major and aligned to 16 bytes.
inline Tensor vectorised(const Tensor& given) {
  STD_TORCH_CHECK(given.dim() == 2, "saved codes are those of a matrix");
  const Tensor x = dense(given);
  return aligned(x.const_data_ptr(), 16) ? x : torch::stable::clone(x);
}

inline Tensor saved_codes(const Tensor& like, int64_t rows, int64_t columns, Format format) {
  const bool packed = format == Format::E2M1;
  const ScalarType type = packed ? ScalarType::Byte : carrier_of(format);
  return empty_like_device(like, {rows, packed ? columns / 2 : columns}, type);
}

// Columns of the matrix that saved codes are of.
inline int64_t columns_of(const Tensor& codes, Format format) {
  STD_TORCH_CHECK(codes.dim() == 2, "saved codes are those of a matrix");
  return codes.size(1) * (format == Format::E2M1 ? 2 : 1);
}

template <typename Body>
void with_stream_type(const Tensor& x, Body&& body) {
  const ScalarType type = x.scalar_type();
  if (type == ScalarType::BFloat16) return body(InputTag<Bf16>{});
  STD_TORCH_CHECK(type == ScalarType::Float, "a stream is bfloat16 or float32");
  body(InputTag<Fp32>{});
}

template <typename Body>
void with_saved_format(Format format, Body&& body) {
  if (format == Format::E4M3) return body(FormatTag<Format::E4M3>{});
  if (format == Format::E5M2) return body(FormatTag<Format::E5M2>{});
  STD_TORCH_CHECK(format == Format::E2M1, "saved codes are E4M3, E5M2 or E2M1");
  body(FormatTag<Format::E2M1>{});
}

#if defined(__CUDACC__)

template <Format F>
struct SavedCodes {
  static constexpr int BYTES = F == Format::E2M1 ? 4 : 8;
  static constexpr __nv_fp8_interpretation_t HARDWARE = F == Format::E5M2 ? __NV_E5M2 : __NV_E4M3;
  uint32_t words[BYTES / 4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < BYTES / 4; ++i) words[i] = 0;
  }
  __device__ __forceinline__ void load(const uint8_t* data) {
    if constexpr (BYTES == 8) {
      const uint2 both = __ldg(reinterpret_cast<const uint2*>(data));
      words[0] = both.x, words[1] = both.y;
    } else {
      words[0] = __ldg(reinterpret_cast<const uint32_t*>(data));
    }
  }
  __device__ __forceinline__ void store(uint8_t* data) const {
    if constexpr (BYTES == 8) *reinterpret_cast<uint2*>(data) = make_uint2(words[0], words[1]);
    else *reinterpret_cast<uint32_t*>(data) = words[0];
  }
  __device__ __forceinline__ void encode(const float (&v)[VECTOR], float inverse) {
    uint32_t pairs[VECTOR / 2];
#pragma unroll
    for (int i = 0; i < VECTOR / 2; ++i) {
      const float a = v[2 * i] * inverse, b = v[2 * i + 1] * inverse;
      if constexpr (F == Format::E2M1) pairs[i] = encode_fp8_pair<F>(a, b);
      else pairs[i] = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, HARDWARE);
    }
    if constexpr (F == Format::E2M1) {
      words[0] = 0;
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) words[0] |= nibble(pairs[i >> 1] >> (8 * (i & 1)) & 0xffu) << (4 * i);
      if (is_nan(inverse)) words[0] = 0x33333333u;  // packed bits of NaN; the group's exponent marks it
    } else {
      words[0] = pairs[0] | pairs[1] << 16;
      words[1] = pairs[2] | pairs[3] << 16;
    }
  }
  // code * scale
  __device__ __forceinline__ void decode(float (&v)[VECTOR], float scale) const {
    if constexpr (F == Format::E2M1) {
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) {  // a nibble is the top of an FP32 number of exponent -126
        const uint32_t bits = words[0] >> (4 * i);
        v[i] = bits_float((bits & 7u) << 22 | (bits & 8u) << 28) * 0x1p126f * scale;
      }
    } else {
#pragma unroll
      for (int i = 0; i < VECTOR / 2; ++i) {
        const auto pair = static_cast<__nv_fp8x2_storage_t>(words[i >> 1] >> (16 * (i & 1)));
        const __half2 halves(__nv_cvt_fp8x2_to_halfraw2(pair, HARDWARE));
        const float2 values = __half22float2(halves);
        v[2 * i] = values.x * scale;
        v[2 * i + 1] = values.y * scale;
      }
    }
  }

 private:
  // pack_e2m1 of ops/reference.py for one E4M3 byte.
  static __device__ __forceinline__ uint32_t nibble(uint32_t byte) {
    const uint32_t size = byte & 0x7fu;
    return ((size < 0x38u ? size >> 5 : ((size - 0x38u) >> 2) + 2u) & 7u) | (byte >> 4 & 8u);
  }
};

// Where the codes of a matrix and the exponents of its groups are.
struct Saved {
  uint8_t* codes;
  uint8_t* exponents;
};

// A vector of saved codes with its scale.
template <Format F>
struct SavedVector {
  SavedCodes<F> codes;
  uint32_t exponent;

  __device__ __forceinline__ void clear() {
    codes.clear();
    exponent = 0;
  }
  // vector: its index in the matrix. shift: log2 of the vectors of a group.
  __device__ __forceinline__ void load(const Saved& from, int64_t vector, int shift) {
    codes.load(from.codes + vector * SavedCodes<F>::BYTES);
    exponent = __ldg(from.exponents + (vector >> shift));
  }
  // Values for a derivative. Exponent 255, of a group with Inf or NaN, is a scale of infinity, and the codes are NaN.
  __device__ __forceinline__ void decode(float (&v)[VECTOR]) const { codes.decode(v, bits_float(exponent << 23)); }
  // Values as the forward kernel computes with them: all NaN in a group with Inf or NaN, also in E2M1.
  __device__ __forceinline__ void values(float (&v)[VECTOR]) const {
    codes.decode(v, bits_float(exponent << 23 | (exponent == 255 ? 1u << 22 : 0u)));
  }
};

// Maximum over the group of this lane's vector; all lanes of a warp must call it.
__device__ __forceinline__ uint32_t group_largest(uint32_t bits, int shift) {
  for (int offset = 1; offset < 1 << shift; offset <<= 1) {
    bits = larger(bits, __shfl_xor_sync(0xffffffffu, bits, offset));
  }
  return bits;
}

// Rounds a vector and saves its codes; v becomes the dequantised values. `vector`: its index in the matrix.
template <Format F>
__device__ __forceinline__ void save(float (&v)[VECTOR], uint32_t amax, bool inside, int64_t vector, int shift,
                                     uint8_t* codes, uint8_t* exponents) {
  const SavedScale of = saved_scale<F>(amax);
  SavedCodes<F> made;
  made.encode(v, of.inverse);
  made.decode(v, of.scale);
  if (!inside) return;
  made.store(codes + vector * SavedCodes<F>::BYTES);
  if ((vector & ((1 << shift) - 1)) == 0) exponents[vector >> shift] = of.exponent;
}

// Writes the maximum over a block to `maximum`. `scratch` has a word per warp.
__device__ __forceinline__ void store_row_maximum(uint32_t bits, uint32_t* scratch, float* maximum) {
  bits = warp_largest(bits);
  if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = bits;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  bits = warp_largest(threadIdx.x < blockDim.x >> 5 ? scratch[threadIdx.x] : 0);
  if (threadIdx.x == 0) *maximum = bits_float(bits);
}

__device__ __forceinline__ void load_floats(float (&v)[VECTOR], const float* data) {
  const float4 a = __ldg(reinterpret_cast<const float4*>(data)), b = __ldg(reinterpret_cast<const float4*>(data) + 1);
  v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
  v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}

template <typename In>
__device__ __forceinline__ Vector<In> round_to_stream(const float (&v)[VECTOR]) {
  Vector<In> made;
#pragma unroll
  for (int i = 0; i < Vector<In>::WORDS; ++i) {
    if constexpr (sizeof(In) == 4) {
      made.words[i] = float_bits(v[i]);
    } else {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(v[2 * i], v[2 * i + 1]);
      made.words[i] = *reinterpret_cast<const uint32_t*>(&pair);
    }
  }
  return made;
}

template <typename In>
__device__ __forceinline__ void store_vector(In* data, const Vector<In>& v) {
#pragma unroll
  for (int i = 0; i < Vector<In>::WORDS; i += 4) {
    reinterpret_cast<uint4*>(data)[i / 4] = make_uint4(v.words[i], v.words[i + 1], v.words[i + 2], v.words[i + 3]);
  }
}

#endif

}  // namespace lowprec
