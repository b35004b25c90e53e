// fold (ops/reference.py): block exponents multiplied into the carrier, code * 2^(e_block - e_row + top), a row scale.
//
// A block per row: first its few scales, then eight codes per thread at a time. The hardware conversion saturates where
// a cast would overflow, so overflowing values and NaN are converted in software.
//
// fold_transposed writes the transpose of that, in blocks of 128x128, from codes or from two of them in a byte. The
// exponents of rows are computed before.
#include "cuda/nibbles.h"
#include "cuda/rotate.h"
#include "cuda/transposed_block.h"

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

__device__ __forceinline__ int shift_of(float scale, int row, int top) { return bounded(exponent(scale) - row + top); }

// Carriers of the E2M1 grid times 2^shift, where all of them are normal numbers: of a code, the exponent is `shift` more.
template <Format F>
__device__ __forceinline__ bool shifted_table(int shift, uint2& table) {
  constexpr bool wide = F == Format::E5M2;
  if (shift < (wide ? -13 : -5) || shift > (wide ? 13 : 6)) return false;
  const uint32_t more = static_cast<uint32_t>(shift) * (wide ? 4u : 8u);
  table = make_uint2((wide ? 0x3e3c3800u : 0x3c383000u) + more * 0x01010100u,
                     (wide ? 0x46444240u : 0x4c484440u) + more * 0x01010101u);
  return true;
}

// What a row's scale and the shifts of its blocks are computed from.
struct RowScale {
  int exponent, nan;
  float most;
  __device__ float value(int top) const { return (nan ? bits_float(0x7fc00000u) : most) * exp2_int(-top); }
};

// Of the scales first, first + step, ... of all threads of a warp.
__device__ __forceinline__ RowScale warp_scale(const float* of, int64_t tiles, int first, int step) {
  RowScale row{-127, 0, -bits_float(INFINITE)};
  for (int64_t i = first; i < tiles; i += step) {
    const float s = of[i];
    row.exponent = max(row.exponent, exponent(s));
    row.nan |= is_nan(s);
    row.most = fmaxf(row.most, s);
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) {
    row.exponent = max(row.exponent, __shfl_xor_sync(0xffffffffu, row.exponent, offset));
    row.nan |= __shfl_xor_sync(0xffffffffu, row.nan, offset);
    row.most = fmaxf(row.most, __shfl_xor_sync(0xffffffffu, row.most, offset));
  }
  return row;
}

// A warp per row.
__global__ void __launch_bounds__(THREADS) row_exponents(const float* __restrict__ scale, int* __restrict__ exponents,
                                                         float* __restrict__ row_scale, int64_t rows, int64_t tiles,
                                                         int top) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (THREADS / 32) + threadIdx.x / 32;
  if (row >= rows) return;
  const RowScale found = warp_scale(scale + row * tiles, tiles, threadIdx.x % 32, 32);
  if (threadIdx.x % 32 == 0) exponents[row] = found.exponent, row_scale[row] = found.value(top);
}

