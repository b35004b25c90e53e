// quantize_both, quantize_transposed and transpose: a matrix and its transpose, in blocks of 128x128.
//
// A thread has 8x8 elements: eight 16-byte loads are in flight before the first use, 16 threads write 128 bytes of a
// row at a time. Tiles within 128x128 need one read; the amax of a row, a column or the tensor needs a read before it (or
// the producer's `amax`).
#include "cuda/amax.h"
#include "cuda/normalize.h"
#include "cuda/quantize.h"
#include "cuda/saved.h"
#include "cuda/transposed_block.h"
#include "norm_arguments.h"

namespace lowprec {
namespace {

// Region of a scale, in coordinates of x: everything, a row, a column, 1x128, 128x1, 128x128.
enum class Share : int { ALL, ROW, COLUMN, LINE, POST, SQUARE, OTHER };

Share share_of(int64_t rows, int64_t columns, Tile tile) {
  const bool tall = tile.rows == rows, wide = tile.columns == columns;
  if (tall && wide) return Share::ALL;
  if (tile.rows == 1 && wide) return Share::ROW;
  if (tall && tile.columns == 1) return Share::COLUMN;
  if (tile.rows == 1 && tile.columns == BLOCK) return Share::LINE;
  if (tile.rows == BLOCK && tile.columns == 1) return Share::POST;
  return tile.rows == BLOCK && tile.columns == BLOCK ? Share::SQUARE : Share::OTHER;
}

// Parameters of one orientation: region of a scale, factor of x, amax, output of scales.
struct Side {
  Share share;
  const float* fold;  // side a: for each column; side b: for each row
  uint32_t* amax;
  float* scale;
};

template <typename In>
__device__ __forceinline__ void load_block(Vector<In> (&x)[8], const In* data, const BlockPlace& at, int64_t rows, int64_t columns) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (at.row + i < rows && at.column < columns) x[i].load(data + (at.row + i) * columns + at.column);
    else x[i].clear();
  }
}

// Loads the factors of eight columns, or ones if there are none.
__device__ __forceinline__ void load_fold(float (&fold)[8], const float* data, int64_t first, int64_t count) {
#pragma unroll
  for (int i = 0; i < 8; ++i) fold[i] = data != nullptr && first + i < count ? data[first + i] : 1.0f;
}

// Amax, as bits in shared memory, of this block's rows times `across` and of its columns times `down`.
template <typename In, bool folded>
__device__ __forceinline__ void block_amax(const Vector<In> (&x)[8], const float (&across)[8], const float (&down)[8],
                                             bool want_rows, bool want_columns, uint32_t* of_rows, uint32_t* of_columns,
                                             const BlockPlace& at) {
  if (want_rows) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      uint32_t found = 0;
      if constexpr (folded) {
#pragma unroll
        for (int j = 0; j < 8; ++j) found = larger_magnitude(found, x[i][j] * across[j]);
      } else {
        found = x[i].largest();
      }
#pragma unroll
      for (int offset = 1; offset < 16; offset <<= 1) found = larger(found, __shfl_xor_sync(0xffffffffu, found, offset));
      if (at.lane_column == 0) of_rows[at.group * 8 + i] = found;
    }
  }
  if (want_columns) {
    uint32_t found[8];
    if constexpr (!folded && std::is_same_v<In, Bf16>) {  // bits have the order of magnitudes: two columns at a time
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        uint32_t two = x[0].words[w] & 0x7fff7fffu;
#pragma unroll
        for (int i = 1; i < 8; ++i) two = __vmaxu2(two, x[i].words[w] & 0x7fff7fffu);
        two = __vmaxu2(two, __shfl_xor_sync(0xffffffffu, two, 16));
        found[2 * w] = two << 16, found[2 * w + 1] = two & 0xffff0000u;
      }
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        found[j] = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) found[j] = larger_magnitude(found[j], folded ? x[i][j] * down[i] : x[i][j]);
        found[j] = larger(found[j], __shfl_xor_sync(0xffffffffu, found[j], 16));
      }
    }
    if ((threadIdx.x & 31) < 16) {
#pragma unroll
      for (int j = 0; j < 8; ++j) atomicMax(&of_columns[at.lane_column * 8 + j], found[j]);
    }
  }
}

