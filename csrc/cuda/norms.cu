// quantized_norm and its gradient: RMSNorm or LayerNorm of a quantised input, whose codes are saved. norm_of_codes
// computes the same from the codes.
//
//   forward    a block per row, in registers: reads x once; writes y, codes and exponents
//   backward   a fixed number of blocks, each over many rows; loads of the next row overlap the reductions of one; the
//              weight's gradient is accumulated in registers, a partial row per block, which a second kernel adds
//
// The number of blocks depends on the shape only and every sum has a fixed order: all runs give the same bits.
#include "cuda/saved.h"

namespace lowprec {
namespace {

constexpr int MOST_THREADS = 512;
constexpr int64_t WIDEST = MOST_THREADS * VECTOR * 4;  // columns: four vectors per thread

// Sums of one or two values over a block, in every thread. `scratch` has two halves, used alternately, so that one
// barrier per sum is enough: a half is written again only after the barrier of the other one.
struct BlockSums {
  float2 (*scratch)[MOST_THREADS / 32];
  int turn;

  template <int values>
  static __device__ __forceinline__ float2 across(float2 v, int lanes) {
    for (int offset = lanes >> 1; offset > 0; offset >>= 1) {
      v.x += __shfl_xor_sync(0xffffffffu, v.x, offset);
      if constexpr (values == 2) v.y += __shfl_xor_sync(0xffffffffu, v.y, offset);
    }
    return v;
  }
  template <int values>
  __device__ __forceinline__ float2 of(float2 v) {
    v = across<values>(v, 32);
    float2* half = scratch[turn & 1];
    ++turn;
    const int lane = threadIdx.x & 31, warps = blockDim.x >> 5;
    if (lane == 0) half[threadIdx.x >> 5] = v;
    __syncthreads();
    const int from = lane & (MOST_THREADS / 32 - 1);
    return across<values>(from < warps ? half[from] : make_float2(0.0f, 0.0f), MOST_THREADS / 32);
  }
};

__device__ __forceinline__ void store_floats(float* data, const float (&v)[VECTOR]) {
  reinterpret_cast<float4*>(data)[0] = make_float4(v[0], v[1], v[2], v[3]);
  reinterpret_cast<float4*>(data)[1] = make_float4(v[4], v[5], v[6], v[7]);
}

template <typename In>
struct Forward {
  const In* x;
  const float* weight;
  const float* bias;  // nullptr if there is none
  float eps;
  bool centered;
  In* y;
  float* amax;
  Saved saved;
  int vectors, shift;  // vectors of a row, log2 of the vectors of a group
};

// of_codes: reads codes and exponents, which it otherwise writes, and not x.
template <typename In, Format F, bool of_codes, int per_thread, int most_threads>
__global__ void __launch_bounds__(most_threads, 1024 / most_threads) norm_rows(const Forward<In> to) {
  __shared__ float2 scratch[2][MOST_THREADS / 32];
  __shared__ uint32_t largest[MOST_THREADS / 32];
  BlockSums sums{scratch, 0};
  const int64_t first = static_cast<int64_t>(blockIdx.x) * to.vectors;
  const float share = 1.0f / static_cast<float>(to.vectors * VECTOR);
  std::conditional_t<of_codes, SavedVector<F>, Vector<In>> held[per_thread];
#pragma unroll
  for (int i = 0; i < per_thread; ++i) {
    const int at = threadIdx.x + i * blockDim.x;
    if (at >= to.vectors) held[i].clear();
    else if constexpr (of_codes) held[i].load(to.saved, first + at, to.shift);
    else held[i].load(to.x + (first + at) * VECTOR);
  }
  float v[per_thread][VECTOR], sum = 0.0f;
#pragma unroll
  for (int i = 0; i < per_thread; ++i) {
    if constexpr (of_codes) {
      held[i].values(v[i]);
    } else {
      const int at = threadIdx.x + i * blockDim.x;
      const uint32_t amax = group_largest(held[i].largest(), to.shift);
#pragma unroll
      for (int j = 0; j < VECTOR; ++j) v[i][j] = held[i][j];
      save<F>(v[i], amax, at < to.vectors, first + at, to.shift, to.saved.codes, to.saved.exponents);
    }
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) sum = to.centered ? sum + v[i][j] : __fmaf_rn(v[i][j], v[i][j], sum);
  }
  float mean_square = sums.of<1>(make_float2(sum, 0.0f)).x * share;
  if (to.centered) {
    const float mean = mean_square;
    sum = 0.0f;
#pragma unroll
    for (int i = 0; i < per_thread; ++i) {
      if (threadIdx.x + i * blockDim.x >= to.vectors) continue;
#pragma unroll
      for (int j = 0; j < VECTOR; ++j) {
        v[i][j] -= mean;
        sum = __fmaf_rn(v[i][j], v[i][j], sum);
      }
    }
    mean_square = sums.of<1>(make_float2(sum, 0.0f)).x * share;
  }
  const float rate = rsqrtf(mean_square + to.eps);
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < per_thread; ++i) {
    const int at = threadIdx.x + i * blockDim.x;
    if (at >= to.vectors) continue;
    float weight[VECTOR];
    load_floats(weight, to.weight + at * VECTOR);
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) v[i][j] = v[i][j] * rate * weight[j];
    if (to.bias != nullptr) {
      load_floats(weight, to.bias + at * VECTOR);
#pragma unroll
      for (int j = 0; j < VECTOR; ++j) v[i][j] += weight[j];
    }
    const Vector<In> y = round_to_stream<In>(v[i]);
    most = larger(most, y.largest());
    store_vector(to.y + (first + at) * VECTOR, y);
  }
  store_row_maximum(most, largest, to.amax + blockIdx.x);
}

