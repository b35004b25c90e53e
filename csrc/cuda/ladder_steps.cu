// quantize_ladder, row_sums, fold_ladder (ops/ladder.py): the steps of rotate_fold_ladder as ops of their own, for
// operands whose amax and sums cross ranks.
//
// A warp has a row and each lane a block, so a row's sums are added without atomics. Where the row's amax is not given,
// a thread block has the row, which it reads twice: rows of all warps would not fit the L2 cache. Blocks of 16 are in
// registers; a lane reads blocks of another width from memory for each use. Sums are whole numbers in FP64, exact in
// any order.
//
// Limited by memory: rotated values are FP32.
#include "cuda/ladder.h"
#include "cuda/ladder_call.h"
#include "ladder_arguments.h"

namespace lowprec {
namespace {

constexpr int WARPS = 8;  // of a thread block

// --- blocks of a row -------------------------------------------------------------------------------------------------

// Pairs of codes, the first of each pair in the low byte.
struct RegisterCodes {
  uint32_t words[LADDER_BLOCK / 4];
  __device__ __forceinline__ uint32_t operator()(int i) const { return words[i >> 1] >> (i & 1 ? 16 : 0) & 0xffffu; }
};
struct StoredCodes {
  const uint16_t* at;
  __device__ __forceinline__ uint32_t operator()(int i) const { return at[i]; }
};

// Pairs of values in half precision.
struct RegisterHalves {
  __half2 v[LADDER_BLOCK / 2];
  __device__ __forceinline__ __half2 operator[](int i) const { return v[i]; }
};
template <typename In>
struct StoredHalves {
  const In* at;
  float factor;
  __device__ __forceinline__ __half2 operator[](int i) const {
    return __floats2half2_rn(at[2 * i].value() * factor, at[2 * i + 1].value() * factor);
  }
};

// Sixteen values in registers, and their codes in memory, all aligned to 16 bytes.
template <typename Type>
struct RegisterBlock {
  using In = Type;
  static constexpr int pairs = LADDER_BLOCK / 2;
  float v[LADDER_BLOCK];

  __device__ __forceinline__ RegisterBlock(const In* at, int) {
#pragma unroll
    for (int part = 0; part < LADDER_BLOCK / VECTOR; ++part) {
      Vector<In> held;
      held.load(at + part * VECTOR);
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) v[part * VECTOR + i] = held[i];
    }
  }
  __device__ __forceinline__ uint32_t amax() const {
    float most[pairs];
#pragma unroll
    for (int i = 0; i < pairs; ++i) most[i] = larger_size(v[i], v[i + pairs]);
#pragma unroll
    for (int half = pairs / 2; half > 0; half /= 2) {
#pragma unroll
      for (int i = 0; i < half; ++i) most[i] = larger_size(most[i], most[i + half]);
    }
    return float_bits(most[0]);
  }
  // Values over 2^unit.
  __device__ __forceinline__ RegisterHalves over(int unit) const {
    const float factor = exp2_int(-unit);
    RegisterHalves made;
#pragma unroll
    for (int i = 0; i < pairs; ++i) made.v[i] = __floats2half2_rn(v[2 * i] * factor, v[2 * i + 1] * factor);
    return made;
  }
};

template <>
struct RegisterBlock<Bf16> {
  using In = Bf16;
  static constexpr int pairs = LADDER_BLOCK / 2;
  PlainPairs<LADDER_BLOCK> of;

  __device__ __forceinline__ RegisterBlock(const In* at, int) {
#pragma unroll
    for (int part = 0; part < LADDER_BLOCK / VECTOR; ++part) {
      Vector<In> held;
      held.load(at + part * VECTOR);
#pragma unroll
      for (int i = 0; i < Vector<In>::WORDS; ++i) of.v[part * Vector<In>::WORDS + i] = held.words[i];
    }
  }
  __device__ __forceinline__ uint32_t amax() const { return of.amax(0); }
  __device__ __forceinline__ RegisterHalves over(int unit) const {
    RegisterHalves made;
    of.scaled(0, unit, made.v);
    return made;
  }
};

// Any even number of values, which stay in memory.
template <typename Type>
struct StoredBlock {
  using In = Type;
  const In* at;
  int pairs;

