// quantize, and its two steps amax and quantize_by, for all formats and tilings.
//
//   rows     tile (1, all)        a block has a row in registers: one read, one write
//   lines    tile (1, 8 .. 256)   lanes that share a line exchange their amax: one read, one write
//   tiles    any other            amax first, then codes: two reads, one write
//
// quantize_by takes the amax of tiles of which x may be a part: one read, one write.
// amax uses bit patterns (numerics/amax.h), so it does not depend on the order of a reduction.
#include "cuda/amax.h"
#include "cuda/normalize.h"
#include "cuda/quantize.h"
#include "norm_arguments.h"

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

constexpr int ACROSS = 32, DOWN = THREADS / ACROSS, STRETCH = 256;

// amax of tiles of one column, which must be zero before. A block has ACROSS vectors of columns and at most STRETCH rows of
// a tile. The number of columns is a multiple of VECTOR.
template <typename In>
__global__ void __launch_bounds__(THREADS) amax_columns(const In* __restrict__ x, uint32_t* __restrict__ amax,
                                                        int64_t columns, int64_t tile_rows, int64_t stretches) {
  __shared__ uint32_t scratch[DOWN][ACROSS][VECTOR];
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * ACROSS + threadIdx.x % ACROSS) * VECTOR;
  const int64_t tile = blockIdx.y / stretches, begin = tile * tile_rows + blockIdx.y % stretches * STRETCH;
  const int64_t end = min(begin + STRETCH, (tile + 1) * tile_rows);
  const int down = threadIdx.x / ACROSS, across = threadIdx.x % ACROSS;
  uint32_t found[VECTOR] = {};
  if (column < columns) {
    for (int64_t row = begin + down; row < end; row += DOWN) {
      const Vector<In> held = read<In, true>(x, row, column, columns);
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) found[i] = larger_magnitude(found[i], held[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) scratch[down][across][i] = found[i];
  __syncthreads();
  if (down > 0 || column >= columns) return;
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) {
    for (int other = 1; other < DOWN; ++other) found[i] = larger(found[i], scratch[other][across][i]);
    atomicMax(amax + tile * columns + column + i, found[i]);
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

// The same for tiles with a multiple of VECTOR columns.
template <typename In>
__global__ void __launch_bounds__(THREADS) amax_wide_tiles(const In* __restrict__ x, uint32_t* __restrict__ amax,
                                                           int64_t columns, Tile tile) {
  __shared__ uint32_t scratch[THREADS / 32];
  const int64_t across = columns / tile.columns;
  const In* first = x + blockIdx.x / across * tile.rows * columns + blockIdx.x % across * tile.columns;
  const uint32_t width = static_cast<uint32_t>(tile.columns) / VECTOR, vectors = static_cast<uint32_t>(tile.rows) * width;
  uint32_t found = 0;
#pragma unroll 4
  for (uint32_t i = threadIdx.x; i < vectors; i += THREADS) {
    Vector<In> held;
    held.load(first + i / width * columns + static_cast<int64_t>(i % width) * VECTOR);
    found = larger(found, held.largest());
  }
  found = block_largest(found, scratch);
  if (threadIdx.x == 0) amax[blockIdx.x] = found;
}

// Scales of tiles from their amax, a block per row of tiles; with a span, exponents have a minimum that depends on the
// row: on its largest amax, or on `tops`. by: factor of values, or divisor if the rule divides.
__global__ void __launch_bounds__(THREADS) tile_scales(const uint32_t* __restrict__ amax, const float* __restrict__ tops,
                                                       float* __restrict__ scale, float* __restrict__ by, int64_t across,
                                                       ScaleRule how) {
  __shared__ int top;
  if (threadIdx.x == 0) top = tops == nullptr ? -1000 : block_exponent(tops[blockIdx.x], how);
  __syncthreads();
  const int64_t base = blockIdx.x * across;
  if (how.span > 0 && tops == nullptr) {
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

// The same for tiles with a multiple of VECTOR columns.
template <typename In, Format F, bool random>
__global__ void __launch_bounds__(THREADS) emit_wide_tiles(const In* __restrict__ x,
                                                           typename Grid<F>::Code* __restrict__ codes,
                                                           const float* __restrict__ by, bool divides, uint32_t columns,
                                                           int64_t vectors, Tile tile, Draw draw) {
  constexpr int EACH = 4;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * THREADS * EACH + threadIdx.x;
  const uint32_t of_row = columns / VECTOR, of_tile = static_cast<uint32_t>(tile.columns) / VECTOR;
  const uint32_t across = of_row / of_tile, height = static_cast<uint32_t>(tile.rows);
  Vector<In> held[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int64_t index = first + i * THREADS;
    if (index < vectors) held[i].load(x + index * VECTOR);
  }
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int64_t index = first + i * THREADS;
    if (index >= vectors) continue;
    const uint32_t row = static_cast<uint32_t>(index / of_row);
    const uint32_t place = static_cast<uint32_t>(index - static_cast<int64_t>(row) * of_row);
    const float of = by[static_cast<int64_t>(row / height) * across + place / of_tile];
    float v[VECTOR];
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) v[j] = divides ? divide(held[i][j], of) : held[i][j] * of;
    coded<F, random>(v, 0.0f, draw, row, static_cast<int64_t>(place) * VECTOR).store_all(codes + index * VECTOR);
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

// A tensor with one scale. forward: from its beginning, where `amax_all` has ended, else from its end, which the kernel
// that made x may have left in the L2 cache.
template <typename In, Format F, bool random>
__global__ void __launch_bounds__(THREADS) emit_tensor(const In* __restrict__ x, typename Grid<F>::Code* __restrict__ codes,
                                                       const uint32_t* __restrict__ amax, float* __restrict__ scale,
                                                       int64_t rows, int64_t columns, ScaleRule how, Draw draw,
                                                       bool forward) {
  constexpr int EACH = 4;
  const TileScale of = tile_scale(bits_float(*amax), how);
  if (blockIdx.x == 0 && threadIdx.x == 0) *scale = of.scale;
  const int64_t vectors = columns / VECTOR, total = rows * vectors;
  const int64_t block = forward ? blockIdx.x : gridDim.x - 1 - blockIdx.x;
  const int64_t first = block * THREADS * EACH + threadIdx.x;
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

// amax of tiles, which must be zero before. whole: rows are whole aligned vectors.
template <typename In>
void launch_tile_amax(const Tensor& x, uint32_t* amax, Tile tile, bool whole) {
  const int64_t rows = rows_of(x), columns = x.size(1), vectors = rows * columns / VECTOR;
  const cudaStream_t stream = stream_of(x);
  const In* in = data_of<In>(x);
  const int shift = whole ? shift_of_lines(tile) : -1;
  const int64_t stretches = ceil_div(tile.rows, STRETCH), tall = rows / tile.rows * stretches;
  const int64_t tiles = rows / tile.rows * (columns / tile.columns);
  if (tile.rows == rows && tile.columns == columns && whole) {
    launch_amax(in, amax, rows * columns, stream);
  } else if (shift >= 0) {
    amax_lines<In><<<ceil_div(vectors, THREADS * 4), THREADS, 0, stream>>>(in, amax, vectors, shift);
  } else if (tile.columns == 1 && whole && tall < 65536) {
    const dim3 blocks(static_cast<unsigned>(ceil_div(columns, ACROSS * VECTOR)), static_cast<unsigned>(tall));
    amax_columns<In><<<blocks, THREADS, 0, stream>>>(in, amax, columns, tile.rows, stretches);
  } else if (tile.columns % VECTOR == 0 && whole && tile.rows * tile.columns < INT32_MAX) {
    amax_wide_tiles<In><<<tiles, THREADS, 0, stream>>>(in, amax, columns, tile);
  } else {
    amax_tiles<In><<<tiles, THREADS, 0, stream>>>(in, amax, columns, tile);
  }
}

// Codes of x by the amax of its tiles. tops: null, or a number for each row of tiles that limits its span.
template <typename In, Format F, bool random, bool whole>
void launch_by(const Tensor& x, const uint32_t* amax, const float* tops, const Tensor& codes_out,
               const Tensor& scale_out, Tile tile, const ScaleRule& how, Draw draw) {
  using Code = typename Grid<F>::Code;
  const int64_t rows = rows_of(x), columns = x.size(1), across = columns / tile.columns, vectors = rows * columns / VECTOR;
  const cudaStream_t stream = stream_of(x);
  const In* in = data_of<In>(x);
  Code* codes = mutable_data_of<Code>(codes_out);
  float* scale = mutable_data_of<float>(scale_out);
  if constexpr (whole) {
    if (tile.rows == rows && tile.columns == columns && how.span == 0) {
      emit_tensor<In, F, random><<<ceil_div(vectors, THREADS * 4), THREADS, 0, stream>>>(
          in, codes, amax, scale, rows, columns, how, draw, false);
      return;
    }
  }
  Tensor made = empty_like_device(x, {rows / tile.rows * across}, ScalarType::Float);
  float* by = mutable_data_of<float>(made);
  tile_scales<<<rows / tile.rows, THREADS, 0, stream>>>(amax, tops, scale, by, across, how);
  if constexpr (whole) {
    if (tile.columns % VECTOR == 0 && columns < INT32_MAX && rows < INT32_MAX) {
      emit_wide_tiles<In, F, random><<<ceil_div(vectors, THREADS * 4), THREADS, 0, stream>>>(
          in, codes, by, how.divides(), static_cast<uint32_t>(columns), vectors, tile, draw);
      return;
    }
  }
  emit_tiles<In, F, random, whole><<<ceil_div(rows * ceil_div(columns, VECTOR), THREADS), THREADS, 0, stream>>>(
      in, codes, by, how.divides(), rows, columns, tile, draw);
}

// Whole vectors: rows, lines and whole tensors have separate kernels. Returns false for other tilings.
template <typename In, Format F, bool random>
bool launch_vectors(const Tensor& x, typename Grid<F>::Code* codes, float* scale, Tile tile, const ScaleRule& how, Draw draw) {
  const int64_t rows = rows_of(x), columns = x.size(1);
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
        in, codes, found, scale, rows, columns, how, draw, true);
    return true;
  }
  return false;
}

template <typename In, Format F, bool random, bool whole>
void launch(const Tensor& x, const Tensor* known, const Tensor& codes_out, const Tensor& scale_out, Tile tile,
            const ScaleRule& how, Draw draw) {
  using Code = typename Grid<F>::Code;
  if constexpr (whole) {
    Code* codes = mutable_data_of<Code>(codes_out);
    float* scale = mutable_data_of<float>(scale_out);
    if (known == nullptr && launch_vectors<In, F, random>(x, codes, scale, tile, how, draw)) return;
  }
  const int64_t tiles = x.size(0) / tile.rows * (x.size(1) / tile.columns);
  Tensor amax = torch::stable::new_zeros(x, {tiles}, ScalarType::Int);
  uint32_t* found = mutable_data_of<uint32_t>(amax);
  if (known != nullptr) launch_amax(data_of<Fp32>(*known), found, known->numel(), stream_of(x));
  else launch_tile_amax<In>(x, found, tile, whole);
  launch_by<In, F, random, whole>(x, found, nullptr, codes_out, scale_out, tile, how, draw);
}

// Calls run(In, F, random, whole) with the types of x and of the format, as tags.
template <typename Run>
void with_kinds(const Tensor& x, Format format, bool random, const Run& run) {
  const bool whole = x.size(1) % VECTOR == 0 && aligned(x.const_data_ptr(), 16);
  const auto with = [&](bool given, const auto& body) { given ? body(std::true_type{}) : body(std::false_type{}); };
  with_input(x, [&](auto in) {
    with_format(format, [&](auto tag) {
      with(random, [&](auto draws) { with(whole, [&](auto vectors) { run(in, tag, draws, vectors); }); });
    });
  });
}

std::tuple<Tensor, Tensor> quantize_any(const Tensor& given, const Tensor* known, const std::string& format_name,
                                        const std::vector<int64_t>& tile_given, const std::string& rule,
                                        double headroom, int64_t span, Draw draw) {
  const Tensor x = dense(given);
  const Format format = parse_format(format_name);
  const int64_t rows = rows_of(x), columns = x.size(1);
  const Tile tile = resolve_tile(rows, columns, tile_given);
  const ScaleRule how = scale_rule_of(format, parse_rule(rule), headroom, span);
  Tensor codes = empty_like_device(x, {rows, columns}, carrier_of(format));
  Tensor scale = empty_like_device(x, {rows / tile.rows, columns / tile.columns}, ScalarType::Float);
  with_kinds(x, format, draw.seed != nullptr, [&](auto in, auto tag, auto random, auto whole) {
    launch<typename decltype(in)::Type, decltype(tag)::value, decltype(random)::value, decltype(whole)::value>(
        x, known, codes, scale, tile, how, draw);
  });
  check_launch("quantize");
  return {codes, scale};
}

Tensor amax(const Tensor& given, std::vector<int64_t> tile_given) {
  const Tensor x = dense(given);
  const Tile tile = resolve_tile(rows_of(x), x.size(1), tile_given);
  Tensor made = torch::stable::new_zeros(x, {x.size(0) / tile.rows, x.size(1) / tile.columns}, ScalarType::Float);
  uint32_t* found = reinterpret_cast<uint32_t*>(mutable_data_of<float>(made));
  const bool whole = x.size(1) % VECTOR == 0 && aligned(x.const_data_ptr(), 16);
  with_input(x, [&](auto in) { launch_tile_amax<typename decltype(in)::Type>(x, found, tile, whole); });
  check_launch("amax");
  return made;
}

std::tuple<Tensor, Tensor> quantize_by(const Tensor& given, const Tensor& amax_given, std::optional<Tensor> tops_given,
                                       std::string format_name, std::vector<int64_t> tile_given, std::string rule,
                                       double headroom, int64_t span, std::string rounding, std::optional<Tensor> seed,
                                       std::optional<Tensor> origin, std::optional<Tensor> rate,
                                       std::optional<Tensor> weight) {
  if (has_norm(given, rate, weight)) {
    const Tensor values = dense(given), rates = dense(*rate), weights = dense(*weight);
    const Tile tile = resolve_tile(rows_of(values), values.size(1), tile_given);
    const bool whole = tile.rows == values.size(0) && tile.columns == values.size(1) && span == 0;
    if (whole && format_name == "E4M3" && rounding == "nearest" && norm_fits(values, weights)) {
      return quantize_norm(values, rates, weights, dense(amax_given), rule, headroom);
    }
    return quantize_by(normalized(values, rates, weights), amax_given, tops_given, format_name, tile_given, rule, headroom,
                       span, rounding, seed, origin, std::nullopt, std::nullopt);
  }
  const Tensor x = dense(given), amax = dense(amax_given);
  const Format format = parse_format(format_name);
  const int64_t rows = rows_of(x), columns = x.size(1);
  const Tile tile = resolve_tile(rows, columns, tile_given);
  const int64_t tiles = rows / tile.rows * (columns / tile.columns);
  STD_TORCH_CHECK(amax.numel() == tiles, "quantize_by: ", amax.numel(), " maxima of ", tiles, " tiles");
  const ScaleRule how = scale_rule_of(format, parse_rule(rule), headroom, span);
  const Draw draw{seed_of(rounding, seed), seed_of(origin)};
  Tensor codes = empty_like_device(x, {rows, columns}, carrier_of(format));
  Tensor scale = empty_like_device(x, {rows / tile.rows, columns / tile.columns}, ScalarType::Float);
  const Tensor of_rows = tops_given.has_value() ? dense(*tops_given) : amax;
  const float* tops = tops_given.has_value() ? data_of<float>(of_rows) : nullptr;
  const uint32_t* found = reinterpret_cast<const uint32_t*>(data_of<float>(amax));
  with_kinds(x, format, draw.seed != nullptr, [&](auto in, auto tag, auto random, auto whole) {
    launch_by<typename decltype(in)::Type, decltype(tag)::value, decltype(random)::value, decltype(whole)::value>(
        x, found, tops, codes, scale, tile, how, draw);
  });
  check_launch("quantize_by");
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

STABLE_TORCH_LIBRARY_IMPL(lowprec, CUDA, m) {
  m.impl("quantize", TORCH_BOX(&lowprec::quantize));
  m.impl("quantize_by", TORCH_BOX(&lowprec::quantize_by));
  m.impl("amax", TORCH_BOX(&lowprec::amax));
}