template <typename In>
struct Backward {
  const In* dy;
  Saved saved;
  const float* weight;
  float eps;
  bool centered;
  In* dx;
  float* dweight;  // [blocks, columns]: a partial row per block
  float* dbias;    // likewise; nullptr without a bias
  int64_t rows;
  int vectors, shift;
};

// Inputs that a thread reads for one vector of a row.
template <typename In, Format F>
struct Read {
  Vector<In> dy;
  SavedVector<F> saved;

  __device__ __forceinline__ void load(const Backward<In>& of, int64_t row, int at) {
    const int64_t vector = row * of.vectors + at;
    dy.load(of.dy + vector * VECTOR);
    saved.load(of.saved, vector, of.shift);
  }
  __device__ __forceinline__ void clear() {
    dy.clear();
    saved.clear();
  }
};

template <typename In, Format F, int per_thread>
__device__ __forceinline__ void read_row(Read<In, F> (&read)[per_thread], const Backward<In>& of, int64_t row) {
#pragma unroll
  for (int i = 0; i < per_thread; ++i) {
    const int at = threadIdx.x + i * blockDim.x;
    if (row < of.rows && at < of.vectors) read[i].load(of, row, at);
    else read[i].clear();
  }
}

// Up to two vectors per thread stay in registers; wider rows are read again, from the caches.
template <typename In, Format F, int per_thread, bool biased>
__global__ void __launch_bounds__(MOST_THREADS, per_thread == 1 && sizeof(In) == 2 ? 2 : 1)
    norm_rows_backward(const Backward<In> of) {
  constexpr bool holds = per_thread <= 2, holds_weight = per_thread == 1 && !biased;
  __shared__ float2 scratch[2][MOST_THREADS / 32];
  BlockSums sums{scratch, 0};
  const float share = 1.0f / static_cast<float>(of.vectors * VECTOR);
  float dweight[per_thread][VECTOR] = {}, dbias[per_thread][VECTOR] = {}, weight[VECTOR] = {};
  if (holds_weight && threadIdx.x < of.vectors) load_floats(weight, of.weight + threadIdx.x * VECTOR);
  Read<In, F> now[per_thread], next[per_thread];
  if constexpr (holds) read_row(next, of, blockIdx.x);
  for (int64_t row = blockIdx.x; row < of.rows; row += gridDim.x) {
    if constexpr (holds) {
#pragma unroll
      for (int i = 0; i < per_thread; ++i) now[i] = next[i];
      read_row(next, of, row + gridDim.x);
    }
    const auto visit = [&](auto&& each) {  // each(i, at, read, x): a vector of this thread
#pragma unroll
      for (int i = 0; i < per_thread; ++i) {
        const int at = threadIdx.x + i * blockDim.x;
        if (at >= of.vectors) continue;
        if constexpr (!holds) now[i].load(of, row, at);
        if constexpr (!holds_weight) load_floats(weight, of.weight + at * VECTOR);
        float x[VECTOR];
        now[i].saved.decode(x);
        each(i, at, now[i].dy, x);
      }
    };
    float2 sum = make_float2(0.0f, 0.0f);  // RMS: sums of x^2 and g x; centred: of x and g
    visit([&](int, int, const Vector<In>& dy, const float(&x)[VECTOR]) {
#pragma unroll
      for (int j = 0; j < VECTOR; ++j) {
        const float g = dy[j] * weight[j];
        sum.x = of.centered ? sum.x + x[j] : __fmaf_rn(x[j], x[j], sum.x);
        sum.y = of.centered ? sum.y + g : __fmaf_rn(g, x[j], sum.y);
      }
    });
    float2 total = sums.of<2>(sum);
    float mean = 0.0f, g_mean = 0.0f;
    if (of.centered) {
      mean = total.x * share, g_mean = total.y * share;
      sum = make_float2(0.0f, 0.0f);
      visit([&](int, int, const Vector<In>& dy, const float(&x)[VECTOR]) {
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) {
          const float apart = x[j] - mean;
          sum.x = __fmaf_rn(apart, apart, sum.x);
          sum.y = __fmaf_rn(dy[j] * weight[j], apart, sum.y);
        }
      });
      total = sums.of<2>(sum);
    }
    const float rate = rsqrtf(__fmaf_rn(total.x, share, of.eps)), along = total.y * rate * share;
    visit([&](int i, int at, const Vector<In>& dy, float(&x)[VECTOR]) {
#pragma unroll
      for (int j = 0; j < VECTOR; ++j) {
        const float n = (x[j] - mean) * rate;
        dweight[i][j] = __fmaf_rn(dy[j], n, dweight[i][j]);
        if constexpr (biased) dbias[i][j] += dy[j];
        x[j] = rate * __fmaf_rn(-along, n, __fmaf_rn(dy[j], weight[j], -g_mean));
      }
      store_vector(of.dx + (row * of.vectors + at) * VECTOR, round_to_stream<In>(x));
    });
  }
