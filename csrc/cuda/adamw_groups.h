// AdamW on one group of any number of elements by one warp, with at least one expanded moment: the update is computed
// once for the extremes of the group and again to encode it. Supports all codecs and lengths; the faster
// adamw_expanded.cu supports the usual ones, and leaves groups with Inf or NaN to this code.
#pragma once

#include "cuda/adamw.h"

namespace lowprec {

#if defined(__CUDACC__)

// log2 of the codes of E4M3 and E5M2, in shared memory; filled by the first 256 threads of a block before a barrier.
struct CodeLogs {
  float of[2][128];
  __device__ __forceinline__ void fill() {
    const int code = threadIdx.x & 127;
    if (threadIdx.x < 256) of[threadIdx.x >> 7][code] = threadIdx.x < 128 ? code_log2<Format::E4M3>(code)
                                                                           : code_log2<Format::E5M2>(code);
  }
};

// Parameters to read one moment of a group and, once its extremes are known, to write it.
struct Coding {
  Store store;
  uint8_t* codes;
  const float* logs;
  float scale, log_scale, inverse, center;  // `scale` if not expanded
  Expansion to;
  bool finite;
  TileScale to_scale;

  __device__ __forceinline__ Coding(Store store, const StateTensors& held, int64_t index, const CodeLogs& table)
      : store(store), codes(static_cast<uint8_t*>(held.codes)), logs(table.of[store == Store::EXPANDED_E5M2]),
        scale(1.0f), log_scale(0.0f), inverse(1.0f), center(1.0f), to{}, finite(true), to_scale{1.0f, 1.0f} {
    if (expanded(store)) {
      log_scale = log2_float(held.scale[index]);
      inverse = divide(1.0f, held.exponent[index]);
      center = held.center[index];
    } else if (scaled(store)) {
      scale = *held.scale;
    }
  }
  __device__ __forceinline__ float read(int64_t at) const {
    if (!expanded(store)) return read_one(store, codes, at, scale);
    const uint8_t code = codes[at];
    return decode_expanded(code, logs[code & 0x7fu], log_scale, inverse, center);
  }
  __device__ __forceinline__ void aim(const Extremes& found, uint32_t maximum) {
    finite = found.largest < INFINITE;
    if (store == Store::EXPANDED_E4M3) to = expansion_of<Format::E4M3>(found.largest, found.smallest);
    if (store == Store::EXPANDED_E5M2) to = expansion_of<Format::E5M2>(found.largest, found.smallest);
    if (scaled(store)) to_scale = scale_of(store, maximum);
  }
  __device__ __forceinline__ void write(int64_t at, float x) const {
    if (store == Store::EXPANDED_E4M3) codes[at] = encode_expanded<Format::E4M3>(x, to, finite);
    else if (store == Store::EXPANDED_E5M2) codes[at] = encode_expanded<Format::E5M2>(x, to, finite);
    else write_one(store, codes, at, x, to_scale.inverse);
  }
  // Writes a first moment, which was `old`, with `decaying`.
  __device__ __forceinline__ void write(int64_t at, float x, float old, const How& how) const {
    write(at, x);
    if (!expanded(store)) decay_one(store, codes, at, x, old, to_scale.scale, how);
  }
  __device__ __forceinline__ void leave(const StateTensors& held, int64_t index) const {
    if (!expanded(store)) return;
    held.scale[index] = to.scale;
    held.exponent[index] = to.exponent;
    held.center[index] = to.center;
  }
};

// Statistics of a group: amax of the new state, of each lane separately; the sum of update_square.
struct Found {
  uint32_t amax[3] = {0, 0, 0};
  double squares = 0.0;
};

template <Pass pass>
__device__ __forceinline__ void step_group(const Item& item, const Numbers& numbers, const How& how,
                                           int64_t index, const CodeLogs& logs, Found& found) {
  const int64_t segment = index / item.per_segment, offset = (index - segment * item.per_segment) * how.group;
  const int64_t start = segment * item.length + offset, count = min(how.group, item.length - offset);
  const int lane = threadIdx.x & 31;
  Coding first(how.stores[0], item.moments[0], index, logs), second(how.stores[1], item.moments[1], index, logs);
  const AdamRate rate = numbers.rate;
  const float grad_scale = divisor(how), old_scale = scaled(how.master) ? *item.master_scale : 1.0f;
  Extremes firsts, seconds;
  for (int64_t at = start + lane; at < start + count; at += 32) {
    const float g = read_gradient(how, item, at, grad_scale);
    const float m = next_first(first.read(at), g, how.constants), v = next_second(second.read(at), g, how.constants);
    if constexpr (pass == Pass::SQUARES) {
      found.squares += static_cast<double>(update_square(g, v, numbers.correction2, how.floor));
    } else if constexpr (pass == Pass::AMAX) {
      found.amax[0] = larger_magnitude(found.amax[0], m);
      found.amax[1] = larger_magnitude(found.amax[1], v);
      if (!scaled(how.master)) continue;
      const float w = read_master(how, item, at, old_scale);
      found.amax[2] = larger_magnitude(found.amax[2], next_weight(w, m, v, how.constants, rate));
    } else {
      firsts.add(m);
      seconds.add(v);
    }
  }
  if constexpr (pass == Pass::UPDATE) {
    firsts.over_warp();
    seconds.over_warp();
    first.aim(firsts, numbers.amax[0]);
    second.aim(seconds, numbers.amax[1]);
    const bool draws = how.master == Master::FP16_STOCHASTIC || how.master == Master::BF16;
    const TileScale to = scaled(how.master) ? scale_of(Store::FP16, numbers.amax[2]) : TileScale{1.0f, 1.0f};
    for (int64_t at = start + lane; at < start + count; at += 32) {
      const float g = read_gradient(how, item, at, grad_scale), old = first.read(at);
      const float m = next_first(old, g, how.constants), v = next_second(second.read(at), g, how.constants);
      const float w = next_weight(read_master(how, item, at, old_scale), m, v, how.constants, rate);
      first.write(at, m, old, how);
      second.write(at, v);
      write_master(how, item, at, w, to, draws ? draw_of(numbers, at, item.columns) : 0u);
    }
    __syncwarp();
    if (lane == 0) {
      first.leave(item.moments[0], index);
      second.leave(item.moments[1], index);
    }
  }
}

#endif

}  // namespace lowprec
