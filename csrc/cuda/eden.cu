// rotated_amax, quantize_eden (ops/eden.py): a random Hadamard transform, E2M1 in blocks of 16 under E4M3 scales, and the
// factor of 128 elements in these scales.
//
// A thread holds eight neighbouring elements: two of them a block, sixteen a group. A matrix is one long row, as rotations
// and groups divide its rows. x is read twice, for the maximum of the rotated matrix and for codes; it is rotated twice.
//
// A group takes one call of Philox: of a thread's four groups each of sixteen threads makes the words of one, and hands
// them on.
#include "cuda/amax.h"
#include "numerics/eden.h"
#include "numerics/hadamard.h"

namespace lowprec {
namespace {

constexpr int EACH = 4, LANES = EDEN_GROUP / VECTOR, LONGEST = 32 * VECTOR;

struct Turn {
  const int64_t* signs;  // null: all +1
  int block;             // 0: none
  float factor;
};

// Flips of the eight elements of each thread of a warp; they repeat every `block` elements.
__device__ __forceinline__ void make_flips(uint8_t (&flips)[32], const Turn& turn) {
  if (threadIdx.x < 32) {
    const bool drawn = turn.signs != nullptr && turn.block > 0;
    flips[threadIdx.x] = drawn ? static_cast<uint8_t>(sign_bits(static_cast<uint64_t>(*turn.signs), threadIdx.x, turn.block)) : 0;
  }
  __syncthreads();
}

// By whole warps.
template <typename In>
__device__ __forceinline__ void rotated(const Vector<In>& held, uint32_t flips, const Turn& turn, float (&v)[VECTOR]) {
#pragma unroll
  for (int j = 0; j < VECTOR; ++j) v[j] = bits_float(float_bits(held[j]) ^ (flips >> j & 1u) << 31);
  if (turn.block == 0) return;
  butterflies(v, turn.block);
  butterflies_across(v, turn.block);
#pragma unroll
  for (int j = 0; j < VECTOR; ++j) v[j] *= turn.factor;
}

// The vectors of a thread: `first`, and three more, THREADS apart.
template <typename In>
__device__ __forceinline__ void fetch(const In* __restrict__ x, int64_t first, int64_t vectors, Vector<In> (&held)[EACH]) {
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int64_t at = first + i * THREADS;
    if (at < vectors) held[i].load(x + at * VECTOR);
    else held[i].clear();
  }
}

template <typename In>
__global__ void __launch_bounds__(THREADS)
    largest_rotated(const In* __restrict__ x, uint32_t* __restrict__ amax, int64_t vectors, Turn turn) {
  __shared__ uint8_t flips[32];
  __shared__ uint32_t scratch[THREADS / 32];
  make_flips(flips, turn);
  const uint32_t mine = flips[threadIdx.x & 31];
  const int64_t stride = static_cast<int64_t>(gridDim.x) * THREADS * EACH;
  uint32_t found = 0;
  for (int64_t base = static_cast<int64_t>(blockIdx.x) * THREADS * EACH; base < vectors; base += stride) {
    Vector<In> held[EACH];
    fetch(x, base + threadIdx.x, vectors, held);
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      float v[VECTOR];
      rotated(held[i], mine, turn, v);
#pragma unroll
      for (int j = 0; j < VECTOR; ++j) found = larger_magnitude(found, v[j]);
    }
  }
  found = block_largest(found, scratch);
  if (threadIdx.x == 0 && found > *reinterpret_cast<volatile uint32_t*>(amax)) atomicMax(amax, found);
}

// Sum of eight by halving.
__device__ __forceinline__ float halved(const float (&p)[VECTOR]) {
  const float a = p[0] + p[4], b = p[1] + p[5], c = p[2] + p[6], d = p[3] + p[7];
  return (a + c) + (b + d);
}

// The sum over a group of what its blocks give; each of a block's two threads has its half.
__device__ __forceinline__ float group_sum(float half, float square) {
  float sum = (half + __shfl_xor_sync(0xffffffffu, half, 1)) * square;
#pragma unroll
  for (int lanes = 2; lanes < LANES; lanes *= 2) sum = sum + __shfl_xor_sync(0xffffffffu, sum, lanes);
  return sum;
}

struct Draw {
  const int64_t *seed, *origin;
};

// Words of the group of this thread's vector number (lane / 4) of four: word number (lane % 4).
__device__ __forceinline__ uint32_t word_of_group(const Draw& draw, int64_t first, int64_t groups_of_row) {
  const int lane = threadIdx.x & (LANES - 1);
  const int64_t group = (first + (lane >> 2) * THREADS) / LANES, row = group / groups_of_row;
  const int64_t down = draw.origin == nullptr ? 0 : draw.origin[0];
  const int64_t along = draw.origin == nullptr ? 0 : draw.origin[1] / EDEN_GROUP;
  const Words words = random_words(static_cast<uint64_t>(*draw.seed), row + down, group - row * groups_of_row + along);
  const uint32_t low = lane & 1 ? words.w[1] : words.w[0], high = lane & 1 ? words.w[3] : words.w[2];
  return lane & 2 ? high : low;
}

struct Outputs {
  uint8_t *codes, *block;
  float *scale, *outer;
};