  __device__ __forceinline__ StoredBlock(const In* from, int width) : at(from), pairs(width / 2) {}
  __device__ __forceinline__ uint32_t amax() const {
    uint32_t bits = 0;
    for (int i = 0; i < 2 * pairs; ++i) bits = larger_magnitude(bits, at[i].value());
    return bits;
  }
  __device__ __forceinline__ StoredHalves<In> over(int unit) const { return {at, exp2_int(-unit)}; }
};

template <typename Type>
constexpr bool in_registers = false;
template <typename In>
constexpr bool in_registers<RegisterBlock<In>> = true;

template <typename Block>
__device__ __forceinline__ auto codes_of(const uint8_t* at) {
  if constexpr (in_registers<Block>) {
    const uint4 held = __ldg(reinterpret_cast<const uint4*>(at));
    return RegisterCodes{{held.x, held.y, held.z, held.w}};
  } else {
    return StoredCodes{reinterpret_cast<const uint16_t*>(at)};
  }
}

// Writes the codes of a block; code: of pair i.
template <typename Block, typename Code>
__device__ __forceinline__ void write_block(const Block& block, uint8_t* to, Code&& code) {
  if constexpr (in_registers<Block>) {
    uint32_t words[LADDER_BLOCK / 4];
#pragma unroll
    for (int w = 0; w < LADDER_BLOCK / 4; ++w) words[w] = code(2 * w) | code(2 * w + 1) << 16;
    *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
  } else {
    for (int i = 0; i < block.pairs; ++i) reinterpret_cast<uint16_t*>(to)[i] = static_cast<uint16_t>(code(i));
  }
}

// --- kernels ---------------------------------------------------------------------------------------------------------

struct Shape {
  int64_t rows;
  int columns, width;
};

// Calls the body with each row of this thread, which it shares with `sharers` threads.
template <typename Body>
__device__ __forceinline__ void for_rows(int64_t rows, int sharers, Body&& body) {
  const int each = static_cast<int>(blockDim.x) / sharers;
  const int64_t step = static_cast<int64_t>(gridDim.x) * each;
  int64_t row = static_cast<int64_t>(blockIdx.x) * each + threadIdx.x / sharers;
  for (; row < rows; row += step) body(row);
}

// By all threads of a block.
template <typename Block>
__device__ __forceinline__ uint32_t row_amax(const typename Block::In* from, const Shape& of, uint32_t* scratch) {
  uint32_t most = 0;
  for (int tile = threadIdx.x; tile < of.columns / of.width; tile += blockDim.x) {
    most = larger(most, Block(from + static_cast<int64_t>(tile) * of.width, of.width).amax());
  }
  return block_largest(most, scratch);
}

// tops: amax of rows, of which x may be a part, or nullptr: a thread block has a row and computes its amax.
template <typename Block, Candidates by>
__global__ void __launch_bounds__(32 * WARPS, 4)
    quantize_rows(const typename Block::In* __restrict__ x, const float* __restrict__ tops, uint8_t* __restrict__ codes,
                  float* __restrict__ scale, float* __restrict__ row_scale, Shape of, int span) {
  __shared__ LadderTables tables;
  __shared__ uint32_t scratch[WARPS];
  make_ladder_tables<by>(tables);
  __syncthreads();
  const int sharers = tops == nullptr ? static_cast<int>(blockDim.x) : 32, rank = threadIdx.x % sharers;
  const int tiles = of.columns / of.width;
  for_rows(of.rows, sharers, [&](int64_t number) {
    const int64_t first = number * of.columns;
    const uint32_t top = tops == nullptr ? row_amax<Block>(x + first, of, scratch) : magnitude_bits(tops[number]);
    const LadderRow row = ladder_row(top, span);
    if (rank == 0) row_scale[number] = ladder_scale(row);
    for (int tile = rank; tile < tiles; tile += sharers) {
      const int64_t at = first + static_cast<int64_t>(tile) * of.width;
      const Block block(x + at, of.width);
      const uint32_t amax = block.amax();
      const BlockRung rung = block_rung(amax, row.floor);
      const auto v = block.over(rung.step + LADDER_LOW);
      const int candidate = chosen_candidate<by>(v, block.pairs, rung, tables);
      const uint4 chosen = tables.chosen[candidate];
      const bool lost = span > 0 ? row.lost : amax >= INFINITE;
      scale[number * tiles + tile] = bits_float(lost ? 0x7fc00000u : chosen.z) * exp2_int(rung.step + LADDER_LOW);
      write_block(block, codes + at, [&](int i) {
        return lost ? 0x7f7fu : code_pair(e2m1_pair(v[i], chosen.x));
      });
    }
  });
}

__device__ __forceinline__ double warp_total(double value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  return value;
}

template <typename Block>
__global__ void __launch_bounds__(32 * WARPS, 4)
    sum_rows(const typename Block::In* __restrict__ x, const uint8_t* __restrict__ codes,
             const float* __restrict__ scale, const float* __restrict__ row_scale, double* __restrict__ sums, Shape of,
             int span) {
  const int lane = threadIdx.x & 31, tiles = of.columns / of.width;
  for_rows(of.rows, 32, [&](int64_t number) {
    const int step = exponent(row_scale[number]) + LADDER_TOP - LADDER_LOW;
    const float inverse = divide(1.0f, row_scale[number] * exp2_int(LADDER_TOP));
    const int floor = span == 0 ? 0 : max(step - span, 0);
    double own = 0.0, made = 0.0;
    for (int tile = lane; tile < tiles; tile += 32) {
      const int64_t at = number * of.columns + static_cast<int64_t>(tile) * of.width;
      const Block block(x + at, of.width);
      const auto code = codes_of<Block>(codes + at);
      const int up = block_rung(block.amax(), floor).step;
      const auto v = block.over(up + LADDER_LOW);
      Chain of_values, of_codes;
#pragma unroll 8
      for (int i = 0; i < block.pairs; ++i) {
        const __half2 each = __habs2(v[i]);
        const auto pair = static_cast<__nv_fp8x2_storage_t>(code(i));
        of_values.add(each, each);
        of_codes.add(each, __habs2(__half2(__nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3))));
      }
      const float times = exp2_int(min(max(up - step, -60), 60));
      own += truncf(of_values.sum() * times * times * SUM_UNITS);
      made += truncf(of_codes.sum() * times * (scale[number * tiles + tile] * inverse) * SUM_UNITS);
    }
    own = warp_total(own), made = warp_total(made);
    if (lane == 0) sums[2 * number] = own, sums[2 * number + 1] = made;
  });
}

