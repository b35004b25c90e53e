// The functions of normalize.h.
#include "cuda/normalize.h"

#include "cuda/amax.h"
#include "cuda/saved.h"

namespace lowprec {
namespace {

template <typename In>
__global__ void __launch_bounds__(256) normalize_rows(const In* __restrict__ x, const float* __restrict__ rate,
                                                      const float* __restrict__ weight, In* __restrict__ out,
                                                      int64_t columns) {
  const int64_t first = blockIdx.x * columns;
  for (int64_t c = threadIdx.x; c < columns; c += blockDim.x) {
    write_one(out + first + c, x[first + c].value() * rate[blockIdx.x] * weight[c]);
  }
}

// Codes of the result of an RMSNorm under one scale. As in quantize.cu from the end of x, which the kernel before, that
// computed the amax, may have left in the L2 cache.
template <Format F>
__global__ void __launch_bounds__(THREADS) emit_norm(const Bf16* __restrict__ x, const float* __restrict__ rate,
                                                     const float* __restrict__ weight,
                                                     typename Grid<F>::Code* __restrict__ codes,
                                                     const uint32_t* __restrict__ amax, float* __restrict__ scale,
                                                     uint32_t total, uint32_t vectors, ScaleRule how) {
  constexpr int EACH = 4;
  const TileScale of = tile_scale(bits_float(*amax), how);
  if (blockIdx.x == 0 && threadIdx.x == 0) *scale = of.scale;
  const uint32_t first = (gridDim.x - 1 - blockIdx.x) * THREADS * EACH + threadIdx.x;
  Vector<Bf16> held[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    if (first + i * THREADS < total) held[i].load(x + static_cast<int64_t>(first + i * THREADS) * VECTOR);
  }
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const uint32_t index = first + i * THREADS, row = index / vectors, column = (index - row * vectors) * VECTOR;
    if (index >= total) continue;
    const float times = __ldg(rate + row);
    float v[VECTOR], by[VECTOR];
    load_floats(by, weight + column);
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) v[j] = held[i][j] * times * by[j];
    const Vector<Bf16> y = round_to_stream<Bf16>(v);
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) v[j] = y[j];
    over_scale(v, of, how.divides());
    Codes<F> made;
    made.encode_nearest(v, of.inverse);
    made.store_all(codes + static_cast<int64_t>(index) * VECTOR);
  }
}

}  // namespace

Tensor normalized(const Tensor& x, const Tensor& rate, const Tensor& weight) {
  const int64_t rows = rows_of(x), columns = x.size(1);
  const Tensor made = empty_like_device(x, {rows, columns}, x.scalar_type());
  const auto launch = [&](auto tag) {
    using In = decltype(tag);
    normalize_rows<In><<<rows, 256, 0, stream_of(x)>>>(data_of<In>(x), data_of<float>(rate), data_of<float>(weight),
                                                       mutable_data_of<In>(made), columns);
  };
  x.scalar_type() == ScalarType::BFloat16 ? launch(Bf16{}) : launch(Fp32{});
  check_launch("normalized");
  return made;
}

bool norm_fits(const Tensor& x, const Tensor& weight) {
  return x.scalar_type() == ScalarType::BFloat16 && x.size(1) % VECTOR == 0 && x.numel() / VECTOR < INT32_MAX &&
         aligned(x.const_data_ptr(), 16) && aligned(weight.const_data_ptr(), 16);
}

std::tuple<Tensor, Tensor> quantize_norm(const Tensor& x, const Tensor& rate, const Tensor& weight, const Tensor& amax,
                                         const std::string& rule, double headroom) {
  STD_TORCH_CHECK(amax.numel() == 1, "quantize_by: ", amax.numel(), " maxima of one tile");
  const ScaleRule how = scale_rule_of(Format::E4M3, parse_rule(rule), headroom, 0);
  const Tensor codes = empty_like_device(x, {x.size(0), x.size(1)}, carrier_of(Format::E4M3));
  const Tensor scale = empty_like_device(x, {1, 1}, ScalarType::Float);
  const uint32_t total = static_cast<uint32_t>(x.numel() / VECTOR);
  emit_norm<Format::E4M3><<<ceil_div(total, THREADS * 4), THREADS, 0, stream_of(x)>>>(
      data_of<Bf16>(x), data_of<float>(rate), data_of<float>(weight), mutable_data_of<Grid<Format::E4M3>::Code>(codes),
      reinterpret_cast<const uint32_t*>(data_of<float>(amax)), mutable_data_of<float>(scale), total,
      static_cast<uint32_t>(x.size(1) / VECTOR), how);
  check_launch("quantize_by");
  return {codes, scale};
}

}  // namespace lowprec
