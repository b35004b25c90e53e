// quantize_nvfp4: E2M1 codes under E4M3 block scales under one FP32 scale of the tensor (ops/reference.py).
//
//   lines     tile (1, 8 .. 256)   the lanes that share a line exchange their amax
//   squares   tile (16, 16)        a block holds 16 rows of 8 tiles, one vector a thread
//   tiles     any other            amax and scales first, then codes
//
// The tensor's maximum comes first in each, so x is read twice (three times in the last): 4.5 bytes an element of BF16.
#include "cuda/amax.h"
#include "cuda/nvfp4.h"

namespace lowprec {
namespace {

template <bool random, typename In>
__device__ __forceinline__ void emit(const Vector<In>& x, const TileScale& of, uint8_t* codes, const Draw& draw,
                                     int64_t row, int64_t column, int64_t columns) {
  float v[VECTOR];
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) v[i] = x[i];
  over_scale(v, of, true);
  coded<random>(v, of.inverse, draw, row, column).store_all(codes + row * columns + column);
}

// `lanes` threads (a power of two, at most 32) share a line of 8 * lanes elements; columns are a multiple of it.
template <typename In, bool random>
__global__ void __launch_bounds__(THREADS)
    nvfp4_lines(const In* __restrict__ x, const uint32_t* __restrict__ amax, Outputs to, int64_t columns,
                int64_t vectors, int lanes, HeadRoom room, Draw draw) {
  constexpr int EACH = 4;
  const float tensor_scale = outer_scale(bits_float(*amax), 2688.0f);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * THREADS * EACH + threadIdx.x;
  if (first == 0) *to.tensor_scale = tensor_scale;
  Vector<In> held[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    if (first + i * THREADS < vectors) held[i].load(x + (first + i * THREADS) * VECTOR);
    else held[i].clear();
  }
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int64_t vector = first + i * THREADS;
    uint32_t most = held[i].largest();
    for (int offset = 1; offset < lanes; offset <<= 1) {
      most = larger(most, __shfl_xor_sync(0xffffffffu, most, offset));
    }
    if (vector >= vectors) continue;
    const Block of = block_of(bits_float(most), tensor_scale, room);
    if (vector % lanes == 0) leave(to, vector / lanes, of.of.scale, of.code);
    const int64_t row = random ? vector * VECTOR / columns : 0;  // without draws, the matrix is one long row
    emit<random>(held[i], of.of, to.codes, draw, row, vector * VECTOR - row * columns, columns);
  }
}

// A block takes 16 rows of 128 columns; two threads side by side and 16 down share a tile.
template <typename In, bool random>
__global__ void __launch_bounds__(THREADS)
    nvfp4_squares(const In* __restrict__ x, const uint32_t* __restrict__ amax, Outputs to, int64_t columns,
                  HeadRoom room, Draw draw) {
  __shared__ uint32_t of_lanes[16][17];
  __shared__ TileScale scales[8];
  const int across = threadIdx.x & 15, down = threadIdx.x >> 4;
  const int64_t strips = (columns + 127) / 128, band = blockIdx.x / strips;
  const int64_t row = band * 16 + down, column = blockIdx.x % strips * 128 + across * VECTOR;
  const float tensor_scale = outer_scale(bits_float(*amax), 2688.0f);
  if (blockIdx.x == 0 && threadIdx.x == 0) *to.tensor_scale = tensor_scale;
  Vector<In> held;
  if (column < columns) held.load(x + row * columns + column);
  else held.clear();
  of_lanes[down][across] = held.largest();
  __syncthreads();
  if (threadIdx.x < 8) {
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < 32; ++i) most = larger(most, of_lanes[i >> 1][2 * threadIdx.x + (i & 1)]);
    const int64_t tile = blockIdx.x % strips * 8 + threadIdx.x;
    const Block of = block_of(bits_float(most), tensor_scale, room);
    if (tile < columns / 16) leave(to, band * (columns / 16) + tile, of.of.scale, of.code);
    scales[threadIdx.x] = of.of;
  }
  __syncthreads();
  if (column < columns) emit<random>(held, scales[across >> 1], to.codes, draw, row, column, columns);
}

