// quantize_nvfp4_by (ops/reference.py): NVFP4 from a given amax of tiles and of the regions with one outer scale: the
// matrix, its rows or its columns. quantize_four_over_six (ops/four_over_six.py): the same, but each block uses its
// scale or 3/2 of it, whichever has the smaller error.
//
//   lines   blocks of 1x16, one per thread
//   tiles   any other tile with a power of two of elements: one per thread block
#include "cuda/nvfp4.h"
#include "numerics/ladder.h"

namespace lowprec {
namespace {

constexpr uint32_t TWELVE_BITS = ~0xfffu;

// Amax of tiles, and of regions with one outer scale, [1 or bands, 1 or across].
struct Maxima {
  const float *tiles, *tops;
  int64_t across;             // tiles in a row
  int64_t down_step, along_step;  // steps in `tops` between neighbouring tiles

  __device__ __forceinline__ float top(int64_t tile) const {
    if (down_step == 0 && along_step == 0) return *tops;
    return tops[tile / across * down_step + tile % across * along_step];
  }
};

__global__ void __launch_bounds__(THREADS) scales_by(Maxima maxima, Outputs to, int64_t tiles, HeadRoom room) {
  const int64_t tile = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
  if (tile >= tiles) return;
  const Block of = block_of(maxima.tiles[tile], outer_scale(maxima.top(tile), 2688.0f), room);
  leave(to, tile, of.of.scale, of.code);
}

__global__ void __launch_bounds__(THREADS)
    outer_scales(const float* __restrict__ tops, float* __restrict__ outer, int64_t count, float reach) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
  if (at < count) outer[at] = outer_scale(tops[at], reach);
}

// --- four over six ---

constexpr float REACH = 6.0f * 256.0f;

struct Candidate {
  float block, scale, inverse;
  uint8_t code;
};

__device__ __forceinline__ Candidate candidate_of(float share, float outer) {
  const uint8_t code = block_code(share);
  const float block = e4m3_value(code), scale = block * outer;
  return {block, scale, divide(1.0f, scale), code};
}

struct Pair {
  Candidate six, four;
};

__device__ __forceinline__ Pair candidates_of(float amax, float outer) {
  const float share = divide(divide(amax, 6.0f), outer);
  return {candidate_of(share, outer), candidate_of(share * 1.5f, outer)};
}

// x / scale of a candidate, correctly rounded: by division below 2^-40 scales, where the product may be inexact.
__device__ __forceinline__ float place_of(float x, const Candidate& of) {
  const bool quick = regular(of.scale) && fabsf(x) >= of.scale * 0x1p-40f && fabsf(x) <= of.scale * 0x1p40f;
  return quick ? quotient(x, of.scale, of.inverse) : divide(x, of.scale);
}

__device__ __forceinline__ float code_of(float place) {
  return is_finite(place) ? round_e2m1(place) : is_nan(place) ? place : with_sign(6.0f, place);
}

// Contribution of an element to the error of its block.
__device__ __forceinline__ float off_by(float place, float block, Candidates by) {
  const float off = bits_float(float_bits(bits_float(magnitude_bits(code_of(place) - place)) * block) & TWELVE_BITS);
  return by == Candidates::MSE ? off * off : off;
}

__device__ __forceinline__ float join(float a, float b, Candidates by) {
  if (by != Candidates::MAX) return a + b;
  return is_nan(a) ? a : is_nan(b) ? b : fmaxf(a, b);
}

// Error of a block of 16.
__device__ __forceinline__ float error_of_line(const float (&place)[LINE], float block, Candidates by) {
  float each[LINE];
#pragma unroll
  for (int i = 0; i < LINE; ++i) each[i] = off_by(place[i], block, by);
  return halved(each, [by](float a, float b) { return join(a, b, by); });
}

// Squared error of a block of finite values. size: magnitudes on the grid.
__device__ __forceinline__ float squares_of_line(const float (&place)[LINE], float block, float (&size)[LINE]) {
  float each[LINE];
#pragma unroll
  for (int i = 0; i < LINE; ++i) {
    size[i] = e2m1_size(place[i]);
    const float off = bits_float(float_bits(fabsf(size[i] - place[i]) * block) & TWELVE_BITS);
    each[i] = off * off;
  }
  return halved(each, [](float a, float b) { return a + b; });
}

// A thread per block. For squared errors, if quotients of all elements need no division, both candidates are computed
// without a branch.
template <typename In>
__global__ void __launch_bounds__(THREADS)
    chosen_lines(const In* __restrict__ x, Maxima maxima, Outputs to, int64_t tiles, Candidates by) {
  const int64_t tile = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
  if (tile >= tiles) return;
  Vector<In> held[2];
  held[0].load(x + tile * LINE);
  held[1].load(x + tile * LINE + VECTOR);
  float v[LINE];
#pragma unroll
  for (int i = 0; i < LINE; ++i) v[i] = held[i / VECTOR][i % VECTOR];
  const float amax = maxima.tiles[tile];
  const Pair pair = candidates_of(amax, outer_scale(maxima.top(tile), REACH));
  const float least = pair.four.scale * 0x1p-40f;
  bool quick = by == Candidates::MSE && regular(pair.six.scale) && regular(pair.four.scale) && amax <= pair.six.scale * 0x1p40f;
#pragma unroll
  for (int i = 0; i < LINE; ++i) quick = quick && (v[i] == 0.0f || fabsf(v[i]) >= least);
  uint32_t words[LINE / 4];
  bool lower;
  if (quick) {
    float six[LINE], four[LINE], place[LINE];
#pragma unroll
    for (int i = 0; i < LINE; ++i) place[i] = quotient(fabsf(v[i]), pair.six.scale, pair.six.inverse);
    const float error = squares_of_line(place, pair.six.block, six);
#pragma unroll
    for (int i = 0; i < LINE; ++i) place[i] = quotient(fabsf(v[i]), pair.four.scale, pair.four.inverse);
    lower = squares_of_line(place, pair.four.block, four) < error;
#pragma unroll
    for (int i = 0; i < LINE; ++i) v[i] = with_sign(lower ? four[i] : six[i], v[i]);
    pack_fp8(v, words);
  } else {
    float places[2][LINE];
#pragma unroll
    for (int i = 0; i < LINE; ++i) places[0][i] = place_of(v[i], pair.six), places[1][i] = place_of(v[i], pair.four);
    lower = error_of_line(places[1], pair.four.block, by) < error_of_line(places[0], pair.six.block, by);
    uint8_t codes[LINE];
#pragma unroll
    for (int i = 0; i < LINE; ++i) codes[i] = encode<Format::E2M1>(lower ? places[1][i] : places[0][i]);
#pragma unroll
    for (int i = 0; i < LINE / 4; ++i) {
      words[i] = codes[4 * i] | codes[4 * i + 1] << 8 | codes[4 * i + 2] << 16 | static_cast<uint32_t>(codes[4 * i + 3]) << 24;
    }
  }
  const Candidate of = lower ? pair.four : pair.six;
  leave_line(to, tile, amax == 0.0f ? 1.0f : of.scale, of.code, words);
}

struct TileErrors {
  float six, four;
};

// Errors of a tile of `count` elements, a power of two, in thread 0: element j is added to j + count / 2, then to
// j + count / 4, and so on. A thread reads its elements in bit-reversed order, so that it adds neighbours.
template <typename Place>
__device__ TileErrors tile_errors(int64_t count, const Pair& pair, Candidates by, const Place& value, float (*shared)[THREADS]) {
  const int threads = static_cast<int>(count < THREADS ? count : THREADS);
  const int levels = __ffsll(count / threads) - 1;
  float six[32], four[32];
  for (int64_t step = 0; threadIdx.x < threads && step < count / threads; ++step) {
    const int64_t turn = levels == 0 ? 0 : static_cast<int64_t>(__brevll(static_cast<unsigned long long>(step)) >> (64 - levels));
    const float x = value(threadIdx.x + turn * threads);
    float a = off_by(place_of(x, pair.six), pair.six.block, by), b = off_by(place_of(x, pair.four), pair.four.block, by);
    int level = 0;
    for (int64_t done = step; done & 1; done >>= 1, ++level) a = join(six[level], a, by), b = join(four[level], b, by);
    six[level] = a, four[level] = b;
  }
  if (threadIdx.x < threads) shared[0][threadIdx.x] = six[levels], shared[1][threadIdx.x] = four[levels];
  __syncthreads();
  for (int half = threads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) {
      shared[0][threadIdx.x] = join(shared[0][threadIdx.x], shared[0][threadIdx.x + half], by);
      shared[1][threadIdx.x] = join(shared[1][threadIdx.x], shared[1][threadIdx.x + half], by);
    }
    __syncthreads();
  }
  return {shared[0][0], shared[1][0]};
}