// packed: two codes in a byte. Eight codes of a row are in one block.
template <Format F, bool packed>
__global__ void __launch_bounds__(THREADS) fold_columns(const uint8_t* __restrict__ codes, const float* __restrict__ scale,
                                                        const int* __restrict__ exponents, uint8_t* __restrict__ folded,
                                                        int64_t rows, int64_t columns, int64_t tiles, int top) {
  __shared__ alignas(16) uint8_t transposed[BLOCK * BLOCK];
  const BlockPlace at;
  const int64_t tile = at.column / (columns / tiles);
  uint2 held[8];
  float of[8];
  int e[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    held[i] = make_uint2(0, 0), of[i] = 1.0f, e[i] = 0;
    if (at.row + i >= rows || at.column >= columns) continue;
    const int64_t first = (at.row + i) * columns + at.column;
    if constexpr (packed) held[i].x = __ldg(reinterpret_cast<const uint32_t*>(codes + first / 2));
    else held[i] = __ldg(reinterpret_cast<const uint2*>(codes + first));
    of[i] = __ldg(scale + (at.row + i) * tiles + tile), e[i] = __ldg(exponents + at.row + i);
  }
  uint32_t words[8][2];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int binades = shift_of(of[i], e[i], top);
    if constexpr (packed) {
      const uint32_t eight = held[i].x;
      if (uint2 table; shifted_table<F>(binades, table)) {
        words[i][0] = unpacked(eight, table), words[i][1] = unpacked(eight >> 16, table);
        continue;
      }
      held[i] = make_uint2(unpacked(eight), unpacked(eight >> 16));
    }
    const float shift = exp2_int(binades);
    words[i][0] = folded_word<F>(held[i].x, shift), words[i][1] = folded_word<F>(held[i].y, shift);
  }
  transpose_block(words, transposed, at);
  __syncthreads();
  write_transposed(transposed, folded, rows, columns);
}

// whole: each eight codes are in one block, and are aligned.
template <Format F, bool whole>
__global__ void __launch_bounds__(THREADS) fold_rows(const uint8_t* __restrict__ codes, const float* __restrict__ scale,
                                                     uint8_t* __restrict__ folded, float* __restrict__ row_scale,
                                                     int64_t columns, int64_t tiles, int top) {
  const int64_t row = blockIdx.x, width = columns / tiles;
  const float* of = scale + row * tiles;
  __shared__ RowScale warps[THREADS / 32];
  RowScale found = warp_scale(of, tiles, threadIdx.x, THREADS);
  if ((threadIdx.x & 31) == 0) warps[threadIdx.x >> 5] = found;
  __syncthreads();
  for (const RowScale& other : warps) {
    found = {max(found.exponent, other.exponent), found.nan | other.nan, fmaxf(found.most, other.most)};
  }
  const int e = found.exponent;
  if (threadIdx.x == 0) row_scale[row] = found.value(top);
  const uint8_t* in = codes + row * columns;
  uint8_t* out = folded + row * columns;
  if constexpr (whole) {
    for (int64_t column = threadIdx.x * VECTOR; column < columns; column += THREADS * VECTOR) {
      const uint2 held = __ldg(reinterpret_cast<const uint2*>(in + column));
      const float shift = exp2_int(shift_of(of[column / width], e, top));
      const uint2 made = make_uint2(folded_word<F>(held.x, shift), folded_word<F>(held.y, shift));
      *reinterpret_cast<uint2*>(out + column) = made;
    }
  } else {
    for (int64_t column = threadIdx.x; column < columns; column += THREADS) {
      out[column] = static_cast<uint8_t>(folded_code<F>(in[column], exp2_int(shift_of(of[column / width], e, top))));
    }
  }
}

void check_fold(const Tensor& codes, const Tensor& scale, Format carrier, int64_t rows, int64_t columns) {
  const ScalarType type = codes.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Float8_e4m3fn || type == ScalarType::Byte,
                  "fold takes E2M1 codes, which ride as float8_e4m3fn, or two in a byte");
  STD_TORCH_CHECK(carrier == Format::E4M3 || carrier == Format::E5M2, "codes fold into E4M3 or E5M2");
  STD_TORCH_CHECK(scale.scalar_type() == ScalarType::Float, "fold takes FP32 scales");
  STD_TORCH_CHECK(scale.size(0) == rows && scale.size(1) > 0 && columns % scale.size(1) == 0,
                  "a scale for each block of each row");
}

int top_of(Format carrier) { return carrier == Format::E4M3 ? 6 : 13; }

}  // namespace

