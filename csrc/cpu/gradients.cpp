// encode_gradients, decode_gradients (ops/gradients.py): threads process blocks of a range, or pieces of a plain range.
#include "cpu/rows.h"
#include "wire.h"

namespace lowprec {
namespace {

constexpr int64_t PLAIN = 4096;  // elements in a piece of a plain range

int64_t bytes_of(Format format) { return format == Format::FP32 ? 4 : 2; }

// Calls body(range, row, first element, elements) for every block of every row, with blocks of PLAIN in plain ranges.
template <typename Body>
void for_blocks(const Wire& wire, const Body& body) {
  for (const WireRange& range : wire.ranges) {
    const int64_t block = range.exponents < 0 ? PLAIN : wire.block, blocks = wire_blocks(range.size, block);
    for_rows(wire.rows * blocks, block, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        const int64_t r = i / blocks, start = i % blocks * block;
        body(range, r, start, std::min(block, range.size - start));
      }
    });
  }
}

// Reads n elements of row r from `first` on as FP32, with zeros for missing elements.
void read(const WireRange& range, int64_t r, int64_t first, int64_t n, float* v) {
  const int64_t there = elements_left(range, r, first, n);
  if (there > 0) load(range.data + (r * range.stride + first) * bytes_of(range.held), range.held, there, v);
  std::fill(v + there, v + n, 0.0f);
}

void encode_block(const Wire& wire, const ScaleRule& how, float* v, int64_t n, uint8_t* codes, uint8_t* exponent) {
  uint32_t bits = 0;
  tile_amax(v, n, n, &bits);
  const TileScale scale = tile_scale(magnitude_of(bits), how);
  *exponent = e8m0_bits(scale.scale);
  if (*exponent == 255) std::fill(codes, codes + wire.block, NAN_CODE);
  if (*exponent == 255) return;
  scale_tiles(v, n, n, &scale.inverse);
  encode_row(wire.format, v, nullptr, n, codes);
  std::fill(codes + n, codes + wire.block, uint8_t{0});
}

void encode_gradients(const Tensor& made, std::vector<Tensor> parts, std::vector<int64_t> sizes,
                      std::vector<int64_t> coded, std::string format, int64_t block, int64_t inner) {
  const int64_t rows = made.size(0);
  const Wire wire = wire_of(parts, rows, sizes, coded, format, block, inner);
  check_rows(made, wire.row_bytes, parts[0]);
  uint8_t* out = mutable_data_of<uint8_t>(made);
  for (int64_t r = 0; wire.padded && r < rows; ++r) out[(r + 1) * wire.row_bytes - 1] = 0;
  const ScaleRule how = scale_rule_of(wire.format, Rule::POW2, 1.0, 0);
  for_blocks(wire, [&](const WireRange& range, int64_t r, int64_t first, int64_t n) {
    thread_local std::vector<float> v;
    v.resize(n);
    read(range, r, first, n, v.data());
    uint8_t* row = out + place_of_row(r, rows, inner) * wire.row_bytes;
    if (range.exponents < 0) {
      const Format plain = plain_of(wire.format);
      encode_row(plain, v.data(), nullptr, n, row + range.bytes + first * bytes_of(plain));
    } else {
      encode_block(wire, how, v.data(), n, row + range.bytes + first, row + range.exponents + first / block);
    }
  });
}

void decode_gradients(std::vector<Tensor> sent, std::vector<Tensor> parts, std::vector<int64_t> sizes,
                      std::vector<int64_t> coded, std::string format, int64_t block, int64_t senders, int64_t inner,
                      bool by_range) {
  for (Tensor& each : sent) each = dense(each);
  const Wire wire = wire_of_sent(sent, parts, sizes, coded, format, block, senders, inner, by_range);
  const char* data = static_cast<const char*>(sent[0].const_data_ptr());
  const auto rows_of = [&](int64_t s) {
    if (sent.size() == 1) return data + s * wire.rows * wire.row_bytes;
    return static_cast<const char*>(sent[s].const_data_ptr());
  };
  for_blocks(wire, [&](const WireRange& range, int64_t r, int64_t first, int64_t n) {
    n = elements_left(range, r, first, n);
    if (n == 0) return;
    const bool plain = range.exponents < 0;
    const Format held = plain ? plain_of(wire.format) : wire.format;
    float* total = reinterpret_cast<float*>(range.data) + r * range.stride + first;
    thread_local std::vector<float> v;
    v.resize(n);
    for (int64_t s = 0; s < senders; ++s) {
      const char* row = rows_of(s) + place_of_row(r, wire.rows, inner) * wire.row_bytes;
      const char* here = wire.by_range ? data + place_by_range(range, senders, s, bytes_of(held)) : row + range.bytes;
      load(here + first * (plain ? bytes_of(held) : 1), held, n, v.data());
      if (!plain) {
        const float scale = e8m0_value(static_cast<uint8_t>(row[range.exponents + first / block]));
        scale_tiles(v.data(), n, n, &scale);
      }
      if (s == 0) std::copy(v.begin(), v.end(), total);
      else for (int64_t i = 0; i < n; ++i) total[i] += v[i];
    }
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(lowprec, CPU, m) {
  m.impl("encode_gradients", TORCH_BOX(&encode_gradients));
  m.impl("decode_gradients", TORCH_BOX(&decode_gradients));
}

}  // namespace lowprec
