// rotate_fold_ladder (ops/ladder.py): random Hadamard transform, E2M1 with the best of four rungs in blocks of 16,
// carriers, a factor per row. This file has rows of x and of gradients (ladder_inputs.h), and the ops;
// ladder_transposed.cu has rows of the transpose.
//
// As in rotate.cu, a thread block has a whole row in registers, because rungs depend on the row's amax. Sums of row
// scales are integers, exact in any order. Other kernels leave them in memory, and a last one computes scales.
//
// Bound by instructions: of about 38 per element, 12 try four rungs, 5 round and encode, 5 rotate, 4 unpack and scale;
// the others are those of a block, copies, and sums. In half precision an instruction has two elements.
#include "cuda/ladder.h"
#include "cuda/ladder_call.h"
#include "cuda/ladder_inputs.h"
#include "cuda/normalize.h"
#include "cuda/rotary.h"
#include "norm_arguments.h"

namespace lowprec {
namespace {

constexpr int ROW_WARPS = 28;  // for rows of 28672
constexpr int STATIC_SHARED = 3072;

// The two sums of a row in parts, one per warp.
struct RowParts {
  int64_t own[ROW_WARPS], made[ROW_WARPS];
};

__device__ __forceinline__ int64_t sum_of_lanes(int64_t x) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes >>= 1) x += __shfl_xor_sync(0xffffffffu, x, lanes);
  return x;
}

// Scale of a row from its parts. Called by one warp.
__device__ __forceinline__ float scale_of_row(const RowParts& parts, int warps, uint32_t most, int span) {
  const int lane = threadIdx.x & 31;
  const int64_t own = sum_of_lanes(lane < warps ? parts.own[lane] : 0);
  const int64_t made = sum_of_lanes(lane < warps ? parts.made[lane] : 0);
  return ladder_scale(ladder_row(most, span)) * row_factor(static_cast<double>(own), static_cast<double>(made));
}

template <typename Rows, int rotation, bool corrected>
__global__ void __launch_bounds__(32 * ROW_WARPS, 1)
    ladder_rows(Rows from, uint8_t* codes, float* __restrict__ scale, int64_t rows, int columns,
                LadderInput how, int span) {
  extern __shared__ uint4 shared[];
  __shared__ alignas(16) uint32_t drawn[HALF_SIGN_WORDS];
  __shared__ uint32_t of_warps[2][ROW_WARPS];
  __shared__ RowParts parts[2];
  __shared__ LadderTables tables;
  constexpr int part = 32 * Rows::chunks, blocks = ROW / LADDER_BLOCK;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  uint4 *stages = shared + from.table(columns), *mine[2] = {stages + warp * part, stages + (warps + warp) * part};
  make_half_signs(drawn, rotation, how.signs);
  make_ladder_tables(tables);
  from.prepare(shared, columns);
  __syncthreads();
  const uint32_t* signs = signs_of_lane<ROW>(drawn, rotation);
  int turn = 0;
  uint32_t before = 0;  // the amax of the previous row
  int64_t row = blockIdx.x;
  if (row < rows) from.fetch(row, columns, mine[0], shared);
  commit_copies();
  for (; row < rows; row += gridDim.x, turn ^= 1) {
    wait_copies();
    __syncwarp();
    uint4* stage = turn ? mine[1] : mine[0];
    if (row + gridDim.x < rows) from.fetch(row + gridDim.x, columns, turn ? mine[0] : mine[1], shared);
    commit_copies();
    uint32_t pairs[ROW / 2];
    from.take(pairs, row, columns, stage, shared, how);
    const auto values = values_of<rotation, ROW>(pairs, signs, how.gain);
    uint32_t amax[blocks], most = 0;
#pragma unroll
    for (int b = 0; b < blocks; ++b) most = larger(most, amax[b] = values.amax(b));
    most = warp_largest(most);
    if (lane == 0) of_warps[turn][warp] = most;
    __syncthreads();  // one per row: slots of a turn are written again only after the barrier of the next row
    most = warp_largest(of_warps[turn][lane < warps ? lane : 0]);
    if (corrected && warp == 0 && row != blockIdx.x) {
      const float made = scale_of_row(parts[turn ^ 1], warps, before, span);
      if (lane == 0) scale[row - gridDim.x] = made;
    }
    if (!corrected && threadIdx.x == 0) scale[row] = ladder_scale(ladder_row(most, span));
    before = most;
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
      if (lane == 0) parts[turn].own[warp] = own, parts[turn].made[warp] = made;
    }
  }
  if constexpr (corrected) {
    __syncthreads();
    if (warp > 0 || row == blockIdx.x) return;
    const float made = scale_of_row(parts[turn ^ 1], warps, before, span);
    if (lane == 0) scale[row - gridDim.x] = made;
  }
}