// Carriers of two codes times a scale; what is too large becomes the largest number.
__device__ __forceinline__ uint32_t carrier_pair(uint32_t codes, float times) {
  const __half2 both = __half2(__nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes), __NV_E4M3));
  const float2 v = __half22float2(both);
  return __nv_cvt_float2_to_fp8x2(make_float2(v.x * times, v.y * times), __NV_SATFINITE, __NV_E4M3);
}

// whole: each sixteen codes are in one block, and are aligned. factor: or nullptr.
template <bool whole>
__global__ void __launch_bounds__(32 * WARPS)
    fold_rows(const uint8_t* __restrict__ codes, const float* __restrict__ scale, const float* __restrict__ row_scale,
              const float* __restrict__ factor, uint8_t* __restrict__ carriers, float* __restrict__ out, Shape of) {
  constexpr int each = whole ? LADDER_BLOCK : 1;
  const int lane = threadIdx.x & 31, tiles = of.columns / of.width;
  for_rows(of.rows, 32, [&](int64_t number) {
    const float row = row_scale[number], inverse = divide(1.0f, row);
    if (lane == 0) out[number] = factor == nullptr ? row : row * factor[number];
    for (int column = lane * each; column < of.columns; column += 32 * each) {
      const int64_t at = number * of.columns + column;
      const float times = scale[number * tiles + column / of.width] * inverse;
      if constexpr (whole) {
        const uint4 held = __ldg(reinterpret_cast<const uint4*>(codes + at));
        const auto word = [&](uint32_t of_four) {
          return carrier_pair(of_four & 0xffffu, times) | carrier_pair(of_four >> 16, times) << 16;
        };
        *reinterpret_cast<uint4*>(carriers + at) = make_uint4(word(held.x), word(held.y), word(held.z), word(held.w));
      } else {
        carriers[at] = static_cast<uint8_t>(carrier_pair(codes[at], times));
      }
    }
  });
}

