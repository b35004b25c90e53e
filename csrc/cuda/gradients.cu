// encode_gradients, decode_gradients (ops/gradients.py): one launch each over a table of ranges, for any number of
// ranges and rows. A warp processes a few hundred elements of one range and row, four neighbours per lane, so that its
// loads and stores are whole sectors; decode adds the rows of all senders in registers and writes once.
//
// Blocks of 256 at aligned addresses use vectors, others single elements. More than TABLE ranges need several launches.
#include "cuda/vectors.h"
#include "wire.h"

namespace lowprec {
namespace {

constexpr int TABLE = 48, WIRE_THREADS = 256, WARPS = WIRE_THREADS / 32, STEP = 128, BLOCK = 256;
constexpr int DECODED = 512, ENCODED_BYTES = 4096;  // per warp: elements that it writes, bytes that it reads
constexpr int WIRES = 64;  // at most, if each sender has its own; MOST_RANKS of comm/symmetric_memory.py
template <typename In>
constexpr int ENCODED = ENCODED_BYTES / sizeof(In);

// Ranges of a launch; in each row, warps first[i] to first[i + 1] process range i, `each` elements per warp.
struct Table {
  WireRange ranges[TABLE];
  int32_t first[TABLE + 1];
  int32_t each[TABLE];
  bool vectors[TABLE];
  int count;
  int32_t rows, inner;
  int64_t row_bytes, block;
  bool padded;  // the row ends with a padding byte, which this launch clears
  bool by_range;  // as in Wire
  bool apart;     // each sender has its own wire
};

// Wires of the senders: one for all, or one each.
struct Wires {
  const uint8_t* of[WIRES];
};

struct Work {
  int64_t row, first;  // in the range: row, first element
  int range;
};

__device__ __forceinline__ bool find_work(const Table& table, Work* work) {
  const int32_t unit = blockIdx.x * WARPS + threadIdx.x / 32;
  if (unit >= table.first[table.count]) return false;
  int i = 0;
  while (unit >= table.first[i + 1]) ++i;
  work->row = blockIdx.y;
  work->range = i;
  work->first = static_cast<int64_t>(unit - table.first[i]) * table.each[i];
  return true;
}

__device__ __forceinline__ int64_t row_at(const Table& table) {
  return table.inner == 1 ? blockIdx.y : place_of_row<int32_t>(blockIdx.y, table.rows, table.inner);
}

// Four neighbouring elements.
template <typename In>
struct Quad {
  static constexpr int WORDS = sizeof(In);
  uint32_t words[WORDS];

