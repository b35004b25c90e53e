// quantize, dequantize, transpose of one matrix, for all formats and tilings.
//
//   rows     tile (1, all)        a block has a row in registers: one read, one write
//   lines    tile (1, 8 .. 256)   lanes that share a line exchange their amax: one read, one write
//   tiles    any other            amax first, then codes: two reads, one write
//
// amax uses bit patterns (numerics/amax.h), so it does not depend on the order of a reduction.
#include "cuda/amax.h"
#include "cuda/quantize.h"

namespace lowprec {
namespace {

struct Draw {
  const int64_t* seed;
  const int64_t* origin;
};

template <Format F, bool random>
__device__ __forceinline__ Codes<F> coded(const float (&v)[VECTOR], float inverse, const Draw& draw, int64_t row,
                                          int64_t column) {
  Codes<F> codes;
  if constexpr (random) {
    const int64_t first = draw.origin == nullptr ? 0 : draw.origin[0], group = draw.origin == nullptr ? 0 : draw.origin[1] >> 3;
    codes.encode_random(v, random_words(static_cast<uint64_t>(*draw.seed), row + first, (column >> 3) + group));
  } else {
    codes.encode_nearest(v, inverse);
  }
  return codes;
}

template <typename In, Format F, bool random, bool whole>
__device__ __forceinline__ void emit(const Vector<In>& x, const TileScale& of, bool divides,
                                     typename Grid<F>::Code* codes, int64_t row, int64_t column, int64_t columns,
                                     const Draw& draw) {
  float v[VECTOR];
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) v[i] = x[i];
  over_scale(v, of, divides);
  const Codes<F> made = coded<F, random>(v, of.inverse, draw, row, column);
  if constexpr (whole) {
    made.store_all(codes + row * columns + column);
  } else {
    made.store_some(codes + row * columns + column, static_cast<int>(min(columns - column, int64_t{VECTOR})));
  }
}

template <typename In, bool whole>
__device__ __forceinline__ Vector<In> read(const In* x, int64_t row, int64_t column, int64_t columns) {
  Vector<In> made;
  if constexpr (whole) {
    made.load(x + row * columns + column);
  } else {
    made.load_some(x + row * columns + column, static_cast<int>(min(columns - column, int64_t{VECTOR})));
  }
  return made;
}

// A block per row; up to `per_thread` vectors per thread stay in registers, others are read again.
template <typename In, Format F, bool random, int threads, int per_thread>
__global__ void __launch_bounds__(threads) quantize_rows(const In* __restrict__ x, typename Grid<F>::Code* __restrict__ codes,
                                                         float* __restrict__ scale, int64_t columns, ScaleRule how, Draw draw) {
  __shared__ uint32_t scratch[threads / 32];
  const int64_t row = blockIdx.x, first = static_cast<int64_t>(threadIdx.x) * VECTOR, stride = threads * VECTOR;
  Vector<In> held[per_thread];
  uint32_t amax = 0;
#pragma unroll
  for (int i = 0; i < per_thread; ++i) {
    const int64_t column = first + i * stride;
    if (column < columns) held[i] = read<In, true>(x, row, column, columns);
    else held[i].clear();
  }
#pragma unroll
  for (int i = 0; i < per_thread; ++i) amax = larger(amax, held[i].largest());
  for (int64_t column = first + per_thread * stride; column < columns; column += stride) {
    amax = larger(amax, read<In, true>(x, row, column, columns).largest());
  }
  const float largest = bits_float(block_largest(amax, scratch));
  TileScale of = tile_scale(largest, how);
  if (how.span > 0) {
    const int e = block_exponent(largest, how);
    of = spanned_scale(largest, e, e, how);
  }
  if (threadIdx.x == 0) scale[row] = of.scale;
#pragma unroll
  for (int i = 0; i < per_thread; ++i) {
    const int64_t column = first + i * stride;
    if (column < columns) emit<In, F, random, true>(held[i], of, how.divides(), codes, row, column, columns, draw);
  }
  for (int64_t column = first + per_thread * stride; column < columns; column += stride) {
    emit<In, F, random, true>(read<In, true>(x, row, column, columns), of, how.divides(), codes, row, column, columns,
                              draw);
  }
}

// 2^shift threads, at most 32, share a line of 8 * 2^shift elements; the number of columns is a multiple of it.
template <typename In, Format F, bool random>
__global__ void __launch_bounds__(THREADS) quantize_lines(const In* __restrict__ x, typename Grid<F>::Code* __restrict__ codes,
                                                          float* __restrict__ scale, int64_t columns, int64_t vectors,
                                                          int shift, ScaleRule how, Draw draw) {
  constexpr int EACH = 4;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * THREADS * EACH + threadIdx.x;
  Vector<In> held[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int64_t vector = first + i * THREADS;
    if (vector < vectors) held[i].load(x + vector * VECTOR);
    else held[i].clear();
  }
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    uint32_t amax = held[i].largest();
    for (int offset = 1; offset < 1 << shift; offset <<= 1) amax = larger(amax, __shfl_xor_sync(0xffffffffu, amax, offset));
    const TileScale of = tile_scale(bits_float(amax), how);
    const int64_t vector = first + i * THREADS;
    if (vector >= vectors) continue;
    const int64_t row = random ? vector * VECTOR / columns : 0, column = vector * VECTOR - row * columns;
    if ((vector & ((1 << shift) - 1)) == 0) scale[vector >> shift] = of.scale;
    emit<In, F, random, true>(held[i], of, how.divides(), codes, row, column, columns, draw);
  }
}

