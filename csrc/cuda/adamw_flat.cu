// Passes of the fused AdamW for moments that are cast or have one scale per tensor: eight neighbouring elements per
// thread, in 16-byte accesses if the arrays are aligned.
#include "cuda/adamw_kernels.h"

namespace lowprec {
namespace {

constexpr int THREADS = 256, TURNS = 4;
constexpr int64_t SHARE = THREADS * VECTOR * TURNS;  // elements of a block

// Reads `count` of eight elements; `whole`: all eight exist and are aligned.
template <typename In>
__device__ __forceinline__ void read_floats(const void* data, int64_t at, int count, bool whole, float scale,
                                            float (&v)[VECTOR]) {
  Vector<In> held;
  const In* from = static_cast<const In*>(data) + at;
  if (whole) held.load(from);
  else held.load_some(from, count);
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) v[i] = std::is_same_v<In, Fp16> ? held[i] * scale : held[i];
}

__device__ __forceinline__ void read_bytes(const void* data, int64_t at, int count, bool whole, float scale,
                                           __nv_fp8_interpretation_t kind, float (&v)[VECTOR]) {
  const uint8_t* from = static_cast<const uint8_t*>(data) + at;
  uint32_t words[2] = {0, 0};
  if (whole) {
    const uint2 both = *reinterpret_cast<const uint2*>(from);
    words[0] = both.x, words[1] = both.y;
  } else {
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
      if (i < count) words[i >> 2] |= static_cast<uint32_t>(from[i]) << (8 * (i & 3));
    }
  }
#pragma unroll
  for (int i = 0; i < VECTOR; i += 2) {
    const auto two = static_cast<__nv_fp8x2_storage_t>(words[i >> 2] >> (8 * (i & 3)));
    const float2 values = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(two, kind)));
    v[i] = values.x * scale, v[i + 1] = values.y * scale;
  }
}

__device__ __forceinline__ void read_eight(Store store, const void* data, int64_t at, int count, bool whole, float scale,
                                           float (&v)[VECTOR]) {
  switch (store) {
    case Store::FP32:
      return read_floats<Fp32>(data, at, count, whole, scale, v);
    case Store::BF16:
      return read_floats<Bf16>(data, at, count, whole, scale, v);
    case Store::FP16:
      return read_floats<Fp16>(data, at, count, whole, scale, v);
    case Store::E4M3:
      return read_bytes(data, at, count, whole, scale, __NV_E4M3, v);
    default:
      return read_bytes(data, at, count, whole, scale, __NV_E5M2, v);
  }
}

template <Format F>
__device__ __forceinline__ void keep(const Codes<F>& codes, void* data, int64_t at, int count, bool whole) {
  auto* to = static_cast<typename Grid<F>::Code*>(data) + at;
  if (whole) codes.store_all(to);
  else codes.store_some(to, count);
}

__device__ __forceinline__ void write_eight(Store store, void* data, int64_t at, int count, bool whole, float inverse,
                                            const float (&x)[VECTOR]) {
  if (store == Store::FP32) {
    Codes<Format::FP32> codes;
    codes.encode_nearest(x);
    keep(codes, data, at, count, whole);
  } else if (store == Store::BF16) {
    Codes<Format::BF16> codes;
    codes.encode_nearest(x);
    keep(codes, data, at, count, whole);
  } else if (store == Store::FP16) {
    Codes<Format::FP16> codes;
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) codes.put(i, write_fp16(x[i] * inverse));
    keep(codes, data, at, count, whole);
  } else {
    float v[VECTOR];
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) v[i] = x[i] * inverse;
    if (store == Store::E4M3) {
      Codes<Format::E4M3> codes;
      codes.encode_nearest(v);
      keep(codes, data, at, count, whole);
    } else {
      Codes<Format::E5M2> codes;
      codes.encode_nearest(v);
      keep(codes, data, at, count, whole);
    }
  }
}

// Writes the codes of a first moment, to nearest with `decaying`; old: its old values.
template <Format F>
__device__ __forceinline__ void keep_decaying(const Codes<F>& nearest, void* data, int64_t at, int count, bool whole,
                                              float scale, const How& how, const float (&x)[VECTOR],
                                              const float (&old)[VECTOR]) {
  constexpr int each = 4 / sizeof(typename Grid<F>::Code), bits = 8 * sizeof(typename Grid<F>::Code);
  constexpr uint32_t size = (1u << (bits - 1)) - 1u;
  bool slow = false;
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) slow |= (nearest.words[i / each] >> (bits * (i % each)) & size) <= how.slowest;
  if (!slow) return keep(nearest, data, at, count, whole);
  Codes<F> codes;
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) {
    const auto code = static_cast<typename Grid<F>::Code>(nearest.words[i / each] >> (bits * (i % each)));
    codes.put(i, decaying<F>(code, x[i], old[i], scale, how.constants));
  }
  keep(codes, data, at, count, whole);
}