// --- ops -------------------------------------------------------------------------------------------------------------

// Row-major, aligned to 16 bytes.
Tensor ready(const Tensor& given) {
  const Tensor x = dense(given);
  return aligned(x.const_data_ptr(), 16) ? x : torch::stable::clone(x);
}

Tensor floats(const Tensor& given) {
  return dense(given.scalar_type() == ScalarType::Float ? given : torch::stable::to(given, ScalarType::Float));
}

// Values in a type that kernels read: as `.float()` does, but for floats of 16 bits.
Tensor values(const Tensor& given) {
  const ScalarType type = given.scalar_type();
  return ready(type == ScalarType::BFloat16 || type == ScalarType::Half ? given : floats(given));
}

// Calls the body with the kind of block: body(BlockTag<RegisterBlock<Bf16>>{}).
template <typename Kind>
struct BlockTag {
  using Block = Kind;
};
template <typename Body>
void with_block(const Tensor& x, int64_t width, Body&& body) {
  with_input(x, [&](auto tag) {
    using In = typename decltype(tag)::Type;
    if (width == LADDER_BLOCK) return body(BlockTag<RegisterBlock<In>>{});
    body(BlockTag<StoredBlock<In>>{});
  });
}

// warps: of a thread block, which has `each` rows at a time.
template <typename Kernel, typename... Arguments>
void launch_rows(Kernel kernel, const Tensor& x, int64_t rows, int warps, int each, Arguments... arguments) {
  const int device = static_cast<int>(x.get_device_index());
  const int64_t blocks = resident_blocks(kernel, 32 * warps, 0, ceil_div(rows, each), device);
  kernel<<<blocks, 32 * warps, 0, stream_of(x)>>>(arguments...);
}

void check_width(int64_t width) {
  STD_TORCH_CHECK(width > 0 && width % 2 == 0, "blocks of an even number of elements, not of ", width);
}

std::tuple<Tensor, Tensor, Tensor> quantize_ladder(const Tensor& given, std::optional<Tensor> tops,
                                                   std::vector<int64_t> tile, std::string candidates, int64_t span) {
  const int64_t rows = rows_of(given), columns = given.size(1), width = ladder_width(rows, columns, tile);
  const Candidates by = parse<Candidates>("choice of a scale", CANDIDATE_NAMES, candidates);
  check_width(width);
  check_tops(tops, rows);
  const Tensor x = values(given);
  const Tensor codes = empty_like_device(x, {rows, columns}, ScalarType::Float8_e4m3fn);
  const Tensor scale = empty_like_device(x, {rows, columns / width}, ScalarType::Float);
  const Tensor row_scale = empty_like_device(x, {rows, 1}, ScalarType::Float);
  if (rows == 0) return {codes, scale, row_scale};
  const Tensor held = tops.has_value() ? floats(*tops) : x;  // must live until the kernel is launched
  const float* amax = tops.has_value() ? data_of<float>(held) : nullptr;
  const Shape of{rows, static_cast<int>(columns), static_cast<int>(width)};
  const int64_t needed = ceil_div(columns / width, 32);  // warps
  const int warps = tops.has_value() ? WARPS : static_cast<int>(std::min<int64_t>(needed, WARPS));
  with_block(x, width, [&](auto tag) {
    using Block = typename decltype(tag)::Block;
    with_choice(by, [&](auto choice) {
      launch_rows(quantize_rows<Block, decltype(choice)::value>, x, rows, warps, tops.has_value() ? WARPS : 1,
                  data_of<typename Block::In>(x), amax, mutable_data_of<uint8_t>(codes),
                  mutable_data_of<float>(scale), mutable_data_of<float>(row_scale), of,
                  static_cast<int>(span));
    });
  });
  check_launch("quantize_ladder");
  return {codes, scale, row_scale};
}