  __device__ __forceinline__ float operator[](int i) const { return element<In>(words, i); }
  // Loads the first `count` elements; the rest are zeros. With count >= 4, `data` is aligned.
  __device__ __forceinline__ void load(const In* data, int64_t count) {
#pragma unroll
    for (int i = 0; i < WORDS; ++i) words[i] = 0;
    if (count >= 4) {
      if constexpr (WORDS == 4) {
        const uint4 all = __ldg(reinterpret_cast<const uint4*>(data));
        words[0] = all.x, words[1] = all.y, words[2] = all.z, words[3] = all.w;
      } else {
        const uint2 all = __ldg(reinterpret_cast<const uint2*>(data));
        words[0] = all.x, words[1] = all.y;
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      if (i >= count) continue;
      if constexpr (WORDS == 4) words[i] = reinterpret_cast<const uint32_t*>(data)[i];
      else words[i >> 1] |= static_cast<uint32_t>(reinterpret_cast<const uint16_t*>(data)[i]) << (i & 1 ? 16 : 0);
    }
  }
  __device__ __forceinline__ uint32_t largest() const {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) bits = larger_magnitude(bits, (*this)[i]);
    return bits;
  }
};

// Codes of four values with one scale, one per byte.
template <Format F>
__device__ __forceinline__ uint32_t four_codes(float a, float b, float c, float d, const TileScale& of) {
  if (is_nan(of.scale)) return NAN_CODE * 0x01010101u;
  return encode_fp8_pair<F>(a * of.inverse, b * of.inverse) | encode_fp8_pair<F>(c * of.inverse, d * of.inverse) << 16;
}

template <Format F, typename In>
__device__ void encode_vectors(const WireRange& range, const In* data, int64_t left, int64_t first, const ScaleRule& how,
                               uint8_t* row) {
  const int lane = threadIdx.x & 31;
  Quad<In> held[ENCODED<In> / STEP];
#pragma unroll
  for (int k = 0; k < ENCODED<In> / STEP; ++k) held[k].load(data + lane * 4 + k * STEP, left - lane * 4 - k * STEP);
  uint8_t exponent = 0;
#pragma unroll
  for (int b = 0; b < ENCODED<In> / BLOCK; ++b) {
    if (first + b * BLOCK >= range.size) break;
    const Quad<In>&low = held[2 * b], &high = held[2 * b + 1];
    const TileScale of = tile_scale(bits_float(warp_largest(larger(low.largest(), high.largest()))), how);
    uint32_t* codes = reinterpret_cast<uint32_t*>(row + range.bytes + first + b * BLOCK) + lane;
    codes[0] = four_codes<F>(low[0], low[1], low[2], low[3], of);
    codes[STEP / 4] = four_codes<F>(high[0], high[1], high[2], high[3], of);
    exponent = lane == b ? e8m0_bits(of.scale) : exponent;
  }
  if (lane < ENCODED<In> / BLOCK && first + lane * BLOCK < range.size) row[range.exponents + first / BLOCK + lane] = exponent;
}

// A block of any size at any address, with `each` = block.
template <Format F, typename In>
__device__ void encode_block(const WireRange& range, const In* data, int64_t left, int64_t first, int64_t block,
                             const ScaleRule& how, uint8_t* row) {
  const int lane = threadIdx.x & 31;
  uint32_t bits = 0;
  for (int64_t i = lane; i < left; i += 32) bits = larger_magnitude(bits, data[i].value());
  const TileScale of = tile_scale(bits_float(warp_largest(bits)), how);
  uint8_t* codes = row + range.bytes + first;
  for (int64_t i = lane; i < block; i += 32) {
    const float v = i < left ? data[i].value() : 0.0f;
    codes[i] = is_nan(of.scale) ? NAN_CODE : static_cast<uint8_t>(encode_fp8_pair<F>(v * of.inverse, 0.0f));
  }
  if (lane == 0) row[range.exponents + first / block] = e8m0_bits(of.scale);
}

template <Format P>
__device__ __forceinline__ typename Grid<P>::Code* plain_at(const WireRange& range, uint8_t* row, int64_t first) {
  return reinterpret_cast<typename Grid<P>::Code*>(row + range.bytes) + first;
}

template <Format P, typename In>
__device__ void encode_plain(const WireRange& range, const In* data, int64_t left, int64_t first, bool vectors,
                             uint8_t* row) {
  const int lane = threadIdx.x & 31;
  auto* out = plain_at<P>(range, row, first);
  const int64_t there = min(static_cast<int64_t>(ENCODED<In>), range.size - first);
  if (!vectors) {
    for (int64_t i = lane; i < there; i += 32) out[i] = encode<P>(i < left ? data[i].value() : 0.0f);
    return;
  }
  Quad<In> held[ENCODED<In> / STEP];
#pragma unroll
  for (int k = 0; k < ENCODED<In> / STEP; ++k) held[k].load(data + lane * 4 + k * STEP, left - lane * 4 - k * STEP);
#pragma unroll
  for (int k = 0; k < ENCODED<In> / STEP; ++k) {
    const int at = lane * 4 + k * STEP;
    const Quad<In>& x = held[k];
    const auto a = encode<P>(x[0]), b = encode<P>(x[1]), c = encode<P>(x[2]), d = encode<P>(x[3]);
    if (at + 4 <= there) {
      if constexpr (P == Format::FP32) *reinterpret_cast<float4*>(out + at) = make_float4(a, b, c, d);
      else *reinterpret_cast<uint2*>(out + at) = make_uint2(a | static_cast<uint32_t>(b) << 16, c | static_cast<uint32_t>(d) << 16);
    } else {
      if (at < there) out[at] = a;
      if (at + 1 < there) out[at + 1] = b;
      if (at + 2 < there) out[at + 2] = c;
    }
  }
}

template <Format F, typename In>
__global__ void __launch_bounds__(WIRE_THREADS) encode_ranges(const __grid_constant__ Table table, const ScaleRule how,
                                                              uint8_t* __restrict__ out) {
  Work work;
  if (!find_work(table, &work)) return;
  const WireRange& range = table.ranges[work.range];
  const int64_t left = elements_left(range, work.row, work.first, table.each[work.range]);
  const In* data = reinterpret_cast<const In*>(range.data) + work.row * range.stride + work.first;
  uint8_t* row = out + row_at(table) * table.row_bytes;
  const bool vectors = table.vectors[work.range];
  if (table.padded && work.range == 0 && work.first == 0 && (threadIdx.x & 31) == 0) row[table.row_bytes - 1] = 0;
  if (range.exponents < 0) {
    encode_plain<F == Format::FP32 ? Format::FP32 : Format::BF16>(range, data, left, work.first, vectors, row);
  } else if constexpr (F != Format::FP32) {
    if (vectors) encode_vectors<F>(range, data, left, work.first, how, row);
    else encode_block<F>(range, data, left, work.first, table.block, how, row);
  }
}

// --- decode ----------------------------------------------------------------------------------------------------------

template <Format F>
__device__ __forceinline__ float2 two_values(uint32_t codes) {
  const auto both = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes),
                                               F == Format::E5M2 ? __NV_E5M2 : __NV_E4M3);
  return __half22float2(__half2(both));
}

