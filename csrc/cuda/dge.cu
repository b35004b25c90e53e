// dge: the gradient times the slope of the differentiable estimator (arXiv 2501.17116, eq. 8; ops/reference.py dge).
//
// Bound by instructions: a power is a logarithm and an exponential, with each product rounded before its sum, about 60
// instructions per element for 8 bytes (FP32 gradient, BF16 weight and result). Floors and integers are computed by
// sums with a magic number, because conversions have a fraction of the throughput.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/vectors.h"
#include "numerics/powers.h"

namespace lowprec {
namespace {

constexpr int DGE_THREADS = 256;
constexpr float MAGIC = 0x1.8p23f;  // bits of MAGIC plus i are those of MAGIC + i
constexpr uint32_t MAGIC_BITS = 0x4b400000u;

struct Slope {
  float power, share, cap;  // 1/k - 1, 1/k
};

// log2_float of powers.h.
__device__ __forceinline__ float log2_fast(float x) {
  const uint32_t bits = float_bits(x);
  const float mantissa = bits_float((bits & 0x7fffffu) | 0x3f800000u);
  const bool high = mantissa >= 1.5f;
  const float t = (high ? mantissa * 0.5f : mantissa) - 1.0f;
  const uint32_t whole = (bits >> 23) + MAGIC_BITS - (high ? 126u : 127u);
  return (bits_float(whole) - MAGIC) + log2_poly(t) * t;
}

// exp2_float of powers.h.
__device__ __forceinline__ float exp2_fast(float x) {
  const float shifted = __fadd_rd(x + 0.5f, MAGIC);
  const float f = x - (shifted - MAGIC);
  const float part = exp2_poly(f) * f + 1.0f;
  return part * bits_float((float_bits(shifted) << 23) + (127u << 23));
}

// f' at w / scale.
__device__ __forceinline__ float slope_at(float w, float inverse, const Slope& how) {
  const float scaled = bits_float(magnitude_bits(w * inverse));
  const float v = fminf(scaled, 6.0f);
  const uint32_t binade = larger(float_bits(v) & INFINITE, 127u << 23);
  const float steps = v * bits_float(INFINITE - binade);  // v 2^(1 - e): the interval's width is 2^(e - 1)
  const float part = steps - (__fadd_rd(steps, 0x1p23f) - 0x1p23f);
  const float centred = fmaxf(bits_float(magnitude_bits(2.0f * part - 1.0f)), TINY);
  const float slope = fminf(exp2_fast(log2_fast(centred) * how.power) * how.share, how.cap);
  return is_nan(scaled) ? scaled : slope;
}

template <typename Out>
__device__ __forceinline__ uint32_t round_pair(float a, float b);
template <>
__device__ __forceinline__ uint32_t round_pair<Bf16>(float a, float b) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(a, b);
  uint32_t word;
  memcpy(&word, &both, 4);
  return word;
}
template <>
__device__ __forceinline__ uint32_t round_pair<Fp16>(float a, float b) {
  const __half2 both = __floats2half2_rn(a, b);
  uint32_t word;
  memcpy(&word, &both, 4);
  return word;
}

template <typename Out>
__device__ __forceinline__ void store(Out* to, const float (&v)[VECTOR], int count, bool whole) {
  constexpr int words = VECTOR * sizeof(Out) / 4;
  uint32_t word[words];
#pragma unroll
  for (int i = 0; i < words; ++i) {
    if constexpr (sizeof(Out) == 4) word[i] = float_bits(v[i]);
    else word[i] = round_pair<Out>(v[2 * i], v[2 * i + 1]);
  }
  if (whole) {
#pragma unroll
    for (int i = 0; i < words; i += 4) {
      reinterpret_cast<uint4*>(to)[i / 4] = make_uint4(word[i], word[i + 1], word[i + 2], word[i + 3]);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) {
    if (i >= count) continue;
    if constexpr (sizeof(Out) == 4) to[i] = Out{v[i]};
    else to[i] = Out{static_cast<uint16_t>(word[i / 2] >> (16 * (i & 1)))};
  }
}

// A block per row. `shared`: the eight elements of a vector have one scale.
template <typename Grad, typename Weight, typename Out>
__global__ void __launch_bounds__(DGE_THREADS)
    dge_rows(const Grad* __restrict__ grad, const Weight* __restrict__ weight, const float* __restrict__ scale,
             Out* __restrict__ out, int64_t columns, Tile tile, Slope how, bool whole, bool shared) {
  const int64_t base = static_cast<int64_t>(blockIdx.x) * columns;
  const float* of_row = scale + blockIdx.x / tile.rows * (columns / tile.columns);
  const bool one = tile.columns == columns;
  float inverse = one ? divide(1.0f, *of_row) : 0.0f;
  for (int64_t column = threadIdx.x * VECTOR; column < columns; column += DGE_THREADS * VECTOR) {
    const int some = static_cast<int>(min(columns - column, int64_t{VECTOR}));
    Vector<Grad> g;
    Vector<Weight> w;
    if (whole) {
      g.load(grad + base + column);
      w.load(weight + base + column);
    } else {
      g.load_some(grad + base + column, some);
      w.load_some(weight + base + column, some);
    }
    if (shared && !one) inverse = divide(1.0f, of_row[column / tile.columns]);
    float v[VECTOR];
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
      if (!shared) inverse = divide(1.0f, of_row[min(column + i, columns - 1) / tile.columns]);
      v[i] = g[i] * slope_at(w[i], inverse, how);
    }
    store(out + base + column, v, some, whole);
  }
}

template <typename Grad, typename Weight, typename Out>
void launch(const Tensor& grad, const Tensor& weight, const Tensor& scale, const Tensor& out, const Slope& how) {
  const int64_t rows = weight.size(0), columns = weight.size(1);
  const Tile tile{rows / scale.size(0), columns / scale.size(1)};
  const bool whole =
      columns % VECTOR == 0 && aligned(grad.const_data_ptr(), 16) && aligned(weight.const_data_ptr(), 16);
  const bool shared = tile.columns == columns || tile.columns % VECTOR == 0;
  dge_rows<Grad, Weight, Out><<<rows, DGE_THREADS, 0, stream_of(weight)>>>(
      data_of<Grad>(grad), data_of<Weight>(weight), data_of<float>(scale), mutable_data_of<Out>(out), columns, tile,
      how, whole, shared);
}

Tensor dge(const Tensor& grad_given, const Tensor& weight_given, const Tensor& scale_given, double k, double cap,
           std::optional<ScalarType> dtype) {
  const Tensor grad = dense(grad_given), weight = dense(weight_given), scale = dense(scale_given);
  const int64_t rows = weight.size(0), columns = weight.size(1);
  STD_TORCH_CHECK(grad.size(0) == rows && grad.size(1) == columns, "a gradient of the weight's shape");
  STD_TORCH_CHECK(scale.scalar_type() == ScalarType::Float, "scales are float32");
  STD_TORCH_CHECK(rows % scale.size(0) == 0 && columns % scale.size(1) == 0, "scales [", scale.size(0), ", ",
                  scale.size(1), "] of a weight [", rows, ", ", columns, "]");
  const ScalarType wanted = dtype.value_or(ScalarType::Float);
  const bool half = wanted == ScalarType::BFloat16 || wanted == ScalarType::Half;
  Tensor out = empty_like_device(grad, {rows, columns}, half ? wanted : ScalarType::Float);
  if (out.numel() == 0) return out;
  const Slope how{static_cast<float>(1.0 / k - 1.0), static_cast<float>(1.0 / k), static_cast<float>(cap)};
  with_input(grad, [&](auto of_grad) {
    with_input(weight, [&](auto of_weight) {
      with_input(out, [&](auto of_out) {
        launch<typename decltype(of_grad)::Type, typename decltype(of_weight)::Type, typename decltype(of_out)::Type>(
            grad, weight, scale, out, how);
      });
    });
  });
  check_launch("dge");
  return half || wanted == ScalarType::Float ? out : torch::stable::to(out, wanted);
}

}  // namespace
}  // namespace lowprec

STABLE_TORCH_LIBRARY_IMPL(lowprec, CUDA, m) { m.impl("dge", TORCH_BOX(&lowprec::dge)); }