// A block a tile: its maximum and scale.
template <typename In>
__global__ void __launch_bounds__(THREADS)
    nvfp4_scales(const In* __restrict__ x, const uint32_t* __restrict__ amax, Outputs to, int64_t columns, Tile tile,
                 HeadRoom room) {
  __shared__ uint32_t scratch[THREADS / 32];
  const int64_t across = columns / tile.columns;
  const int64_t row = blockIdx.x / across * tile.rows, column = blockIdx.x % across * tile.columns;
  uint32_t most = 0;
  for (int64_t i = threadIdx.x; i < tile.rows * tile.columns; i += THREADS) {
    most = larger_magnitude(most, x[(row + i / tile.columns) * columns + column + i % tile.columns].value());
  }
  most = block_largest(most, scratch);
  if (threadIdx.x != 0) return;
  const float tensor_scale = outer_scale(bits_float(*amax), 2688.0f);
  const Block of = block_of(bits_float(most), tensor_scale, room);
  leave(to, blockIdx.x, of.of.scale, of.code);
  if (blockIdx.x == 0) *to.tensor_scale = tensor_scale;
}

template <typename In, bool random>
void launch(const Tensor& x, const uint32_t* amax, const Outputs& to, Tile tile, HeadRoom room, Draw draw) {
  const int64_t rows = x.size(0), columns = x.size(1), vectors = rows * columns / VECTOR;
  const In* in = data_of<In>(x);
  const cudaStream_t stream = stream_of(x);
  const int64_t lanes = tile.columns / VECTOR;
  const bool whole = tile.columns % VECTOR == 0;
  if (whole && tile.rows == 1 && lanes <= 32 && (lanes & (lanes - 1)) == 0) {
    nvfp4_lines<In, random><<<ceil_div(vectors, THREADS * 4), THREADS, 0, stream>>>(
        in, amax, to, columns, vectors, static_cast<int>(lanes), room, draw);
  } else if (whole && tile.rows == 16 && tile.columns == 16) {
    nvfp4_squares<In, random>
        <<<rows / 16 * ceil_div(columns, 128), THREADS, 0, stream>>>(in, amax, to, columns, room, draw);
  } else {
    const int64_t tiles = rows / tile.rows * (columns / tile.columns);
    nvfp4_scales<In><<<tiles, THREADS, 0, stream>>>(in, amax, to, columns, tile, room);
    nvfp4_codes<In, random><<<ceil_div(rows * ceil_div(columns, VECTOR), THREADS), THREADS, 0, stream>>>(
        in, to.scale, to.codes, rows, columns, tile, draw);
  }
}

std::tuple<Tensor, Tensor, Tensor, Tensor> quantize_nvfp4(const Tensor& given, std::vector<int64_t> tile_given,
                                                          double headroom, std::string rounding,
                                                          std::optional<Tensor> seed, std::optional<Tensor> origin) {
  Tensor x = dense(given);
  if (!aligned(x.const_data_ptr(), 16)) x = torch::stable::clone(x);
  const int64_t rows = x.size(0), columns = x.size(1);
  const Tile tile = resolve_tile(rows, columns, tile_given);
  const int64_t bands = rows / tile.rows, tiles = columns / tile.columns;
  Tensor codes = empty_like_device(x, {rows, columns}, ScalarType::Float8_e4m3fn);
  Tensor scale = empty_like_device(x, {bands, tiles}, ScalarType::Float);
  Tensor block = empty_like_device(x, {bands, tiles}, ScalarType::Float8_e4m3fn);
  Tensor tensor_scale = empty_like_device(x, {1, 1}, ScalarType::Float);
  Tensor amax = torch::stable::new_zeros(x, {1}, ScalarType::Int);
  const Outputs to{mutable_data_of<uint8_t>(codes), mutable_data_of<uint8_t>(block), mutable_data_of<float>(scale),
                   mutable_data_of<float>(tensor_scale)};
  const HeadRoom room = head_room(headroom);
  const Draw draw{seed_of(rounding, seed), seed_of(origin)};
  uint32_t* found = mutable_data_of<uint32_t>(amax);
  with_input(x, [&](auto tag) {
    using In = typename decltype(tag)::Type;
    launch_amax(data_of<In>(x), found, rows * columns, stream_of(x));
    if (draw.seed != nullptr) launch<In, true>(x, found, to, tile, room, draw);
    else launch<In, false>(x, found, to, tile, room, draw);
  });
  check_launch("quantize_nvfp4");
  return {codes, scale, block, tensor_scale};
}

}  // namespace
}  // namespace lowprec

STABLE_TORCH_LIBRARY_IMPL(lowprec, CUDA, m) { m.impl("quantize_nvfp4", TORCH_BOX(&lowprec::quantize_nvfp4)); }
