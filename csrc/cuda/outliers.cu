// outlier_bounds, quantize_carrier, and both in one pass (ops/reference.py, ops/pairs.py quantize_outliers): reads a
// row once, selects its (clipped + 1)-th smallest and largest values (cuda/row_in_shared_memory.h), and writes its
// codes.
//
// Bound by instructions, not by memory. Of about 23 per element, 14 round (quotient, magic sum, two comparisons with
// the bounds, half a conversion), 1 finds extremes of clusters, 2 mark candidates; the rest is the bitwise searches,
// shared by about 100 elements of a thread. FP32 and odd rows are read again for each bit of their bounds.
#include "cuda/row_in_shared_memory.h"

namespace lowprec {
namespace {

// Carrier codes of four values in words a and b.
template <typename In>
__device__ __forceinline__ uint32_t carrier_codes(uint32_t a, uint32_t b, const Bounds& of, float scale,
                                                  float inverse) {
  using P = Pairs<In>;
  const auto pair = [&](uint32_t w) -> uint32_t {
    const float first = carrier_size(P::low(w), of.low, of.high, scale, inverse);
    const float second = carrier_size(P::high(w), of.low, of.high, scale, inverse);
    return __nv_cvt_float2_to_fp8x2(make_float2(first, second), __NV_SATFINITE, __NV_E4M3);
  };
  return (pair(a) | pair(b) << 16) | (__byte_perm(a, b, 0x7531) & 0x80808080u);
}

template <typename In, int warps, int depth>
__global__ void __launch_bounds__(warps == 1 ? 64 : 32 * warps)
    outliers_of_rows(const In* __restrict__ x, uint8_t* __restrict__ codes, float* __restrict__ scale,
                     float* __restrict__ low, float* __restrict__ high, int64_t rows, int columns, uint32_t clipped) {
  extern __shared__ uint4 memory[];
  __shared__ uint32_t slots[2 * warps];
  using Row = WarpGroup<warps>;
  using Held = SharedMemoryRow<In, warps, depth>;
  using P = Pairs<In>;
  const int side = warps == 1 ? threadIdx.x >> 5 : 0, rank = Row::rank(), count = columns / VECTOR;
  const int64_t row = warps == 1 ? static_cast<int64_t>(blockIdx.x) * 2 + side : blockIdx.x;
  if (warps == 1 && row >= rows) return;
  uint4* mine = memory + side * (count + Held::places / VECTOR);
  Row group(slots);
  Held held{mine + rank, reinterpret_cast<uint16_t*>(mine + count), count, rank};
  held.fetch(reinterpret_cast<const uint4*>(x + row * columns) + rank);
  const Bounds of = held.bounds(group, clipped);
  if (codes == nullptr) {
    if (rank == 0) {
      low[row] = of.low;
      high[row] = of.high;
    }
    return;
  }
  const CarrierScale by = carrier_scale(of.low, of.high, of.amax);
  if (rank == 0) scale[row] = by.of_carrier;
  uint2* out = reinterpret_cast<uint2*>(codes + row * columns) + rank;
  if (of.finite && carrier_plain(of.low, of.high, by)) {
    const float over = by.of_carrier, inverse = by.inverse * CARRIER_SHIFT;
#pragma unroll 4
    for (int i = 0; i < Held::held; ++i) {
      if (!held.has(i)) break;
      const uint4 v = held.vector(i);
      out[i * Row::size] =
          make_uint2(carrier_codes<In>(v.x, v.y, of, over, inverse), carrier_codes<In>(v.z, v.w, of, over, inverse));
    }
    return;
  }
  for (int i = 0; held.has(i); ++i) {
    const uint32_t* words = reinterpret_cast<const uint32_t*>(held.vectors + i * Row::size);
    for (int j = 0; j < 4; ++j) {
      uint8_t* to = reinterpret_cast<uint8_t*>(out + i * Row::size) + 2 * j;
      to[0] = carrier_code(P::low(words[j]), of.low, of.high, by.scale);
      to[1] = carrier_code(P::high(words[j]), of.low, of.high, by.scale);
    }
  }
}

// --- rows of any length and type -------------------------------------------------------------------------------------

constexpr int ANY_WARPS = 8;

// Bits that are the same in all keys of a type.
template <typename In>
constexpr int spare = sizeof(In) == 4 ? 0 : 13;

template <typename In>
__global__ void __launch_bounds__(32 * ANY_WARPS)
    bounds_of_any(const In* __restrict__ x, float* __restrict__ low, float* __restrict__ high,
                  float* __restrict__ amax, int64_t columns, uint32_t clipped) {
  __shared__ uint32_t slots[2 * ANY_WARPS];
  WarpGroup<ANY_WARPS> group(slots);
  const In* values = x + blockIdx.x * columns;
  const auto keys = [&](auto&& visit) {
    for (int64_t i = threadIdx.x; i < columns; i += 32 * ANY_WARPS) {
      visit(ordered(float_bits(values[i].value())) >> spare<In>);
    }
  };
  uint32_t top = 0, least = 0, size = 0;
  for (int64_t i = threadIdx.x; i < columns; i += 32 * ANY_WARPS) {
    size = larger_magnitude(size, values[i].value());
  }
  keys([&](uint32_t key) {
    top = larger(top, key);
    least = larger(least, ~key);
  });
  top = group.largest(top);
  least = ~group.largest(least);
  size = group.largest(size);
  const bool nan = size > INFINITE;
  uint2 both = make_uint2(0, 0);
  if (!nan) both = ranks_of_all(group, clipped, top, least, keys);
  if (threadIdx.x != 0) return;
  const auto value = [](uint32_t key) -> float {
    const uint32_t whole = key << spare<In>;
    return bits_float(unordered(whole & SIGN ? whole : whole | ((1u << spare<In>) - 1)));
  };
  low[blockIdx.x] = nan ? bits_float(0x7fc00000u) : value(both.x);
  high[blockIdx.x] = nan ? bits_float(0x7fc00000u) : value(both.y);
  if (amax != nullptr) amax[blockIdx.x] = bits_float(size);
}

template <typename In>
__global__ void __launch_bounds__(256)
    codes_of_rows(const In* __restrict__ x, const float* __restrict__ low, const float* __restrict__ high,
                  const float* __restrict__ amax, uint8_t* __restrict__ codes, float* __restrict__ scale,
                  int64_t columns, bool whole) {
  const int64_t row = blockIdx.x;
  const float from = low[row], to = high[row];
  const CarrierScale by = carrier_scale(from, to, amax[row]);
  if (threadIdx.x == 0) scale[row] = by.of_carrier;
  const In* in = x + row * columns;
  Codes<Format::E4M3> made;
  for (int64_t column = threadIdx.x * VECTOR; column < columns; column += 256 * VECTOR) {
    Vector<In> held;
    const int some = static_cast<int>(min(columns - column, int64_t{VECTOR}));
    if (whole) held.load(in + column);
    else held.load_some(in + column, some);
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) made.put(i, carrier_code(held[i], from, to, by.scale));
    if (whole) made.store_all(codes + row * columns + column);
    else made.store_some(codes + row * columns + column, some);
  }
}

// --- ops -------------------------------------------------------------------------------------------------------------

struct Outputs {
  uint8_t* codes;  // null: compute bounds only
  float *scale, *low, *high;
};

template <typename In, int warps, int depth>
void launch_team(const Tensor& x, const Outputs& to, uint32_t clipped) {
  using Held = SharedMemoryRow<In, warps, depth>;
  const int64_t rows = rows_of(x), columns = x.size(1), sides = warps == 1 ? 2 : 1;
  const size_t bytes = sides * (columns + Held::places) * 2;
  const auto kernel = outliers_of_rows<In, warps, depth>;
  if (bytes > 48 * 1024) {
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  }
  kernel<<<ceil_div(rows, sides), 32 * warps * sides, bytes, stream_of(x)>>>(
      data_of<In>(x), to.codes, to.scale, to.low, to.high, rows, static_cast<int>(columns), clipped);
}

// Returns false unless the rows have 16-bit floats and fit a group of warps.
template <typename In>
bool launch_held(const Tensor& x, const Outputs& to, uint32_t clipped) {
  const int64_t columns = x.size(1);
  if constexpr (sizeof(In) == 2) {
    if (columns % VECTOR != 0 || columns > 32768 || !aligned(x.const_data_ptr(), 16)) return false;
    if (columns <= 2048) launch_team<In, 1, 1>(x, to, clipped);
    else if (columns <= 4096) launch_team<In, 1, 2>(x, to, clipped);
    else if (columns <= 8192) launch_team<In, 2, 2>(x, to, clipped);
    else if (columns <= 12288) launch_team<In, 2, 3>(x, to, clipped);
    else if (columns <= 16384) launch_team<In, 4, 2>(x, to, clipped);
    else launch_team<In, 8, 2>(x, to, clipped);
    return true;
  }
  return false;
}

uint32_t checked_rank(const Tensor& x, int64_t clipped) {
  STD_TORCH_CHECK(x.dim() == 2 && clipped >= 0 && clipped < x.size(1), "cannot clip ", clipped, " values of a row of ",
                  x.size(x.dim() - 1));
  return static_cast<uint32_t>(clipped);
}

Tensor row_of_floats(const Tensor& x) { return empty_like_device(x, {x.size(0), 1}, ScalarType::Float); }

template <typename In>
void launch_bounds_of_any(const Tensor& x, const Tensor& low, const Tensor& high, float* amax, uint32_t clipped) {
  bounds_of_any<In><<<x.size(0), 32 * ANY_WARPS, 0, stream_of(x)>>>(
      data_of<In>(x), mutable_data_of<float>(low), mutable_data_of<float>(high), amax, x.size(1), clipped);
}

template <typename In>
void launch_codes(const Tensor& x, const Tensor& low, const Tensor& high, const Tensor& amax, const Tensor& codes,
                  const Tensor& scale) {
  const int64_t columns = x.size(1);
  const bool whole = columns % VECTOR == 0 && aligned(x.const_data_ptr(), 16);
  codes_of_rows<In><<<x.size(0), 256, 0, stream_of(x)>>>(
      data_of<In>(x), data_of<float>(low), data_of<float>(high), data_of<float>(amax), mutable_data_of<uint8_t>(codes),
      mutable_data_of<float>(scale), columns, whole);
}

std::tuple<Tensor, Tensor> outlier_bounds(const Tensor& given, int64_t clipped) {
  const Tensor x = dense(given);
  const uint32_t rank = checked_rank(x, clipped);
  Tensor low = row_of_floats(x), high = row_of_floats(x);
  if (x.size(0) == 0) return {low, high};
  with_input(x, [&](auto tag) {
    using In = typename decltype(tag)::Type;
    const Outputs to{nullptr, nullptr, mutable_data_of<float>(low), mutable_data_of<float>(high)};
    if (!launch_held<In>(x, to, rank)) launch_bounds_of_any<In>(x, low, high, nullptr, rank);
  });
  check_launch("outlier_bounds");
  return {low, high};
}

std::tuple<Tensor, Tensor> quantize_carrier(const Tensor& given, const Tensor& low, const Tensor& high,
                                            const Tensor& amax) {
  const Tensor x = dense(given);
  STD_TORCH_CHECK(x.dim() == 2 && low.numel() == x.size(0) && high.numel() == x.size(0) && amax.numel() == x.size(0),
                  "one bound a row at each end, and one amax");
  Tensor codes = empty_like_device(x, {x.size(0), x.size(1)}, ScalarType::Float8_e4m3fn);
  Tensor scale = row_of_floats(x);
  if (x.numel() == 0) return {codes, scale};
  with_input(x, [&](auto tag) {
    launch_codes<typename decltype(tag)::Type>(x, dense(low), dense(high), dense(amax), codes, scale);
  });
  check_launch("quantize_carrier");
  return {codes, scale};
}

std::tuple<Tensor, Tensor> quantize_outliers(const Tensor& given, int64_t clipped) {
  const Tensor x = dense(given);
  const uint32_t rank = checked_rank(x, clipped);
  Tensor codes = empty_like_device(x, {x.size(0), x.size(1)}, ScalarType::Float8_e4m3fn);
  Tensor scale = row_of_floats(x);
  if (x.size(0) == 0) return {codes, scale};
  with_input(x, [&](auto tag) {
    using In = typename decltype(tag)::Type;
    const Outputs to{mutable_data_of<uint8_t>(codes), mutable_data_of<float>(scale), nullptr, nullptr};
    if (launch_held<In>(x, to, rank)) return;
    Tensor low = row_of_floats(x), high = row_of_floats(x), amax = row_of_floats(x);
    launch_bounds_of_any<In>(x, low, high, mutable_data_of<float>(amax), rank);
    launch_codes<In>(x, low, high, amax, codes, scale);
  });
  check_launch("quantize_outliers");
  return {codes, scale};
}

}  // namespace
}  // namespace lowprec

STABLE_TORCH_LIBRARY_IMPL(lowprec, CUDA, m) {
  m.impl("outlier_bounds", TORCH_BOX(&lowprec::outlier_bounds));
  m.impl("quantize_carrier", TORCH_BOX(&lowprec::quantize_carrier));
  m.impl("quantize_outliers", TORCH_BOX(&lowprec::quantize_outliers));
}
