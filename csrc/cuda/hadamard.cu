// hadamard (ops/reference.py), hadamard_half (ops/ladder.py): random signs, then the Walsh-Hadamard transform of each
// block, orthonormal in FP32, or times a power of two in half precision.
//
// Blocks are contiguous in memory, so rows do not matter: a thread has eight neighbouring elements; strides 1, 2, 4 are
// in its registers, 8 to 128 across the lanes of its warp. Longer blocks need one more pass per stride.
#include <cuda_fp16.h>

#include "cuda/ladder_call.h"
#include "numerics/ladder.h"

namespace lowprec {
namespace {

constexpr int THREADS = 256;
constexpr int WARP_BLOCK = 32 * VECTOR;  // the longest block within a warp

// A thread's eight elements in half precision; lanes have neighbouring elements. Stages below 8 are in the thread.
__device__ __forceinline__ void rotate_half(float (&v)[VECTOR], int block, float gain) {
  float top[VECTOR], down[VECTOR];
#pragma unroll
  for (int j = 0; j < VECTOR; ++j) top[j] = fabsf(v[j]);
#pragma unroll
  for (int stride = 1; stride < VECTOR; stride *= 2) {
    if (stride >= block) continue;
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
      if (!(j & stride)) top[j] = top[j + stride] = larger_size(top[j], top[j + stride]);
    }
  }
  for (int lanes = 1; lanes * VECTOR < block; lanes *= 2) {
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) top[j] = larger_size(top[j], __shfl_xor_sync(0xffffffffu, top[j], lanes));
  }
  const auto half = [](float x) { return __half2float(__float2half_rn(x)); };
#pragma unroll
  for (int j = 0; j < VECTOR; ++j) {
    const int shift = rotation_shift(top[j]);
    v[j] = half(v[j] * exp2_int(shift));
    down[j] = exp2_int(-shift) * gain;
  }
#pragma unroll
  for (int stride = 1; stride < VECTOR; stride *= 2) {
    if (stride >= block) continue;
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
      if (j & stride) continue;
      const float a = v[j], b = v[j + stride];
      v[j] = half(a + b);
      v[j + stride] = half(a - b);
    }
  }
  for (int lanes = 1; lanes * VECTOR < block; lanes *= 2) {
    const float sign = threadIdx.x & lanes ? -1.0f : 1.0f;
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) v[j] = half(__fmaf_rn(v[j], sign, __shfl_xor_sync(0xffffffffu, v[j], lanes)));
  }
#pragma unroll
  for (int j = 0; j < VECTOR; ++j) v[j] *= down[j];
}

// signs: a seed, or nullptr; signs repeat every `period` elements. block: at most WARP_BLOCK.
template <typename In, bool half>
__global__ void __launch_bounds__(THREADS)
    rotate_blocks(const In* __restrict__ x, float* __restrict__ out, int64_t count, const int64_t* __restrict__ signs,
                  int block, int64_t period, float factor) {
  __shared__ uint8_t flips[WARP_BLOCK / VECTOR];
  const bool table = signs != nullptr && period <= WARP_BLOCK;
  if (table && threadIdx.x < WARP_BLOCK / VECTOR) {
    const uint64_t seed = static_cast<uint64_t>(*signs);
    flips[threadIdx.x] = static_cast<uint8_t>(sign_bits(seed, threadIdx.x, static_cast<int>(period)));
  }
  __syncthreads();
  const int64_t stride = static_cast<int64_t>(gridDim.x) * THREADS;
  const int64_t vectors = (count + VECTOR - 1) / VECTOR, rounded = (vectors + 31) / 32 * 32;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x; i < rounded; i += stride) {  // whole warps
    const int64_t first = i * VECTOR;
    Vector<In> held;
    if (first + VECTOR <= count) held.load(x + first);
    else if (first < count) held.load_some(x + first, static_cast<int>(count - first));
    else held.clear();
    uint32_t bits = 0;
    if (table) {
      bits = flips[i & (WARP_BLOCK / VECTOR - 1)];
    } else if (signs != nullptr) {
      const Words words = random_words(static_cast<uint64_t>(*signs), 0, static_cast<uint64_t>(first % period >> 3));
#pragma unroll
      for (int j = 0; j < VECTOR; ++j) bits |= (bits_of(words, j) & 1u) << j;
    }
    float v[VECTOR];
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) v[j] = bits_float(float_bits(held[j]) ^ (bits >> j & 1u) << 31);
    if constexpr (half) {
      rotate_half(v, block, factor);
    } else {
      butterflies(v, block);
      if (block > VECTOR) butterflies_across(v, block);
#pragma unroll
      for (int j = 0; j < VECTOR; ++j) v[j] *= factor;
    }
    if (first + VECTOR <= count) {
      reinterpret_cast<float4*>(out + first)[0] = make_float4(v[0], v[1], v[2], v[3]);
      reinterpret_cast<float4*>(out + first)[1] = make_float4(v[4], v[5], v[6], v[7]);
    } else {
#pragma unroll
      for (int j = 0; j < VECTOR; ++j) {
        if (first + j < count) out[first + j] = v[j];
      }
    }
  }
}

