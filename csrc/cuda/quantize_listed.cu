// amax_all and quantize_all_by: amaxes of many tensors, and their codes under one scale each, a launch for all of them
// (defined by ops/reference.py).
#include "cuda/amax.h"

namespace lowprec {
namespace {

constexpr int BATCH = 100;  // tensors per launch: kernel parameters are 4 KB
constexpr int EACH = 4;
constexpr int64_t CHUNK = THREADS * VECTOR * EACH;  // elements of a block

struct Listed {
  const void* x;
  void* codes;
  int64_t count, first;  // index of its first chunk in the batch
};

struct Batch {
  Listed tensors[BATCH];
  uint8_t aligned[BATCH];
  int count;
  int first;  // index of its first tensor among all
};
static_assert(sizeof(Batch) + 64 <= 4096, "kernel parameters");

// The tensor of this block: the last one that begins at or before it. Each has a chunk.
__device__ __forceinline__ int tensor_of(const Batch& batch) {
  int low = 0, high = batch.count - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (batch.tensors[middle].first <= blockIdx.x) low = middle;
    else high = middle - 1;
  }
  return low;
}

template <typename In>
__device__ __forceinline__ void read_chunk(Vector<In> (&held)[EACH], const In* x, int64_t count, int64_t begin,
                                           bool aligned) {
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int64_t at = begin + (static_cast<int64_t>(i) * THREADS + threadIdx.x) * VECTOR;
    if (aligned && at + VECTOR <= count) held[i].load(x + at);
    else if (at < count) held[i].load_some(x + at, static_cast<int>(min(count - at, int64_t{VECTOR})));
    else held[i].clear();
  }
}

template <typename In>
__global__ void __launch_bounds__(THREADS) amax_listed(const __grid_constant__ Batch batch, uint32_t* amax) {
  __shared__ uint32_t scratch[THREADS / 32];
  const int index = tensor_of(batch);
  const Listed& of = batch.tensors[index];
  Vector<In> held[EACH];
  read_chunk(held, static_cast<const In*>(of.x), of.count, (blockIdx.x - of.first) * CHUNK, batch.aligned[index]);
  uint32_t found = 0;
#pragma unroll
  for (int i = 0; i < EACH; ++i) found = larger(found, held[i].largest());
  found = block_largest(found, scratch);
  if (threadIdx.x == 0) atomicMax(amax + batch.first + index, found);
}

template <typename In, Format F>
__global__ void __launch_bounds__(THREADS)
    quantize_listed(const __grid_constant__ Batch batch, const float* amax, float* scale, ScaleRule how) {
  using Code = typename Grid<F>::Code;
  const int index = tensor_of(batch);
  const Listed& of = batch.tensors[index];
  const int64_t chunk = blockIdx.x - of.first;
  const TileScale by = tile_scale(amax[batch.first + index], how);
  if (chunk == 0 && threadIdx.x == 0) scale[batch.first + index] = by.scale;
  Vector<In> held[EACH];
  read_chunk(held, static_cast<const In*>(of.x), of.count, chunk * CHUNK, batch.aligned[index]);
  Code* codes = static_cast<Code*>(of.codes);
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int64_t at = chunk * CHUNK + (static_cast<int64_t>(i) * THREADS + threadIdx.x) * VECTOR;
    if (at >= of.count) continue;
    float v[VECTOR];
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) v[j] = held[i][j];
    over_scale(v, by, how.divides());
    Codes<F> made;
    made.encode_nearest(v, by.inverse);
    if (batch.aligned[index] && at + VECTOR <= of.count) made.store_all(codes + at);
    else made.store_some(codes + at, static_cast<int>(min(of.count - at, int64_t{VECTOR})));
  }
}

// Calls run(batch, blocks) for the tensors in batches. codes: none, or one for each tensor.
template <typename Run>
void in_batches(const std::vector<Tensor>& xs, const std::vector<Tensor>& codes, const Run& run) {
  for (size_t start = 0; start < xs.size(); start += BATCH) {
    Batch batch;
    batch.count = static_cast<int>(std::min<size_t>(BATCH, xs.size() - start));
    batch.first = static_cast<int>(start);
    int64_t chunks = 0;
    for (int i = 0; i < batch.count; ++i) {
      const Tensor& x = xs[start + i];
      STD_TORCH_CHECK(x.is_contiguous() && x.scalar_type() == xs[0].scalar_type() && !x.is_cpu() &&
                          x.get_device_index() == xs[0].get_device_index(),
                      "contiguous tensors of one dtype on one device");
      void* to = codes.empty() ? nullptr : codes[start + i].mutable_data_ptr();
      batch.tensors[i] = {x.const_data_ptr(), to, x.numel(), chunks};
      batch.aligned[i] = aligned(x.const_data_ptr(), 16) && aligned(to, 16);
      chunks += std::max<int64_t>(1, ceil_div(x.numel(), CHUNK));
    }
    run(batch, chunks);
  }
}

Tensor amax_of_all(std::vector<Tensor> xs) {
  STD_TORCH_CHECK(!xs.empty(), "amax_all takes at least one tensor");
  Tensor made = torch::stable::new_zeros(xs[0], {static_cast<int64_t>(xs.size())}, ScalarType::Float);
  uint32_t* found = reinterpret_cast<uint32_t*>(mutable_data_of<float>(made));
  with_input(xs[0], [&](auto in) {
    in_batches(xs, {}, [&](const Batch& batch, int64_t chunks) {
      amax_listed<typename decltype(in)::Type><<<chunks, THREADS, 0, stream_of(xs[0])>>>(batch, found);
    });
  });
  check_launch("amax_all");
  return made;
}

Tensor quantize_all_by(std::vector<Tensor> xs, const Tensor& amax_given, std::vector<Tensor> codes,
                       std::string format_name, std::string rule, double headroom) {
  STD_TORCH_CHECK(!xs.empty() && codes.size() == xs.size() && amax_given.numel() == static_cast<int64_t>(xs.size()),
                  "quantize_all_by: codes and an amax for each of at least one tensor");
  const Format format = parse_format(format_name);
  const ScaleRule how = scale_rule_of(format, parse_rule(rule), headroom, 0);
  const Tensor amax = dense(amax_given);
  STD_TORCH_CHECK(amax.scalar_type() == ScalarType::Float, "quantize_all_by: amaxes in FP32");
  Tensor scale = empty_like_device(xs[0], {amax.numel()}, ScalarType::Float);
  with_input(xs[0], [&](auto in) {
    with_format(format, [&](auto tag) {
      using Code = typename Grid<decltype(tag)::value>::Code;
      for (size_t i = 0; i < xs.size(); ++i) {
        STD_TORCH_CHECK(codes[i].is_contiguous() && codes[i].numel() == xs[i].numel() &&
                            codes[i].element_size() == static_cast<int64_t>(sizeof(Code)),
                        "quantize_all_by: contiguous codes of the tensor's size");
      }
      in_batches(xs, codes, [&](const Batch& batch, int64_t chunks) {
        quantize_listed<typename decltype(in)::Type, decltype(tag)::value><<<chunks, THREADS, 0, stream_of(xs[0])>>>(
            batch, data_of<float>(amax), mutable_data_of<float>(scale), how);
      });
    });
  });
  check_launch("quantize_all_by");
  return scale;
}

}  // namespace
}  // namespace lowprec

STABLE_TORCH_LIBRARY_IMPL(lowprec, CUDA, m) {
  m.impl("amax_all", TORCH_BOX(&lowprec::amax_of_all));
  m.impl("quantize_all_by", TORCH_BOX(&lowprec::quantize_all_by));
}
