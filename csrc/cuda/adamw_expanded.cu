// AdamW for moments expanded in groups of 128 and weights in FP32 or in BF16 with stochastic rounding, in one pass: a
// warp per eight groups, four lanes per group. Each lane decodes and updates eight elements at a time, writes their
// weights, and stores the new moments in shared memory. When the extremes of the groups are known, each of 16 lanes
// computes the encoding parameters of one moment of one group, and the moments are read again. So work per group is
// shared by 128 elements, and the loops are short, so that six warps per scheduler run from the instruction cache.
//
// The kernel is bound by instructions, not by memory: about 120 per element, of which decoding takes 47 and encoding
// 19, both by approximations with the bits of numerics/ (approx_encode.h). BF16 weights add the rounding and one call
// of Philox per eight elements. Quotients and roots are products with an inverse and a correction. They need operands
// in a range, which is tested once for four elements; outside it the kernel uses the correctly rounded operators.
//
// One correction is enough for a quotient: with y the correctly rounded inverse of b, the error of q = a y is below 1.5
// units of its last place, so that a - b q is almost exact. The corrected sum is wrong by at most 2^-22 units before it
// is rounded, which matters only if a / b is that close to the midpoint of two numbers. Then q is one of these two, the
// correction is half a unit, and its error is below the distance to the midpoint, at least 2^-24 / b units for
// 1 <= b < 2. The quotients of all such a and b were tested.
#include <algorithm>

#include "cuda/adamw_groups.h"
#include "cuda/adamw_kernels.h"
#include "cuda/approx_encode.h"