#pragma unroll
  for (int i = 0; i < per_thread; ++i) {
    const int at = threadIdx.x + i * blockDim.x;
    if (at >= of.vectors) continue;
    const int64_t to = (static_cast<int64_t>(blockIdx.x) * of.vectors + at) * VECTOR;
    store_floats(of.dweight + to, dweight[i]);
    if constexpr (biased) store_floats(of.dbias + to, dbias[i]);
  }
}

// Adds columns of the partial rows, 32 columns per block: 16 threads per column add every sixteenth row, then a tree.
__global__ void __launch_bounds__(512) add_rows(const float* __restrict__ partial, float* __restrict__ total, int rows,
                                                int columns) {
  __shared__ float sums[16][33];
  const int column = blockIdx.x * 32 + threadIdx.x;
  float sum = 0.0f;
  if (column < columns) {
#pragma unroll 4
    for (int row = threadIdx.y; row < rows; row += 16) {
      sum += __ldg(partial + static_cast<int64_t>(row) * columns + column);
    }
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  for (int half = 8; half > 0; half >>= 1) {
    if (threadIdx.y < half) sums[threadIdx.y][threadIdx.x] += sums[threadIdx.y + half][threadIdx.x];
    __syncthreads();
  }
  if (threadIdx.y == 0 && column < columns) total[column] = sums[0][threadIdx.x];
}

int threads_for(int64_t vectors, int per_thread) { return static_cast<int>(ceil_div(ceil_div(vectors, per_thread), 32) * 32); }

// Blocks of the backward pass: enough threads to fill half of 132 multiprocessors.
int64_t blocks_for(int64_t rows, int threads) {
  const int64_t each = 1024 / threads < 2 ? 2 : 1024 / threads > 8 ? 8 : 1024 / threads;
  return rows < 132 * each ? rows : 132 * each;
}

const float* floats_of(const Tensor& x, int64_t columns) {
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Float && x.numel() == columns && aligned(x.const_data_ptr(), 16),
                  "a norm's weight and bias are float32, one a column");
  return data_of<float>(x);
}