// First read: amax of whole rows, whole columns, or everything.
template <typename In, bool folded>
__global__ void __launch_bounds__(THREADS) outer_amax(const In* __restrict__ data, int64_t rows, int64_t columns, Side a, Side b) {
  __shared__ uint32_t of_rows[BLOCK], of_columns[BLOCK];
  const BlockPlace at;
  Vector<In> x[8];
  float across[8], down[8];
  load_block(x, data, at, rows, columns);
  if constexpr (folded) {
    load_fold(across, a.fold, at.column, columns);
    load_fold(down, b.fold, at.row, rows);
  }
  if (threadIdx.x < BLOCK) of_columns[threadIdx.x] = 0;
  __syncthreads();
  block_amax<In, folded>(x, across, down, a.amax != nullptr, b.amax != nullptr, of_rows, of_columns, at);
  __syncthreads();
  const int i = threadIdx.x & (BLOCK - 1);
  const bool first = threadIdx.x < BLOCK;
  uint32_t* amax = first ? a.amax : b.amax;
  if (amax == nullptr) return;
  const uint32_t found = first ? of_rows[i] : of_columns[i];
  if ((first ? a.share : b.share) == Share::ALL) {
    const uint32_t most = warp_largest(found);
    if ((threadIdx.x & 31) == 0 && most > *reinterpret_cast<volatile uint32_t*>(amax)) atomicMax(amax, most);
    return;
  }
  const int64_t index = static_cast<int64_t>(first ? blockIdx.y : blockIdx.x) * BLOCK + i;
  if (index < (first ? rows : columns)) atomicMax(amax + index, found);
}

// Scale and inverse of the block's i-th row (side a) or column (side b). One block of those that share a scale writes
// it, also to `also`, in the order of the transposed matrix, if both sides share it.
__device__ __forceinline__ TileScale block_scale(const Side& side, float* also, uint32_t inside, int i, int64_t block,
                                                 int64_t blocks, int64_t along, int64_t blocks_along, int64_t count,
                                                 const ScaleRule& how) {
  const int64_t index = block * BLOCK + i;
  if (index >= count) return {1.0f, 1.0f};
  if (side.share == Share::ALL) {
    const TileScale of = tile_scale(bits_float(*side.amax), how);
    if (index == 0 && along == 0) {
      *side.scale = of.scale;
      if (also != nullptr) *also = of.scale;
    }
    return of;
  }
  if (side.share == Share::ROW || side.share == Share::COLUMN) {
    const TileScale of = tile_scale(bits_float(side.amax[index]), how);
    if (along == 0) {
      side.scale[index] = of.scale;
      if (also != nullptr) also[index] = of.scale;
    }
    return of;
  }
  const TileScale of = tile_scale(bits_float(inside), how);
  if (side.share != Share::SQUARE) {
    side.scale[index * blocks_along + along] = of.scale;
  } else if (i == 0) {
    side.scale[block * blocks_along + along] = of.scale;
    if (also != nullptr) also[along * blocks + block] = of.scale;
  }
  return of;
}

// Divides eight values by their scales. short_way: all scales are `regular`.
__device__ __forceinline__ void over_scales(float (&v)[8], const TileScale (&of)[8], bool divides, bool short_way) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    if (!divides) v[j] *= of[j].inverse;
    else if (short_way) v[j] = quotient(v[j], of[j].scale, of[j].inverse);
    else v[j] = divide(v[j], of[j].scale);
  }
}