namespace lowprec {
namespace {

constexpr int MOST_THREADS = 768, GROUP = 128, GROUPS = 8;
constexpr int EACH = 8, TURNS = GROUP / 4 / EACH;  // elements of a lane per turn
constexpr uint32_t ALL = 0xffffffffu;

__device__ __forceinline__ float hardware_inverse(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float hardware_inverse_root(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Correctly rounded root of 2^-100 <= x <= 2^20.
__device__ __forceinline__ float root_of(float x) {
  const float inverse = hardware_inverse_root(x), s = x * inverse;
  return __fmaf_rn(__fmaf_rn(-s, s, x), 0.5f * inverse, s);
}

// Correctly rounded inverse of a number from 2^-100 to 2^100, by the instructions that the compiler emits for it.
__device__ __forceinline__ float inverse_of(float b) {
  const float rough = hardware_inverse(b);
  return __fmaf_rn(__fmaf_rn(-b, rough, 1.0f), rough, rough);
}

// Correctly rounded a / b from the correctly rounded inverse of b; needs operands without intermediate underflow.
__device__ __forceinline__ float quotient_of(float a, float b, float inverse) {
  const float q = a * inverse;
  return __fmaf_rn(__fmaf_rn(-b, q, a), inverse, q);
}

__device__ __forceinline__ float larger_of(float a, float b) {  // of a and |b|; NaN propagates
  float made;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(made) : "f"(a), "f"(fabsf(b)));
  return made;
}

// Shared memory of a warp.
struct Work {
  float4 moments[TURNS][2][EACH / 4][32];
  union {
    DecodeParams past[GROUPS][2];
    EncodeParams coming[GROUPS][2];
  };
};
constexpr int TABLE = 128 * 32 * sizeof(float);

// A group of the matrix. For an index beyond the last, `written` is 0 and the rest describes an existing group.
struct Span {
  int64_t index, start;
  int count, written;
};

__device__ __forceinline__ Span locate(const Item& item, int64_t index) {
  Span made{index, index * GROUP, GROUP, 0};
  if (static_cast<int64_t>(item.per_segment) * GROUP != item.length) {
    const uint32_t segment = static_cast<uint32_t>(index) / static_cast<uint32_t>(item.per_segment);
    const int64_t offset = (index - static_cast<int64_t>(segment) * item.per_segment) * GROUP;
    made.start = segment * item.length + offset;
    made.count = static_cast<int>(min(static_cast<int64_t>(GROUP), item.length - offset));
  }
  if (made.start < item.numbers) made.written = made.count;
  else made.index = made.start = 0, made.count = EACH;
  return made;
}

// Constants of the weight update, and the range in which quotients and roots need no test.
struct Step {
  AdamRate rate;
  AdamConstants constants;
  float grad_scale, inverse_root, least, most;

  __device__ __forceinline__ Step(const AdamRate& rate, const AdamConstants& constants, float grad_scale)
      : rate(rate), constants(constants), grad_scale(grad_scale), inverse_root(divide(1.0f, rate.root)) {
    const bool regular = rate.root >= 0x1p-10f && rate.root <= 1.0f && constants.eps >= 0x1p-60f &&
                         constants.eps <= 0x1p10f && rate.step_size >= 0x1p-100f && rate.step_size <= 0x1p60f;
    const float inverse = hardware_inverse(rate.step_size);
    least = regular ? fmaxf(0x1p-79f * inverse, TINY) : bits_float(INFINITE);
    most = fminf(0x1p59f * inverse, Grid<Format::FP32>::max);
    asm volatile("" : "+f"(inverse_root), "+f"(least), "+f"(most));  // computed here, not at each use
  }
};

// Extremes of a lane's new moments. tiny: bits 0 and 1 are set if a non-zero element of that moment is below 2^-126.
struct Gathered {
  float low[2] = {bits_float(INFINITE), bits_float(INFINITE)}, high[2] = {0.0f, 0.0f};
  uint32_t tiny = 0;
};

// Updates four elements in place: w, m, v become the new weights and moments.
template <bool PLAIN>
__device__ __forceinline__ void step_four(float (&w)[4], const float (&g)[4], float (&m)[4], float (&v)[4],
                                          uint32_t first, uint32_t second, const DecodeParams& past_first,
                                          const DecodeParams& past_second, const Step& step, const char* table,
                                          Gathered& found) {
  const uint32_t lane4 = 4 * (threadIdx.x & 31);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    m[i] = next_first(past_first.value<true, PLAIN>(first, i, table, lane4), g[i], step.constants);
    v[i] = next_second(past_second.value<false, PLAIN>(second, i, table, lane4), g[i], step.constants);
  }
  float low_m = fabsf(m[0]), high_m = low_m, low_v = v[0], high_v = low_v;
#pragma unroll
  for (int i = 1; i < 4; ++i) {
    low_m = fminf(low_m, fabsf(m[i])), high_m = larger_of(high_m, m[i]);
    low_v = fminf(low_v, v[i]), high_v = larger_of(high_v, v[i]);
  }
  found.high[0] = larger_of(found.high[0], high_m), found.high[1] = larger_of(found.high[1], high_v);
  if (low_m >= step.least && high_m <= step.most && low_v >= 0x1p-100f && high_v <= 0x1p20f) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float b = quotient_of(root_of(v[i]), step.rate.root, step.inverse_root) + step.constants.eps;
      w[i] = w[i] * step.rate.decay - quotient_of(m[i] * step.rate.step_size, b, inverse_of(b));
    }
    found.low[0] = fminf(found.low[0], low_m), found.low[1] = fminf(found.low[1], low_v);
    return;
  }
#pragma unroll 1
  for (int i = 0; i < 4; ++i) {
    const float size = fabsf(m[0]), next[3] = {next_weight(w[0], m[0], v[0], step.constants, step.rate), m[0], v[0]};
    if (size >= TINY) found.low[0] = fminf(found.low[0], size);
    if (v[0] >= TINY) found.low[1] = fminf(found.low[1], v[0]);
    found.tiny |= (size < TINY && size > 0.0f ? 1u : 0u) | (v[0] < TINY && v[0] > 0.0f ? 2u : 0u);
#pragma unroll
    for (int j = 0; j < 3; ++j) w[j] = w[j + 1], m[j] = m[j + 1], v[j] = v[j + 1];
    w[3] = next[0], m[3] = next[1], v[3] = next[2];
  }
}

__device__ __forceinline__ void spread(float (&to)[2][4], const float4& a, const float4& b) {
  to[0][0] = a.x, to[0][1] = a.y, to[0][2] = a.z, to[0][3] = a.w;
  to[1][0] = b.x, to[1][1] = b.y, to[1][2] = b.z, to[1][3] = b.w;
}

