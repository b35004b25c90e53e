// quantize_nvfp4: E2M1 codes with E4M3 block scales and one FP32 scale of the tensor (ops/reference.py).
//
//   blocks    tile (1, 16)         one per thread
//   lines     tile (1, 8 .. 256)   lanes that share a line exchange their amax
//   squares   tile (16, 16)        a block has 16 rows of 8 tiles, one vector per thread
//   tiles     any other            amax and scales first, then codes
//
// All compute the tensor's amax first, so x is read twice (three times for `tiles`): 4.5 bytes per element of BF16.
#include "cuda/nvfp4.h"
#include "cuda/rotate.h"

#include <utility>

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

template <typename In, bool random>
__global__ void __launch_bounds__(THREADS)
    nvfp4_blocks(const In* __restrict__ x, const uint32_t* __restrict__ amax, Outputs to, uint32_t blocks,
                 uint32_t blocks_of_row, HeadRoom room, Turn turn, Draw draw) {
  __shared__ uint16_t flips[32];
  make_flips(flips, turn);
  const uint32_t mine = flips[threadIdx.x & 31];
  const float tensor_scale = outer_scale(bits_float(*amax), 2688.0f);
  const uint32_t first = blockIdx.x * (THREADS * LINES_EACH) + threadIdx.x;
  if (first == 0) *to.tensor_scale = tensor_scale;
  Line<In> held[LINES_EACH];
  fetch(x, first, blocks, held);
#pragma unroll
  for (uint32_t i = 0; i < LINES_EACH; ++i) {
    const uint32_t at = first + i * THREADS;
    float v[LINE];
    held[i].rotated(v, mine, turn);
    if (at >= blocks) continue;
    const float most = bits_float(line_amax(v));
    const Block of = block_of(most, tensor_scale, room);
    places(v, of.of);
    uint32_t words[LINE / 4];
    if constexpr (random) {
      const uint32_t row = at / blocks_of_row, block = at - row * blocks_of_row;
      const int64_t down = draw.origin == nullptr ? 0 : draw.origin[0];
      const int64_t group = 2 * block + (draw.origin == nullptr ? 0 : draw.origin[1] >> 3);
      const uint64_t seed = static_cast<uint64_t>(*draw.seed);
      const Words drawn[2] = {random_words(seed, row + down, group), random_words(seed, row + down, group + 1)};
      if (plain(most, of.of)) random_codes(v, drawn, words);
      else each_code(words, [&](int j) { return encode_stochastic<Format::E2M1>(v[j], bits_of(drawn[j >> 3], j & 7)); });
    } else {
      if (plain(most, of.of)) nearest_codes(v, words);
      else each_code(words, [&](int j) { return encode<Format::E2M1>(v[j]); });
    }
    leave_line(to, at, of.of.scale, of.code, words);
  }
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
    const int64_t row = random ? vector * VECTOR / columns : 0;  // without random bits, the matrix is one long row
    emit<random>(held[i], of.of, to.codes, draw, row, vector * VECTOR - row * columns, columns);
  }
}

// A block has 16 rows of 128 columns; two neighbouring threads and 16 below each other share a tile.
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

// A block per tile computes its amax and scale.
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

bool by_blocks(const Tensor& x, Tile tile) {
  return tile.rows == 1 && tile.columns == LINE && x.numel() / LINE >> 32 == 0;
}