// Bytes of one sender for a lane's elements, loaded and not yet decoded.
template <Format F>
struct SentCodes {
  static constexpr int FLIGHT = 4;  // senders whose bytes are loaded before the first is added
  uint32_t words[DECODED / STEP];
  uint8_t exponents[DECODED / BLOCK];

  __device__ __forceinline__ void load(const WireRange& range, const uint8_t* row, int64_t first, int lane) {
#pragma unroll
    for (int k = 0; k < DECODED / STEP; ++k) {
      const bool there = first + k / 2 * BLOCK < range.size;
      words[k] = there ? __ldg(reinterpret_cast<const uint32_t*>(row + range.bytes + first) + lane + k * (STEP / 4)) : 0;
      if (k % 2 == 0) exponents[k / 2] = there ? __ldg(row + range.exponents + first / BLOCK + k / 2) : 0;
    }
  }
  __device__ __forceinline__ float4 values(int k) const {
    const float scale = e8m0_value(exponents[k / 2]);
    const float2 low = two_values<F>(words[k] & 0xffffu), high = two_values<F>(words[k] >> 16);
    return make_float4(low.x * scale, low.y * scale, high.x * scale, high.y * scale);
  }
};

template <typename Plain>
struct SentPlain {
  static constexpr int FLIGHT = 4 / sizeof(Plain);
  Quad<Plain> quads[DECODED / STEP];

  __device__ __forceinline__ void load(const WireRange& range, const uint8_t* row, int64_t first, int lane) {
    const Plain* data = reinterpret_cast<const Plain*>(row + range.bytes) + first;
#pragma unroll
    for (int k = 0; k < DECODED / STEP; ++k) {
      const int at = lane * 4 + k * STEP;
      quads[k].load(data + at, range.size - first - at);
    }
  }
  __device__ __forceinline__ float4 values(int k) const {
    return make_float4(quads[k][0], quads[k][1], quads[k][2], quads[k][3]);
  }
};

// row_of(s): the row of sender s.
template <typename Sent, typename Rows>
__device__ void decode_vectors(const WireRange& range, const Rows& row_of, int64_t senders, int64_t first, float* out,
                               int64_t left) {
  const int lane = threadIdx.x & 31;
  float4 total[DECODED / STEP];
  for (int64_t s = 0; s < senders; s += Sent::FLIGHT) {
    Sent sent[Sent::FLIGHT];
#pragma unroll
    for (int i = 0; i < Sent::FLIGHT; ++i) {
      if (s + i < senders) sent[i].load(range, row_of(s + i), first, lane);
    }
#pragma unroll
    for (int i = 0; i < Sent::FLIGHT; ++i) {
      if (s + i >= senders) break;
#pragma unroll
      for (int k = 0; k < DECODED / STEP; ++k) {
        const float4 v = sent[i].values(k);
        if (s + i == 0) total[k] = v;
        else total[k].x += v.x, total[k].y += v.y, total[k].z += v.z, total[k].w += v.w;
      }
    }
  }
#pragma unroll
  for (int k = 0; k < DECODED / STEP; ++k) {
    const int at = lane * 4 + k * STEP;
    if (at + 4 <= left) {
      *reinterpret_cast<float4*>(out + at) = total[k];
    } else {
      if (at < left) out[at] = total[k].x;
      if (at + 1 < left) out[at + 1] = total[k].y;
      if (at + 2 < left) out[at + 2] = total[k].z;
    }
  }
}