// Encodes a group, divided among four lanes: reads new moments from shared memory and uses the group's new parameters.
template <Format F>
__device__ __forceinline__ void encode_group(const Work& work, int quartet, int own, int written, uint32_t tiny,
                                             uint8_t* of_first, uint8_t* of_second) {
  const int lane = threadIdx.x & 31;
  const EncodeParams* to = work.coming[quartet];
  const float4 a = *reinterpret_cast<const float4*>(to), b = *reinterpret_cast<const float4*>(to + 1);
  // A value that counts as zero could be expanded to a code: its lane uses the exact formula.
  const uint32_t all_first = to[0].doubtful | (tiny & 1u) ? ALL : 0u;
  const uint32_t all_second = to[1].doubtful | (tiny & 2u) ? ALL : 0u;
  of_first += own, of_second += own;
#pragma unroll 1
  for (int turn = 0; turn < TURNS; ++turn, of_first += 4 * EACH, of_second += 4 * EACH) {
    uint32_t codes[2][2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float4 *at_m = &work.moments[turn][0][i][lane], *at_v = &work.moments[turn][1][i][lane];
      const float4 m = *at_m;
      uint32_t open_first, open_second;
      uint32_t made_first = approx_encode<F>(m, a.x, a.y, a.z, a.w, open_first);
      uint32_t made_second = approx_encode<F>(*at_v, b.x, b.y, b.z, b.w, open_second);
      open_first |= all_first, open_second |= all_second;
      if ((open_first | open_second) != 0) {
        made_first = exact_fallback<F>(made_first, open_first, &at_m->x, to[0]);
        made_second = exact_fallback<F>(made_second, open_second, &at_v->x, to[1]);
      }
      const uint32_t high = __byte_perm(float_bits(m.z), float_bits(m.w), 0x7300);
      const uint32_t signs = __byte_perm(__byte_perm(float_bits(m.x), float_bits(m.y), 0x0073), high, 0x7610);
      codes[0][i] = made_first | (signs & 0x80808080u);
      codes[1][i] = made_second;
    }
    if (turn * 4 * EACH + own < written) {
      __stcs(reinterpret_cast<uint2*>(of_first), make_uint2(codes[0][0], codes[0][1]));
      __stcs(reinterpret_cast<uint2*>(of_second), make_uint2(codes[1][0], codes[1][1]));
    }
  }
}

// Eight BF16 values as FP32.
__device__ __forceinline__ void widen(float (&to)[2][4], const uint4& of) {
  const uint32_t words[4] = {of.x, of.y, of.z, of.w};
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    to[i >> 2][i & 3] = bits_float(i & 1 ? words[i >> 1] & 0xffff0000u : words[i >> 1] << 16);
  }
}

__device__ __noinline__ uint32_t exact_stochastic(float v, uint32_t bits) {
  return static_cast<uint32_t>(encode_stochastic<Format::BF16>(v, bits)) << 16;
}

// Weights of a kernel: `BF16` are rounded stochastically, and may be held in FP32 parameters.
template <bool BF16>
struct Weights {
  __device__ __forceinline__ Weights(const Item& item, const Numbers&, const How&, const Span& span)
      : of(static_cast<float*>(item.parameter) + span.start) {}
  __device__ __forceinline__ void read(int at, float (&w)[2][4]) const {
    const float4* from = reinterpret_cast<const float4*>(of + at);
    spread(w, __ldcs(from), __ldcs(from + 1));
  }
  __device__ __forceinline__ void write(int at, const float (&w)[2][4]) const {
    float4* to = reinterpret_cast<float4*>(of + at);
    __stcs(to, make_float4(w[0][0], w[0][1], w[0][2], w[0][3]));
    __stcs(to + 1, make_float4(w[1][0], w[1][1], w[1][2], w[1][3]));
  }
  float* of;
};

template <>
struct Weights<true> {
  __device__ __forceinline__ Weights(const Item& item, const Numbers& numbers, const How& how, const Span& span)
      : seed(numbers.seed), wide(how.fp32_parameter) {
    const uint32_t here = static_cast<uint32_t>(span.index) / static_cast<uint32_t>(item.per_row);  // row of the shard
    row = static_cast<uint32_t>(here + numbers.origin[0]);
    column = static_cast<uint32_t>(span.start - here * item.columns + numbers.origin[1]);
    of = static_cast<uint8_t*>(item.parameter) + span.start * (wide ? 4 : 2);
  }
  __device__ __forceinline__ void read(int at, float (&w)[2][4]) const {
    if (wide) {
      const float4* from = reinterpret_cast<const float4*>(of) + at / 4;
      spread(w, __ldcs(from), __ldcs(from + 1));
    } else {
      widen(w, __ldcs(reinterpret_cast<const uint4*>(of) + at / 8));
    }
  }
  __device__ __forceinline__ void write(int at, const float (&w)[2][4]) const {
    const Words random = random_words(seed, row, (column + at) >> 3);
    uint32_t rounded[EACH];  // BF16 in the upper half of a word
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const float value = w[i >> 2][i & 3];
      rounded[i] = bf16_stochastic(value, bits_of(random, i));
      if (!drops_half(value)) rounded[i] = exact_stochastic(value, bits_of(random, i));
    }
    uint32_t words[EACH / 2];
#pragma unroll
    for (int i = 0; i < EACH; i += 2) words[i / 2] = __byte_perm(rounded[i], rounded[i + 1], 0x7632);
    if (!wide) return __stcs(reinterpret_cast<uint4*>(of) + at / 8, make_uint4(words[0], words[1], words[2], words[3]));
    float4* to = reinterpret_cast<float4*>(of) + at / 4;
    float values[2][4];
    widen(values, make_uint4(words[0], words[1], words[2], words[3]));
    __stcs(to, make_float4(values[0][0], values[0][1], values[0][2], values[0][3]));
    __stcs(to + 1, make_float4(values[1][0], values[1][1], values[1][2], values[1][3]));
  }
  uint64_t seed;
  uint8_t* of;
  uint32_t row, column;
  bool wide;
};