template <typename In, bool random>
void launch(const Tensor& x, const uint32_t* amax, const Outputs& to, Tile tile, HeadRoom room, Turn turn, Draw draw) {
  const int64_t rows = rows_of(x), columns = x.size(1), vectors = rows * columns / VECTOR;
  const In* in = data_of<In>(x);
  const cudaStream_t stream = stream_of(x);
  const int64_t lanes = tile.columns / VECTOR;
  const bool whole = tile.columns % VECTOR == 0;
  if (by_blocks(x, tile)) {
    nvfp4_blocks<In, random><<<ceil_div(vectors / 2, THREADS * LINES_EACH), THREADS, 0, stream>>>(
        in, amax, to, static_cast<uint32_t>(vectors / 2), static_cast<uint32_t>(columns / LINE), room, turn, draw);
  } else if (whole && tile.rows == 1 && lanes <= 32 && (lanes & (lanes - 1)) == 0) {
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

// Arguments of a call; rotation is 0 if x is already rotated.
struct Request {
  Tensor x;
  Tile tile;
  HeadRoom room;
  Draw draw;
  Turn turn;
};

Request request_of(const Tensor& given, const std::vector<int64_t>& tile_given, double headroom, const std::string& rounding,
                   const std::optional<Tensor>& seed, const std::optional<Tensor>& origin,
                   const std::optional<Tensor>& signs, int64_t rotation) {
  Tensor x = dense(given);
  const Tile tile = resolve_tile(rows_of(x), x.size(1), tile_given);
  if (rotation > 0 && (rotation > LONGEST || !by_blocks(x, tile))) x = hadamard(x, signs, std::exchange(rotation, 0));
  if (!aligned(x.const_data_ptr(), 16)) x = torch::stable::clone(x);
  return {x, tile, head_room(headroom), {seed_of(rounding, seed), seed_of(origin)}, lines_turn(x, signs, rotation)};
}

// Writes the outer scale, from the amax, and codes or values.
void run(const Request& r, const Outputs& to) {
  Tensor amax = torch::stable::new_zeros(r.x, {1}, ScalarType::Int);
  uint32_t* found = mutable_data_of<uint32_t>(amax);
  with_input(r.x, [&](auto tag) {
    using In = typename decltype(tag)::Type;
    if (r.turn.block > 0) launch_largest_rotated(data_of<In>(r.x), found, r.x.numel() / LINE, r.turn, stream_of(r.x));
    else launch_amax(data_of<In>(r.x), found, r.x.numel(), stream_of(r.x));
    if (r.draw.seed != nullptr) launch<In, true>(r.x, found, to, r.tile, r.room, r.turn, r.draw);
    else launch<In, false>(r.x, found, to, r.tile, r.room, r.turn, r.draw);
  });
  check_launch("quantize_nvfp4");
}

std::tuple<Tensor, Tensor, Tensor, Tensor> quantize_nvfp4(const Tensor& given, std::vector<int64_t> tile, double headroom,
                                                          std::string rounding, std::optional<Tensor> seed,
                                                          std::optional<Tensor> origin, std::optional<Tensor> signs,
                                                          int64_t rotation) {
  const Request r = request_of(given, tile, headroom, rounding, seed, origin, signs, rotation);
  const int64_t rows = r.x.size(0), columns = r.x.size(1), bands = rows / r.tile.rows, tiles = columns / r.tile.columns;
  Tensor codes = empty_like_device(r.x, {rows, columns}, ScalarType::Float8_e4m3fn);
  Tensor scale = empty_like_device(r.x, {bands, tiles}, ScalarType::Float);
  Tensor block = empty_like_device(r.x, {bands, tiles}, ScalarType::Float8_e4m3fn);
  Tensor outer = empty_like_device(r.x, {1, 1}, ScalarType::Float);
  run(r, {mutable_data_of<uint8_t>(codes), mutable_data_of<uint8_t>(block), mutable_data_of<float>(scale),
          mutable_data_of<float>(outer), nullptr});
  return {codes, scale, block, outer};
}

std::tuple<Tensor, Tensor> round_nvfp4(const Tensor& given, double headroom, std::string rounding,
                                       std::optional<Tensor> seed, std::optional<Tensor> origin,
                                       std::optional<Tensor> signs, int64_t rotation) {
  const Request r = request_of(given, {1, LINE}, headroom, rounding, seed, origin, signs, rotation);
  STD_TORCH_CHECK(by_blocks(r.x, r.tile), "a matrix of ", r.x.numel(), " elements has more than this kernel counts");
  Tensor values = empty_like_device(r.x, {r.x.size(0), r.x.size(1)}, ScalarType::BFloat16);
  Tensor outer = empty_like_device(r.x, {1, 1}, ScalarType::Float);
  run(r, {nullptr, nullptr, nullptr, mutable_data_of<float>(outer), mutable_data_of<uint16_t>(values)});
  return {values, outer};
}

}  // namespace
}  // namespace lowprec

STABLE_TORCH_LIBRARY_IMPL(lowprec, CUDA, m) {
  m.impl("quantize_nvfp4", TORCH_BOX(&lowprec::quantize_nvfp4));
  m.impl("round_nvfp4", TORCH_BOX(&lowprec::round_nvfp4));
}
