// rotate_fold (ops/rotated.py): random Hadamard transform, E2M1 with stochastic rounding in blocks of 32, block
// exponents folded into an FP8 carrier. This file has rows of x and the op; rotate_transposed.cu has rows of the
// transpose.
//
// The first code of a row needs the row's largest exponent, so a thread block has a whole row in registers and reads x
// once. Meanwhile the next row is copied into shared memory, swizzled to avoid bank conflicts on both sides. In the
// usual case a thread has 32 neighbouring elements: the last butterfly of 64 is an exchange between two lanes, one
// instruction per element more than within a thread, but 72 registers leave room for 28 warps. In the other cases, and
// for rows of more than 28672, a thread has 64.
//
// Bound by instructions, not by memory. Of about 27 per element (BF16, blocks of 64, stochastic), 7 are butterflies, 5
// an eighth of a Philox call (2.2 wide products, 2.5 exclusive ors), 4 round (product, fixed point, byte permutation,
// multiply-add), 2 encode, 1.8 unpack and negate, 1 computes the amax; the rest are copies and addresses. 132
// multiprocessors issue 1.1 such elements per picosecond, with 3 bytes each: at most 3.3 TB/s.
#include "cuda/quantize.h"
#include "cuda/rotate_rows.h"

namespace lowprec {
namespace {

constexpr int MOST_WARPS = 16;        // a row of 32768, 64 elements per thread
constexpr int MOST_PLAIN_WARPS = 28;  // a row of 28672, 32 elements per thread
constexpr int STATIC_SHARED = 2048;

// A block per row, then its next row. Dynamic shared memory: two stages of the row.
template <typename In, bool random, bool plain, int held>
__global__ void __launch_bounds__(32 * (plain ? MOST_PLAIN_WARPS : MOST_WARPS), 1)
    rotate_rows(const In* __restrict__ x, uint8_t* __restrict__ codes, float* __restrict__ scale, int64_t rows,
                int columns, Rotation how) {
  extern __shared__ uint4 stages[];
  __shared__ Tables tables;
  __shared__ int of_warps[2][plain ? MOST_PLAIN_WARPS : MOST_WARPS];
  constexpr int part = 32 * CHUNKS<In, held>, blocks = held / MX_BLOCK;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  uint4* mine[2] = {stages + warp * part, stages + (warps + warp) * part};
  make_tables(tables, how);
  const uint32_t* signs = signs_of_lane<held>(tables.signs, plain ? HELD : how.block);
  const float given = sizeof(In) == 1 ? *how.scale : 1.0f;
  uint64_t seed = 0;
  uint32_t first_row = 0, group = threadIdx.x * (held / 8);
  if constexpr (random) {
    seed = static_cast<uint64_t>(*how.seed);
    if (how.origin != nullptr) {
      first_row = static_cast<uint32_t>(how.origin[0]);
      group += static_cast<uint32_t>(how.origin[1] >> 3);
    }
  }
  int turn = 0;
  int64_t row = blockIdx.x;
  if (row < rows) fetch<In, held>(x + row * columns, columns, mine[0]);
  commit_copies();
  for (; row < rows; row += gridDim.x, turn ^= 1) {
    wait_copies();
    __syncwarp();
    uint4* stage = turn ? mine[1] : mine[0];
    if (row + gridDim.x < rows) {
      fetch<In, held>(x + (row + gridDim.x) * columns, columns, turn ? mine[0] : mine[1]);
    }
    commit_copies();
    float v[held];
    take<In, held>(v, stage, signs, given);
    rotate<plain ? HELD : 0>(v, how);
    int key[blocks];
#pragma unroll
    for (int b = 0; b < blocks; ++b) key[b] = block_key(v + b * MX_BLOCK, how);
    int largest = __reduce_max_sync(0xffffffffu, max(key[0], key[blocks - 1]));
    if (lane == 0) of_warps[turn][warp] = largest;
    __syncthreads();  // one per row: these slots are written again only after the barrier of the next row
    largest = __reduce_max_sync(0xffffffffu, of_warps[turn][lane < warps ? lane : 0]);
    if (threadIdx.x == 0) scale[row] = row_scale(largest, how);
    uint32_t words[held / 4];
#pragma unroll
    for (int b = 0; b < blocks; ++b) {
      emit<random, plain>(v + b * MX_BLOCK, block_codes(key[b], largest, tables, how), how, seed,
                          first_row + static_cast<uint32_t>(row), group + b * (MX_BLOCK / 8),
                          words + b * (MX_BLOCK / 4));
    }
    uint8_t* out = codes + row * columns;
    write_codes(words, stage, [&](int piece, const uint4& of) {
      const int column = warp * 32 * held + piece * 16;
      if (column < columns) *reinterpret_cast<uint4*>(out + column) = of;
    });
  }
}

template <typename In, bool random, bool plain>
void launch_rows(const RotateCall& call) {
  constexpr int held = plain ? HELD / 2 : HELD;
  const int warps = static_cast<int>(ceil_div(call.columns, 32 * held));
  const size_t shared = 2 * warps * 32 * held * sizeof(In);
  const auto kernel = rotate_rows<In, random, plain, held>;
  const int64_t blocks = resident_blocks(kernel, 32 * warps, shared, call.rows, call.device);
  kernel<<<blocks, 32 * warps, shared, call.stream>>>(static_cast<const In*>(call.x), call.codes, call.scale, call.rows,
                                                      static_cast<int>(call.columns), call.how);
}

template <typename In>
void launch_rows(const RotateCall& call) {
  const bool random = call.how.seed != nullptr;
  if constexpr (sizeof(In) < 4) {
    const bool fits = call.columns <= MOST_PLAIN_WARPS * 32 * (HELD / 2);
    if (call.plain && fits) return random ? launch_rows<In, true, true>(call) : launch_rows<In, false, true>(call);
  }
  random ? launch_rows<In, true, false>(call) : launch_rows<In, false, false>(call);
}

// --- step by step: shapes and rules that the fused kernels do not support --------------------------------------------

template <typename In>
__global__ void plain_values(const In* __restrict__ x, const float* __restrict__ scale, int step, bool transposed,
                             int64_t rows, int64_t columns, float* __restrict__ out) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (index >= rows * columns) return;
  float v;
  if constexpr (sizeof(In) == 1) v = decode<Format::E4M3>(x[index].bits);
  else v = x[index].value();
  if (scale != nullptr) v = bf16_value(bf16_bits(v * scale[step * (index / columns)]));
  out[transposed ? index % columns * rows + index / columns : index] = v;
}

using Folded = std::tuple<Tensor, Tensor>;

Rotation constants(int64_t rotation, const ScaleRule& rule, const std::string& carrier) {
  Rotation how{};
  const bool folded = rule.rule == Rule::E8M0_FLOOR;
  how.block = static_cast<int>(rotation);
  how.factor = hadamard_factor(rotation);
  how.carry = folded ? 0 : 0x7fffffu - (float_bits(rule.threshold) & 0x7fffffu);
  how.offset = rule.offset;
  how.span = rule.span;
  how.headroom = folded ? static_cast<float>(rule.headroom) : 1.0f;
  how.quotient = folded ? static_cast<float>(1.0 / rule.headroom) : 1.0f;
  how.lift = exponent(how.quotient);
  how.e5m2 = parse_format(carrier) == Format::E5M2;
  how.top = how.e5m2 ? 13 : 6;
  return how;
}

// Whether one product can apply both factors: blocks of 64, whose factor is a power of two. Values are multiples of
// 2^-133, so products with the factor and with the headroom are exact, and one product with both rounds as two do; no
// value exceeds 6.
bool plain_products(const Rotation& how, const ScaleRule& rule) {
  const bool few_bits = (float_bits(how.headroom) & 0xffffu) == 0;
  const bool floors = rule.rule == Rule::E8M0_FLOOR;
  const bool in_range = floors ? rule.headroom <= 0.75 : rule.headroom >= 0.5 && rule.headroom <= 1.0;
  return how.block == HELD && few_bits && in_range;
}

Folded rotate_fold(const Tensor& given, std::optional<Tensor> scale, bool transposed, std::optional<Tensor> signs,
                   int64_t rotation, std::string scale_rule, double headroom, int64_t span, std::string carrier,
                   std::string rounding, std::optional<Tensor> seed, std::optional<Tensor> origin,
                   std::optional<Tensor>) {
  const Tensor x = dense(given);
  const int64_t rows = x.size(transposed ? 1 : 0), columns = x.size(transposed ? 0 : 1);
  STD_TORCH_CHECK(rotation >= 0 && (rotation & (rotation - 1)) == 0 && (rotation == 0 || columns % rotation == 0),
                  "blocks of ", rotation, " do not fit a row of ", columns);
  STD_TORCH_CHECK(rows > 0 && columns > 0, "an empty operand has no scale");
  resolve_tile(rows, columns, {1, MX_BLOCK});
  const Format format = parse_format(carrier);
  STD_TORCH_CHECK(format == Format::E4M3 || format == Format::E5M2, "codes fold into E4M3 or E5M2");
  const ScaleRule rule = scale_rule_of(Format::E2M1, parse_rule(scale_rule), headroom, span);
  const float* tensor_scale = scale.has_value() ? data_of<float>(*scale) : nullptr;
  const bool codes_given = x.scalar_type() == ScalarType::Float8_e4m3fn;
  const int64_t bytes = x.scalar_type() == ScalarType::Float ? 4 : codes_given ? 1 : 2;
  const int64_t of_row = 2 * ceil_div(columns, 32 * HELD) * 32 * HELD * bytes;
  const int64_t stages = transposed ? (bytes == 4 ? 144 : 80) * 1024 : of_row;
  int shared = 0;
  cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, static_cast<int>(x.get_device_index()));
  const bool shaped = transposed ? rows % 8 == 0 : columns <= MOST_WARPS * 32 * HELD;
  const bool fits = shaped && stages + STATIC_SHARED <= shared;
  const bool power = rule.rule != Rule::FP32 && span > 0 && headroom > 0.0 && headroom <= 1.0;
  const bool fused = fits && power && rotation <= 256 && x.scalar_type() != ScalarType::Half &&
                     codes_given == (tensor_scale != nullptr) && aligned(x.const_data_ptr(), 16);
  if (!fused) {
    Tensor v = plain_matrix(x, tensor_scale, 0, transposed);
    if (rotation > 0) v = hadamard(v, signs, rotation);
    const int64_t within = rule.rule == Rule::FP32 ? 0 : span;  // FP32 scales have no span
    auto [codes, block_scale] = quantize(v, "E2M1", {1, MX_BLOCK}, scale_rule, headroom, within, rounding, seed, origin);
    return fold(codes, block_scale, carrier);
  }
  const Tensor codes = empty_like_device(x, {rows, columns}, carrier_of(format));
  const Tensor row_scale = empty_like_device(x, {rows, 1}, ScalarType::Float);
  RotateCall call{x.const_data_ptr(), rows_of(x), x.size(1), mutable_data_of<uint8_t>(codes),
                  mutable_data_of<float>(row_scale), constants(rotation, rule, carrier), false,
                  static_cast<int>(x.get_device_index()), stream_of(x)};
  call.how.signs = seed_of(signs);
  call.how.seed = seed_of(rounding, seed);
  call.how.origin = seed_of(origin);
  call.how.scale = tensor_scale;
  call.plain = bytes < 4 && plain_products(call.how, rule);
  with_operand(x, [&](auto tag) {
    using In = typename decltype(tag)::Type;
    if constexpr (!std::is_same_v<In, Fp16>) {
      if (!transposed) return launch_rows<In>(call);
      Tensor keys = torch::stable::new_zeros(x, {rows}, ScalarType::Int);
      Tensor saved = empty_like_device(x, {ceil_div(columns, HELD), rows}, ScalarType::Short);
      launch_transposed<In>(call, mutable_data_of<uint32_t>(keys), mutable_data_of<uint16_t>(saved));
    }
  });
  check_launch("rotate_fold");
  return {codes, row_scale};
}

}  // namespace

Tensor plain_matrix(const Tensor& x, const float* scale, int step, bool transposed) {
  const int64_t rows = rows_of(x), columns = x.size(1);
  Tensor out = empty_like_device(x, {transposed ? columns : rows, transposed ? rows : columns}, ScalarType::Float);
  with_operand(x, [&](auto tag) {
    using In = typename decltype(tag)::Type;
    plain_values<In><<<ceil_div(rows * columns, 256), 256, 0, stream_of(x)>>>(
        data_of<In>(x), scale, step, transposed, rows, columns, mutable_data_of<float>(out));
  });
  return out;
}

}  // namespace lowprec

STABLE_TORCH_LIBRARY_IMPL(lowprec, CUDA, m) { m.impl("rotate_fold", TORCH_BOX(&lowprec::rotate_fold)); }