template <Format F, bool BF16_GRADIENT, bool BF16_WEIGHTS>
__global__ void __launch_bounds__(MOST_THREADS, 1) step_expanded(const Item* __restrict__ items,
                                                            const Numbers* __restrict__ numbers, int count,
                                                            int64_t units, How how) {
  extern __shared__ __align__(16) uint8_t shared[];
  __shared__ CodeLogs logs;
  logs.fill();
  __syncthreads();
  float* copies = reinterpret_cast<float*>(shared);  // one per lane
  for (int i = threadIdx.x; i < 128 * 32; i += blockDim.x) copies[i] = logs.of[F == Format::E5M2][i >> 5];
  __syncthreads();
  const char* table = reinterpret_cast<const char*>(copies);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, quartet = lane >> 2, own = EACH * (lane & 3);
  Work& work = reinterpret_cast<Work*>(shared + TABLE)[warp];
  const int side = lane & 1;  // the moment whose parameters this lane computes
  const float grad_scale = divisor(how);
  int which = 0;
  for (int64_t unit = static_cast<int64_t>(warp) * gridDim.x + blockIdx.x; unit < units;
       unit += static_cast<int64_t>(gridDim.x) * (blockDim.x >> 5)) {
    while (which + 1 < count && items[which + 1].first <= unit) ++which;
    const Item& item = items[which];
    if (skipped(item)) continue;
    const int64_t group = (unit - item.first) * GROUPS;
    const Span span = locate(item, group + quartet);
    const StateTensors& mine = item.moments[side];
    const float own_scale = mine.scale[span.index], own_exponent = mine.exponent[span.index];
    DecodeParams past{log2_float(own_scale >= TINY ? own_scale : 1.0f), divide(1.0f, own_exponent),
                      mine.center[span.index], 0};
    if (!__all_sync(ALL, past.ordinary<F>(own_scale))) {
      Found none;
#pragma unroll 1
      for (int i = 0; i < GROUPS; ++i) {
        if (locate(item, group + i).written > 0) {
          step_group<Pass::UPDATE>(item, numbers[which], how, group + i, logs, none);
        }
      }
      continue;
    }
    __syncwarp();  // all lanes have read the parameters of the previous unit
    if ((lane & 2) == 0) work.past[quartet][side] = past;
    __syncwarp();
    const DecodeParams past_first = work.past[quartet][0], past_second = work.past[quartet][1];
    const Step step(numbers[which].rate, how.constants, grad_scale);
    // --- decode, update ---
    Gathered found;
    const uint32_t plain = past_first.plain & past_second.plain;
    const Weights<BF16_WEIGHTS> weights(item, numbers[which], how, span);
    const auto* gradient = static_cast<const uint8_t*>(item.gradient) + span.start * (BF16_GRADIENT ? 2 : 4);
    auto* of_first = static_cast<uint8_t*>(item.moments[0].codes) + span.start;
    auto* of_second = static_cast<uint8_t*>(item.moments[1].codes) + span.start;
#pragma unroll 1
    for (int turn = 0; turn < TURNS; ++turn) {
      const int at = min(turn * 4 * EACH + own, span.count - EACH);  // beyond the end: repeat the last elements
      const uint2 first = __ldcs(reinterpret_cast<const uint2*>(of_first + at));
      const uint2 second = __ldcs(reinterpret_cast<const uint2*>(of_second + at));
      float w[2][4], g[2][4], m[2][4], v[2][4];
      if constexpr (BF16_GRADIENT) {
        widen(g, __ldcs(reinterpret_cast<const uint4*>(gradient + 2 * at)));
      } else {
        const float4* from = reinterpret_cast<const float4*>(gradient + 4 * at);
        spread(g, __ldcs(from), __ldcs(from + 1));
      }
      weights.read(at, w);
      if (step.grad_scale != 1.0f) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) g[i >> 2][i & 3] = divide(g[i >> 2][i & 3], step.grad_scale);
      }
      uint32_t present = 0x80808080u;
#pragma unroll
      for (const uint32_t word : {first.x, first.y, second.x, second.y}) present &= (word & 0x7f7f7f7fu) + 0x7f7f7f7fu;
      if (__all_sync(ALL, present == 0x80808080u && plain)) {
        step_four<true>(w[0], g[0], m[0], v[0], first.x, second.x, past_first, past_second, step, table, found);
        step_four<true>(w[1], g[1], m[1], v[1], first.y, second.y, past_first, past_second, step, table, found);
      } else {
        step_four<false>(w[0], g[0], m[0], v[0], first.x, second.x, past_first, past_second, step, table, found);
        step_four<false>(w[1], g[1], m[1], v[1], first.y, second.y, past_first, past_second, step, table, found);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        work.moments[turn][0][i][lane] = make_float4(m[i][0], m[i][1], m[i][2], m[i][3]);
        work.moments[turn][1][i][lane] = make_float4(v[i][0], v[i][1], v[i][2], v[i][3]);
      }
      if (turn * 4 * EACH + own < span.written) weights.write(at, w);
    }
    __syncwarp();
    // --- new parameters of the groups: even lanes for the first moment, odd lanes for the second ---
    uint32_t high = float_bits(side ? found.high[1] : found.high[0]);
    uint32_t low = float_bits(side ? found.low[1] : found.low[0]);
    high = max(high, __shfl_xor_sync(ALL, float_bits(side ? found.high[0] : found.high[1]), 1));
    low = min(low, __shfl_xor_sync(ALL, float_bits(side ? found.low[0] : found.low[1]), 1));
    high = max(high, __shfl_xor_sync(ALL, high, 2));
    low = min(low, __shfl_xor_sync(ALL, low, 2));
    const Expansion made = expansion_of<F>(high, low);
    EncodeParams coming{};
    coming.aim<F>(made, high, low);
    if ((lane & 2) == 0) {
      work.coming[quartet][side] = coming;
      if (span.written > 0) {
        mine.scale[span.index] = made.scale;
        mine.exponent[span.index] = made.exponent;
        mine.center[span.index] = made.center;
      }
    }
    __syncwarp();
    encode_group<F>(work, quartet, own, span.written, found.tiny, of_first, of_second);
  }
}