// same: both orientations have the same codes, scaled by rows. Otherwise a is scaled by rows and b by columns.
template <typename In, Format F, bool same, bool folded>
__global__ void __launch_bounds__(THREADS) emit_both(const In* __restrict__ data, uint8_t* __restrict__ codes,
                                                     uint8_t* __restrict__ codes_t, int64_t rows, int64_t columns, Side a,
                                                     Side b, ScaleRule how) {
  __shared__ alignas(16) uint8_t transposed[BLOCK * BLOCK];
  __shared__ uint32_t of_rows[BLOCK], of_columns[BLOCK];
  __shared__ TileScale scale_row[BLOCK], scale_column[BLOCK];
  const BlockPlace at;
  Vector<In> x[8];
  float across[8], down[8];
  load_block(x, data, at, rows, columns);
  if constexpr (folded) {
    load_fold(across, a.fold, at.column, columns);
    load_fold(down, b.fold, at.row, rows);
  }
  const bool inner_a = a.share >= Share::LINE, inner_b = !same && b.share >= Share::LINE;
  if (inner_a || inner_b) {
    if (threadIdx.x < BLOCK) of_columns[threadIdx.x] = 0;
    __syncthreads();
    block_amax<In, folded>(x, across, down, inner_a, inner_b, of_rows, of_columns, at);
    __syncthreads();
    const bool square_a = a.share == Share::SQUARE, square_b = !same && b.share == Share::SQUARE;
    if (square_a || square_b) {  // one warp per side
      if (threadIdx.x < 64 && (threadIdx.x < 32 ? square_a : square_b)) {
        uint32_t* found = threadIdx.x < 32 ? of_rows : of_columns;
        const int lane = threadIdx.x & 31;
        uint32_t most = larger(larger(found[lane], found[lane + 32]), larger(found[lane + 64], found[lane + 96]));
        most = warp_largest(most);
        for (int i = 0; i < 4; ++i) found[lane + 32 * i] = most;
      }
      __syncthreads();
    }
  }
  {
    const int i = threadIdx.x & (BLOCK - 1);
    if (threadIdx.x < BLOCK) {
      scale_row[i] = block_scale(a, same ? b.scale : nullptr, of_rows[i], i, blockIdx.y, gridDim.y, blockIdx.x,
                                 gridDim.x, rows, how);
    } else if constexpr (!same) {
      scale_column[i] =
          block_scale(b, nullptr, of_columns[i], i, blockIdx.x, gridDim.x, blockIdx.y, gridDim.y, columns, how);
    }
  }
  __syncthreads();
  uint32_t words[8][2];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const TileScale of = scale_row[at.group * 8 + i];
    float v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = folded ? x[i][j] * across[j] : x[i][j];
    over_scale(v, of, how.divides());
    Codes<F> made;
    made.encode_nearest(v, of.inverse);
    words[i][0] = made.words[0], words[i][1] = made.words[1];
    if (at.row + i < rows && at.column < columns) made.store_all(reinterpret_cast<typename Grid<F>::Code*>(codes) + (at.row + i) * columns + at.column);
  }
  if constexpr (!same) {
    TileScale of[8];
    float least = 1.0f;
    bool short_way = true;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      of[j] = scale_column[at.lane_column * 8 + j];
      least = of[j].inverse > 0.0f && of[j].inverse < bits_float(INFINITE) ? least : 0.0f;
      short_way = short_way && regular(of[j].scale);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float v[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j] = folded ? x[i][j] * down[i] : x[i][j];
      over_scales(v, of, how.divides(), short_way);
      Codes<F> made;
      made.encode_nearest(v, least);
      words[i][0] = made.words[0], words[i][1] = made.words[1];
    }
  }
  transpose_block(words, transposed, at);
  __syncthreads();
  write_transposed(transposed, codes_t, rows, columns);
}

