// AdamW over moments expanded in groups of 128, FP32 weights: one pass. Eight lanes hold a group, sixteen elements each, so
// that what is made once a group is shared by sixteen; even lanes make the first moment's share of it, odd lanes the
// second's.
//
// It is bound by instructions, not by memory, so three things are made by other means than numerics/ does, to the same
// bits:
//
//   decoding   the power of two is added to the exponent's field; groups for which this could leave FP32's normal
//              numbers, or which are not finite, go to step_group
//   encoding   a code needs 3 bits of (|x| / A)^k M. The hardware's log2 and 2^x give y within d = 2^-16 + 2^-20 k of it
//              (below); where y (1 - d) and y (1 + d) round to the same code, that is the code, and where not, one in
//              some thousand, the exact formula decides
//   quotients  and roots by the steps that the compiler emits for correctly rounded ones, without its test of the
//   operands, which is made once for a lane's elements instead: outside the tested range, the correctly rounded operators
//
// The bound d, in logarithms, u = 2^-24, |k log2(x / A)| <= P = 31: the exact formula's own roundings, k (2 * 1.41 + 1) u
// + 2 P u; lg2.approx within 2^-22 absolutely or relatively, 4 k u + 4 P u; the sum's and its constant's roundings,
// P u + 1.2 k u + 24 u; ex2.approx, the polynomial and the products, 10 u. Together, times ln 2:
// 0.7 (7 P + 9 k + 34) u < 2^-16.5 + 2^-21.3 k.
#include "cuda/adamw_groups.h"
#include "cuda/adamw_kernels.h"

namespace lowprec {
namespace {

constexpr int THREADS = 256, WARPS = THREADS / 32, GROUP = 128, QUADS = 4;
constexpr uint32_t ALL = 0xffffffffu;

__device__ __forceinline__ float hardware_log2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float hardware_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

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

// Correctly rounded a / b from an inverse of b that is within a unit of its last place: no underflow on the way.
__device__ __forceinline__ float quotient_of(float a, float b, float inverse) {
  const float first = a * inverse, second = __fmaf_rn(__fmaf_rn(-b, first, a), inverse, first);
  return __fmaf_rn(__fmaf_rn(-b, second, a), inverse, second);
}

// log2 of the smallest and the largest code.
template <Format F>
constexpr float LOWEST = F == Format::E4M3 ? -9.0f : -16.0f;
template <Format F>
constexpr float HIGHEST = F == Format::E4M3 ? 8.807355f : 15.807355f;

// What a group's codes of one moment are decoded by.
struct Past {
  float log_scale, inverse, center;

  template <Format F>
  __device__ __forceinline__ bool ordinary() const {
    const float top = (HIGHEST<F> + log_scale) * inverse, bottom = (LOWEST<F> + log_scale) * inverse;
    return center >= 0x1p-120f && bottom > -240.0f && top + static_cast<float>(exponent(center)) < 125.0f;
  }
  // Of byte `i`; lane4: four times the lane, whose own copy of the table is read.
  template <bool SIGNED>
  __device__ __forceinline__ float value(uint32_t codes, int i, const char* logs, uint32_t lane4) const {
    const uint32_t row = (i == 0 ? codes << 7 : codes >> (8 * i - 7)) & 0x3f80u;
    const float log_code = *reinterpret_cast<const float*>(logs + (row | lane4));
    const float power = (log_code + log_scale) * inverse;
    const float moved = __fadd_rd(power + 0.5f, 0x1.8p23f), f = power - (moved - 0x1.8p23f);
    const float part = (exp2_poly(f) * f + 1.0f) * center;
    const int bits = max(static_cast<int>(float_bits(part) + (float_bits(moved) << 23)), static_cast<int>(SMALLEST_NORMAL));
    const uint32_t size = row == 0 ? 0u : static_cast<uint32_t>(bits);
    return bits_float(SIGNED ? size | ((codes << (24 - 8 * i)) & SIGN) : size);
  }
};

// What a group's new values of one moment are encoded by.
template <Format F>
struct Coming {
  float k, offset, stretch_by, band;
  int whole;  // of log2 of the largest magnitude
  float part;
  uint32_t doubtful;  // all ones: every code by the exact formula