template <Format F>
__device__ __forceinline__ float value_at(const WireRange& range, const uint8_t* row, int64_t at, int64_t block) {
  if (range.exponents < 0) {
    constexpr Format P = F == Format::FP32 ? Format::FP32 : Format::BF16;
    return decode<P>(reinterpret_cast<const typename Grid<P>::Code*>(row + range.bytes)[at]);
  }
  if constexpr (F == Format::FP32) return 0.0f;
  else return decode<F>(row[range.bytes + at]) * e8m0_value(row[range.exponents + at / block]);
}

template <Format F, typename Rows>
__device__ __forceinline__ void decode_range(const Table& table, const Work& work, const WireRange& range,
                                             const Rows& row_of, int64_t senders, int64_t left) {
  float* out = reinterpret_cast<float*>(range.data) + work.row * range.stride + work.first;
  if (!table.vectors[work.range]) {
#pragma unroll 1
    for (int64_t i = threadIdx.x & 31; i < left; i += 32) {
      float total = value_at<F>(range, row_of(0), work.first + i, table.block);
#pragma unroll 1
      for (int64_t s = 1; s < senders; ++s) total += value_at<F>(range, row_of(s), work.first + i, table.block);
      out[i] = total;
    }
  } else if (range.exponents < 0) {
    using Plain = std::conditional_t<F == Format::FP32, Fp32, Bf16>;
    decode_vectors<SentPlain<Plain>>(range, row_of, senders, work.first, out, left);
  } else if constexpr (F != Format::FP32) {
    decode_vectors<SentCodes<F>>(range, row_of, senders, work.first, out, left);
  }
}

template <Format F>
__global__ void __launch_bounds__(WIRE_THREADS, 3) decode_ranges(const __grid_constant__ Table table,
                                                              const __grid_constant__ Wires wires, int64_t senders) {
  Work work;
  if (!find_work(table, &work)) return;
  const WireRange& range = table.ranges[work.range];
  const int64_t left = elements_left(range, work.row, work.first, table.each[work.range]);
  if (left == 0) return;
  const int64_t place = row_at(table) * table.row_bytes;
  if (table.apart) {
    return decode_range<F>(table, work, range, [&](int64_t s) { return wires.of[s] + place; }, senders, left);
  }
  constexpr int64_t WIDTH = F == Format::FP32 ? 4 : 2;  // of plain elements
  // `range.bytes` is added to the row: sender 0's elements of the range are at senders * range.bytes.
  const uint8_t* row = wires.of[0] + (table.by_range ? (senders - 1) * range.bytes : place);
  const int64_t step = table.by_range ? range.size * WIDTH : table.rows * table.row_bytes;
  decode_range<F>(table, work, range, [&](int64_t s) { return row + s * step; }, senders, left);
}

// --- launches --------------------------------------------------------------------------------------------------------

// Whether every four elements of a range are aligned to their size, in memory and on the wire.
bool by_vectors(const Wire& wire, const WireRange& range, const std::vector<const uint8_t*>& bytes) {
  const int64_t held = range.held == Format::FP32 ? 16 : 8;
  const bool coded = range.exponents >= 0;
  const int64_t sent = coded ? 4 : plain_of(wire.format) == Format::FP32 ? 16 : 8;
  if (wire.by_range && range.size * (sent / 4) % sent != 0) return false;  // of each sender
  for (const uint8_t* each : bytes) {
    if (!aligned(each, sent)) return false;
  }
  return (!coded || wire.block == BLOCK) && aligned(range.data, held) && range.stride * (held / 4) % held == 0 &&
         wire.row_bytes % sent == 0 && range.bytes % sent == 0;
}