__device__ __forceinline__ void write_first(Store store, void* data, int64_t at, int count, bool whole, TileScale to,
                                            const How& how, const float (&x)[VECTOR], const float (&old)[VECTOR]) {
  if (store == Store::FP32) return write_eight(store, data, at, count, whole, 1.0f, x);
  float v[VECTOR];
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) v[i] = store == Store::BF16 ? x[i] : x[i] * to.inverse;
  if (store == Store::BF16) {
    Codes<Format::BF16> codes;
    codes.encode_nearest(v);
    keep_decaying(codes, data, at, count, whole, 1.0f, how, x, old);
  } else if (store == Store::FP16) {
    Codes<Format::FP16> codes;
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) codes.put(i, write_fp16(v[i]));
    keep_decaying(codes, data, at, count, whole, to.scale, how, x, old);
  } else if (store == Store::E4M3) {
    Codes<Format::E4M3> codes;
    codes.encode_nearest(v);
    keep_decaying(codes, data, at, count, whole, to.scale, how, x, old);
  } else {
    Codes<Format::E5M2> codes;
    codes.encode_nearest(v);
    keep_decaying(codes, data, at, count, whole, to.scale, how, x, old);
  }
}

__device__ __forceinline__ void read_weights(Master master, const How& how, const Item& item, int64_t at, int count,
                                             bool whole, float scale, float (&w)[VECTOR]) {
  if (scaled(master)) read_floats<Fp16>(item.master, at, count, whole, scale, w);
  else if (master == Master::FP32 || how.fp32_parameter) read_floats<Fp32>(item.parameter, at, count, whole, scale, w);
  else read_floats<Bf16>(item.parameter, at, count, whole, scale, w);
}

// Random bits of eight elements: one Philox call if they are in one row.
__device__ __forceinline__ void draws_of(const Item& item, const Numbers& numbers, int64_t at,
                                         uint32_t (&bits)[VECTOR]) {
  if (item.columns % VECTOR == 0) {
    const int64_t row = at / item.columns, column = at - row * item.columns + numbers.origin[1];
    const Words words = random_words(numbers.seed, row + numbers.origin[0], column >> 3);
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) bits[i] = bits_of(words, i);
  } else {
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) bits[i] = draw_of(numbers, at + i, item.columns);
  }
}

__device__ __forceinline__ void write_weights(Master master, const How& how, const Item& item, int64_t at,
                                              int count, bool whole, TileScale to, const Numbers& numbers,
                                              const float (&w)[VECTOR]) {
  if (master == Master::FP32) return write_eight(Store::FP32, item.parameter, at, count, whole, 1.0f, w);
  uint32_t bits[VECTOR];
  if (master != Master::FP16) draws_of(item, numbers, at, bits);
  uint16_t values[VECTOR];
  if (master == Master::BF16) {
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) values[i] = encode_stochastic<Format::BF16>(w[i], bits[i]);
  } else {
    Codes<Format::FP16> codes;
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
      const float v = w[i] * to.inverse;
      const uint16_t code = master == Master::FP16 ? write_fp16(v) : encode_stochastic<Format::FP16>(v, bits[i]);
      codes.put(i, code);
      values[i] = bf16_bits(__half2float(__ushort_as_half(code)) * to.scale);
    }
    keep(codes, item.master, at, count, whole);
  }
  if (how.fp32_parameter) {
    Codes<Format::FP32> wide;
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) wide.put(i, bf16_value(values[i]));
    return keep(wide, item.parameter, at, count, whole);
  }
  Codes<Format::BF16> narrow;
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) narrow.put(i, values[i]);
  keep(narrow, item.parameter, at, count, whole);
}