__global__ void __launch_bounds__(THREADS)
    one_stage(float* __restrict__ out, int64_t pairs, int64_t stride, float factor) {
  const int64_t pair = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
  if (pair >= pairs) return;
  float* low = out + pair / stride * 2 * stride + pair % stride;
  const float a = low[0], b = low[stride];
  low[0] = (a + b) * factor;
  low[stride] = (a - b) * factor;
}


// The transform of each block; gain: in half precision, times this.
Tensor transformed(const Tensor& given, const std::optional<Tensor>& seed, int64_t block, std::optional<double> gain) {
  Tensor x = dense(given);
  const ScalarType type = x.scalar_type();
  const bool float_input = type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half;
  if (!float_input) x = torch::stable::to(x, ScalarType::Float);  // as `.float()` does
  const int64_t rows = rows_of(x), columns = x.size(1), count = rows * columns;
  STD_TORCH_CHECK(block > 0 && (block & (block - 1)) == 0 && columns % block == 0, "blocks of ", block,
                  " do not fit a row of ", columns);
  Tensor out = empty_like_device(x, {rows, columns}, ScalarType::Float);
  if (count == 0) return out;
  if (!aligned(x.const_data_ptr(), 16)) x = torch::stable::clone(x);
  const float factor = gain.has_value() ? static_cast<float>(*gain) : hadamard_factor(block);
  const bool one_pass = block <= WARP_BLOCK;
  const int64_t blocks = std::min<int64_t>(ceil_div(ceil_div(count, VECTOR), THREADS), 132 * 16);
  float* to = mutable_data_of<float>(out);
  const cudaStream_t stream = stream_of(x);
  with_input(x, [&](auto tag) {
    using In = typename decltype(tag)::Type;
    const auto kernel = gain.has_value() ? rotate_blocks<In, true> : rotate_blocks<In, false>;
    kernel<<<blocks, THREADS, 0, stream>>>(data_of<In>(x), to, count, seed_of(seed),
                                           static_cast<int>(one_pass ? block : WARP_BLOCK), block, one_pass ? factor : 1.0f);
  });
  for (int64_t stride = WARP_BLOCK; stride < block; stride *= 2) {
    const float last = 2 * stride == block ? factor : 1.0f;
    one_stage<<<ceil_div(count / 2, THREADS), THREADS, 0, stream>>>(to, count / 2, stride, last);
  }
  check_launch("hadamard");
  return out;
}

}  // namespace

Tensor hadamard(const Tensor& x, std::optional<Tensor> seed, int64_t block) {
  return transformed(x, seed, block, std::nullopt);
}

int binades_of(double gain) {
  int exponent = 0;
  STD_TORCH_CHECK(gain > 0.0 && std::frexp(gain, &exponent) == 0.5, "a gain is a power of two, not ", gain);
  return exponent - 1;
}

Tensor hadamard_half(const Tensor& x, std::optional<Tensor> seed, int64_t block, double gain) {
  STD_TORCH_CHECK(block <= HALF_GROUP, "half precision holds sums of up to ", HALF_GROUP, " numbers, not of ", block);
  binades_of(gain);
  return transformed(x, seed, block, gain);
}

}  // namespace lowprec

STABLE_TORCH_LIBRARY_IMPL(lowprec, CUDA, m) {
  m.impl("hadamard", TORCH_BOX(&lowprec::hadamard));
  m.impl("hadamard_half", TORCH_BOX(&lowprec::hadamard_half));
}