// amax of lines of 8 * 2^shift elements, which 2^shift threads share.
template <typename In>
__global__ void __launch_bounds__(THREADS) amax_lines(const In* __restrict__ x, uint32_t* __restrict__ amax, int64_t vectors,
                                                      int shift) {
  constexpr int EACH = 4;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * THREADS * EACH + threadIdx.x;
  Vector<In> held[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    if (first + i * THREADS < vectors) held[i].load(x + (first + i * THREADS) * VECTOR);
    else held[i].clear();
  }
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int64_t vector = first + i * THREADS;
    uint32_t found = held[i].largest();
    for (int offset = 1; offset < 1 << shift; offset <<= 1) found = larger(found, __shfl_xor_sync(0xffffffffu, found, offset));
    if (vector < vectors && (vector & ((1 << shift) - 1)) == 0) amax[vector >> shift] = found;
  }
}

// A block per tile.
template <typename In>
__global__ void __launch_bounds__(THREADS) amax_tiles(const In* __restrict__ x, uint32_t* __restrict__ amax, int64_t columns,
                                                      Tile tile) {
  __shared__ uint32_t scratch[THREADS / 32];
  const int64_t across = columns / tile.columns;
  const int64_t row = blockIdx.x / across * tile.rows, column = blockIdx.x % across * tile.columns;
  uint32_t found = 0;
  for (int64_t i = threadIdx.x; i < tile.rows * tile.columns; i += THREADS) {
    found = larger_magnitude(found, x[(row + i / tile.columns) * columns + column + i % tile.columns].value());
  }
  found = block_largest(found, scratch);
  if (threadIdx.x == 0) amax[blockIdx.x] = found;
}

// Scales of tiles from their amax, a block per row of tiles; with a span, exponents have a minimum that depends on the
// row. by: factor of values, or divisor if the rule divides.
__global__ void __launch_bounds__(THREADS) tile_scales(const uint32_t* __restrict__ amax, float* __restrict__ scale,
                                                       float* __restrict__ by, int64_t across, ScaleRule how) {
  __shared__ int top;
  if (threadIdx.x == 0) top = -1000;
  __syncthreads();
  const int64_t base = blockIdx.x * across;
  if (how.span > 0) {
    int e = -1000;
    for (int64_t i = threadIdx.x; i < across; i += THREADS) e = max(e, block_exponent(bits_float(amax[base + i]), how));
    atomicMax(&top, e);
    __syncthreads();
  }
  for (int64_t i = threadIdx.x; i < across; i += THREADS) {
    const float largest = bits_float(amax[base + i]);
    const TileScale of =
        how.span > 0 ? spanned_scale(largest, block_exponent(largest, how), top, how) : tile_scale(largest, how);
    scale[base + i] = of.scale;
    by[base + i] = how.divides() ? of.scale : of.inverse;
  }
}