void check_width(int64_t columns) {
  STD_TORCH_CHECK(columns <= WIDEST, "a norm that saves codes takes at most ", WIDEST, " columns, not ", columns);
}

template <typename In, Format F, bool of_codes>
void launch_rows(const Forward<In>& to, int64_t rows, cudaStream_t stream) {
  const int64_t vectors = to.vectors;
  if (vectors <= 512) norm_rows<In, F, of_codes, 2, 256><<<rows, threads_for(vectors, 2), 0, stream>>>(to);
  else if (vectors <= 1024) norm_rows<In, F, of_codes, 2, 512><<<rows, threads_for(vectors, 2), 0, stream>>>(to);
  else norm_rows<In, F, of_codes, 4, 512><<<rows, threads_for(vectors, 4), 0, stream>>>(to);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> quantized_norm(const Tensor& given, const Tensor& weight_given,
                                                     std::optional<Tensor> bias_given, double eps, bool centered,
                                                     std::string format_name, int64_t group) {
  const Tensor x = vectorised(given), weight = torch::stable::contiguous(weight_given);
  const Format format = parse_format(format_name);
  const int64_t rows = rows_of(x), columns = x.size(1), vectors = columns / VECTOR;
  const int shift = group_shift(columns, group);
  check_width(columns);
  Tensor y = empty_like_device(x, {rows, columns}, x.scalar_type());
  Tensor amax = empty_like_device(x, {rows}, ScalarType::Float);
  Tensor codes = saved_codes(x, rows, columns, format);
  Tensor exponents = empty_like_device(x, {rows, columns / group}, ScalarType::Byte);
  std::optional<Tensor> bias;
  if (bias_given.has_value()) bias = torch::stable::contiguous(*bias_given);
  if (rows == 0) return {y, amax, codes, exponents};
  with_stream_type(x, [&](auto in) {
    using In = typename decltype(in)::Type;
    const Forward<In> to{data_of<In>(x), floats_of(weight, columns), bias ? floats_of(*bias, columns) : nullptr,
                         static_cast<float>(eps), centered, mutable_data_of<In>(y), mutable_data_of<float>(amax),
                         {mutable_data_of<uint8_t>(codes), mutable_data_of<uint8_t>(exponents)},
                         static_cast<int>(vectors), shift};
    with_saved_format(format, [&](auto tag) { launch_rows<In, decltype(tag)::value, false>(to, rows, stream_of(x)); });
  });
  check_launch("quantized_norm");
  return {y, amax, codes, exponents};
}

std::tuple<Tensor, Tensor> norm_of_codes(const Tensor& codes_given, const Tensor& exponents_given,
                                         const Tensor& weight_given, std::optional<Tensor> bias_given, double eps,
                                         bool centered, std::string format_name, int64_t group, ScalarType dtype) {
  const Tensor codes = vectorised(codes_given), exponents = dense(exponents_given);
  const Tensor weight = torch::stable::contiguous(weight_given);
  const Format format = parse_format(format_name);
  const int64_t rows = rows_of(codes), columns = columns_of(codes, format);
  const int shift = group_shift(columns, group);
  check_width(columns);
  STD_TORCH_CHECK(exponents.numel() == rows * columns / group, "codes and exponents are those of another matrix");
  Tensor y = empty_like_device(codes, {rows, columns}, dtype), amax = empty_like_device(codes, {rows}, ScalarType::Float);
  std::optional<Tensor> bias;
  if (bias_given.has_value()) bias = torch::stable::contiguous(*bias_given);
  if (rows == 0) return {y, amax};
  with_stream_type(y, [&](auto in) {
    using In = typename decltype(in)::Type;
    const Forward<In> to{nullptr, floats_of(weight, columns), bias ? floats_of(*bias, columns) : nullptr,
                         static_cast<float>(eps), centered, mutable_data_of<In>(y), mutable_data_of<float>(amax),
                         {mutable_data_of<uint8_t>(codes), mutable_data_of<uint8_t>(exponents)},
                         static_cast<int>(columns / VECTOR), shift};
    with_saved_format(format, [&](auto tag) { launch_rows<In, decltype(tag)::value, true>(to, rows, stream_of(y)); });
  });
  check_launch("norm_of_codes");
  return {y, amax};
}

template <typename In, Format F, int per_thread>
void launch_backward(const Backward<In>& of, int64_t blocks, int threads, cudaStream_t stream) {
  if (of.dbias != nullptr) norm_rows_backward<In, F, per_thread, true><<<blocks, threads, 0, stream>>>(of);
  else norm_rows_backward<In, F, per_thread, false><<<blocks, threads, 0, stream>>>(of);
}

std::tuple<Tensor, Tensor, Tensor> quantized_norm_backward(const Tensor& dy_given, const Tensor& codes_given,
                                                      const Tensor& exponents_given, const Tensor& weight_given,
                                                      bool biased, double eps, bool centered, std::string format_name,
                                                      int64_t group) {
  const Tensor dy = vectorised(dy_given), codes = vectorised(codes_given), exponents = dense(exponents_given);
  const Tensor weight = torch::stable::contiguous(weight_given);
  const int64_t rows = rows_of(dy), columns = dy.size(1), vectors = columns / VECTOR;
  const int shift = group_shift(columns, group);
  check_width(columns);
  const int per_thread = vectors <= MOST_THREADS ? 1 : vectors <= 2 * MOST_THREADS ? 2 : 4;
  const int threads = threads_for(vectors, per_thread);
  const int64_t blocks = blocks_for(rows, threads);
  Tensor dx = empty_like_device(dy, {rows, columns}, dy.scalar_type());
  if (rows == 0) {
    return {dx, torch::stable::new_zeros(dy, {columns}, ScalarType::Float),
            torch::stable::new_zeros(dy, {biased ? columns : 0}, ScalarType::Float)};
  }
  Tensor dweight = empty_like_device(dy, {columns}, ScalarType::Float);
  Tensor dbias = empty_like_device(dy, {biased ? columns : 0}, ScalarType::Float);
  Tensor partial = empty_like_device(dy, {biased ? 2 : 1, blocks, columns}, ScalarType::Float);
  float* sums = mutable_data_of<float>(partial);
  const cudaStream_t stream = stream_of(dy);
  with_stream_type(dy, [&](auto in) {
    using In = typename decltype(in)::Type;
    const Backward<In> of{data_of<In>(dy), {mutable_data_of<uint8_t>(codes), mutable_data_of<uint8_t>(exponents)},
                          floats_of(weight, columns), static_cast<float>(eps), centered, mutable_data_of<In>(dx), sums,
                          biased ? sums + blocks * columns : nullptr, rows, static_cast<int>(vectors), shift};
    with_saved_format(parse_format(format_name), [&](auto tag) {
      constexpr Format F = decltype(tag)::value;
      if (per_thread == 1) launch_backward<In, F, 1>(of, blocks, threads, stream);
      else if (per_thread == 2) launch_backward<In, F, 2>(of, blocks, threads, stream);
      else launch_backward<In, F, 4>(of, blocks, threads, stream);
    });
  });
  const dim3 grid(ceil_div(columns, 32)), block(32, 16);
  add_rows<<<grid, block, 0, stream>>>(sums, mutable_data_of<float>(dweight), blocks, columns);
  if (biased) {
    add_rows<<<grid, block, 0, stream>>>(sums + blocks * columns, mutable_data_of<float>(dbias), blocks, columns);
  }
  check_launch("quantized_norm_backward");
  return {dx, dweight, dbias};
}

}  // namespace
}  // namespace lowprec

STABLE_TORCH_LIBRARY_IMPL(lowprec, CUDA, m) {
  m.impl("quantized_norm", TORCH_BOX(&lowprec::quantized_norm));
  m.impl("norm_of_codes", TORCH_BOX(&lowprec::norm_of_codes));
  m.impl("quantized_norm_backward", TORCH_BOX(&lowprec::quantized_norm_backward));
}