// Bytes of shared memory: this row and the next, and the table.
template <typename Rows>
int64_t shared_of(const Rows& from, int64_t columns) {
  return 16 * (2 * ceil_div(columns, 32 * ROW) * 32 * Rows::chunks + from.table(static_cast<int>(columns)));
}

template <int rotation, bool corrected, typename Rows>
void launch_rows(const LadderCall& call, Rows from) {
  const auto kernel = ladder_rows<Rows, rotation, corrected>;
  const int threads = 32 * static_cast<int>(ceil_div(call.columns, 32 * ROW));
  const size_t shared = shared_of(from, call.columns);
  const int64_t blocks = resident_blocks(kernel, threads, shared, call.rows, call.device);
  kernel<<<blocks, threads, shared, call.stream>>>(from, call.codes, call.scale, call.rows,
                                                   static_cast<int>(call.columns), call.how, call.span);
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

// Results of an op for codes [rows, columns], and the call without its input. Kernels that do not write scales need
// `clear` before them and `finish` after; `zeros` also has `flags` bytes for `column_amax`.
struct LadderResults {
  Tensor codes, scale;
  std::optional<Tensor> keys, zeros;
  LadderCall call{};

  // into: memory for the codes, else they have their own.
  LadderResults(const Tensor& x, int64_t rows, int64_t columns, const LadderOp& op, std::optional<Tensor> into = std::nullopt)
      : codes(into.has_value() ? *into : empty_like_device(x, {rows, columns}, ScalarType::Float8_e4m3fn)),
        scale(empty_like_device(x, {rows, 1}, ScalarType::Float)) {
    STD_TORCH_CHECK(rows > 0 && columns > 0, "an empty operand has no scale");
    STD_TORCH_CHECK(ladder_width(rows, columns, op.tile) == LADDER_BLOCK, "this kernel has blocks of ", LADDER_BLOCK);
    const int64_t rotation = op.rotation;
    STD_TORCH_CHECK(rotation >= 0 && (rotation & (rotation - 1)) == 0 && (rotation == 0 || columns % rotation == 0),
                    "blocks of ", rotation, " do not fit a row of ", columns);
    STD_TORCH_CHECK(op.span > 0 && op.span <= 11, "codes fold within 11 binades, not ", op.span);
    call.codes = mutable_data_of<uint8_t>(codes), call.scale = mutable_data_of<float>(scale);
    call.rotation = static_cast<int>(rotation), call.span = static_cast<int>(op.span), call.corrected = op.corrected;
    call.how.signs = seed_of(op.signs), call.how.gain = binades_of(op.gain);
    call.device = static_cast<int>(x.get_device_index()), call.stream = stream_of(x);
    call.x = x.const_data_ptr(), call.rows = rows_of(x), call.columns = x.size(1);
  }

  void clear(int64_t flags) {
    const int64_t rows = codes.size(0), sums = call.corrected ? 2 * rows : 0;
    keys = empty_like_device(codes, {rows}, ScalarType::Int);
    zeros = torch::stable::new_zeros(codes, {sums + ceil_div(flags, 8) + 1}, ScalarType::Long);
    call.left = {mutable_data_of<uint32_t>(*keys), mutable_data_of<unsigned long long>(*zeros)};
    call.column_amax = reinterpret_cast<uint16_t*>(call.left.sums + sums);
  }

  void finish() {
    const int64_t rows = codes.size(0);
    row_scales<<<ceil_div(rows, 256), 256, 0, call.stream>>>(call.left, rows, call.span, call.corrected, call.scale);
  }
};

// E4M3 codes of values over a scale.
template <typename In>
__global__ void round_to_codes(const In* __restrict__ x, const float* __restrict__ scale, uint8_t* __restrict__ codes, int64_t count) {
  const float inverse = 1.0f / *scale;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
    codes[i] = static_cast<uint8_t>(encode<Format::E4M3>(x[i].value() * inverse));
  }
}

Tensor rounded_codes(const Tensor& x, const Tensor& scale) {
  Tensor codes = empty_like_device(x, {x.size(0), x.size(1)}, ScalarType::Float8_e4m3fn);
  with_input(x, [&](auto in) {
    using In = typename decltype(in)::Type;
    const int64_t blocks = ceil_div(x.numel(), 256);
    round_to_codes<In><<<blocks < 65536 ? blocks : 65536, 256, 0, stream_of(x)>>>(
        data_of<In>(x), data_of<float>(scale), mutable_data_of<uint8_t>(codes), x.numel());
  });
  return codes;
}