// E4M3 codes of the transpose alone, under one scale. normed: x is the input of an RMSNorm, of whose result amax is.
template <typename In, bool normed>
__global__ void __launch_bounds__(THREADS) emit_transposed(const In* __restrict__ data, const float* __restrict__ rate,
                                                           const float* __restrict__ weight, const uint32_t* __restrict__ amax,
                                                           uint8_t* __restrict__ codes_t, float* __restrict__ scale,
                                                           int64_t rows, int64_t columns, ScaleRule how) {
  __shared__ alignas(16) uint8_t transposed[BLOCK * BLOCK];
  const BlockPlace at;
  Vector<In> x[8];
  load_block(x, data, at, rows, columns);
  const TileScale of = tile_scale(bits_float(*amax), how);
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) *scale = of.scale;
  float by[8] = {};
  if constexpr (normed) {
    if (at.column < columns) load_floats(by, weight + at.column);
  }
  uint32_t words[8][2];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float v[8];
    if constexpr (normed) {
      const float times = at.row + i < rows ? __ldg(rate + at.row + i) : 0.0f;
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j] = x[i][j] * times * by[j];
      const Vector<In> y = round_to_stream<In>(v);
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j] = y[j];
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j] = x[i][j];
    }
    over_scale(v, of, how.divides());
    Codes<Format::E4M3> made;
    made.encode_nearest(v, of.inverse);
    words[i][0] = made.words[0], words[i][1] = made.words[1];
  }
  transpose_block(words, transposed, at);
  __syncthreads();
  write_transposed(transposed, codes_t, rows, columns);
}

__global__ void __launch_bounds__(THREADS) transpose_bytes(const uint8_t* __restrict__ codes, uint8_t* __restrict__ codes_t,
                                                           int64_t rows, int64_t columns) {
  __shared__ alignas(16) uint8_t transposed[BLOCK * BLOCK];
  const BlockPlace at;
  uint32_t words[8][2];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    uint2 v = make_uint2(0, 0);
    if (at.row + i < rows && at.column < columns) v = __ldg(reinterpret_cast<const uint2*>(codes + (at.row + i) * columns + at.column));
    words[i][0] = v.x, words[i][1] = v.y;
  }
  transpose_block(words, transposed, at);
  __syncthreads();
  write_transposed(transposed, codes_t, rows, columns);
}

__global__ void __launch_bounds__(THREADS) transpose_any(const uint8_t* __restrict__ codes, uint8_t* __restrict__ codes_t,
                                                         int64_t rows, int64_t columns) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
  if (index < rows * columns) codes_t[index % columns * rows + index / columns] = codes[index];
}

// Transpose by tiles in shared memory.
constexpr int TRANSPOSE_TILE = 32;
template <typename Bits>
__global__ void __launch_bounds__(THREADS) transpose_values(const Bits* __restrict__ x, Bits* __restrict__ out, int64_t rows,
                                                            int64_t columns) {
  __shared__ Bits tile[TRANSPOSE_TILE][TRANSPOSE_TILE + 1];
  const int64_t across = (columns + TRANSPOSE_TILE - 1) / TRANSPOSE_TILE;
  const int64_t row = blockIdx.x / across * TRANSPOSE_TILE, column = blockIdx.x % across * TRANSPOSE_TILE;
  const int lane = threadIdx.x % TRANSPOSE_TILE, step = THREADS / TRANSPOSE_TILE;
  for (int i = threadIdx.x / TRANSPOSE_TILE; i < TRANSPOSE_TILE; i += step) {
    if (row + i < rows && column + lane < columns) tile[i][lane] = x[(row + i) * columns + column + lane];
  }
  __syncthreads();
  for (int i = threadIdx.x / TRANSPOSE_TILE; i < TRANSPOSE_TILE; i += step) {
    if (column + i < columns && row + lane < rows) out[(column + i) * rows + row + lane] = tile[lane][i];
  }
}

Tensor transposed_values(const Tensor& x) {
  const int64_t rows = rows_of(x), columns = x.size(1), tiles = ceil_div(rows, TRANSPOSE_TILE) * ceil_div(columns, TRANSPOSE_TILE);
  Tensor out = empty_like_device(x, {columns, rows}, x.scalar_type());
  with_input(x, [&](auto in) {
    using Bits = std::conditional_t<sizeof(typename decltype(in)::Type) == 2, uint16_t, uint32_t>;
    transpose_values<<<tiles, THREADS, 0, stream_of(x)>>>(data_of<Bits>(x), mutable_data_of<Bits>(out), rows, columns);
  });
  return out;
}