// PLAIN: everything is FP32, known at compile time.
template <Pass pass, bool PLAIN>
__global__ void __launch_bounds__(THREADS, 2) step_flat(const Item* __restrict__ items, Numbers* __restrict__ numbers,
                                                     int count, How how, double* __restrict__ partial) {
  __shared__ uint32_t scratch[THREADS / 32];
  __shared__ double sums[THREADS / 32];
  const Store stores[2] = {PLAIN ? Store::FP32 : how.stores[0], PLAIN ? Store::FP32 : how.stores[1]};
  const Master master = PLAIN ? Master::FP32 : how.master;
  const int which = item_of(items, count, blockIdx.x);
  const Item item = items[which];
  if (skipped(item)) return;
  const AdamRate rate = numbers[which].rate;
  const float grad_scale = divisor(how);
  float old_scale[3] = {1.0f, 1.0f, 1.0f};
  TileScale to[3] = {{1.0f, 1.0f}, {1.0f, 1.0f}, {1.0f, 1.0f}};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (!scaled(stores[i])) continue;
    old_scale[i] = *item.moments[i].scale;
    if (pass == Pass::UPDATE) to[i] = scale_of(stores[i], numbers[which].amax[i]);
  }
  if (scaled(master)) {
    old_scale[2] = *item.master_scale;
    if (pass == Pass::UPDATE) to[2] = scale_of(Store::FP16, numbers[which].amax[2]);
  }
  uint32_t amax[3] = {0, 0, 0};
  double squares = 0.0;
  int64_t at = (blockIdx.x - item.first) * SHARE + threadIdx.x * VECTOR;
#pragma unroll 1
  for (int turn = 0; turn < TURNS; ++turn, at += THREADS * VECTOR) {
    if (at >= item.numbers) break;
    const int some = static_cast<int>(min(static_cast<int64_t>(VECTOR), item.numbers - at));
    const bool whole = item.aligned && some == VECTOR;
    const bool weights = pass == Pass::UPDATE || (pass == Pass::AMAX && scaled(master));
    float g[VECTOR], m[VECTOR], v[VECTOR], w[VECTOR], old[VECTOR];
    if (!PLAIN && how.bf16_gradient) read_floats<Bf16>(item.gradient, at, some, whole, 1.0f, g);
    else read_floats<Fp32>(item.gradient, at, some, whole, 1.0f, g);
    read_eight(stores[0], item.moments[0].codes, at, some, whole, old_scale[0], m);
    read_eight(stores[1], item.moments[1].codes, at, some, whole, old_scale[1], v);
    if (weights) read_weights(master, how, item, at, some, whole, old_scale[2], w);
    if (grad_scale != 1.0f) {
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) g[i] = divide(g[i], grad_scale);
    }
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
      old[i] = m[i];
      m[i] = next_first(old[i], g[i], how.constants);
      v[i] = next_second(v[i], g[i], how.constants);
      if (weights) w[i] = next_weight(w[i], m[i], v[i], how.constants, rate);
      if (i >= some) continue;
      if constexpr (pass == Pass::SQUARES) {
        squares += static_cast<double>(update_square(g[i], v[i], numbers[which].correction2, how.floor));
      } else if constexpr (pass == Pass::AMAX) {
        amax[0] = larger_magnitude(amax[0], m[i]);
        amax[1] = larger_magnitude(amax[1], v[i]);
        if (weights) amax[2] = larger_magnitude(amax[2], w[i]);
      }
    }
    if constexpr (pass == Pass::UPDATE) {
      write_first(stores[0], item.moments[0].codes, at, some, whole, to[0], how, m, old);
      write_eight(stores[1], item.moments[1].codes, at, some, whole, to[1].inverse, v);
      write_weights(master, how, item, at, some, whole, to[2], numbers[which], w);
    }
  }
  if constexpr (pass == Pass::AMAX) leave_amax(amax, numbers[which], how, scratch);
  if constexpr (pass == Pass::SQUARES) leave_sum(squares, partial + blockIdx.x, sums);
}

}  // namespace

int64_t flat_units(const Item& item, const How&) { return ceil_div(item.numbers, SHARE); }

void launch_flat(Pass pass, const Table& table, const How& how, cudaStream_t stream) {
  const bool plain = how.stores[0] == Store::FP32 && how.stores[1] == Store::FP32 && how.master == Master::FP32 &&
                     !how.bf16_gradient;
  const auto kernel = pass == Pass::SQUARES  ? step_flat<Pass::SQUARES, false>
                      : pass == Pass::AMAX ? step_flat<Pass::AMAX, false>
                      : plain                ? step_flat<Pass::UPDATE, true>
                                             : step_flat<Pass::UPDATE, false>;
  kernel<<<table.units, THREADS, 0, stream>>>(table.items, table.numbers, table.count, how, table.partial);
  check_launch("adamw");
}

}  // namespace lowprec