template <typename In, Format F, bool random, bool whole>
__global__ void __launch_bounds__(THREADS) emit_tiles(const In* __restrict__ x, typename Grid<F>::Code* __restrict__ codes,
                                                      const float* __restrict__ by, bool divides, int64_t rows,
                                                      int64_t columns, Tile tile, Draw draw) {
  const int64_t vectors = (columns + VECTOR - 1) / VECTOR, across = columns / tile.columns;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
  if (index >= rows * vectors) return;
  const int64_t row = index / vectors, column = index % vectors * VECTOR;
  const Vector<In> held = read<In, whole>(x, row, column, columns);
  const float* of_row = by + row / tile.rows * across;
  float v[VECTOR];
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) {
    const float of = of_row[min(column + i, columns - 1) / tile.columns];
    v[i] = divides ? divide(held[i], of) : held[i] * of;
  }
  const Codes<F> made = coded<F, random>(v, 0.0f, draw, row, column);
  if constexpr (whole) made.store_all(codes + row * columns + column);
  else made.store_some(codes + row * columns + column, static_cast<int>(min(columns - column, int64_t{VECTOR})));
}

// Second read of a tensor with one scale.
template <typename In, Format F, bool random>
__global__ void __launch_bounds__(THREADS) emit_tensor(const In* __restrict__ x, typename Grid<F>::Code* __restrict__ codes,
                                                       const uint32_t* __restrict__ amax, float* __restrict__ scale,
                                                       int64_t rows, int64_t columns, ScaleRule how, Draw draw) {
  constexpr int EACH = 4;
  const TileScale of = tile_scale(bits_float(*amax), how);
  if (blockIdx.x == 0 && threadIdx.x == 0) *scale = of.scale;
  const int64_t vectors = columns / VECTOR, total = rows * vectors;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * THREADS * EACH + threadIdx.x;
  Vector<In> held[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int64_t index = first + i * THREADS;
    if (index >= total) continue;
    held[i].load(x + index * VECTOR);
  }
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int64_t index = first + i * THREADS;
    if (index >= total) continue;
    const int64_t row = random ? index / vectors : 0, column = (index - row * vectors) * VECTOR;
    emit<In, F, random, true>(held[i], of, how.divides(), codes, row, column, columns, draw);
  }
}

// log2 of the number of vectors in a line, for lines within a warp; -1 for other tilings.
int shift_of_lines(Tile tile) {
  const int64_t lanes = tile.columns / VECTOR;
  if (tile.rows != 1 || tile.columns % VECTOR != 0 || lanes > 32 || (lanes & (lanes - 1)) != 0) return -1;
  int shift = 0;
  while (1 << shift < lanes) ++shift;
  return shift;
}

// Whole vectors: rows, lines and whole tensors have separate kernels. Returns false for other tilings.
template <typename In, Format F, bool random>
bool launch_vectors(const Tensor& x, typename Grid<F>::Code* codes, float* scale, Tile tile, const ScaleRule& how, Draw draw) {
  const int64_t rows = x.size(0), columns = x.size(1);
  const cudaStream_t stream = stream_of(x);
  const In* in = data_of<In>(x);
  if (tile.rows == 1 && tile.columns == columns) {
    if (columns <= 4 * 128 * VECTOR) {
      quantize_rows<In, F, random, 128, 4><<<rows, 128, 0, stream>>>(in, codes, scale, columns, how, draw);
    } else {
      quantize_rows<In, F, random, THREADS, 6><<<rows, THREADS, 0, stream>>>(in, codes, scale, columns, how, draw);
    }
    return true;
  }
  const int64_t vectors = rows * columns / VECTOR;
  const int shift = shift_of_lines(tile);
  if (shift >= 0 && how.span == 0) {
    quantize_lines<In, F, random><<<ceil_div(vectors, THREADS * 4), THREADS, 0, stream>>>(
        in, codes, scale, columns, vectors, shift, how, draw);
    return true;
  }
  if (tile.rows == rows && tile.columns == columns && how.span == 0) {
    Tensor amax = torch::stable::new_zeros(x, {1}, ScalarType::Int);
    uint32_t* found = mutable_data_of<uint32_t>(amax);
    launch_amax(in, found, rows * columns, stream);
    emit_tensor<In, F, random><<<ceil_div(vectors, THREADS * 4), THREADS, 0, stream>>>(
        in, codes, found, scale, rows, columns, how, draw);
    return true;
  }
  return false;
}