template <typename In>
__global__ void __launch_bounds__(THREADS)
    quantize_groups(const In* __restrict__ x, const float* __restrict__ top, Outputs to, int64_t vectors,
                    int64_t groups_of_row, Turn turn, Draw draw) {
  __shared__ uint8_t flips[32];
  make_flips(flips, turn);
  const uint32_t mine = flips[threadIdx.x & 31];
  const float outer = eden_outer(*top);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * THREADS * EACH + threadIdx.x;
  if (first == 0) *to.outer = outer;
  Vector<In> held[EACH];
  fetch(x, first, vectors, held);
  const int lane = threadIdx.x & (LANES - 1);
  const uint32_t word = word_of_group(draw, first, groups_of_row);
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int64_t vector = first + i * THREADS;
    float v[VECTOR], square[VECTOR], product[VECTOR];
    rotated(held[i], mine, turn, v);
    uint32_t most = 0;
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) most = larger_magnitude(most, v[j]);
    most = larger(most, __shfl_xor_sync(0xffffffffu, most, 1));
    const float block = eden_block(bits_float(most), outer), wide = block * outer;
    const TileScale of{wide, divide(1.0f, wide)};
    over_scale(v, of, true);
    Codes<Format::E2M1> codes;
    codes.encode_nearest(v, of.inverse);
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
      const float code = is_finite(v[j]) ? round_e2m1(v[j]) : v[j];
      square[j] = v[j] * v[j];
      product[j] = v[j] * code;
    }
    const float own = group_sum(halved(square), block * block), made = group_sum(halved(product), block * block);
    const uint32_t drawn = __shfl_sync(0xffffffffu, word, (threadIdx.x & 31 & ~(LANES - 1)) + 4 * i + (lane >> 2));
    if (vector >= vectors) continue;
    codes.store_all(to.codes + vector * VECTOR);
    if (lane & 1) continue;
    const uint8_t stored = eden_stored(block, eden_factor(own, made), drawn >> (16 * (lane >> 1 & 1)) & 0xffffu);
    to.block[vector / 2] = stored;
    to.scale[vector / 2] = eden_scale(bits_float(most), stored, outer);
  }
}

Turn turn_of(const Tensor& x, const std::optional<Tensor>& signs, int64_t rotation) {
  STD_TORCH_CHECK(x.dim() == 2 && x.size(1) % EDEN_GROUP == 0, "groups of ", EDEN_GROUP, " do not divide a row of ", x.size(1));
  STD_TORCH_CHECK(rotation >= 0 && rotation <= LONGEST && (rotation & (rotation - 1)) == 0 &&
                      (rotation == 0 || x.size(1) % rotation == 0),
                  "blocks of ", rotation, " do not fit a row of ", x.size(1));
  return {seed_of(signs), static_cast<int>(rotation), hadamard_factor(rotation)};
}

Tensor ready(const Tensor& given) {
  const Tensor x = dense(given);
  return aligned(x.const_data_ptr(), 16) ? x : torch::stable::clone(x);
}

Tensor rotated_amax(const Tensor& given, std::optional<Tensor> signs, int64_t rotation) {
  const Tensor x = ready(given);
  const Turn turn = turn_of(x, signs, rotation);
  Tensor found = torch::stable::new_zeros(x, {1, 1}, ScalarType::Float);
  const int64_t vectors = x.numel() / VECTOR, blocks = ceil_div(vectors, THREADS * EACH);
  if (vectors == 0) return found;
  with_input(x, [&](auto tag) {
    using In = typename decltype(tag)::Type;
    largest_rotated<In><<<blocks < 132 * 8 ? blocks : 132 * 8, THREADS, 0, stream_of(x)>>>(
        data_of<In>(x), reinterpret_cast<uint32_t*>(mutable_data_of<float>(found)), vectors, turn);
  });
  check_launch("rotated_amax");
  return found;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> quantize_eden(const Tensor& given, const Tensor& top, std::optional<Tensor> signs,
                                                         int64_t rotation, const Tensor& seed,
                                                         std::optional<Tensor> origin) {
  const Tensor x = ready(given), most = dense(top);
  const Turn turn = turn_of(x, signs, rotation);
  STD_TORCH_CHECK(most.numel() == 1 && most.scalar_type() == ScalarType::Float, "the largest magnitude is one FP32 number");
  const int64_t rows = x.size(0), columns = x.size(1), vectors = x.numel() / VECTOR;
  Tensor codes = empty_like_device(x, {rows, columns}, ScalarType::Float8_e4m3fn);
  Tensor scale = empty_like_device(x, {rows, columns / EDEN_BLOCK}, ScalarType::Float);
  Tensor block = empty_like_device(x, {rows, columns / EDEN_BLOCK}, ScalarType::Float8_e4m3fn);
  Tensor outer = empty_like_device(x, {1, 1}, ScalarType::Float);
  STD_TORCH_CHECK(vectors > 0, "an empty matrix has no scale");
  const Outputs to{mutable_data_of<uint8_t>(codes), mutable_data_of<uint8_t>(block), mutable_data_of<float>(scale),
                   mutable_data_of<float>(outer)};
  const Draw draw{data_of<int64_t>(seed), seed_of(origin)};
  with_input(x, [&](auto tag) {
    using In = typename decltype(tag)::Type;
    quantize_groups<In><<<ceil_div(vectors, THREADS * EACH), THREADS, 0, stream_of(x)>>>(
        data_of<In>(x), data_of<float>(most), to, vectors, columns / EDEN_GROUP, turn, draw);
  });
  check_launch("quantize_eden");
  return {codes, scale, block, outer};
}

}  // namespace
}  // namespace lowprec

STABLE_TORCH_LIBRARY_IMPL(lowprec, CUDA, m) {
  m.impl("rotated_amax", TORCH_BOX(&lowprec::rotated_amax));
  m.impl("quantize_eden", TORCH_BOX(&lowprec::quantize_eden));
}