// Calls launch(table, grid) for every TABLE ranges. each: elements per warp; in an encode without vectors a warp has
// one block instead.
template <typename Launch>
void for_tables(const Wire& wire, const std::vector<const uint8_t*>& bytes, int64_t each, bool encodes,
                const Launch& launch) {
  STD_TORCH_CHECK(wire.rows < 65536, "a wire of ", wire.rows, " rows");
  for (size_t begin = 0; begin < wire.ranges.size(); begin += TABLE) {
    Table table{};
    table.rows = static_cast<int32_t>(wire.rows), table.inner = static_cast<int32_t>(wire.inner),
     table.row_bytes = wire.row_bytes, table.block = wire.block;
    table.padded = wire.padded && begin == 0, table.by_range = wire.by_range, table.apart = bytes.size() > 1;
    for (size_t i = begin; i < wire.ranges.size() && table.count < TABLE; ++i) {
      const WireRange& range = wire.ranges[i];
      const int at = table.count++;
      table.ranges[at] = range;
      table.vectors[at] = by_vectors(wire, range, bytes);
      const bool whole = encodes && range.exponents >= 0 && !table.vectors[at];
      table.each[at] = static_cast<int32_t>(whole ? wire.block : each);
      table.first[at + 1] = table.first[at] + static_cast<int32_t>(ceil_div(range.size, table.each[at]));
    }
    launch(table, dim3(static_cast<unsigned>(ceil_div(table.first[table.count], WARPS)), static_cast<unsigned>(wire.rows)));
  }
}

// Calls body(tag) with the format of codes; for plain BF16 rows, which have no codes, with any format.
template <typename Body>
void with_codes(Format format, const Body& body) {
  if (format == Format::FP32) return body(FormatTag<Format::FP32>{});
  if (format == Format::E5M2) return body(FormatTag<Format::E5M2>{});
  body(FormatTag<Format::E4M3>{});
}

void encode_gradients(const Tensor& made, std::vector<Tensor> parts, std::vector<int64_t> sizes,
                      std::vector<int64_t> coded, std::string format, int64_t block, int64_t inner) {
  const Wire wire = wire_of(parts, made.size(0), sizes, coded, format, block, inner);
  check_rows(made, wire.row_bytes, parts[0]);
  if (wire.rows == 0) return;
  uint8_t* out = mutable_data_of<uint8_t>(made);
  const ScaleRule how = scale_rule_of(wire.format, Rule::POW2, 1.0, 0);
  with_codes(wire.format, [&](auto tag) {
    constexpr Format F = decltype(tag)::value;
    with_input(parts[0], [&](auto held) {
      using In = typename decltype(held)::Type;
      for_tables(wire, {out}, ENCODED<In>, true, [&](const Table& table, dim3 blocks) {
        encode_ranges<F, In><<<blocks, WIRE_THREADS, 0, stream_of(made)>>>(table, how, out);
      });
    });
  });
  check_launch("encode_gradients");
}

void decode_gradients(std::vector<Tensor> sent, std::vector<Tensor> parts, std::vector<int64_t> sizes,
                      std::vector<int64_t> coded, std::string format, int64_t block, int64_t senders, int64_t inner,
                      bool by_range) {
  for (Tensor& each : sent) each = dense(each);
  const Wire wire = wire_of_sent(sent, parts, sizes, coded, format, block, senders, inner, by_range);
  STD_TORCH_CHECK(sent.size() <= WIRES, "at most ", WIRES, " senders have a wire of their own, not ", sent.size());
  if (wire.rows == 0) return;
  std::vector<const uint8_t*> bytes;
  Wires wires{};
  for (const Tensor& each : sent) {
    wires.of[bytes.size()] = data_of<uint8_t>(each);
    bytes.push_back(data_of<uint8_t>(each));
  }
  with_codes(wire.format, [&](auto tag) {
    constexpr Format F = decltype(tag)::value;
    for_tables(wire, bytes, DECODED, false, [&](const Table& table, dim3 blocks) {
      decode_ranges<F><<<blocks, WIRE_THREADS, 0, stream_of(sent[0])>>>(table, wires, senders);
    });
  });
  check_launch("decode_gradients");
}

}  // namespace
}  // namespace lowprec

STABLE_TORCH_LIBRARY_IMPL(lowprec, CUDA, m) {
  m.impl("encode_gradients", TORCH_BOX(&lowprec::encode_gradients));
  m.impl("decode_gradients", TORCH_BOX(&lowprec::decode_gradients));
}
