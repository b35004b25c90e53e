// quantize_expanded, dequantize_expanded: COAT's dynamic range expansion, a warp per group (numerics/expansion.h). The
// optimizer's fused update has its own kernels (adamw.cu); these are for its initialisation, its observer and tests.
#include "cuda/groups.h"

namespace lowprec {
namespace {

constexpr int THREADS = 256, WARPS = THREADS / 32;

template <typename In, Format F>
__global__ void __launch_bounds__(THREADS) encode_groups(const In* __restrict__ x, uint8_t* __restrict__ codes,
                                                         float* __restrict__ scale, float* __restrict__ exponents,
                                                         float* __restrict__ center, Groups groups) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * WARPS + (threadIdx.x >> 5);
  if (index >= groups.count) return;  // uniform over a warp
  const int lane = threadIdx.x & 31;
  const Place place = place_of(groups, index);
  Extremes found;
  for (int64_t i = lane; i < place.count; i += 32) found.add(x[place.start + i].value());
  found.over_warp();
  const Expansion how = expansion_of<F>(found.largest, found.smallest);
  for (int64_t i = lane; i < place.count; i += 32) {
    codes[place.start + i] = encode_expanded<F>(x[place.start + i].value(), how, found.largest < INFINITE);
  }
  if (lane == 0) {
    scale[index] = how.scale;
    exponents[index] = how.exponent;
    center[index] = how.center;
  }
}

template <Format F>
__global__ void __launch_bounds__(THREADS) decode_groups(const uint8_t* __restrict__ codes,
                                                         const float* __restrict__ scale,
                                                         const float* __restrict__ exponents,
                                                         const float* __restrict__ center, float* __restrict__ values,
                                                         Groups groups) {
  __shared__ float logs[128];
  if (threadIdx.x < 128) logs[threadIdx.x] = code_log2<F>(threadIdx.x);
  __syncthreads();
  const int64_t index = static_cast<int64_t>(blockIdx.x) * WARPS + (threadIdx.x >> 5);
  if (index >= groups.count) return;
  const Place place = place_of(groups, index);
  const float c = center[index], log_scale = log2_float(scale[index]), inverse = divide(1.0f, exponents[index]);
  for (int64_t i = threadIdx.x & 31; i < place.count; i += 32) {
    const uint8_t code = codes[place.start + i];
    values[place.start + i] = decode_expanded(code, logs[code & 0x7fu], log_scale, inverse, c);
  }
}

// Calls body(FormatTag) for the two formats of expanded moments.
template <typename Body>
void with_fp8(Format format, const Body& body) {
  STD_TORCH_CHECK(format == Format::E4M3 || format == Format::E5M2, "expanded codes are E4M3 or E5M2");
  if (format == Format::E4M3) body(FormatTag<Format::E4M3>{});
  else body(FormatTag<Format::E5M2>{});
}

std::tuple<Tensor, Tensor, Tensor, Tensor> quantize_expanded(const Tensor& input, std::string format, int64_t group,
                                                             int64_t segments) {
  const Tensor x = dense(input);
  const int64_t rows = rows_of(x), columns = x.size(1);
  const Groups groups = groups_of(rows, columns, group, segments);
  const Format to = parse_format(format);
  const Tensor codes = empty_like_device(x, {rows, columns}, carrier_of(to));
  const std::vector<int64_t> shape{rows, segments * groups.per_segment};
  const Tensor scale = empty_like_device(x, shape, ScalarType::Float);
  const Tensor exponents = empty_like_device(x, shape, ScalarType::Float);
  const Tensor center = empty_like_device(x, shape, ScalarType::Float);
  if (groups.count > 0) {
    with_fp8(to, [&](auto tag) {
      with_input(x, [&](auto input_tag) {
        using In = typename decltype(input_tag)::Type;
        encode_groups<In, decltype(tag)::value><<<ceil_div(groups.count, WARPS), THREADS, 0, stream_of(x)>>>(
            data_of<In>(x), mutable_data_of<uint8_t>(codes), mutable_data_of<float>(scale),
            mutable_data_of<float>(exponents), mutable_data_of<float>(center), groups);
      });
    });
    check_launch("quantize_expanded");
  }
  return {codes, scale, exponents, center};
}

Tensor dequantize_expanded(const Tensor& input, const Tensor& scale, const Tensor& exponents, const Tensor& center,
                           std::string format, int64_t group, int64_t segments) {
  const Tensor codes = dense(input), s = dense(scale), k = dense(exponents), c = dense(center);
  const int64_t rows = rows_of(codes), columns = codes.size(1);
  const Groups groups = groups_of(rows, columns, group, segments);
  STD_TORCH_CHECK(s.numel() == groups.count && k.numel() == groups.count && c.numel() == groups.count,
                  "a scale, an exponent and a centre for each group of each row");
  const Tensor values = empty_like_device(codes, {rows, columns}, ScalarType::Float);
  if (groups.count > 0) {
    with_fp8(parse_format(format), [&](auto tag) {
      decode_groups<decltype(tag)::value><<<ceil_div(groups.count, WARPS), THREADS, 0, stream_of(codes)>>>(
          data_of<uint8_t>(codes), data_of<float>(s), data_of<float>(k), data_of<float>(c),
          mutable_data_of<float>(values), groups);
    });
    check_launch("dequantize_expanded");
  }
  return values;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(lowprec, CUDA, m) {
  m.impl("quantize_expanded", TORCH_BOX(&quantize_expanded));
  m.impl("dequantize_expanded", TORCH_BOX(&dequantize_expanded));
}

}  // namespace lowprec
