// rotate_fold_ladder (ops/ladder.py): random Hadamard transform, E2M1 with the best of four rungs in blocks of 16,
// carriers, a factor per row. This file has rows of x, also of the gradient of SwiGLU, and the ops;
// ladder_transposed.cu has rows of the transpose.
//
// As in rotate.cu, a thread block has a whole row in registers, because rungs depend on the row's amax. Kernels leave
// the parts of row scales in memory, with sums as integers, exact in any order; a last kernel computes scales.
//
// Bound by instructions: of about 38 per element, 12 try four rungs, 5 round and encode, 5 rotate, 4 unpack and scale;
// the others are those of a block, copies, and sums. In half precision an instruction has two elements.
#include "cuda/ladder.h"
#include "cuda/ladder_call.h"
#include "cuda/rotate_rows.h"
#include "numerics/activations.h"

namespace lowprec {
namespace {

constexpr int ROW = 32;        // elements per thread
constexpr int ROW_WARPS = 28;  // for rows of 28672
constexpr int STATIC_SHARED = 2048;

// Rows of x in memory. chunks: 16-byte chunks of a row in shared memory per thread.
template <typename In>
struct StoredRows {
  static constexpr int chunks = CHUNKS<In, ROW>;
  const In* x;

  __device__ __forceinline__ void fetch(int64_t row, int columns, uint4* to) const {
    lowprec::fetch<In, ROW>(x + row * columns, columns, to);
  }
  __device__ __forceinline__ void take(uint32_t (&pairs)[ROW / 2], int64_t row, int, uint4* stage, const LadderInput& how) const {
    take_pairs<In, ROW>(pairs, stage, sizeof(In) == 1 ? how.scale[row * how.scale_step] : 1.0f);
  }
};

// Rows of the gradient of SwiGLU (gated.cu), computed here and written to dx. A pair of elements is one gate and one up.
struct GatedRows {
  static constexpr int own = CHUNKS<Bf16, ROW>, chunks = own + CHUNKS<Bf16, ROW / 2>;
  const Bf16 *dy, *gate_up;
  Bf16* dx;

