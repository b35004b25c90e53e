// rotate_fold_ladder (ops/ladder.py): random Hadamard transform, E2M1 with the best of four rungs in blocks of 16,
// carriers, a factor per row. This file has rows of x and the op; ladder_transposed.cu has rows of the transpose.
//
// As in rotate.cu, a thread block has a whole row in registers, because rungs depend on the row's amax. Kernels leave
// the parts of row scales in memory, with sums as integers, exact in any order; a last kernel computes scales.
//
// Bound by instructions: of about 38 per element, 12 try four rungs, 5 round and encode, 5 rotate, 4 unpack and scale;
// the others are those of a block, copies, and sums. In half precision an instruction has two elements.
#include "cuda/ladder.h"
#include "cuda/ladder_call.h"
#include "cuda/rotate_rows.h"

namespace lowprec {
namespace {

constexpr int ROW = 32;        // elements per thread
constexpr int ROW_WARPS = 28;  // for rows of 28672
constexpr int STATIC_SHARED = 2048;

template <typename In, int rotation, bool corrected>
__global__ void __launch_bounds__(32 * ROW_WARPS, 1)
    ladder_rows(const In* __restrict__ x, uint8_t* __restrict__ codes, RowLeft left, int64_t rows, int columns,
                LadderInput how, int span) {
  extern __shared__ uint4 stages[];
  __shared__ alignas(16) uint32_t drawn[HALF_SIGN_WORDS];
  __shared__ uint32_t of_warps[2][ROW_WARPS];
  __shared__ LadderTables tables;
  constexpr int part = 32 * CHUNKS<In, ROW>, blocks = ROW / LADDER_BLOCK;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  uint4* mine[2] = {stages + warp * part, stages + (warps + warp) * part};
  make_half_signs(drawn, rotation, how.signs);
  make_ladder_tables(tables);
  __syncthreads();
  const uint32_t* signs = signs_of_lane<ROW>(drawn, rotation);
  int turn = 0;
  int64_t row = blockIdx.x;
  if (row < rows) fetch<In, ROW>(x + row * columns, columns, mine[0]);
  commit_copies();
  for (; row < rows; row += gridDim.x, turn ^= 1) {
    wait_copies();
    __syncwarp();
    uint4* stage = turn ? mine[1] : mine[0];
    if (row + gridDim.x < rows) {
      fetch<In, ROW>(x + (row + gridDim.x) * columns, columns, turn ? mine[0] : mine[1]);
    }
    commit_copies();
    uint32_t pairs[ROW / 2];
    take_pairs<In, ROW>(pairs, stage, sizeof(In) == 1 ? how.scale[row * how.scale_step] : 1.0f);
    const auto values = values_of<rotation, ROW>(pairs, signs, how.gain);
    uint32_t amax[blocks], most = 0;
#pragma unroll
    for (int b = 0; b < blocks; ++b) most = larger(most, amax[b] = values.amax(b));
    most = warp_largest(most);
    if (lane == 0) of_warps[turn][warp] = most;
    __syncthreads();  // one per row: these slots are written again only after the barrier of the next row
    most = warp_largest(of_warps[turn][lane < warps ? lane : 0]);
    if (threadIdx.x == 0) left.keys[row] = most;
    RowSums sums;
    uint8_t* out = codes + row * columns + warp * 32 * ROW;
    emit_blocks<corrected, ROW>(values, amax, ladder_row(most, span), tables, sums,
                                [&](int n, const uint32_t (&words)[LADDER_BLOCK / 2]) {
      if (n > 0) __syncwarp();  // before codes that were staged are overwritten
      write_codes(words, stage, [&](int piece, const uint4& of) {
        const int at = piece / 2 * ROW + n * 32 + piece % 2 * 16;
        if (warp * 32 * ROW + at < columns) *reinterpret_cast<uint4*>(out + at) = of;
      });
    });
    if constexpr (corrected) {
      const int64_t own = warp_sum(sums.own), made = warp_sum(sums.made);
      if (lane == 0) left.add(row, own, made);
    }
  }
}

template <typename In, int rotation, bool corrected>
void launch_rows(const LadderCall& call) {
  const auto kernel = ladder_rows<In, rotation, corrected>;
  const int warps = static_cast<int>(ceil_div(call.columns, 32 * ROW));
  const size_t shared = 2 * warps * 32 * ROW * sizeof(In);
  const int64_t blocks = resident_blocks(kernel, 32 * warps, shared, call.rows, call.device);
  kernel<<<blocks, 32 * warps, shared, call.stream>>>(static_cast<const In*>(call.x), call.codes, call.left, call.rows,
                                                      static_cast<int>(call.columns), call.how, call.span);
}

template <typename In, bool corrected>
void launch_rows(const LadderCall& call) {
  call.rotation == 0 ? launch_rows<In, 0, corrected>(call) : launch_rows<In, HALF_ROTATION, corrected>(call);
}

// --- step by step: shapes, types, rotations and choices that the fused kernels do not support ------------------------

// A block per row of FP32, which it reads twice; a thread processes blocks of 16.
template <bool corrected, Candidates by>
__global__ void __launch_bounds__(256) ladder_plain(const float* __restrict__ x, uint8_t* __restrict__ codes, RowLeft left,
                                                    int64_t columns, int span) {
  __shared__ uint32_t scratch[8];
  __shared__ LadderTables tables;
  make_ladder_tables<by>(tables);  // the barriers of block_largest follow
  const float* in = x + blockIdx.x * columns;
  uint32_t most = 0;
  for (int64_t i = threadIdx.x; i < columns; i += blockDim.x) most = larger_magnitude(most, in[i]);
  most = block_largest(most, scratch);
  if (threadIdx.x == 0) left.keys[blockIdx.x] = most;
  const LadderRow row = ladder_row(most, span);
  RowSums sums;
  int64_t own = 0, made = 0;
  for (int64_t at = threadIdx.x * LADDER_BLOCK; at < columns; at += blockDim.x * LADDER_BLOCK) {
    uint32_t amax = 0, words[LADDER_BLOCK / 4];
    for (int i = 0; i < LADDER_BLOCK; ++i) amax = larger_magnitude(amax, in[at + i]);
    const BlockRung rung = block_rung(amax, row.floor);
    const float unit = exp2_int(-(rung.step + LADDER_LOW));
    __half2 v[LADDER_BLOCK / 2];
    for (int i = 0; i < LADDER_BLOCK / 2; ++i) v[i] = __floats2half2_rn(in[at + 2 * i] * unit, in[at + 2 * i + 1] * unit);
    sums = RowSums{};
    emit_block<corrected, by>(v, rung, row, tables, words, sums);
    own += sums.own, made += sums.made;
    uint32_t* out = reinterpret_cast<uint32_t*>(codes + blockIdx.x * columns + at);
    for (int i = 0; i < LADDER_BLOCK / 4; ++i) out[i] = words[i];
  }
  if constexpr (corrected) left.add(blockIdx.x, own, made);
}

// Scales of rows from `left`, the results of the other kernels.
__global__ void row_scales(RowLeft left, int64_t rows, int span, bool corrected, float* __restrict__ scale) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  const float own = ladder_scale(ladder_row(left.keys[row], span));
  const auto sum = [&](int i) { return static_cast<double>(static_cast<int64_t>(left.sums[2 * row + i])); };
  scale[row] = corrected ? own * row_factor(sum(0), sum(1)) : own;
}

void launch_plain(const LadderCall& call, const Tensor& x, const std::optional<Tensor>& signs, double gain, bool transposed,
                  Candidates by) {
  Tensor v = plain_matrix(x, call.how.scale, call.how.scale_step, transposed);
  if (call.rotation > 0) v = hadamard_half(v, signs, call.rotation, gain);
  with_choice(by, [&](auto tag) {
    constexpr Candidates error = decltype(tag)::value;
    const auto kernel = call.corrected ? ladder_plain<true, error> : ladder_plain<false, error>;
    kernel<<<v.size(0), 256, 0, call.stream>>>(data_of<float>(v), call.codes, call.left, v.size(1), call.span);
  });
}

bool fits(const Tensor& x, bool transposed, int64_t rows, int64_t columns, int64_t rotation, Candidates by) {
  const ScalarType type = x.scalar_type();
  const int64_t bytes = type == ScalarType::Float8_e4m3fn ? 1 : 2;
  const int64_t stages = transposed ? TRANSPOSED_SHARED : 2 * ceil_div(columns, 32 * ROW) * 32 * ROW * bytes;
  int shared = 0;
  cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, static_cast<int>(x.get_device_index()));
  const bool shaped = transposed ? rows % 8 == 0 : columns <= ROW_WARPS * 32 * ROW;
  const bool chosen = by == Candidates::MSE, read = type == ScalarType::BFloat16 || bytes == 1;
  return shaped && chosen && read && stages + STATIC_SHARED <= shared && (rotation == 0 || rotation == HALF_ROTATION) &&
         aligned(x.const_data_ptr(), 16);
}