std::tuple<Tensor, Tensor> fold(const Tensor& codes_given, const Tensor& scale_given, std::string carrier) {
  const Tensor codes = dense(codes_given), scale = dense(scale_given);
  const int64_t rows = rows_of(codes), columns = codes.size(1), tiles = scale.size(1);
  const Format format = parse_format(carrier);
  STD_TORCH_CHECK(codes.scalar_type() == ScalarType::Float8_e4m3fn, "fold takes codes as float8_e4m3fn");
  check_fold(codes, scale, format, rows, columns);
  Tensor folded = empty_like_device(codes, {rows, columns}, carrier_of(format));
  Tensor row_scale = empty_like_device(scale, {rows, 1}, ScalarType::Float);
  if (rows == 0) return {folded, row_scale};
  const uint8_t* in = data_of<uint8_t>(codes);
  const bool whole = columns / tiles % VECTOR == 0 && columns % VECTOR == 0 && aligned(in, VECTOR);
  const auto launch = [&](auto kernel) {
    kernel<<<rows, THREADS, 0, stream_of(codes)>>>(in, data_of<float>(scale), mutable_data_of<uint8_t>(folded),
                                                   mutable_data_of<float>(row_scale), columns, tiles, top_of(format));
  };
  if (format == Format::E4M3) launch(whole ? fold_rows<Format::E4M3, true> : fold_rows<Format::E4M3, false>);
  else launch(whole ? fold_rows<Format::E5M2, true> : fold_rows<Format::E5M2, false>);
  check_launch("fold");
  return {folded, row_scale};
}

namespace {

std::tuple<Tensor, Tensor> fold_transposed(const Tensor& codes_given, const Tensor& scale_given, std::string carrier,
                                           std::optional<Tensor>) {
  const Tensor codes = dense(codes_given), scale = dense(scale_given);
  const bool packed = codes.scalar_type() == ScalarType::Byte;
  const int64_t rows = rows_of(codes), columns = codes.size(1) * (packed ? 2 : 1), tiles = scale.size(1);
  const Format format = parse_format(carrier);
  const bool blocks = rows > 0 && rows % 16 == 0 && tiles > 0 && columns % (tiles * VECTOR) == 0 &&
                      aligned(codes.const_data_ptr(), VECTOR);
  if (!blocks) {
    const auto [folded, row_scale] = fold(packed ? unpack_e2m1(codes) : codes, scale, carrier);
    return {transpose_codes(folded), row_scale};
  }
  check_fold(codes, scale, format, rows, columns);
  Tensor folded = empty_like_device(codes, {columns, rows}, carrier_of(format));
  Tensor row_scale = empty_like_device(scale, {rows, 1}, ScalarType::Float);
  Tensor exponents = empty_like_device(scale, {rows}, ScalarType::Int);
  const int top = top_of(format);
  const cudaStream_t stream = stream_of(codes);
  const float* scales = data_of<float>(scale);
  int* found = mutable_data_of<int>(exponents);
  row_exponents<<<ceil_div(rows, THREADS / 32), THREADS, 0, stream>>>(scales, found, mutable_data_of<float>(row_scale),
                                                                      rows, tiles, top);
  const auto launch = [&](auto kernel) {
    kernel<<<dim3(ceil_div(columns, BLOCK), ceil_div(rows, BLOCK)), THREADS, 0, stream>>>(
        data_of<uint8_t>(codes), scales, found, mutable_data_of<uint8_t>(folded), rows, columns, tiles, top);
  };
  if (format == Format::E4M3) launch(packed ? fold_columns<Format::E4M3, true> : fold_columns<Format::E4M3, false>);
  else launch(packed ? fold_columns<Format::E5M2, true> : fold_columns<Format::E5M2, false>);
  check_launch("fold_transposed");
  return {folded, row_scale};
}

}  // namespace
}  // namespace lowprec

STABLE_TORCH_LIBRARY_IMPL(lowprec, CUDA, m) {
  m.impl("fold", TORCH_BOX(&lowprec::fold));
  m.impl("fold_transposed", TORCH_BOX(&lowprec::fold_transposed));
}
