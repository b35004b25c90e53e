// Checked arguments of the gradient ops, for C++ and CUDA kernels.
#pragma once

#include "binding.h"
#include "numerics/wire.h"

namespace lowprec {

struct Wire {
  std::vector<WireRange> ranges;
  Format format;
  int64_t rows, block, inner, row_bytes;
  bool padded;            // with one byte, to an even number of bytes
  bool by_range = false;  // one plain row of each sender: the elements of all senders, range by range
};

// Offset of sender s's plain elements of a range, `width` bytes each, on a wire that is sent range by range.
inline int64_t place_by_range(const WireRange& range, int64_t senders, int64_t s, int64_t width) {
  return senders * range.bytes + s * range.size * width;
}

inline Format plain_of(Format format) { return format == Format::FP32 ? Format::FP32 : Format::BF16; }

inline int64_t wire_blocks(int64_t size, int64_t block) { return (size + block - 1) / block; }

// The common format of all parts; parts are copied to FP32 if formats differ or are neither 16-bit nor 32-bit floats.
inline Format held_in(std::vector<Tensor>& parts) {
  const ScalarType type = parts[0].scalar_type();
  bool same = type == ScalarType::BFloat16 || type == ScalarType::Half || type == ScalarType::Float;
  for (const Tensor& part : parts) same = same && part.scalar_type() == type;
  for (Tensor& part : parts) {
    if (!same) part = torch::stable::to(part, ScalarType::Float);
  }
  return !same || type == ScalarType::Float ? Format::FP32 : type == ScalarType::Half ? Format::FP16 : Format::BF16;
}

// parts: [rows, size] with dense rows, or 1-D and dense.
inline Wire wire_of(std::vector<Tensor>& parts, int64_t rows, const std::vector<int64_t>& sizes,
                    const std::vector<int64_t>& coded, const std::string& format, int64_t block, int64_t inner) {
  Wire made{{}, parse_format(format), rows, block, inner, 0, false};
  STD_TORCH_CHECK(block >= 1 && !sizes.empty() && sizes.size() == coded.size() && sizes.size() == parts.size(),
                  "a row has ranges and blocks of at least one element");
  STD_TORCH_CHECK(inner >= 1 && rows % inner == 0, rows, " rows are not ", inner, " equal groups");
  const int64_t plain = plain_of(made.format) == Format::FP32 ? 4 : 2;
  int64_t codes = 0, exponents = 0;
  for (size_t i = 0; i < sizes.size(); ++i) codes += coded[i] ? 0 : sizes[i] * plain;
  exponents = codes;
  for (size_t i = 0; i < sizes.size(); ++i) exponents += coded[i] ? wire_blocks(sizes[i], block) * block : 0;
  int64_t start = 0;
  const Format held = held_in(parts);
  for (size_t i = 0; i < sizes.size(); ++i) {
    const Tensor& part = parts[i];
    const bool flat = part.dim() == 1;
    STD_TORCH_CHECK(sizes[i] >= 1, "a range has at least one element, not ", sizes[i]);
    STD_TORCH_CHECK(flat ? part.numel() <= rows * sizes[i]
                         : part.dim() == 2 && part.size(0) == rows && part.size(1) == sizes[i],
                    "a range of ", rows, " rows of ", sizes[i], " has another shape");
    STD_TORCH_CHECK(part.numel() == 0 || part.size(part.dim() - 1) == 1 || part.stride(part.dim() - 1) == 1,
                    "rows of a range lie densely");
    STD_TORCH_CHECK(!coded[i] || made.format == Format::E4M3 || made.format == Format::E5M2, "a range of codes is E4M3 or E5M2, not ", format);
    int64_t& at = coded[i] ? codes : start;
    made.ranges.push_back({static_cast<char*>(const_cast<void*>(part.const_data_ptr())), held,
                           flat ? sizes[i] : part.stride(0), part.numel(), sizes[i], at, coded[i] ? exponents : -1});
    const int64_t blocks = wire_blocks(sizes[i], block);
    at += coded[i] ? blocks * block : sizes[i] * plain;
    exponents += coded[i] ? blocks : 0;
  }
  made.padded = exponents % 2 != 0;
  made.row_bytes = exponents + made.padded;
  return made;
}

// For shared scales, which are not sent: no exponents, and plain elements in BF16 (ops/shared_gradients.py).
inline Wire wire_of_shared(std::vector<Tensor>& parts, int64_t rows, const std::vector<int64_t>& sizes,
                           const std::vector<int64_t>& coded, const Tensor& scales, const std::string& format) {
  STD_TORCH_CHECK(format == "E4M3" || format == "E5M2", "codes under a shared scale are E4M3 or E5M2, not ", format);
  STD_TORCH_CHECK(scales.dim() == 1 && scales.numel() == static_cast<int64_t>(sizes.size()) &&
                      scales.scalar_type() == ScalarType::Float && scales.is_contiguous(),
                  sizes.size(), " ranges have as many FP32 scales");
  Wire made = wire_of(parts, rows, sizes, coded, format, 1, 1);
  int64_t bytes = 0;
  for (size_t i = 0; i < sizes.size(); ++i) bytes += coded[i] ? sizes[i] : 2 * sizes[i];
  made.padded = bytes % 2 != 0;
  made.row_bytes = bytes + made.padded;
  return made;
}

// Rows of bytes as they are made or sent: uint8 [rows, row_bytes], dense.
inline void check_rows(const Tensor& rows, int64_t row_bytes, const Tensor& part) {
  STD_TORCH_CHECK(rows.dim() == 2 && rows.size(1) == row_bytes && rows.scalar_type() == ScalarType::Byte &&
                      rows.is_contiguous() && rows.is_cuda() == part.is_cuda(),
                  "rows of these ranges are dense uint8 [rows, ", row_bytes, "] on their device");
}

// For decoding; parts are the sums. sent: the wire of each sender, or one of all.
inline Wire wire_of_sent(const std::vector<Tensor>& sent, std::vector<Tensor>& parts, const std::vector<int64_t>& sizes,
                         const std::vector<int64_t>& coded, const std::string& format, int64_t block, int64_t senders,
                         int64_t inner, bool by_range) {
  const int64_t wires = static_cast<int64_t>(sent.size());
  STD_TORCH_CHECK(senders >= 1 && (wires == 1 || wires == senders), senders,
                  " senders have one wire each or one for all, not ", wires);
  STD_TORCH_CHECK(wires == 1 || !by_range, "wires apart are not sent range by range");
  STD_TORCH_CHECK(sent[0].dim() == 2 && sent[0].size(0) * wires % senders == 0, "these wires have no rows of ", senders,
                  " senders");
  for (const Tensor& part : parts) STD_TORCH_CHECK(part.scalar_type() == ScalarType::Float, "sums are FP32");
  Wire made = wire_of(parts, sent[0].size(0) * wires / senders, sizes, coded, format, block, inner);
  made.by_range = by_range;
  for (const int64_t has_codes : coded) {
    STD_TORCH_CHECK(!by_range || (made.rows == 1 && !has_codes), "only one row without codes is sent range by range");
  }
  for (const Tensor& each : sent) {
    check_rows(each, made.row_bytes, parts[0]);
    STD_TORCH_CHECK(each.size(0) == sent[0].size(0), "senders have equally many rows");
  }
  return made;
}

}  // namespace lowprec