template <typename In, Format F, bool random, bool whole>
void launch(const Tensor& x, const Tensor* known, const Tensor& codes_out, const Tensor& scale_out, Tile tile,
            const ScaleRule& how, Draw draw) {
  using Code = typename Grid<F>::Code;
  const int64_t rows = x.size(0), columns = x.size(1), across = columns / tile.columns;
  const cudaStream_t stream = stream_of(x);
  const In* in = data_of<In>(x);
  Code* codes = mutable_data_of<Code>(codes_out);
  float* scale = mutable_data_of<float>(scale_out);
  if constexpr (whole) {
    if (known == nullptr && launch_vectors<In, F, random>(x, codes, scale, tile, how, draw)) return;
  }
  const int64_t tiles = rows / tile.rows * across;
  Tensor amax = torch::stable::new_zeros(x, {tiles}, ScalarType::Int);
  uint32_t* found = mutable_data_of<uint32_t>(amax);
  Tensor by = empty_like_device(x, {tiles}, ScalarType::Float);
  if (known != nullptr) {
    launch_amax(data_of<Fp32>(*known), found, known->numel(), stream);
  } else if (const int shift = whole ? shift_of_lines(tile) : -1; shift >= 0) {
    const int64_t vectors = rows * columns / VECTOR;
    amax_lines<In><<<ceil_div(vectors, THREADS * 4), THREADS, 0, stream>>>(in, found, vectors, shift);
  } else {
    amax_tiles<In><<<tiles, THREADS, 0, stream>>>(in, found, columns, tile);
  }
  tile_scales<<<rows / tile.rows, THREADS, 0, stream>>>(found, scale, mutable_data_of<float>(by), across, how);
  emit_tiles<In, F, random, whole><<<ceil_div(rows * ceil_div(columns, VECTOR), THREADS), THREADS, 0, stream>>>(
      in, codes, mutable_data_of<float>(by), how.divides(), rows, columns, tile, draw);
}

std::tuple<Tensor, Tensor> quantize_any(const Tensor& given, const Tensor* known, const std::string& format_name,
                                        const std::vector<int64_t>& tile_given, const std::string& rule,
                                        double headroom, int64_t span, Draw draw) {
  const Tensor x = dense(given);
  const Format format = parse_format(format_name);
  const int64_t rows = x.size(0), columns = x.size(1);
  const Tile tile = resolve_tile(rows, columns, tile_given);
  const ScaleRule how = scale_rule_of(format, parse_rule(rule), headroom, span);
  Tensor codes = empty_like_device(x, {rows, columns}, carrier_of(format));
  Tensor scale = empty_like_device(x, {rows / tile.rows, columns / tile.columns}, ScalarType::Float);
  with_input(x, [&](auto in) {
    using In = typename decltype(in)::Type;
    with_format(format, [&](auto tag) {
      constexpr Format F = decltype(tag)::value;
      const bool whole = columns % VECTOR == 0 && aligned(x.const_data_ptr(), 16);
      const auto run = draw.seed != nullptr ? (whole ? launch<In, F, true, true> : launch<In, F, true, false>)
                                            : (whole ? launch<In, F, false, true> : launch<In, F, false, false>);
      run(x, known, codes, scale, tile, how, draw);
    });
  });
  check_launch("quantize");
  return {codes, scale};
}

}  // namespace

std::tuple<Tensor, Tensor> quantize(const Tensor& x, std::string format, std::vector<int64_t> tile, std::string rule,
                                    double headroom, int64_t span, std::string rounding, std::optional<Tensor> seed,
                                    std::optional<Tensor> origin) {
  return quantize_any(x, nullptr, format, tile, rule, headroom, span, Draw{seed_of(rounding, seed), seed_of(origin)});
}

std::tuple<Tensor, Tensor> quantize_whole(const Tensor& x, const Tensor& amax, std::string format, std::string rule,
                                          double headroom) {
  return quantize_any(x, &amax, format, {-1, -1}, rule, headroom, 0, Draw{nullptr, nullptr});
}

}  // namespace lowprec

STABLE_TORCH_LIBRARY_IMPL(lowprec, CUDA, m) { m.impl("quantize", TORCH_BOX(&lowprec::quantize)); }