// FP32 copies multiplied by the factors, for tilings and shapes that the blocks do not support.
template <typename In>
__global__ void __launch_bounds__(THREADS) folded_copies(const In* __restrict__ x, const float* __restrict__ across,
                                                         const float* __restrict__ down, float* __restrict__ plain,
                                                         float* __restrict__ transposed, int64_t rows, int64_t columns) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
  if (index >= rows * columns) return;
  const int64_t row = index / columns, column = index % columns;
  const float v = x[index].value();
  plain[index] = across == nullptr ? v : v * across[column];
  transposed[column * rows + row] = down == nullptr ? v : v * down[row];
}

using Both = std::tuple<Tensor, Tensor, Tensor, Tensor>;

struct Request {
  Tensor x;
  std::optional<Tensor> amax;
  const float *across, *down;
  Format format;
  Tile tile, tile_t;  // each as (rows, columns) of the matrix that it tiles
  ScaleRule how;
};

bool both_same(const Request& r, Share a, Share b) {
  const bool folded = r.across != nullptr || r.down != nullptr;
  return !folded && a == b && (a == Share::ALL || a == Share::ROW || a == Share::SQUARE);
}

template <typename In, Format F>
void launch_both(const Request& r, Share share_a, Share share_b, const Tensor& codes, const Tensor& scale,
                 const Tensor& codes_t, const Tensor& scale_t) {
  const int64_t rows = r.x.size(0), columns = r.x.size(1);
  const cudaStream_t stream = stream_of(r.x);
  const In* x = data_of<In>(r.x);
  const bool same = both_same(r, share_a, share_b), folded = r.across != nullptr || r.down != nullptr;
  Side a{share_a, r.across, nullptr, mutable_data_of<float>(scale)}, b{share_b, r.down, nullptr, mutable_data_of<float>(scale_t)};
  const int64_t of_a = share_a == Share::ALL ? 1 : share_a == Share::ROW ? rows : 0;
  const int64_t of_b = same ? 0 : share_b == Share::ALL ? 1 : share_b == Share::COLUMN ? columns : 0;
  const dim3 grid(ceil_div(columns, BLOCK), ceil_div(rows, BLOCK));
  Tensor workspace = torch::stable::new_zeros(r.x, {of_a + of_b + 1}, ScalarType::Int);
  uint32_t* words = mutable_data_of<uint32_t>(workspace);
  if (of_a > 0) a.amax = words;
  if (of_b > 0) b.amax = words + of_a;
  if (share_a == Share::ALL && share_b == Share::ALL && !folded) {
    if (r.amax.has_value()) launch_amax(data_of<Fp32>(*r.amax), a.amax, r.amax->numel(), stream);
    else launch_amax(x, a.amax, rows * columns, stream);
  } else if (of_a + of_b > 0) {
    if (folded) outer_amax<In, true><<<grid, THREADS, 0, stream>>>(x, rows, columns, a, b);
    else outer_amax<In, false><<<grid, THREADS, 0, stream>>>(x, rows, columns, a, b);
  }
  uint8_t *out = mutable_data_of<uint8_t>(codes), *out_t = mutable_data_of<uint8_t>(codes_t);
  if (same) emit_both<In, F, true, false><<<grid, THREADS, 0, stream>>>(x, out, out_t, rows, columns, a, b, r.how);
  else if (folded) emit_both<In, F, false, true><<<grid, THREADS, 0, stream>>>(x, out, out_t, rows, columns, a, b, r.how);
  else emit_both<In, F, false, false><<<grid, THREADS, 0, stream>>>(x, out, out_t, rows, columns, a, b, r.how);
}