  __device__ __forceinline__ void aim(const Expansion& to, uint32_t largest, uint32_t smallest) {
    constexpr float log_limit = HIGHEST<F>;
    k = to.exponent;
    whole = to.largest.whole;
    part = to.largest.part;
    offset = log_limit - k * part;
    band = 0x1p-16f + k * 0x1p-20f;
    const int span = static_cast<int>(largest >> 23) - static_cast<int>(smallest >> 23);
    const bool fits = whole >= -126 && whole <= 126 && (span <= 100 || smallest == INFINITE) && largest < INFINITE;
    stretch_by = exp2_int(fits ? -whole : 0);
    doubtful = fits ? 0u : largest < INFINITE ? 1u : 3u;  // 3: all codes are zeros
  }
  // Codes of four values.
  template <bool SIGNED>
  __device__ __forceinline__ uint32_t codes(float a, float b, float c, float d) const {
    const float x[4] = {a, b, c, d};
    float low[4], high[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float y = hardware_exp2(__fmaf_rn(k, hardware_log2(bits_float(magnitude_bits(x[i])) * stretch_by), offset));
      low[i] = y * (1.0f - band);
      high[i] = y * (1.0f + band);
    }
    uint32_t made = encode_fp8_pair<F>(low[0], low[1]) | encode_fp8_pair<F>(low[2], low[3]) << 16;
    uint32_t open = made ^ (encode_fp8_pair<F>(high[0], high[1]) | encode_fp8_pair<F>(high[2], high[3]) << 16);
    if (doubtful != 0) open = ALL;
    while (open != 0) {
      const int place = (__ffs(open) - 1) & ~7;
      const float value = place == 0 ? a : place == 8 ? b : place == 16 ? c : d;
      uint32_t code = 0;
      if (doubtful != 3) code = encode<F>(stretch<F>(bits_float(magnitude_bits(value)), k, Log2Parts{whole, part}));
      made = (made & ~(0xffu << place)) | code << place;
      open &= ~(0xffu << place);
    }
    if (!SIGNED) return made;
    const uint32_t ab = __byte_perm(float_bits(a), float_bits(b), 0x0073), cd = __byte_perm(float_bits(c), float_bits(d), 0x0073);
    return made | (__byte_perm(ab, cd, 0x5410) & 0x80808080u);
  }
};

template <Format F, bool BF16_GRADIENT>
__global__ void __launch_bounds__(THREADS, 2) step_expanded(const Item* __restrict__ items,
                                                            const Numbers* __restrict__ numbers, int count,
                                                            int64_t units, How how) {
  __shared__ __align__(16) float copies[128 * 32];
  __shared__ CodeLogs logs;
  if (skipped(how)) return;
  logs.fill();
  __syncthreads();
  for (int i = threadIdx.x; i < 128 * 32; i += THREADS) copies[i] = logs.of[F == Format::E5M2][i >> 5];
  __syncthreads();
  const char* table = reinterpret_cast<const char*>(copies);
  const int lane = threadIdx.x & 31, octet = lane >> 3, place = lane & 7;
  const bool odd = lane & 1;
  const float grad_scale = divisor(how);
  const AdamConstants constants = how.constants;
  int which = 0;
  for (int64_t unit = static_cast<int64_t>(blockIdx.x) * WARPS + (threadIdx.x >> 5); unit < units;
       unit += static_cast<int64_t>(gridDim.x) * WARPS) {
    while (which + 1 < count && items[which + 1].first <= unit) ++which;
    const Item& item = items[which];
    const int64_t index = (unit - item.first) * 4 + octet;
    int64_t start = index * GROUP;
    int here = GROUP;
    bool active;
    if (static_cast<int64_t>(item.per_segment) * GROUP == item.length) {
      active = start < item.numbers;
    } else {
      const uint32_t segment = static_cast<uint32_t>(index) / static_cast<uint32_t>(item.per_segment);
      const int64_t offset = (index - static_cast<int64_t>(segment) * item.per_segment) * GROUP;
      start = segment * item.length + offset;
      here = static_cast<int>(min(static_cast<int64_t>(GROUP), item.length - offset));
      active = start < item.numbers;
    }
    if (!active) here = 0;
    start += place * 4;
    // --- read ---
    const Held& mine = item.moments[odd];
    const float own_scale = active ? mine.scale[index] : 1.0f, own_exponent = active ? mine.exponent[index] : 1.0f;
    const float own_center = active ? mine.center[index] : 1.0f;
    float w[4 * QUADS], m[4 * QUADS], v[4 * QUADS];
    uint32_t first[QUADS], second[QUADS];
    uint2 raw[QUADS];
#pragma unroll
    for (int j = 0; j < QUADS; ++j) {
      const int64_t at = start + 32 * j;
      float4 p = make_float4(0.0f, 0.0f, 0.0f, 0.0f), g = p;
      first[j] = second[j] = 0;
      raw[j] = make_uint2(0, 0);
      if (32 * j + 4 * place < here) {
        p = *reinterpret_cast<const float4*>(static_cast<const float*>(item.parameter) + at);
        if (BF16_GRADIENT) raw[j] = *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(item.gradient) + at);
        else g = *reinterpret_cast<const float4*>(static_cast<const float*>(item.gradient) + at);
        first[j] = *reinterpret_cast<const uint32_t*>(static_cast<const uint8_t*>(item.moments[0].codes) + at);
        second[j] = *reinterpret_cast<const uint32_t*>(static_cast<const uint8_t*>(item.moments[1].codes) + at);
      }
      w[4 * j] = p.x, w[4 * j + 1] = p.y, w[4 * j + 2] = p.z, w[4 * j + 3] = p.w;
      m[4 * j] = g.x, m[4 * j + 1] = g.y, m[4 * j + 2] = g.z, m[4 * j + 3] = g.w;
    }
    // --- decode ---
    const Past own{log2_float(own_scale >= TINY ? own_scale : 1.0f), divide(1.0f, own_exponent), own_center};
    if (!__all_sync(ALL, own.ordinary<F>() && own_scale >= TINY)) {
      Found none;
      for (int i = 0; i < 4; ++i) {
        const int64_t of_warp = (unit - item.first) * 4 + i;
        if (of_warp < item.numbers / item.length * item.per_segment) {
          step_group<Pass::UPDATE>(item, numbers[which], how, of_warp, logs, none);
        }
      }
      continue;
    }
    const Past other{__shfl_xor_sync(ALL, own.log_scale, 1), __shfl_xor_sync(ALL, own.inverse, 1),
                     __shfl_xor_sync(ALL, own.center, 1)};
    const Past past_first = odd ? other : own, past_second = odd ? own : other;
    const AdamRate rate = numbers[which].rate;
    uint32_t low_first = ALL, high_first = 0, low_second = ALL, high_second = 0;  // bits - 1: zeros become the largest
#pragma unroll
    for (int j = 0; j < QUADS; ++j) {
      const bool there = 32 * j + 4 * place < here;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float g = m[4 * j + i];
        if (BF16_GRADIENT) {
          const uint32_t word = i < 2 ? raw[j].x : raw[j].y;
          g = bits_float(i & 1 ? word & 0xffff0000u : word << 16);
        }
        if (grad_scale != 1.0f) g = divide(g, grad_scale);
        const float new_m = next_first(past_first.value<true>(first[j], i, table, 4 * lane), g, constants);
        const float new_v = next_second(past_second.value<false>(second[j], i, table, 4 * lane), g, constants);
        m[4 * j + i] = new_m;
        v[4 * j + i] = new_v;
        if (there) {
          const uint32_t size_m = magnitude_bits(new_m) - 1u, size_v = magnitude_bits(new_v) - 1u;
          low_first = min(low_first, size_m), high_first = max(high_first, size_m);
          low_second = min(low_second, size_v), high_second = max(high_second, size_v);
        }
      }
    }
    // --- weights ---
    const float least = bits_float(low_first + 1u) * rate.step_size, most = bits_float(high_first + 1u) * rate.step_size;
    const bool regular = high_first < INFINITE - 1u && high_second < float_bits(0x1p20f) &&
                         low_first >= SMALLEST_NORMAL && low_second >= float_bits(0x1p-100f) && least >= 0x1p-80f &&
                         most <= 0x1p60f && rate.root >= 0x1p-10f && rate.root <= 1.0f && constants.eps >= 0x1p-60f &&
                         constants.eps <= 0x1p10f;
    Extremes firsts, seconds;
    if (regular) {
      const float inverse_root = divide(1.0f, rate.root);
#pragma unroll
      for (int i = 0; i < 4 * QUADS; ++i) {
        const float b = quotient_of(root_of(v[i]), rate.root, inverse_root) + constants.eps;
        const float rough = hardware_inverse(b), inverse = __fmaf_rn(__fmaf_rn(-b, rough, 1.0f), rough, rough);
        w[i] = w[i] * rate.decay - quotient_of(m[i] * rate.step_size, b, inverse);
      }
      firsts.largest = high_first + 1u, firsts.smallest = low_first + 1u;
      seconds.largest = high_second + 1u, seconds.smallest = low_second + 1u;
    } else {
#pragma unroll
      for (int j = 0; j < QUADS; ++j) {
        if (32 * j + 4 * place >= here) continue;
#pragma unroll
        for (int i = 4 * j; i < 4 * j + 4; ++i) {
          w[i] = next_weight(w[i], m[i], v[i], constants, rate);
          firsts.add(m[i]);
          seconds.add(v[i]);
        }
      }
    }
    __syncwarp();
    // --- the groups' new extremes: even lanes take the first moment's, odd lanes the second's ---
    Extremes kept = odd ? seconds : firsts, sent = odd ? firsts : seconds;
    kept.largest = max(kept.largest, __shfl_xor_sync(ALL, sent.largest, 1));
    kept.smallest = min(kept.smallest, __shfl_xor_sync(ALL, sent.smallest, 1));
#pragma unroll
    for (int step = 2; step < 8; step <<= 1) {
      kept.largest = max(kept.largest, __shfl_xor_sync(ALL, kept.largest, step));
      kept.smallest = min(kept.smallest, __shfl_xor_sync(ALL, kept.smallest, step));
    }
    const Expansion made = expansion_of<F>(kept.largest, kept.smallest);
    if (active && place < 2) {
      mine.scale[index] = made.scale;
      mine.exponent[index] = made.exponent;
      mine.center[index] = made.center;
    }
    // --- encode and write ---
    Coming<F> coming;
    coming.aim(made, kept.largest, kept.smallest);
    Coming<F> to[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int from = (lane & ~7) + i;
      to[i].k = __shfl_sync(ALL, coming.k, from);
      to[i].offset = __shfl_sync(ALL, coming.offset, from);
      to[i].stretch_by = __shfl_sync(ALL, coming.stretch_by, from);
      to[i].band = __shfl_sync(ALL, coming.band, from);
      to[i].whole = __shfl_sync(ALL, coming.whole, from);
      to[i].part = __shfl_sync(ALL, coming.part, from);
      // What counts as zero could be stretched to a code: its lane takes the exact formula.
      const uint32_t low = i == 0 ? low_first : low_second;
      to[i].doubtful = __shfl_sync(ALL, coming.doubtful, from) | (low < SMALLEST_NORMAL - 1u ? 1u : 0u);
    }
#pragma unroll
    for (int j = 0; j < QUADS; ++j) {
      if (32 * j + 4 * place >= here) continue;
      const int64_t at = start + 32 * j;
      const float* a = w + 4 * j;
      *reinterpret_cast<float4*>(static_cast<float*>(item.parameter) + at) = make_float4(a[0], a[1], a[2], a[3]);
      a = m + 4 * j;
      *reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(item.moments[0].codes) + at) =
          to[0].template codes<true>(a[0], a[1], a[2], a[3]);
      a = v + 4 * j;
      *reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(item.moments[1].codes) + at) =
          to[1].template codes<false>(a[0], a[1], a[2], a[3]);
    }
  }
}

template <Format F>
void launch(const Table& table, const How& how, cudaStream_t stream) {
  const auto kernel = how.bf16_gradient ? step_expanded<F, true> : step_expanded<F, false>;
  const int64_t blocks = ceil_div(table.units, WARPS), most = 132 * 2;
  kernel<<<blocks < most ? blocks : most, THREADS, 0, stream>>>(table.items, table.numbers, table.count, table.units, how);
  check_launch("adamw");
}

}  // namespace

bool fits_expanded(const Item& item, const How& how) {
  return how.stores[0] == how.stores[1] && expanded(how.stores[0]) && how.master == Master::FP32 && how.group == GROUP &&
         item.aligned && item.length % 4 == 0 && item.numbers / item.length * item.per_segment < INT32_MAX;
}

int64_t expanded_units(const Item& item, const How&) {
  return ceil_div(item.numbers / item.length * item.per_segment, 4);
}

void launch_expanded(const Table& table, const How& how, cudaStream_t stream) {
  if (how.stores[0] == Store::EXPANDED_E4M3) launch<Format::E4M3>(table, how, stream);
  else launch<Format::E5M2>(table, how, stream);
}

}  // namespace lowprec