std::tuple<Tensor, Tensor> rotate_fold_ladder(const Tensor& given, std::optional<Tensor> scale, bool transposed,
                                              std::optional<Tensor> signs, int64_t rotation, double gain,
                                              std::vector<int64_t> tile, std::string candidates, int64_t span,
                                              bool corrected, std::optional<Tensor>) {
  const Tensor x = dense(given);
  const int64_t rows = x.size(transposed ? 1 : 0), columns = x.size(transposed ? 0 : 1);
  STD_TORCH_CHECK(rows > 0 && columns > 0, "an empty operand has no scale");
  STD_TORCH_CHECK(ladder_width(rows, columns, tile) == LADDER_BLOCK, "this kernel has blocks of ", LADDER_BLOCK);
  STD_TORCH_CHECK(rotation >= 0 && (rotation & (rotation - 1)) == 0 && (rotation == 0 || columns % rotation == 0),
                  "blocks of ", rotation, " do not fit a row of ", columns);
  STD_TORCH_CHECK(span > 0 && span <= 11, "codes fold within 11 binades, not ", span);
  const Candidates by = parse<Candidates>("choice of a scale", CANDIDATE_NAMES, candidates);
  STD_TORCH_CHECK((x.scalar_type() == ScalarType::Float8_e4m3fn) == scale.has_value(), "a scale belongs to E4M3 codes");
  const Tensor codes = empty_like_device(x, {rows, columns}, ScalarType::Float8_e4m3fn);
  const Tensor row_scale = empty_like_device(x, {rows, 1}, ScalarType::Float);
  LadderCall call{};
  call.x = x.const_data_ptr(), call.rows = rows_of(x), call.columns = x.size(1);
  call.codes = mutable_data_of<uint8_t>(codes);
  call.rotation = static_cast<int>(rotation);
  call.how.signs = seed_of(signs), call.how.gain = binades_of(gain);
  const Tensor held = scale.has_value() ? dense(*scale) : x;  // must live until the kernels are launched
  if (scale.has_value()) call.how.scale = data_of<float>(held), call.how.scale_step = held.numel() > 1 ? 1 : 0;
  call.span = static_cast<int>(span);
  call.corrected = corrected, call.device = static_cast<int>(x.get_device_index()), call.stream = stream_of(x);
  const Tensor keys = empty_like_device(x, {rows}, ScalarType::Int);
  const bool fused = fits(x, transposed, rows, columns, rotation, by);
  const int64_t sums = corrected ? 2 * rows : 0;
  const int64_t flags = fused && transposed ? column_amax_size(call.rows, call.columns) : 0;
  const Tensor zeros = torch::stable::new_zeros(x, {sums + ceil_div(flags, 4) + 1}, ScalarType::Long);
  call.left = {mutable_data_of<uint32_t>(keys), mutable_data_of<unsigned long long>(zeros)};
  call.column_amax = reinterpret_cast<uint16_t*>(call.left.sums + sums);
  if (!fused) {
    launch_plain(call, x, signs, gain, transposed, by);
  } else {
    with_operand(x, [&](auto tag) {
      using In = typename decltype(tag)::Type;
      if constexpr (std::is_same_v<In, Bf16> || std::is_same_v<In, Code8>) {
        if (transposed) return launch_ladder_transposed<In>(call);
        corrected ? launch_rows<In, true>(call) : launch_rows<In, false>(call);
      }
    });
  }
  row_scales<<<ceil_div(rows, 256), 256, 0, call.stream>>>(call.left, rows, call.span, corrected,
                                                           mutable_data_of<float>(row_scale));
  check_launch("rotate_fold_ladder");
  return {codes, row_scale};
}

}  // namespace
}  // namespace lowprec

STABLE_TORCH_LIBRARY_IMPL(lowprec, CUDA, m) { m.impl("rotate_fold_ladder", TORCH_BOX(&lowprec::rotate_fold_ladder)); }
