// dge: the gradient times the slope of the differentiable estimator (arXiv 2501.17116, eq. 8; ops/reference.py dge).
// dge_all: the same in place, for many gradients in one launch.
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

// How a row is read. `whole`: in vectors. `shared`: the eight elements of a vector have one scale. `narrow`: weights are
// rounded to BF16 first.
struct Row {
  int64_t columns, tile_columns;
  bool whole, shared, narrow;
};

// One row by a block; `out` may be `grad`.
template <typename Grad, typename Weight, typename Out>
__device__ __forceinline__ void correct_row(const Grad* grad, const Weight* weight, const float* scale, Out* out,
                                            const Row& row, const Slope& how) {
  const bool one = row.tile_columns == row.columns;
  float inverse = one ? divide(1.0f, *scale) : 0.0f;
  for (int64_t column = threadIdx.x * VECTOR; column < row.columns; column += DGE_THREADS * VECTOR) {
    const int some = static_cast<int>(min(row.columns - column, int64_t{VECTOR}));
    Vector<Grad> g;
    Vector<Weight> w;
    if (row.whole) {
      g.load(grad + column);
      w.load(weight + column);
    } else {
      g.load_some(grad + column, some);
      w.load_some(weight + column, some);
    }
    if (row.shared && !one) inverse = divide(1.0f, scale[column / row.tile_columns]);
    float v[VECTOR];
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
      if (!row.shared) inverse = divide(1.0f, scale[min(column + i, row.columns - 1) / row.tile_columns]);
      const float value = row.narrow ? __bfloat162float(__float2bfloat16_rn(w[i])) : w[i];
      v[i] = g[i] * slope_at(value, inverse, how);
    }
    store(out + column, v, some, row.whole);
  }
}

Row row_of(const Tensor& grad, const Tensor& weight, int64_t tile_columns, bool narrow) {
  const int64_t columns = weight.size(1);
  const bool aligned_rows = aligned(grad.const_data_ptr(), 16) && aligned(weight.const_data_ptr(), 16);
  const bool shared = tile_columns == columns || tile_columns % VECTOR == 0;
  return {columns, tile_columns, columns % VECTOR == 0 && aligned_rows, shared, narrow};
}

// A block per row.
template <typename Grad, typename Weight, typename Out>
__global__ void __launch_bounds__(DGE_THREADS)
    dge_rows(const Grad* __restrict__ grad, const Weight* __restrict__ weight, const float* __restrict__ scale,
             Out* __restrict__ out, int64_t tile_rows, Row row, Slope how) {
  const int64_t base = static_cast<int64_t>(blockIdx.x) * row.columns;
  const float* of_row = scale + blockIdx.x / tile_rows * (row.columns / row.tile_columns);
  correct_row(grad + base, weight + base, of_row, out + base, row, how);
}

constexpr int BATCH = 48;  // gradients per launch: kernel parameters are 4 KB

struct Listed {
  float* grad;
  const void* weight;
  const float* scale;
  int64_t first, tile_rows;  // index of its first row in the batch
  Row row;
  bool bf16;  // the weight
};

struct Batch {
  Listed of[BATCH];
  int count;
};
static_assert(sizeof(Batch) + sizeof(Slope) <= 4096, "kernel parameters");

// A block per row of all gradients.
__global__ void __launch_bounds__(DGE_THREADS) dge_listed(const __grid_constant__ Batch batch, Slope how) {
  int low = 0, high = batch.count - 1;
  while (low < high) {  // the last gradient that begins at or before this row
    const int middle = (low + high + 1) / 2;
    if (batch.of[middle].first <= blockIdx.x) low = middle;
    else high = middle - 1;
  }
  const Listed& of = batch.of[low];
  const int64_t row = blockIdx.x - of.first, base = row * of.row.columns;
  const float* scale = of.scale + row / of.tile_rows * (of.row.columns / of.row.tile_columns);
  auto* grad = reinterpret_cast<Fp32*>(of.grad) + base;
  if (of.bf16) correct_row(grad, static_cast<const Bf16*>(of.weight) + base, scale, grad, of.row, how);
  else correct_row(grad, static_cast<const Fp32*>(of.weight) + base, scale, grad, of.row, how);
}

