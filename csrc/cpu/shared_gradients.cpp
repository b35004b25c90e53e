// encode_gradients_by, decode_gradients_by (ops/shared_gradients.py): threads process pieces of a range's rows.
#include <atomic>

#include "cpu/rows.h"
#include "wire.h"

namespace lowprec {
namespace {

constexpr int64_t PIECE = 4096;  // elements of a piece

// Calls body(range, its scale, row, first element, elements) for every piece of every row.
template <typename Body>
void for_pieces(const Wire& wire, const Tensor& scales, const Body& body) {
  const float* s = data_of<float>(scales);
  for (size_t i = 0; i < wire.ranges.size(); ++i) {
    const WireRange& range = wire.ranges[i];
    const int64_t pieces = wire_blocks(range.size, PIECE);
    for_rows(wire.rows * pieces, PIECE, [&](int64_t begin, int64_t end) {
      for (int64_t at = begin; at < end; ++at) {
        const int64_t first = at % pieces * PIECE;
        body(range, s[i], at / pieces, first, std::min(PIECE, range.size - first));
      }
    });
  }
}

Tensor encode_gradients_by(std::vector<Tensor> parts, int64_t rows, std::vector<int64_t> sizes,
                           std::vector<int64_t> coded, const Tensor& scales, std::string format) {
  const Wire wire = wire_of_shared(parts, rows, sizes, coded, scales, format);
  Tensor made = empty_like_device(parts[0], {rows, wire.row_bytes}, ScalarType::Byte);
  uint8_t* out = mutable_data_of<uint8_t>(made);
  for (int64_t r = 0; wire.padded && r < rows; ++r) out[(r + 1) * wire.row_bytes - 1] = 0;
  for_pieces(wire, scales, [&](const WireRange& range, float s, int64_t r, int64_t first, int64_t n) {
    float v[PIECE];
    const int64_t there = elements_left(range, r, first, n), bytes = range.held == Format::FP32 ? 4 : 2;
    if (there > 0) load(range.data + (r * range.stride + first) * bytes, range.held, there, v);
    std::fill(v + there, v + n, 0.0f);
    uint8_t* row = out + r * wire.row_bytes + range.bytes;
    if (range.exponents < 0) return encode_row(Format::BF16, v, nullptr, n, row + 2 * first);
    for (int64_t i = 0; i < n; ++i) v[i] *= s;
    encode_row(wire.format, v, nullptr, n, row + first);
    for (int64_t i = 0; i < n; ++i) row[first + i] = is_nan(v[i]) ? NAN_CODE : row[first + i];
  });
  return made;
}

// Rounds sums to the format's grid; sets `at` where the result is at the maximum.
void round_sum(Format format, int64_t n, float* v, uint8_t* codes, uint8_t* at) {
  encode_row(format, v, nullptr, n, codes);
  load(reinterpret_cast<const char*>(codes), format, n, v);
  const float most = format == Format::E5M2 ? Grid<Format::E5M2>::max : Grid<Format::E4M3>::max;
  for (int64_t i = 0; i < n; ++i) at[i] |= bits_float(magnitude_bits(v[i])) == most;
}

Tensor decode_gradients_by(const Tensor& given, std::vector<Tensor> parts, std::vector<int64_t> sizes,
                           std::vector<int64_t> coded, const Tensor& scales, std::string format, int64_t senders,
                           bool every_addition) {
  const Tensor sent = dense(given);
  STD_TORCH_CHECK(senders >= 1 && sent.dim() == 2 && sent.size(0) % senders == 0, "a wire of ", sent.size(0),
                  " rows is not of ", senders, " senders");
  for (const Tensor& part : parts) STD_TORCH_CHECK(part.scalar_type() == ScalarType::Float, "sums are FP32");
  const Wire wire = wire_of_shared(parts, sent.size(0) / senders, sizes, coded, scales, format);
  STD_TORCH_CHECK(sent.size(1) == wire.row_bytes, "a row of these ranges has ", wire.row_bytes, " bytes, not ", sent.size(1));
  const char* data = static_cast<const char*>(sent.const_data_ptr());
  std::atomic<int64_t> count{0};
  for_pieces(wire, scales, [&](const WireRange& range, float s, int64_t r, int64_t first, int64_t n) {
    n = elements_left(range, r, first, n);
    const bool plain = range.exponents < 0;
    const Format held = plain ? Format::BF16 : wire.format;
    float next[PIECE], *total = reinterpret_cast<float*>(range.data) + r * range.stride + first;
    uint8_t codes[PIECE], at[PIECE] = {};
    for (int64_t k = 0; k < senders; ++k) {
      const char* row = data + (k * wire.rows + r) * wire.row_bytes + range.bytes + first * (plain ? 2 : 1);
      load(row, held, n, k == 0 ? total : next);
      for (int64_t i = 0; k > 0 && i < n; ++i) total[i] += next[i];
      if (!plain && (every_addition ? k > 0 : k + 1 == senders)) round_sum(held, n, total, codes, at);
    }
    if (plain) return;
    for (int64_t i = 0; i < n; ++i) total[i] *= 1.0f / s;
    count += std::count(at, at + n, uint8_t{1});
  });
  Tensor made = empty_like_device(sent, {}, ScalarType::Long);
  *mutable_data_of<int64_t>(made) = count;
  return made;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(lowprec, CPU, m) {
  m.impl("encode_gradients_by", TORCH_BOX(&encode_gradients_by));
  m.impl("decode_gradients_by", TORCH_BOX(&decode_gradients_by));
}

}  // namespace lowprec