template <typename In>
__global__ void __launch_bounds__(THREADS)
    chosen_tiles(const In* __restrict__ x, Maxima maxima, Outputs to, int64_t columns, Tile tile, Candidates by) {
  __shared__ float shared[2][THREADS];
  const int64_t across = columns / tile.columns, count = tile.rows * tile.columns;
  const int64_t row = blockIdx.x / across * tile.rows, column = blockIdx.x % across * tile.columns;
  const auto at = [&](int64_t j) { return (row + j / tile.columns) * columns + column + j % tile.columns; };
  const float amax = maxima.tiles[blockIdx.x];
  const Pair pair = candidates_of(amax, outer_scale(maxima.top(blockIdx.x), REACH));
  const TileErrors errors = tile_errors(count, pair, by, [&](int64_t j) { return x[at(j)].value(); }, shared);
  const Candidate of = errors.four < errors.six ? pair.four : pair.six;
  for (int64_t j = threadIdx.x; j < count; j += THREADS) {
    to.codes[at(j)] = encode<Format::E2M1>(place_of(x[at(j)].value(), of));
  }
  if (threadIdx.x == 0) leave(to, blockIdx.x, amax == 0.0f ? 1.0f : of.scale, of.code);
}

// --- the ops ---

struct Given {
  Tensor x, amax, top, codes, scale, block, outer;
  Tile tile;
  Maxima maxima;
  Outputs to;
  int64_t rows, columns, tiles;
};