template <typename Grad, typename Weight, typename Out>
void launch(const Tensor& grad, const Tensor& weight, const Tensor& scale, const Tensor& out, const Slope& how) {
  const int64_t rows = weight.size(0);
  const Row row = row_of(grad, weight, weight.size(1) / scale.size(1), false);
  dge_rows<Grad, Weight, Out><<<rows, DGE_THREADS, 0, stream_of(weight)>>>(
      data_of<Grad>(grad), data_of<Weight>(weight), data_of<float>(scale), mutable_data_of<Out>(out),
      rows / scale.size(0), row, how);
}

Slope slope_of(double k, double cap) {
  return {static_cast<float>(1.0 / k - 1.0), static_cast<float>(1.0 / k), static_cast<float>(cap)};
}

void check_sizes(const Tensor& grad, const Tensor& weight, const Tensor& scale) {
  const int64_t rows = rows_of(weight), columns = weight.size(1);
  STD_TORCH_CHECK(grad.size(0) == rows && grad.size(1) == columns, "a gradient of the weight's shape");
  STD_TORCH_CHECK(scale.scalar_type() == ScalarType::Float, "scales are float32");
  if (weight.numel() > 0) scaled_tile(rows, columns, scale);
}

Tensor dge(const Tensor& grad_given, const Tensor& weight_given, const Tensor& scale_given, double k, double cap,
           std::optional<ScalarType> dtype) {
  const Tensor grad = dense(grad_given), weight = dense(weight_given), scale = dense(scale_given);
  const int64_t rows = rows_of(weight), columns = weight.size(1);
  check_sizes(grad, weight, scale);
  const ScalarType wanted = dtype.value_or(ScalarType::Float);
  const bool half = wanted == ScalarType::BFloat16 || wanted == ScalarType::Half;
  Tensor out = empty_like_device(grad, {rows, columns}, half ? wanted : ScalarType::Float);
  if (out.numel() == 0) return out;
  const Slope how = slope_of(k, cap);
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

void dge_all(std::vector<Tensor> grads, std::vector<Tensor> weights, std::vector<Tensor> scales, double k, double cap,
             ScalarType dtype) {
  STD_TORCH_CHECK(grads.size() == weights.size() && grads.size() == scales.size(),
                  "a weight and scales for each gradient");
  Batch batch;
  batch.count = 0;
  int64_t rows = 0;
  std::vector<Tensor> held;  // rounded weights that are not made in the kernel, until it is launched
  const auto flush = [&](const Tensor& like) {
    if (rows > 0) dge_listed<<<rows, DGE_THREADS, 0, stream_of(like)>>>(batch, slope_of(k, cap));
    batch.count = 0;
    rows = 0;
  };
  for (size_t i = 0; i < grads.size(); ++i) {
    const Tensor& grad = grads[i];
    if (grad.numel() == 0) continue;
    Tensor weight = dense(weights[i]);
    const Tensor scale = dense(scales[i]);
    check_sizes(grad, weight, scale);
    STD_TORCH_CHECK(grad.scalar_type() == ScalarType::Float && grad.is_contiguous(),
                    "dge_all: contiguous gradients in FP32");
    const ScalarType given = weight.scalar_type();
    const bool narrow = given == ScalarType::Float && dtype == ScalarType::BFloat16;
    if (!narrow && given != dtype) weight = torch::stable::to(weight, dtype);
    const bool bf16 = weight.scalar_type() == ScalarType::BFloat16;
    STD_TORCH_CHECK(bf16 || weight.scalar_type() == ScalarType::Float, "dge_all: weights in FP32 or BF16");
    held.push_back(weight);
    held.push_back(scale);
    batch.of[batch.count++] = {mutable_data_of<float>(grad),
                               weight.const_data_ptr(),
                               data_of<float>(scale),
                               rows,
                               grad.size(0) / scale.size(0),
                               row_of(grad, weight, grad.size(1) / scale.size(1), narrow),
                               bf16};
    rows += grad.size(0);
    if (batch.count == BATCH) flush(grad);
  }
  if (batch.count > 0) flush(grads[0]);
  check_launch("dge_all");
}

}  // namespace
}  // namespace lowprec

STABLE_TORCH_LIBRARY_IMPL(lowprec, CUDA, m) {
  m.impl("dge", TORCH_BOX(&lowprec::dge));
  m.impl("dge_all", TORCH_BOX(&lowprec::dge_all));
}
