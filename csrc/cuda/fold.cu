// fold (ops/reference.py): block exponents multiplied into the carrier, code * 2^(e_block - e_row + top), a row scale.
//
// A block per row: first its few scales, then eight codes per thread at a time. The hardware conversion saturates where
// a cast would overflow, so overflowing values and NaN are converted in software.
#include "cuda/rotate.h"

namespace lowprec {
namespace {

constexpr int THREADS = 256;

template <Format F>
__device__ __forceinline__ uint32_t folded_code(uint32_t code, float shift) {
  if ((code & 0x7fu) == 0x7fu) return code;  // NaN has the same code in both carriers
  return cast_ieee<F>(decode<Format::E4M3>(static_cast<uint8_t>(code)) * shift);
}

// Four codes of one block.
template <Format F>
__device__ __forceinline__ uint32_t folded_word(uint32_t codes, float shift) {
  uint32_t made = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t pair = codes >> 16 * half & 0xffffu;
    const __half2 both = __half2(__nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(pair), __NV_E4M3));
    const float2 v = __half22float2(both);
    const float a = v.x * shift, b = v.y * shift;
    uint32_t out;
    if (fabsf(a) <= Grid<F>::max && fabsf(b) <= Grid<F>::max) {
      out = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, F == Format::E5M2 ? __NV_E5M2 : __NV_E4M3);
    } else {
      out = folded_code<F>(pair & 0xffu, shift) | folded_code<F>(pair >> 8, shift) << 8;
    }
    made |= out << 16 * half;
  }
  return made;
}

__device__ __forceinline__ float shift_of(float scale, int row, int top) {
  return exp2_int(bounded(exponent(scale) - row + top));
}

// whole: each eight codes are in one block, and are aligned.
template <Format F, bool whole>
__global__ void __launch_bounds__(THREADS) fold_rows(const uint8_t* __restrict__ codes, const float* __restrict__ scale,
                                                     uint8_t* __restrict__ folded, float* __restrict__ row_scale,
                                                     int64_t columns, int64_t tiles, int top) {
  __shared__ int exponents[THREADS / 32], nans[THREADS / 32];
  __shared__ float scales[THREADS / 32];
  const int64_t row = blockIdx.x, width = columns / tiles;
  const float* of = scale + row * tiles;
  int e = -127, nan = 0;
  float most = -bits_float(INFINITE);
  for (int64_t i = threadIdx.x; i < tiles; i += THREADS) {
    const float s = of[i];
    e = max(e, exponent(s));
    nan |= is_nan(s);
    most = fmaxf(most, s);
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) {
    e = max(e, __shfl_xor_sync(0xffffffffu, e, offset));
    nan |= __shfl_xor_sync(0xffffffffu, nan, offset);
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, offset));
  }
  if ((threadIdx.x & 31) == 0) {
    const int warp = threadIdx.x >> 5;
    exponents[warp] = e, nans[warp] = nan, scales[warp] = most;
  }
  __syncthreads();
  for (int i = 0; i < THREADS / 32; ++i) e = max(e, exponents[i]), nan |= nans[i], most = fmaxf(most, scales[i]);
  if (threadIdx.x == 0) row_scale[row] = (nan ? bits_float(0x7fc00000u) : most) * exp2_int(-top);
  const uint8_t* in = codes + row * columns;
  uint8_t* out = folded + row * columns;
  if constexpr (whole) {
    for (int64_t column = threadIdx.x * VECTOR; column < columns; column += THREADS * VECTOR) {
      const uint2 held = __ldg(reinterpret_cast<const uint2*>(in + column));
      const float shift = shift_of(of[column / width], e, top);
      const uint2 made = make_uint2(folded_word<F>(held.x, shift), folded_word<F>(held.y, shift));
      *reinterpret_cast<uint2*>(out + column) = made;
    }
  } else {
    for (int64_t column = threadIdx.x; column < columns; column += THREADS) {
      out[column] = static_cast<uint8_t>(folded_code<F>(in[column], shift_of(of[column / width], e, top)));
    }
  }
}

}  // namespace

std::tuple<Tensor, Tensor> fold(const Tensor& codes_given, const Tensor& scale_given, std::string carrier) {
  const Tensor codes = dense(codes_given), scale = dense(scale_given);
  const int64_t rows = rows_of(codes), columns = codes.size(1), tiles = scale.size(1);
  const Format format = parse_format(carrier);
  STD_TORCH_CHECK(format == Format::E4M3 || format == Format::E5M2, "codes fold into E4M3 or E5M2");
  STD_TORCH_CHECK(codes.scalar_type() == ScalarType::Float8_e4m3fn && scale.scalar_type() == ScalarType::Float,
                  "fold takes E2M1 codes, which ride as float8_e4m3fn, and FP32 scales");
  STD_TORCH_CHECK(scale.size(0) == rows && tiles > 0 && columns % tiles == 0, "a scale for each block of each row");
  Tensor folded = empty_like_device(codes, {rows, columns}, carrier_of(format));
  Tensor row_scale = empty_like_device(scale, {rows, 1}, ScalarType::Float);
  if (rows == 0) return {folded, row_scale};
  const uint8_t* in = data_of<uint8_t>(codes);
  const bool whole = columns / tiles % VECTOR == 0 && columns % VECTOR == 0 && aligned(in, VECTOR);
  const auto launch = [&](auto kernel, int top) {
    kernel<<<rows, THREADS, 0, stream_of(codes)>>>(in, data_of<float>(scale), mutable_data_of<uint8_t>(folded),
                                                   mutable_data_of<float>(row_scale), columns, tiles, top);
  };
  if (format == Format::E4M3) {
    whole ? launch(fold_rows<Format::E4M3, true>, 6) : launch(fold_rows<Format::E4M3, false>, 6);
  } else {
    whole ? launch(fold_rows<Format::E5M2, true>, 13) : launch(fold_rows<Format::E5M2, false>, 13);
  }
  check_launch("fold");
  return {folded, row_scale};
}

}  // namespace lowprec

namespace lowprec {
namespace {

std::tuple<Tensor, Tensor> fold_after(const Tensor& codes, const Tensor& scale, std::string carrier,
                                      std::optional<Tensor>) {
  return fold(codes, scale, carrier);
}

}  // namespace
}  // namespace lowprec

STABLE_TORCH_LIBRARY_IMPL(lowprec, CUDA, m) { m.impl("fold", TORCH_BOX(&lowprec::fold_after)); }