Tensor row_sums(const Tensor& given, const Tensor& codes_given, const Tensor& scale_given, const Tensor& row_given,
                int64_t span) {
  check_sums(given, codes_given, scale_given, row_given);
  STD_TORCH_CHECK(codes_given.scalar_type() == ScalarType::Float8_e4m3fn, "codes are E2M1 in float8_e4m3fn");
  const Tensor x = values(given), codes = ready(codes_given), scale = floats(scale_given), row = floats(row_given);
  const int64_t rows = rows_of(x), columns = x.size(1), width = columns / scale.size(1);
  check_width(width);
  const Tensor sums = empty_like_device(x, {rows, 2}, ScalarType::Double);
  if (rows == 0) return sums;
  const Shape of{rows, static_cast<int>(columns), static_cast<int>(width)};
  with_block(x, width, [&](auto tag) {
    using Block = typename decltype(tag)::Block;
    launch_rows(sum_rows<Block>, x, rows, WARPS, WARPS, data_of<typename Block::In>(x), data_of<uint8_t>(codes),
                data_of<float>(scale), data_of<float>(row), mutable_data_of<double>(sums), of, static_cast<int>(span));
  });
  check_launch("row_sums");
  return sums;
}

std::tuple<Tensor, Tensor> fold_ladder(const Tensor& codes_given, const Tensor& scale_given, const Tensor& row_given,
                                       std::optional<Tensor> factor) {
  check_scales(codes_given, scale_given, row_given);
  check_tops(factor, codes_given.size(0));
  STD_TORCH_CHECK(codes_given.scalar_type() == ScalarType::Float8_e4m3fn, "codes are E2M1 in float8_e4m3fn");
  const Tensor codes = ready(codes_given), scale = floats(scale_given), row = floats(row_given);
  const int64_t rows = rows_of(codes), columns = codes.size(1), width = columns / scale.size(1);
  const Tensor carriers = empty_like_device(codes, {rows, columns}, ScalarType::Float8_e4m3fn);
  const Tensor out = empty_like_device(row, {rows, 1}, ScalarType::Float);
  if (rows == 0) return {carriers, out};
  const Tensor held = factor.has_value() ? floats(*factor) : row;  // must live until the kernel is launched
  const Shape of{rows, static_cast<int>(columns), static_cast<int>(width)};
  launch_rows(width % LADDER_BLOCK == 0 ? fold_rows<true> : fold_rows<false>, codes, rows, WARPS, WARPS,
              data_of<uint8_t>(codes), data_of<float>(scale), data_of<float>(row),
              factor.has_value() ? data_of<float>(held) : nullptr,
              mutable_data_of<uint8_t>(carriers), mutable_data_of<float>(out), of);
  check_launch("fold_ladder");
  return {carriers, out};
}

}  // namespace
}  // namespace lowprec

STABLE_TORCH_LIBRARY_IMPL(lowprec, CUDA, m) {
  m.impl("quantize_ladder", TORCH_BOX(&lowprec::quantize_ladder));
  m.impl("row_sums", TORCH_BOX(&lowprec::row_sums));
  m.impl("fold_ladder", TORCH_BOX(&lowprec::fold_ladder));
}
