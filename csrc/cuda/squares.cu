// sum_squares of many tensors in FP64, in one pass and a fixed order (defined by ops/updates.py).
//
//     squares   a block per chunk of a tensor; the tensors' addresses are kernel parameters
//     add_up    a warp per tensor adds its chunks
#include "cuda/adamw_kernels.h"

namespace lowprec {
namespace {

constexpr int BATCH = 100;  // tensors per launch: kernel parameters are 4 KB
constexpr int THREADS = 256, EACH = 8;
constexpr int64_t CHUNK = THREADS * VECTOR * EACH;  // elements of a block

struct Listed {
  const void* data;
  int64_t count, first;  // index of its first chunk in the batch
  bool bf16, whole_vectors;
};

struct Batch {
  Listed tensors[BATCH];
  int count;
};
static_assert(sizeof(Batch) + 16 <= 4096, "kernel parameters");

template <typename In>
__device__ __forceinline__ double squares_of(const In* x, int64_t count, bool whole_vectors) {
  double total = 0.0;
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int64_t at = (static_cast<int64_t>(i) * THREADS + threadIdx.x) * VECTOR;
    Vector<In> held;
    held.clear();
    if (whole_vectors && at + VECTOR <= count) held.load(x + at);
    else if (at < count) held.load_some(x + at, static_cast<int>(count - at < VECTOR ? count - at : VECTOR));
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
      const double value = static_cast<double>(held[j]);
      total = fma(value, value, total);
    }
  }
  return total;
}

__global__ void __launch_bounds__(THREADS) squares(const __grid_constant__ Batch batch, double* partial) {
  __shared__ double sums[THREADS / 32];
  int low = 0, high = batch.count - 1;
  while (low < high) {  // the last tensor that begins at or before this chunk; empty tensors have no chunk
    const int middle = (low + high + 1) / 2;
    if (batch.tensors[middle].first <= blockIdx.x) low = middle;
    else high = middle - 1;
  }
  const Listed& of = batch.tensors[low];
  const int64_t at = (blockIdx.x - of.first) * CHUNK, count = min(of.count - at, CHUNK);
  const double total = of.bf16 ? squares_of(static_cast<const Bf16*>(of.data) + at, count, of.whole_vectors)
                               : squares_of(static_cast<const Fp32*>(of.data) + at, count, of.whole_vectors);
  leave_sum(total, partial + blockIdx.x, sums);
}

__global__ void add_up(const __grid_constant__ Batch batch, const double* partial, double* out) {
  const Listed& of = batch.tensors[blockIdx.x];
  const int64_t end = of.first + (of.count + CHUNK - 1) / CHUNK;
  double total = 0.0;
  for (int64_t i = of.first + threadIdx.x; i < end; i += 32) total += partial[i];
  total = warp_sum(total);
  if (threadIdx.x == 0) out[blockIdx.x] = total;
}

Tensor sum_squares(std::vector<Tensor> xs) {
  const Tensor& like = xs[0];
  const cudaStream_t stream = stream_of(like);
  const Tensor out = empty_like_device(like, {static_cast<int64_t>(xs.size())}, ScalarType::Double);
  for (size_t start = 0; start < xs.size(); start += BATCH) {
    Batch batch;
    batch.count = static_cast<int>(std::min<size_t>(BATCH, xs.size() - start));
    int64_t chunks = 0;
    for (int i = 0; i < batch.count; ++i) {
      const Tensor& x = xs[start + i];
      const bool bf16 = x.scalar_type() == ScalarType::BFloat16;
      STD_TORCH_CHECK((bf16 || x.scalar_type() == ScalarType::Float) && x.is_contiguous() && !x.is_cpu() &&
                          x.get_device_index() == like.get_device_index(),
                      "sum_squares: contiguous tensors in FP32 or BF16 on one device");
      const void* data = x.mutable_data_ptr();
      batch.tensors[i] = {data, x.numel(), chunks, bf16, aligned(data, 16)};
      chunks += ceil_div(x.numel(), CHUNK);
    }
    const Tensor partial = empty_like_device(like, {std::max<int64_t>(chunks, 1)}, ScalarType::Double);
    auto* sums = mutable_data_of<double>(partial);
    if (chunks > 0) squares<<<chunks, THREADS, 0, stream>>>(batch, sums);
    add_up<<<batch.count, 32, 0, stream>>>(batch, sums, mutable_data_of<double>(out) + start);
  }
  check_launch("sum_squares");
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(lowprec, CUDA, m) { m.impl("sum_squares", TORCH_BOX(&sum_squares)); }

}  // namespace lowprec