Both quantize_both(const Tensor& given, std::optional<Tensor> amax, std::optional<Tensor> across_given,
                   std::optional<Tensor> down_given, std::string format_name, std::vector<int64_t> tile_given,
                   std::vector<int64_t> tile_t_given, std::string rule, double headroom) {
  const Tensor x = dense(given);
  const int64_t rows = rows_of(x), columns = x.size(1);
  std::optional<Tensor> across, down;
  if (across_given.has_value()) across = dense(*across_given);
  if (down_given.has_value()) down = dense(*down_given);
  if (amax.has_value()) amax = dense(*amax);
  const Format format = parse_format(format_name);
  Request r{x, amax, across.has_value() ? data_of<float>(*across) : nullptr,
            down.has_value() ? data_of<float>(*down) : nullptr, format, resolve_tile(rows, columns, tile_given),
            resolve_tile(columns, rows, tile_t_given), scale_rule_of(format, parse_rule(rule), headroom, 0)};
  const Share share_a = share_of(rows, columns, r.tile), share_b = share_of(rows, columns, {r.tile_t.columns, r.tile_t.rows});
  const bool byte = format != Format::BF16 && format != Format::FP16 && format != Format::FP32;
  const bool by_rows = share_a != Share::OTHER && share_a != Share::COLUMN && share_a != Share::POST;
  const bool by_columns = share_b != Share::OTHER && share_b != Share::ROW && share_b != Share::LINE;
  const bool blocks = byte && columns % 8 == 0 && rows % 16 == 0 && aligned(x.const_data_ptr(), 16) &&
                      ((by_rows && by_columns) || both_same(r, share_a, share_b));
  const auto rounded = [&](const Tensor& each, const std::vector<int64_t>& tile) {
    return quantize(each, format_name, tile, rule, headroom, 0, "nearest", std::nullopt, std::nullopt);
  };
  if (!blocks && r.across == nullptr && r.down == nullptr && !amax.has_value()) {
    auto [codes, scale] = rounded(x, tile_given);
    auto [codes_t, scale_t] = rounded(transposed_values(x), tile_t_given);
    return {codes, scale, codes_t, scale_t};
  }
  if (!blocks) {
    Tensor plain = empty_like_device(x, {rows, columns}, ScalarType::Float);
    Tensor transposed = empty_like_device(x, {columns, rows}, ScalarType::Float);
    with_input(x, [&](auto in) {
      using In = typename decltype(in)::Type;
      folded_copies<In><<<ceil_div(rows * columns, THREADS), THREADS, 0, stream_of(x)>>>(
          data_of<In>(x), r.across, r.down, mutable_data_of<float>(plain), mutable_data_of<float>(transposed), rows, columns);
    });
    const bool everything = share_a == Share::ALL && share_b == Share::ALL && r.across == nullptr && r.down == nullptr;
    const auto made = [&](const Tensor& each, const std::vector<int64_t>& tile) {
      if (amax.has_value() && everything) return quantize_whole(each, *amax, format_name, rule, headroom);
      return rounded(each, tile);
    };
    auto [codes, scale] = made(plain, tile_given);
    auto [codes_t, scale_t] = made(transposed, tile_t_given);
    return {codes, scale, codes_t, scale_t};
  }
  Tensor codes = empty_like_device(x, {rows, columns}, carrier_of(format));
  Tensor codes_t = empty_like_device(x, {columns, rows}, carrier_of(format));
  Tensor scale = empty_like_device(x, {rows / r.tile.rows, columns / r.tile.columns}, ScalarType::Float);
  Tensor scale_t = empty_like_device(x, {columns / r.tile_t.rows, rows / r.tile_t.columns}, ScalarType::Float);
  with_input(x, [&](auto in) {
    using In = typename decltype(in)::Type;
    if (format == Format::E4M3) launch_both<In, Format::E4M3>(r, share_a, share_b, codes, scale, codes_t, scale_t);
    else if (format == Format::E5M2) launch_both<In, Format::E5M2>(r, share_a, share_b, codes, scale, codes_t, scale_t);
    else if (format == Format::E2M1) launch_both<In, Format::E2M1>(r, share_a, share_b, codes, scale, codes_t, scale_t);
    else if (format == Format::INT4) launch_both<In, Format::INT4>(r, share_a, share_b, codes, scale, codes_t, scale_t);
    else launch_both<In, Format::INT8>(r, share_a, share_b, codes, scale, codes_t, scale_t);
  });
  check_launch("quantize_both");
  return {codes, scale, codes_t, scale_t};
}