template <Format F>
void launch(const Table& table, const How& how, cudaStream_t stream) {
  const auto kernel = how.master == Master::BF16
                          ? (how.bf16_gradient ? step_expanded<F, true, true> : step_expanded<F, false, true>)
                          : (how.bf16_gradient ? step_expanded<F, true, false> : step_expanded<F, false, false>);
  int device = 0, multiprocessors = 0, most = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  const int fit = (most - TABLE - static_cast<int>(sizeof(CodeLogs))) / static_cast<int>(sizeof(Work));
  const int warps = std::min(fit, MOST_THREADS / 32), shared = TABLE + warps * static_cast<int>(sizeof(Work));
  const int blocks = static_cast<int>(std::min<int64_t>(table.units, multiprocessors));
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  kernel<<<blocks, 32 * warps, shared, stream>>>(table.items, table.numbers, table.count, table.units, how);
  check_launch("adamw");
}

}  // namespace

bool fits_expanded(const Item& item, const How& how) {
  return how.stores[0] == how.stores[1] && expanded(how.stores[0]) && !scaled(how.master) &&
         how.group == GROUP && item.aligned && item.length % EACH == 0 &&
         item.numbers / item.length * item.per_segment < INT32_MAX;
}

int64_t expanded_units(const Item& item, const How&) {
  return ceil_div(item.numbers / item.length * item.per_segment, GROUPS);
}

void launch_expanded(const Table& table, const How& how, cudaStream_t stream) {
  if (how.stores[0] == Store::EXPANDED_E4M3) launch<Format::E4M3>(table, how, stream);
  else launch<Format::E5M2>(table, how, stream);
}

}  // namespace lowprec