Given given_of(const Tensor& x_given, const Tensor& amax_given, const Tensor& top_given, const std::vector<int64_t>& tile) {
  Tensor x = dense(x_given);
  if (!aligned(x.const_data_ptr(), 16)) x = torch::stable::clone(x);
  const Tensor amax = dense(amax_given), top = dense(top_given);
  const int64_t rows = rows_of(x), columns = x.size(1);
  const Tile of = resolve_tile(rows, columns, tile);
  const int64_t bands = rows / of.rows, across = columns / of.columns;
  STD_TORCH_CHECK(amax.scalar_type() == ScalarType::Float && top.scalar_type() == ScalarType::Float, "maxima are float32");
  STD_TORCH_CHECK(amax.numel() == bands * across, bands * across, " tiles have as many maxima, not ", amax.numel());
  STD_TORCH_CHECK(top.dim() == 2 && (top.size(0) == 1 || top.size(0) == bands) && (top.size(1) == 1 || top.size(1) == across),
                  "maxima above tiles are of all of them, of a row or of a column, not [", top.size(0), ", ", top.size(1), "]");
  Given made{x, amax, top,
             empty_like_device(x, {rows, columns}, ScalarType::Float8_e4m3fn),
             empty_like_device(x, {bands, across}, ScalarType::Float),
             empty_like_device(x, {bands, across}, ScalarType::Float8_e4m3fn),
             empty_like_device(x, {top.size(0), top.size(1)}, ScalarType::Float),
             of,
             {data_of<float>(amax), data_of<float>(top), across, top.size(0) > 1 ? top.size(1) : 0, top.size(1) > 1 ? 1 : 0},
             {}, rows, columns, bands * across};
  made.to = {mutable_data_of<uint8_t>(made.codes), mutable_data_of<uint8_t>(made.block), mutable_data_of<float>(made.scale),
             mutable_data_of<float>(made.outer)};
  STD_TORCH_CHECK(made.tiles > 0, "an empty matrix has no scale");
  return made;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> quantize_nvfp4_by(const Tensor& x, const Tensor& amax, const Tensor& top,
                                                             std::vector<int64_t> tile, double headroom,
                                                             std::string rounding, std::optional<Tensor> seed,
                                                             std::optional<Tensor> origin) {
  const Given g = given_of(x, amax, top, tile);
  const Draw draw{seed_of(rounding, seed), seed_of(origin)};
  const cudaStream_t stream = stream_of(g.x);
  outer_scales<<<ceil_div(g.top.numel(), THREADS), THREADS, 0, stream>>>(g.maxima.tops, g.to.tensor_scale, g.top.numel(), 2688.0f);
  scales_by<<<ceil_div(g.tiles, THREADS), THREADS, 0, stream>>>(g.maxima, g.to, g.tiles, head_room(headroom));
  with_input(g.x, [&](auto tag) {
    using In = typename decltype(tag)::Type;
    const auto kernel = draw.seed != nullptr ? nvfp4_codes<In, true> : nvfp4_codes<In, false>;
    kernel<<<ceil_div(g.rows * ceil_div(g.columns, VECTOR), THREADS), THREADS, 0, stream>>>(
        data_of<In>(g.x), g.to.scale, g.to.codes, g.rows, g.columns, g.tile, draw);
  });
  check_launch("quantize_nvfp4_by");
  return {g.codes, g.scale, g.block, g.outer};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> quantize_four_over_six(const Tensor& x, const Tensor& amax, const Tensor& top,
                                                                  std::vector<int64_t> tile, std::string candidates) {
  const Candidates by = parse<Candidates>("choice of a scale", CANDIDATE_NAMES, candidates);
  const Given g = given_of(x, amax, top, tile);
  const int64_t count = g.tile.rows * g.tile.columns;
  STD_TORCH_CHECK(by != Candidates::NONE && (count & (count - 1)) == 0, "tiles of ", g.tile.rows, "x", g.tile.columns, " by ",
                  candidates, ": a power of two by one of mse, mae, max");
  const cudaStream_t stream = stream_of(g.x);
  outer_scales<<<ceil_div(g.top.numel(), THREADS), THREADS, 0, stream>>>(g.maxima.tops, g.to.tensor_scale, g.top.numel(), REACH);
  with_input(g.x, [&](auto tag) {
    using In = typename decltype(tag)::Type;
    if (g.tile.rows == 1 && g.tile.columns == 16) {
      chosen_lines<In><<<ceil_div(g.tiles, THREADS), THREADS, 0, stream>>>(data_of<In>(g.x), g.maxima, g.to, g.tiles, by);
    } else {
      chosen_tiles<In><<<g.tiles, THREADS, 0, stream>>>(data_of<In>(g.x), g.maxima, g.to, g.columns, g.tile, by);
    }
  });
  check_launch("quantize_four_over_six");
  return {g.codes, g.scale, g.block, g.outer};
}

}  // namespace
}  // namespace lowprec

STABLE_TORCH_LIBRARY_IMPL(lowprec, CUDA, m) {
  m.impl("quantize_nvfp4_by", TORCH_BOX(&lowprec::quantize_nvfp4_by));
  m.impl("quantize_four_over_six", TORCH_BOX(&lowprec::quantize_four_over_six));
}
