// SwiGLU without saved codes: y = silu(gate) up for rows whose columns alternate gate, up, and its gradient. Each is
// one pass that also computes the amax of each output row, so that per-tensor quantisation needs no extra pass for it
// (ops/activations.py).
#include <cuda_bf16.h>

#include "cuda/ladder_call.h"
#include "cuda/vectors.h"
#include "numerics/activations.h"

namespace lowprec {
namespace {

constexpr int THREADS = 256;

template <typename In>
constexpr Format format_of = std::is_same_v<In, Bf16> ? Format::BF16 : std::is_same_v<In, Fp16> ? Format::FP16 : Format::FP32;

// Eight values rounded to the output dtype, and their largest magnitude after rounding.
template <typename In>
struct Rounded {
  Vector<In> made;
  __device__ __forceinline__ void put(const float (&v)[VECTOR]) {
    if constexpr (std::is_same_v<In, Bf16>) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const __nv_bfloat162 two = __float22bfloat162_rn(make_float2(v[2 * i], v[2 * i + 1]));
        made.words[i] = *reinterpret_cast<const uint32_t*>(&two);
      }
    } else if constexpr (std::is_same_v<In, Fp16>) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const __half2 two = __float22half2_rn(make_float2(v[2 * i], v[2 * i + 1]));
        made.words[i] = *reinterpret_cast<const uint32_t*>(&two);
      }
    } else {
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) made.words[i] = float_bits(v[i]);
    }
  }
  __device__ __forceinline__ void store(In* data) const {
#pragma unroll
    for (int i = 0; i < Vector<In>::WORDS / 4; ++i) {
      reinterpret_cast<uint4*>(data)[i] =
          make_uint4(made.words[4 * i], made.words[4 * i + 1], made.words[4 * i + 2], made.words[4 * i + 3]);
    }
  }
};

// A block per row. Vectors of eight outputs if width and addresses allow it, else single elements.
template <typename In, bool whole>
__global__ void __launch_bounds__(THREADS) gated_rows(const In* __restrict__ gate_up, In* __restrict__ y,
                                                      float* __restrict__ amax, int64_t width) {
  __shared__ uint32_t scratch[THREADS / 32];
  const In* from = gate_up + blockIdx.x * 2 * width;
  In* to = y + blockIdx.x * width;
  uint32_t largest = 0;
  if constexpr (whole) {
    for (int64_t at = threadIdx.x * VECTOR; at < width; at += THREADS * VECTOR) {
      Vector<In> pairs[2];
      pairs[0].load(from + 2 * at);
      pairs[1].load(from + 2 * at + VECTOR);
      float v[VECTOR];
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) v[i] = silu(pairs[i >> 2][2 * (i & 3)]) * pairs[i >> 2][2 * (i & 3) + 1];
      Rounded<In> out;
      out.put(v);
      out.store(to + at);
      largest = larger(largest, out.made.largest());
    }
  } else {
    for (int64_t at = threadIdx.x; at < width; at += THREADS) {
      write_one(to + at, silu(from[2 * at].value()) * from[2 * at + 1].value());
      largest = larger_magnitude(largest, to[at].value());
    }
  }
  largest = block_largest(largest, scratch);
  if (threadIdx.x == 0) amax[blockIdx.x] = bits_float(largest);
}

template <typename In, bool whole>
__global__ void __launch_bounds__(THREADS) gated_gradients(const In* __restrict__ dy, const In* __restrict__ gate_up,
                                                           In* __restrict__ dx, float* __restrict__ amax, int64_t width) {
  __shared__ uint32_t scratch[THREADS / 32];
  const In* of = dy + blockIdx.x * width;
  const In* from = gate_up + blockIdx.x * 2 * width;
  In* to = dx + blockIdx.x * 2 * width;
  uint32_t largest = 0;
  if constexpr (whole) {
    for (int64_t at = threadIdx.x * VECTOR; at < width; at += THREADS * VECTOR) {
      Vector<In> pairs[2], upstream;
      upstream.load(of + at);
      pairs[0].load(from + 2 * at);
      pairs[1].load(from + 2 * at + VECTOR);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float v[VECTOR];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const GatedGradients g = gated_silu_gradients(upstream[4 * half + i], pairs[half][2 * i], pairs[half][2 * i + 1]);
          v[2 * i] = g.gate, v[2 * i + 1] = g.up;
        }
        Rounded<In> out;
        out.put(v);
        out.store(to + 2 * at + half * VECTOR);
        largest = larger(largest, out.made.largest());
      }
    }
  } else {
    for (int64_t at = threadIdx.x; at < width; at += THREADS) {
      const GatedGradients g = gated_silu_gradients(of[at].value(), from[2 * at].value(), from[2 * at + 1].value());
      write_one(to + 2 * at, g.gate);
      write_one(to + 2 * at + 1, g.up);
      largest = larger_magnitude(larger_magnitude(largest, to[2 * at].value()), to[2 * at + 1].value());
    }
  }
  largest = block_largest(largest, scratch);
  if (threadIdx.x == 0) amax[blockIdx.x] = bits_float(largest);
}

std::tuple<Tensor, Tensor> gated_silu(const Tensor& given) {
  const Tensor gate_up = dense(given);
  const int64_t rows = rows_of(gate_up), width = gate_up.size(1) / 2;
  Tensor y = empty_like_device(gate_up, {rows, width}, gate_up.scalar_type());
  Tensor amax = empty_like_device(gate_up, {rows}, ScalarType::Float);
  with_input(gate_up, [&](auto in) {
    using In = typename decltype(in)::Type;
    const bool whole = width % VECTOR == 0 && aligned(gate_up.const_data_ptr(), 16);
    auto kernel = whole ? gated_rows<In, true> : gated_rows<In, false>;
    kernel<<<rows, THREADS, 0, stream_of(gate_up)>>>(data_of<In>(gate_up), mutable_data_of<In>(y), mutable_data_of<float>(amax), width);
  });
  check_launch("gated_silu");
  return {y, amax};
}

}  // namespace

std::tuple<Tensor, Tensor> gated_silu_backward(const Tensor& given_dy, const Tensor& given) {
  const Tensor dy = dense(given_dy), gate_up = dense(given);
  const int64_t rows = rows_of(dy), width = dy.size(1);
  Tensor dx = empty_like_device(dy, {rows, 2 * width}, dy.scalar_type());
  Tensor amax = empty_like_device(dy, {rows}, ScalarType::Float);
  STD_TORCH_CHECK(dy.scalar_type() == gate_up.scalar_type(), "gated_silu_backward: dy and gate_up differ in dtype");
  with_input(dy, [&](auto in) {
    using In = typename decltype(in)::Type;
    const bool whole = width % VECTOR == 0 && aligned(gate_up.const_data_ptr(), 16) && aligned(dy.const_data_ptr(), 16);
    auto kernel = whole ? gated_gradients<In, true> : gated_gradients<In, false>;
    kernel<<<rows, THREADS, 0, stream_of(dy)>>>(data_of<In>(dy), data_of<In>(gate_up), mutable_data_of<In>(dx),
                                                mutable_data_of<float>(amax), width);
  });
  check_launch("gated_silu_backward");
  return {dx, amax};
}

}  // namespace lowprec

STABLE_TORCH_LIBRARY_IMPL(lowprec, CUDA, m) {
  m.impl("gated_silu", TORCH_BOX(&lowprec::gated_silu));
  m.impl("gated_silu_backward", TORCH_BOX(&lowprec::gated_silu_backward));
}