std::tuple<Tensor, Tensor> quantize_transposed(const Tensor& given, const Tensor& amax_given, std::string format_name,
                                               std::string rule, double headroom, std::optional<Tensor> rate_given,
                                               std::optional<Tensor> weight_given, std::optional<Tensor>) {
  const bool normed = has_norm(given, rate_given, weight_given);
  const Tensor x = dense(given), amax = dense(amax_given);
  const int64_t rows = rows_of(x), columns = x.size(1);
  STD_TORCH_CHECK(amax.numel() == 1, "quantize_transposed: ", amax.numel(), " maxima of one tile");
  const Format format = parse_format(format_name);
  const Tensor rate = normed ? dense(*rate_given) : x, weight = normed ? dense(*weight_given) : x;
  const bool blocks = format == Format::E4M3 && columns % 8 == 0 && rows % 16 == 0 && aligned(x.const_data_ptr(), 16) &&
                      (!normed || norm_fits(x, weight));
  if (!blocks) {
    return quantize_whole(transposed_values(normed ? normalized(x, rate, weight) : x), amax, format_name, rule, headroom);
  }
  const ScaleRule how = scale_rule_of(format, parse_rule(rule), headroom, 0);
  Tensor codes_t = empty_like_device(x, {columns, rows}, carrier_of(format));
  Tensor scale = empty_like_device(x, {1, 1}, ScalarType::Float);
  const dim3 grid(ceil_div(columns, BLOCK), ceil_div(rows, BLOCK));
  const auto launch = [&](auto in, auto with_norm) {
    using In = decltype(in);
    constexpr bool of_norm = decltype(with_norm)::value;
    emit_transposed<In, of_norm><<<grid, THREADS, 0, stream_of(x)>>>(
        data_of<In>(x), of_norm ? data_of<float>(rate) : nullptr, of_norm ? data_of<float>(weight) : nullptr,
        reinterpret_cast<const uint32_t*>(data_of<float>(amax)), mutable_data_of<uint8_t>(codes_t),
        mutable_data_of<float>(scale), rows, columns, how);
  };
  if (normed) launch(Bf16{}, std::true_type{});
  else with_input(x, [&](auto in) { launch(typename decltype(in)::Type{}, std::false_type{}); });
  check_launch("quantize_transposed");
  return {codes_t, scale};
}

Tensor transpose_after(const Tensor& codes, std::optional<Tensor>) { return transpose_codes(codes); }

}  // namespace

Tensor transpose_codes(const Tensor& given) {
  const Tensor codes = dense(given);
  STD_TORCH_CHECK(codes.element_size() == 1, "transpose takes codes of one byte, not of ", codes.element_size());
  const int64_t rows = rows_of(codes), columns = codes.size(1);
  Tensor transposed = empty_like_device(codes, {columns, rows}, codes.scalar_type());
  const uint8_t* in = data_of<uint8_t>(codes);
  uint8_t* out = mutable_data_of<uint8_t>(transposed);
  const cudaStream_t stream = stream_of(codes);
  if (columns % 8 == 0 && rows % 16 == 0 && aligned(in, 8)) {
    transpose_bytes<<<dim3(ceil_div(columns, BLOCK), ceil_div(rows, BLOCK)), THREADS, 0, stream>>>(in, out, rows, columns);
  } else {
    transpose_any<<<ceil_div(rows * columns, THREADS), THREADS, 0, stream>>>(in, out, rows, columns);
  }
  check_launch("transpose");
  return transposed;
}

}  // namespace lowprec

STABLE_TORCH_LIBRARY_IMPL(lowprec, CUDA, m) {
  m.impl("quantize_both", TORCH_BOX(&lowprec::quantize_both));
  m.impl("quantize_transposed", TORCH_BOX(&lowprec::quantize_transposed));
  m.impl("transpose", TORCH_BOX(&lowprec::transpose_after));
}