// norm: rate and weight of the RMSNorm whose input is given, or nothing.
std::tuple<Tensor, Tensor> folded(const Tensor& given, const std::optional<Tensor>& scale, bool transposed, const LadderOp& op,
                                  const std::optional<std::pair<Tensor, Tensor>>& norm = std::nullopt) {
  const Tensor x = dense(given);
  const int64_t rows = x.size(transposed ? 1 : 0), columns = x.size(transposed ? 0 : 1);
  const ScalarType type = x.scalar_type();
  const bool codes = type == ScalarType::Float8_e4m3fn, rounds = scale.has_value() && !codes;
  STD_TORCH_CHECK(!codes || scale.has_value(), "E4M3 codes need a scale");
  STD_TORCH_CHECK(!rounds || scale->numel() == 1, "values are rounded to E4M3 under one scale");
  LadderResults made(x, rows, columns, op);
  LadderCall& call = made.call;
  const Tensor held = scale.has_value() ? dense(*scale) : x;  // must live until the kernels are launched
  if (scale.has_value()) call.how.scale = data_of<float>(held), call.how.scale_step = held.numel() > 1 ? 1 : 0;
  const bool read = codes || (type == ScalarType::BFloat16 && (!rounds || (transposed && op.rotation == HALF_ROTATION)));
  const auto rows_of_norm = [&] {
    return NormRows{static_cast<const Bf16*>(call.x), data_of<float>(norm->first), data_of<float>(norm->second)};
  };
  const int64_t shared = scale.has_value() ? shared_of(StoredRows<Code8>{}, columns)
                         : norm.has_value() ? shared_of(rows_of_norm(), columns)
                                            : shared_of(StoredRows<Bf16>{}, columns);
  const bool fused = read && (transposed ? fits(call, TRANSPOSED_SHARED, rows % 8 == 0, op.by) : rows_fit(call, shared, op.by));
  if (norm.has_value()) {
    call.how.rate = data_of<float>(norm->first), call.how.weight = data_of<float>(norm->second);
    const bool inside = fused && transposed == rounds && aligned(call.how.rate, 16) && aligned(call.how.weight, 16);
    if (!inside) return folded(normalized(x, norm->first, norm->second), scale, transposed, op);
  }
  if (rounds && !fused) return folded(rounded_codes(x, *scale), scale, transposed, op);
  if (transposed || !fused) made.clear(fused ? 2 * column_amax_size(call.rows, call.columns) : 0);
  if (!fused) {
    launch_plain(call, x, op.signs, op.gain, transposed, op.by);
  } else {
    with_operand(x, [&](auto tag) {
      using In = typename decltype(tag)::Type;
      if constexpr (std::is_same_v<In, Bf16> || std::is_same_v<In, Code8>) {
        if (transposed) launch_ladder_transposed<In>(call);
        else if (norm.has_value()) launch_rows(call, rows_of_norm());
        else launch_rows(call, StoredRows<In>{{}, static_cast<const In*>(call.x)});
      }
    });
  }
  if (transposed || !fused) made.finish();
  check_launch("rotate_fold_ladder");
  return {made.codes, made.scale};
}

Candidates candidates_of(const std::string& name) { return parse<Candidates>("choice of a scale", CANDIDATE_NAMES, name); }

std::tuple<Tensor, Tensor> rotate_fold_ladder(const Tensor& x, std::optional<Tensor> scale, bool transposed,
                                              std::optional<Tensor> signs, int64_t rotation, double gain,
                                              std::vector<int64_t> tile, std::string candidates, int64_t span,
                                              bool corrected, std::optional<Tensor>, std::optional<Tensor> rate,
                                              std::optional<Tensor> weight) {
  std::optional<std::pair<Tensor, Tensor>> norm;
  if (has_norm(x, rate, weight)) norm = {dense(*rate), dense(*weight)};
  return folded(x, scale, transposed, {signs, rotation, gain, tile, candidates_of(candidates), span, corrected}, norm);
}