  __device__ __forceinline__ void fetch(int64_t row, int columns, uint4* to) const {
    lowprec::fetch<Bf16, ROW>(gate_up + row * columns, columns, to);
    lowprec::fetch<Bf16, ROW / 2>(dy + row * (columns / 2), columns / 2, to + 32 * own);
  }
  __device__ __forceinline__ void take(uint32_t (&pairs)[ROW / 2], int64_t row, int columns, uint4* stage,
                                       const LadderInput&) const {
    uint32_t upstream[ROW / 4];
    take_pairs<Bf16, ROW>(pairs, stage, 1.0f);
    take_pairs<Bf16, ROW / 2>(upstream, stage + 32 * own, 1.0f);
#pragma unroll
    for (int i = 0; i < ROW / 2; ++i) {
      const float of = bits_float(i % 2 ? upstream[i / 2] & 0xffff0000u : upstream[i / 2] << 16);
      const GatedGradients g = gated_silu_gradients(of, bits_float(pairs[i] << 16), bits_float(pairs[i] & 0xffff0000u));
      pairs[i] = bits_of_pair(__float22bfloat162_rn(make_float2(g.gate, g.up)));
    }
    const int first = (threadIdx.x >> 5) * 32 * ROW;
    Bf16* out = dx + row * columns + first;
    write_codes(pairs, stage, [&](int piece, const uint4& of) {  // a barrier follows before the stage is used again
      if (first + piece * 8 < columns) *reinterpret_cast<uint4*>(out + piece * 8) = of;
    });
  }
};

template <typename Rows, int rotation, bool corrected>
__global__ void __launch_bounds__(32 * ROW_WARPS, 1)
    ladder_rows(Rows from, uint8_t* __restrict__ codes, RowLeft left, int64_t rows, int columns, LadderInput how, int span) {
  extern __shared__ uint4 stages[];
  __shared__ alignas(16) uint32_t drawn[HALF_SIGN_WORDS];
  __shared__ uint32_t of_warps[2][ROW_WARPS];
  __shared__ LadderTables tables;
  constexpr int part = 32 * Rows::chunks, blocks = ROW / LADDER_BLOCK;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  uint4* mine[2] = {stages + warp * part, stages + (warps + warp) * part};
  make_half_signs(drawn, rotation, how.signs);
  make_ladder_tables(tables);
  __syncthreads();
  const uint32_t* signs = signs_of_lane<ROW>(drawn, rotation);
  int turn = 0;
  int64_t row = blockIdx.x;
  if (row < rows) from.fetch(row, columns, mine[0]);
  commit_copies();
  for (; row < rows; row += gridDim.x, turn ^= 1) {
    wait_copies();
    __syncwarp();
    uint4* stage = turn ? mine[1] : mine[0];
    if (row + gridDim.x < rows) from.fetch(row + gridDim.x, columns, turn ? mine[0] : mine[1]);
    commit_copies();
    uint32_t pairs[ROW / 2];
    from.take(pairs, row, columns, stage, how);
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

// Bytes of shared memory for rows of `columns`: this row and the next.
template <typename Rows>
int64_t stages_of(int64_t columns) {
  return 2 * ceil_div(columns, 32 * ROW) * 32 * Rows::chunks * 16;
}

template <int rotation, bool corrected, typename Rows>
void launch_rows(const LadderCall& call, Rows from) {
  const auto kernel = ladder_rows<Rows, rotation, corrected>;
  const int threads = 32 * static_cast<int>(ceil_div(call.columns, 32 * ROW));
  const size_t shared = stages_of<Rows>(call.columns);
  const int64_t blocks = resident_blocks(kernel, threads, shared, call.rows, call.device);
  kernel<<<blocks, threads, shared, call.stream>>>(from, call.codes, call.left, call.rows, static_cast<int>(call.columns),
                                                   call.how, call.span);
}

template <typename Rows>
void launch_rows(const LadderCall& call, Rows from) {
  constexpr int none = 0;
  if (call.rotation == none) call.corrected ? launch_rows<none, true>(call, from) : launch_rows<none, false>(call, from);
  else call.corrected ? launch_rows<HALF_ROTATION, true>(call, from) : launch_rows<HALF_ROTATION, false>(call, from);
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

// Whether the fused kernels support this call. stages: dynamic shared memory. shaped: further conditions.
bool fits(const LadderCall& call, int64_t stages, bool shaped, Candidates by) {
  int shared = 0;
  cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, call.device);
  return shaped && by == Candidates::MSE && stages + STATIC_SHARED <= shared &&
         (call.rotation == 0 || call.rotation == HALF_ROTATION) && aligned(call.x, 16);
}

bool rows_fit(const LadderCall& call, int64_t stages, Candidates by) {
  return fits(call, stages, call.columns <= ROW_WARPS * 32 * ROW, by);
}

// Arguments of an op, besides its input.
struct LadderOp {
  std::optional<Tensor> signs;
  int64_t rotation;
  double gain;
  std::vector<int64_t> tile;
  Candidates by;
  int64_t span;
  bool corrected;
};

// Results of an op for codes [rows, columns], and the call without its input. `zeros` also has `flags` bytes for
// `column_amax`.
struct LadderResults {
  Tensor codes, scale, keys, zeros;
  LadderCall call{};

  LadderResults(const Tensor& x, int64_t rows, int64_t columns, const LadderOp& op)
      : codes(empty_like_device(x, {rows, columns}, ScalarType::Float8_e4m3fn)),
        scale(empty_like_device(x, {rows, 1}, ScalarType::Float)), keys(empty_like_device(x, {rows}, ScalarType::Int)) {
    STD_TORCH_CHECK(rows > 0 && columns > 0, "an empty operand has no scale");
    STD_TORCH_CHECK(ladder_width(rows, columns, op.tile) == LADDER_BLOCK, "this kernel has blocks of ", LADDER_BLOCK);
    const int64_t rotation = op.rotation;
    STD_TORCH_CHECK(rotation >= 0 && (rotation & (rotation - 1)) == 0 && (rotation == 0 || columns % rotation == 0),
                    "blocks of ", rotation, " do not fit a row of ", columns);
    STD_TORCH_CHECK(op.span > 0 && op.span <= 11, "codes fold within 11 binades, not ", op.span);
    call.codes = mutable_data_of<uint8_t>(codes);
    call.rotation = static_cast<int>(rotation), call.span = static_cast<int>(op.span), call.corrected = op.corrected;
    call.how.signs = seed_of(op.signs), call.how.gain = binades_of(op.gain);
    call.device = static_cast<int>(x.get_device_index()), call.stream = stream_of(x);
    call.x = x.const_data_ptr(), call.rows = rows_of(x), call.columns = x.size(1);
  }

  void clear(int64_t flags) {
    const int64_t rows = codes.size(0), sums = call.corrected ? 2 * rows : 0;
    zeros = torch::stable::new_zeros(codes, {sums + ceil_div(flags, 8) + 1}, ScalarType::Long);
    call.left = {mutable_data_of<uint32_t>(keys), mutable_data_of<unsigned long long>(zeros)};
    call.column_amax = reinterpret_cast<uint16_t*>(call.left.sums + sums);
  }

  void finish() {
    const int64_t rows = codes.size(0);
    row_scales<<<ceil_div(rows, 256), 256, 0, call.stream>>>(call.left, rows, call.span, call.corrected,
                                                             mutable_data_of<float>(scale));
  }
};

std::tuple<Tensor, Tensor> folded(const Tensor& given, const std::optional<Tensor>& scale, bool transposed, const LadderOp& op) {
  const Tensor x = dense(given);
  const int64_t rows = x.size(transposed ? 1 : 0), columns = x.size(transposed ? 0 : 1);
  const ScalarType type = x.scalar_type();
  STD_TORCH_CHECK((type == ScalarType::Float8_e4m3fn) == scale.has_value(), "a scale belongs to E4M3 codes");
  LadderResults made(x, rows, columns, op);
  LadderCall& call = made.call;
  const Tensor held = scale.has_value() ? dense(*scale) : x;  // must live until the kernels are launched
  if (scale.has_value()) call.how.scale = data_of<float>(held), call.how.scale_step = held.numel() > 1 ? 1 : 0;
  const bool read = type == ScalarType::BFloat16 || scale.has_value();
  const int64_t stages = scale.has_value() ? stages_of<StoredRows<Code8>>(columns) : stages_of<StoredRows<Bf16>>(columns);
  const bool fused = read && (transposed ? fits(call, TRANSPOSED_SHARED, rows % 8 == 0, op.by) : rows_fit(call, stages, op.by));
  made.clear(fused && transposed ? 2 * column_amax_size(call.rows, call.columns) : 0);
  if (!fused) {
    launch_plain(call, x, op.signs, op.gain, transposed, op.by);
  } else {
    with_operand(x, [&](auto tag) {
      using In = typename decltype(tag)::Type;
      if constexpr (std::is_same_v<In, Bf16> || std::is_same_v<In, Code8>) {
        if (transposed) launch_ladder_transposed<In>(call);
        else launch_rows(call, StoredRows<In>{static_cast<const In*>(call.x)});
      }
    });
  }
  made.finish();
  check_launch("rotate_fold_ladder");
  return {made.codes, made.scale};
}

std::tuple<Tensor, Tensor> rotate_fold_ladder(const Tensor& x, std::optional<Tensor> scale, bool transposed,
                                              std::optional<Tensor> signs, int64_t rotation, double gain,
                                              std::vector<int64_t> tile, std::string candidates, int64_t span,
                                              bool corrected, std::optional<Tensor>) {
  const Candidates by = parse<Candidates>("choice of a scale", CANDIDATE_NAMES, candidates);
  return folded(x, scale, transposed, {signs, rotation, gain, tile, by, span, corrected});
}

// The gradient of SwiGLU and its codes, in one kernel where it fits.
std::tuple<Tensor, Tensor, Tensor> gated_silu_backward_ladder(const Tensor& given_dy, const Tensor& given,
                                                              std::optional<Tensor> signs, int64_t rotation, double gain,
                                                              std::vector<int64_t> tile, std::string candidates,
                                                              int64_t span, bool corrected) {
  const Candidates by = parse<Candidates>("choice of a scale", CANDIDATE_NAMES, candidates);
  const LadderOp op{signs, rotation, gain, tile, by, span, corrected};
  const Tensor dy = dense(given_dy), gate_up = dense(given);
  const int64_t rows = rows_of(gate_up), columns = gate_up.size(1);
  STD_TORCH_CHECK(rows_of(dy) == rows && 2 * dy.size(1) == columns, "gated_silu_backward_ladder: dy [", dy.size(0), ", ",
                  dy.size(1), "] for gate_up [", rows, ", ", columns, "]");
  LadderResults made(gate_up, rows, columns, op);
  const bool read = dy.scalar_type() == ScalarType::BFloat16 && gate_up.scalar_type() == ScalarType::BFloat16;
  if (!read || !aligned(dy.const_data_ptr(), 16) || !rows_fit(made.call, stages_of<GatedRows>(columns), by)) {
    const Tensor dx = std::get<0>(gated_silu_backward(dy, gate_up));
    const auto [codes, scale] = folded(dx, std::nullopt, false, op);
    return {dx, codes, scale};
  }
  const Tensor dx = empty_like_device(dy, {rows, columns}, dy.scalar_type());
  made.clear(0);
  launch_rows(made.call, GatedRows{data_of<Bf16>(dy), data_of<Bf16>(gate_up), mutable_data_of<Bf16>(dx)});
  made.finish();
  check_launch("gated_silu_backward_ladder");
  return {dx, made.codes, made.scale};
}

}  // namespace
}  // namespace lowprec

STABLE_TORCH_LIBRARY_IMPL(lowprec, CUDA, m) {
  m.impl("rotate_fold_ladder", TORCH_BOX(&lowprec::rotate_fold_ladder));
  m.impl("gated_silu_backward_ladder", TORCH_BOX(&lowprec::gated_silu_backward_ladder));
}
