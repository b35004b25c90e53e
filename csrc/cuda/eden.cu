// rotated_amax, quantize_eden (ops/eden.py): a random Hadamard transform, E2M1 in blocks of 16 with E4M3 scales, and
// the correction factor of 128 elements in these scales.
//
// A thread per block, eight threads per group. A matrix is one long row, because rotations and groups divide its rows.
// x is read and rotated twice: for the amax of the rotated matrix, and for codes.
//
// A group needs one call of Philox: a thread has two groups, and each of eight threads computes a word of one of them.
#include "cuda/amax.h"
#include "cuda/nvfp4.h"
#include "numerics/eden.h"

namespace lowprec {
namespace {

constexpr int EACH = LINES_EACH, LANES = EDEN_GROUP / LINE;

// Sum of a block: eight elements by halving, then the two halves.
__device__ __forceinline__ float block_sum(const float (&p)[LINE]) {
  float half[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float* of = p + i * VECTOR;
    half[i] = ((of[0] + of[4]) + (of[2] + of[6])) + ((of[1] + of[5]) + (of[3] + of[7]));
  }
  return half[0] + half[1];
}

// The sum over a group of its blocks' sums.
__device__ __forceinline__ float group_sum(float sum) {
#pragma unroll
  for (int lanes = 1; lanes < LANES; lanes *= 2) sum = sum + __shfl_xor_sync(0xffffffffu, sum, lanes);
  return sum;
}

// Random word number (lane % 4) of one of two groups, those of this thread's block number (lane / 4).
__device__ __forceinline__ uint32_t word_of_group(const Draw& draw, int64_t first, int64_t groups_of_row) {
  const int lane = threadIdx.x & (LANES - 1);
  const uint32_t group = static_cast<uint32_t>((first + (lane >> 2) * THREADS) / LANES);
  const uint32_t of_row = static_cast<uint32_t>(groups_of_row), row = group / of_row;
  const int64_t down = draw.origin == nullptr ? 0 : draw.origin[0];
  const int64_t along = draw.origin == nullptr ? 0 : draw.origin[1] / EDEN_GROUP;
  const Words words = random_words(static_cast<uint64_t>(*draw.seed), row + down, group - row * of_row + along);
  const uint32_t low = lane & 1 ? words.w[1] : words.w[0], high = lane & 1 ? words.w[3] : words.w[2];
  return lane & 2 ? high : low;
}

template <typename In>
__global__ void __launch_bounds__(THREADS)
    quantize_groups(const In* __restrict__ x, const float* __restrict__ top, Outputs to, int64_t blocks,
                    int64_t groups_of_row, Turn turn, Draw draw) {
  __shared__ uint16_t flips[32];
  make_flips(flips, turn);
  const uint32_t mine = flips[threadIdx.x & 31];
  const float outer = eden_outer(*top);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * THREADS * EACH + threadIdx.x;
  if (first == 0) *to.tensor_scale = outer;
  Line<In> held[EACH];
  fetch(x, first, blocks, held);
  const int lane = threadIdx.x & (LANES - 1);
  const uint32_t word = word_of_group(draw, first, groups_of_row);
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int64_t at = first + i * THREADS;
    float v[LINE], square[LINE], product[LINE];
    held[i].rotated(v, mine, turn);
    const float most = bits_float(line_amax(v)), block = eden_block(most, outer), wide = block * outer;
    const TileScale of{wide, divide(1.0f, wide)};
    uint32_t words[LINE / 4];
    places(v, of);
    if (plain(most, of)) {
      float code[LINE];
#pragma unroll
      for (int j = 0; j < LINE; ++j) {
        code[j] = with_sign(e2m1_size(v[j]), v[j]);
        square[j] = v[j] * v[j], product[j] = v[j] * code[j];
      }
      pack_fp8(code, words);
    } else {
      each_code(words, [&](int j) { return encode<Format::E2M1>(v[j]); });
#pragma unroll
      for (int j = 0; j < LINE; ++j) {
        const float code = is_finite(v[j]) ? with_sign(e2m1_size(v[j]), v[j]) : v[j];
        square[j] = v[j] * v[j], product[j] = v[j] * code;
      }
    }
    const float own = group_sum(block_sum(square) * (block * block)), made = group_sum(block_sum(product) * (block * block));
    const uint32_t drawn = __shfl_sync(0xffffffffu, word, (threadIdx.x & 31 & ~(LANES - 1)) + 4 * i + (lane >> 1));
    if (at >= blocks) continue;
    const uint8_t stored = eden_stored(block, eden_factor(own, made), drawn >> (16 * (lane & 1)) & 0xffffu);
    leave_line(to, at, eden_scale(most, stored, outer), stored, words);
  }
}

Turn turn_of(const Tensor& x, const std::optional<Tensor>& signs, int64_t rotation) {
  STD_TORCH_CHECK(x.dim() == 2 && x.size(1) % EDEN_GROUP == 0, "groups of ", EDEN_GROUP, " do not divide a row of ", x.size(1));
  return lines_turn(x, signs, rotation);
}

Tensor ready(const Tensor& given) {
  const Tensor x = dense(given);
  return aligned(x.const_data_ptr(), 16) ? x : torch::stable::clone(x);
}

Tensor rotated_amax(const Tensor& given, std::optional<Tensor> signs, int64_t rotation) {
  const Tensor x = ready(given);
  const Turn turn = turn_of(x, signs, rotation);
  Tensor found = torch::stable::new_zeros(x, {1, 1}, ScalarType::Float);
  if (x.numel() == 0) return found;
  with_input(x, [&](auto tag) {
    launch_largest_rotated(data_of<typename decltype(tag)::Type>(x), reinterpret_cast<uint32_t*>(mutable_data_of<float>(found)),
                           x.numel() / LINE, turn, stream_of(x));
  });
  check_launch("rotated_amax");
  return found;
}

void run(const Tensor& given, const Tensor& top, const std::optional<Tensor>& signs, int64_t rotation, const Tensor& seed,
         const std::optional<Tensor>& origin, const Outputs& to) {
  const Tensor x = ready(given), most = dense(top);
  const Turn turn = turn_of(x, signs, rotation);
  STD_TORCH_CHECK(most.numel() == 1 && most.scalar_type() == ScalarType::Float, "the largest magnitude is one FP32 number");
  const int64_t lines = x.numel() / LINE;
  STD_TORCH_CHECK(lines > 0, "an empty matrix has no scale");
  STD_TORCH_CHECK(lines >> 32 == 0, "a matrix of ", lines, " blocks has more than this kernel counts");
  const Draw draw{data_of<int64_t>(seed), seed_of(origin)};
  with_input(x, [&](auto tag) {
    using In = typename decltype(tag)::Type;
    quantize_groups<In><<<ceil_div(lines, THREADS * EACH), THREADS, 0, stream_of(x)>>>(
        data_of<In>(x), data_of<float>(most), to, lines, x.size(1) / EDEN_GROUP, turn, draw);
  });
  check_launch("quantize_eden");
}

std::tuple<Tensor, Tensor, Tensor, Tensor> quantize_eden(const Tensor& x, const Tensor& top, std::optional<Tensor> signs,
                                                         int64_t rotation, const Tensor& seed,
                                                         std::optional<Tensor> origin) {
  const int64_t rows = rows_of(x), columns = x.size(1);
  Tensor codes = empty_like_device(x, {rows, columns}, ScalarType::Float8_e4m3fn);
  Tensor scale = empty_like_device(x, {rows, columns / EDEN_BLOCK}, ScalarType::Float);
  Tensor block = empty_like_device(x, {rows, columns / EDEN_BLOCK}, ScalarType::Float8_e4m3fn);
  Tensor outer = empty_like_device(x, {1, 1}, ScalarType::Float);
  run(x, top, signs, rotation, seed, origin,
      {mutable_data_of<uint8_t>(codes), mutable_data_of<uint8_t>(block), mutable_data_of<float>(scale),
       mutable_data_of<float>(outer), nullptr});
  return {codes, scale, block, outer};
}

std::tuple<Tensor, Tensor> round_eden(const Tensor& x, const Tensor& top, std::optional<Tensor> signs, int64_t rotation,
                                      const Tensor& seed, std::optional<Tensor> origin) {
  Tensor values = empty_like_device(x, {x.size(0), x.size(1)}, ScalarType::BFloat16);
  Tensor outer = empty_like_device(x, {1, 1}, ScalarType::Float);
  run(x, top, signs, rotation, seed, origin,
      {nullptr, nullptr, nullptr, mutable_data_of<float>(outer), mutable_data_of<uint16_t>(values)});
  return {values, outer};
}

}  // namespace
}  // namespace lowprec

STABLE_TORCH_LIBRARY_IMPL(lowprec, CUDA, m) {
  m.impl("rotated_amax", TORCH_BOX(&lowprec::rotated_amax));
  m.impl("quantize_eden", TORCH_BOX(&lowprec::quantize_eden));
  m.impl("round_eden", TORCH_BOX(&lowprec::round_eden));
}