// The gradient of SwiGLU, and its codes, which are written over dy: in one kernel where it fits.
std::tuple<Tensor, Tensor> gated_silu_backward_ladder(const Tensor& dy, const Tensor& given, std::optional<Tensor> signs,
                                                      int64_t rotation, double gain, std::vector<int64_t> tile,
                                                      std::string candidates, int64_t span, bool corrected) {
  const LadderOp op{signs, rotation, gain, tile, candidates_of(candidates), span, corrected};
  const Tensor gate_up = dense(given);
  const int64_t rows = rows_of(gate_up), columns = gate_up.size(1);
  STD_TORCH_CHECK(rows_of(dy) == rows && 2 * dy.size(1) == columns, "gated_silu_backward_ladder: dy [", dy.size(0), ", ",
                  dy.size(1), "] for gate_up [", rows, ", ", columns, "]");
  STD_TORCH_CHECK(dy.is_contiguous() && (dy.scalar_type() == ScalarType::BFloat16 || dy.scalar_type() == ScalarType::Half),
                  "gated_silu_backward_ladder writes codes over a matrix of 16 bits");
  LadderResults made(gate_up, rows, columns, op, dy);
  const bool read = dy.scalar_type() == ScalarType::BFloat16 && gate_up.scalar_type() == ScalarType::BFloat16;
  const auto from = [&](Bf16* dx) { return GatedRows{{}, data_of<Bf16>(dy), data_of<Bf16>(gate_up), dx}; };
  if (!read || !aligned(dy.const_data_ptr(), 16) || !rows_fit(made.call, shared_of(from(nullptr), columns), op.by)) {
    const Tensor dx = std::get<0>(gated_silu_backward(dy, gate_up));
    const auto [codes, scale] = folded(dx, std::nullopt, false, op);
    cudaMemcpyAsync(made.call.codes, codes.const_data_ptr(), rows * columns, cudaMemcpyDeviceToDevice, made.call.stream);
    check_launch("gated_silu_backward_ladder");
    return {dx, scale};
  }
  const Tensor dx = empty_like_device(dy, {rows, columns}, dy.scalar_type());
  launch_rows(made.call, from(mutable_data_of<Bf16>(dx)));
  check_launch("gated_silu_backward_ladder");
  return {dx, made.scale};
}

// The gradient of queries, keys and values, rotated back, and its codes, in one kernel where it fits.
std::tuple<Tensor, Tensor, Tensor> rotary_backward_ladder(const Tensor& given_dq, const Tensor& given_dk,
                                                          const Tensor& given_dv, const Tensor& given_cosines,
                                                          const Tensor& given_sines, std::optional<Tensor> signs,
                                                          int64_t rotation, double gain, std::vector<int64_t> tile,
                                                          std::string candidates, int64_t span, bool corrected) {
  const LadderOp op{signs, rotation, gain, tile, candidates_of(candidates), span, corrected};
  const Tensor dq = dense(given_dq), dk = dense(given_dk), dv = dense(given_dv);
  const Tensor cosines = dense(given_cosines), sines = dense(given_sines);
  const RotaryShape shape = rotary_shape(dq, dk, dv, cosines, sines);
  LadderResults made(dq, shape.rows, shape.columns, op);
  made.call.columns = shape.columns;  // dq has a part of them
  const int bits = shape.head == 64 ? 6 : shape.head == 128 ? 7 : shape.head == 256 ? 8 : 0;
  const auto from = [&](Bf16* dx) {
    return RotaryRows{data_of<Bf16>(dq), data_of<Bf16>(dk), data_of<Bf16>(dv), data_of<float>(cosines), data_of<float>(sines),
                      dx, bits, static_cast<int>(shape.queries), static_cast<int>(shape.groups), static_cast<int>(shape.tokens)};
  };
  bool read = bits > 0 && dq.scalar_type() == ScalarType::BFloat16;
  for (const Tensor& each : {dq, dk, dv, cosines, sines}) read = read && aligned(each.const_data_ptr(), 16);
  if (!read || !rows_fit(made.call, shared_of(from(nullptr), shape.columns), op.by)) {
    const Tensor dx = rotary_backward(dq, dk, dv, cosines, sines);
    const auto [codes, scale] = folded(dx, std::nullopt, false, op);
    return {dx, codes, scale};
  }
  const Tensor dx = empty_like_device(dq, {shape.rows, shape.columns}, dq.scalar_type());
  launch_rows(made.call, from(mutable_data_of<Bf16>(dx)));
  check_launch("rotary_backward_ladder");
  return {dx, made.codes, made.scale};
}

}  // namespace
}  // namespace lowprec

STABLE_TORCH_LIBRARY_IMPL(lowprec, CUDA, m) {
  m.impl("rotate_fold_ladder", TORCH_BOX(&lowprec::rotate_fold_ladder));
  m.impl("gated_silu_backward_ladder", TORCH_BOX(&lowprec::gated_silu_backward_ladder));
  m.impl("rotary_backward_ladder", TORCH_BOX(&lowprec::rotary_backward_ladder));
}
