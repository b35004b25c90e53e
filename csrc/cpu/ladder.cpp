// quantize_ladder, row_sums, fold_ladder, rotate_fold_ladder (ops/ladder.py): E2M1 with the best of three rungs, its
// carriers, a factor per row. A row goes through all steps while it is in the cache.
#include "numerics/ladder.h"

#include "cpu/rotate.h"

namespace lowprec {
namespace {

// Result of a half-precision sum or product: operands are halves, and the FP32 result is rounded to half.
LOWPREC_HD float half_of(float v) { return round_nearest<Format::FP16>(v); }

template <typename Join>
LOWPREC_HD float halved(float* v, int64_t n, const Join& join) {
  for (int64_t half = n / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i) v[i] = join(v[i], v[i + half]);
  }
  return v[0];
}

struct LadderHow {
  int64_t width;
  Candidates by;
  int span;
};

// Error of a candidate. size: magnitudes in half precision; ratio: its scale; inverse: 1 / ratio, rounded to FP32.
LOWPREC_CLONES float candidate_error(const float* size, int64_t n, float ratio, float inverse, Candidates by, float* off) {
  const float factor = half_of(inverse);
  for (int64_t i = 0; i < n; ++i) {
    const float place = half_of(size[i] * factor);
    const float from = bits_float(magnitude_bits(round_nearest<Format::E2M1>(clamp(place, 6.0f)) - place));
    off[i] = by == Candidates::MSE ? half_of(from * from) : from;
  }
  if (by == Candidates::MAX) return halved(off, n, [](float a, float b) { return a > b ? a : b; }) * ratio;
  const float sum = halved(off, n, [](float a, float b) { return half_of(a + b); });
  return by == Candidates::MSE ? sum * ratio * ratio : sum * ratio;
}

int chosen_rung(const float* v, int rung, int floor, const LadderHow& how, float* size, float* off) {
  const int step = rung_step(rung);
  const float unit = exp2_int(-(step + LADDER_LOW));
  for (int64_t i = 0; i < how.width; ++i) size[i] = half_of(bits_float(magnitude_bits(v[i])) * unit);
  int found = rung + 1;
  float least = 0.0f;
  for (int candidate = rung + 1; candidate >= std::max(rung - 1, floor); --candidate) {
    const int at = rung_step(candidate), place = candidate - 3 * at;
    const float error = candidate_error(size, how.width, rung_times(place, at - step), inverse_times(place, at - step),
                                        how.by, off);
    if (candidate == rung + 1 || error < least) least = error, found = candidate;
  }
  return found;
}

struct Buffers {
  std::vector<float> v, spare, size, off, scale, inverse, shift;
  std::vector<uint32_t> amax;
  Buffers(int64_t n, int64_t width)
      : v(n), spare(n), size(width), off(width), scale(n / width), inverse(n / width), shift(n / width), amax(n / width) {}
};

// Computes the rungs of the row in b.v: b.scale, b.inverse and, for carriers, b.shift. top: bits of the row's amax.
LadderRow row_rungs(Buffers& b, int64_t n, const LadderHow& how, const uint32_t* top) {
  const int64_t blocks = n / how.width;
  std::fill(b.amax.begin(), b.amax.end(), 0u);
  tile_amax(b.v.data(), n, how.width, b.amax.data());
  uint32_t most = 0;
  for (const uint32_t bits : b.amax) most = larger(most, bits);
  const LadderRow row = ladder_row(top == nullptr ? most : *top, how.span);
  for (int64_t i = 0; i < blocks; ++i) {
    const bool lost = how.span > 0 ? row.lost : b.amax[i] >= INFINITE;
    int rung = std::max(first_rung(b.amax[i]), 3 * row.floor);
    if (how.by != Candidates::NONE && !lost) {
      rung = chosen_rung(b.v.data() + i * how.width, rung, 3 * row.floor, how, b.size.data(), b.off.data());
    }
    const int step = rung_step(rung);
    b.scale[i] = lost ? bits_float(0x7fc00000u) : rung_scale(rung);
    b.inverse[i] = lost ? bits_float(0x7fc00000u) : rung_inverse(rung);
    if (how.span > 0) b.shift[i] = lost ? b.scale[i] : rung_times(rung - 3 * step, step - row.step + LADDER_TOP);
  }
  return row;
}

// Adds a block's sums of y^2 and y q s, truncated to multiples of 2^-28, to sums[0] and sums[1], in units of 2^-28,
// with y = x * unit and q s = codes * shift * lift.
LOWPREC_CLONES void add_block(const float* x, const float* codes, int64_t n, float unit, float shift, float lift,
                              float* square, float* product, double* sums) {
  for (int64_t i = 0; i < n; ++i) {
    const float own = x[i] * unit;
    square[i] = own * own;
    product[i] = own * (codes[i] * shift);
  }
  const auto add = [](float a, float b) { return a + b; };
  sums[0] += std::trunc(static_cast<double>(halved(square, n, add) * SUM_UNITS));
  sums[1] += std::trunc(static_cast<double>(halved(product, n, add) * (SUM_UNITS * lift)));
}

// Checks for scales [rows, tiles] of codes [rows, columns], and one number per row.
void check_scales(const Tensor& codes, const Tensor& scale, const Tensor& row) {
  const int64_t rows = codes.size(0), columns = codes.size(1);
  STD_TORCH_CHECK(scale.dim() == 2 && scale.size(0) == rows && scale.size(1) > 0 && columns % scale.size(1) == 0,
                  "scales of ", rows, " x ", columns, " codes are [", rows, ", a divisor of ", columns, "], not ",
                  scale.numel(), " numbers in ", scale.size(0), " rows");
  STD_TORCH_CHECK(row.numel() == rows, rows, " rows have as many scales, not ", row.numel());
}

void check_tops(const std::optional<Tensor>& given, int64_t rows) {
  STD_TORCH_CHECK(!given.has_value() || given->numel() == rows, rows, " rows take one number each, not ",
                  given.has_value() ? given->numel() : 0);
}

LadderHow how_of(int64_t rows, int64_t columns, const std::vector<int64_t>& tile, const std::string& by, int64_t span) {
  return {ladder_width(rows, columns, tile), parse<Candidates>("choice of a scale", CANDIDATE_NAMES, by),
          static_cast<int>(span)};
}

std::tuple<Tensor, Tensor, Tensor> quantize_ladder(const Tensor& x, std::optional<Tensor> tops, std::vector<int64_t> tile,
                                                   std::string candidates, int64_t span) {
  const int64_t rows = x.size(0), columns = x.size(1);
  const LadderHow how = how_of(rows, columns, tile, candidates, span);
  check_tops(tops, rows);
  const Tensor codes = empty_like_device(x, {rows, columns}, ScalarType::Float8_e4m3fn);
  const Tensor scale = empty_like_device(x, {rows, columns / how.width}, ScalarType::Float);
  const Tensor row_scale = empty_like_device(x, {rows, 1}, ScalarType::Float);
  const Source source = source_of(x);
  std::vector<float> given(rows);
  if (tops.has_value()) load(source_of(*tops), 0, rows, given.data());
  float *out_scale = mutable_data_of<float>(scale), *out_row = mutable_data_of<float>(row_scale);
  uint8_t* out = mutable_data_of<uint8_t>(codes);
  for_rows(rows, columns, [&](int64_t first, int64_t last) {
    Buffers b(columns, how.width);
    for (int64_t r = first; r < last; ++r) {
      load(source, r * columns, columns, b.v.data());
      const uint32_t top = magnitude_bits(given[r]);
      out_row[r] = ladder_scale(row_rungs(b, columns, how, tops.has_value() ? &top : nullptr));
      std::copy(b.scale.begin(), b.scale.end(), out_scale + r * (columns / how.width));
      scale_tiles(b.v.data(), columns, how.width, b.inverse.data());
      encode_row(Format::E2M1, b.v.data(), nullptr, columns, out + r * columns);
    }
  });
  return {codes, scale, row_scale};
}

Tensor row_sums(const Tensor& x, const Tensor& codes, const Tensor& scale, const Tensor& row) {
  check_scales(codes, scale, row);
  STD_TORCH_CHECK(x.size(0) == codes.size(0) && x.size(1) == codes.size(1), "codes of ", x.size(0), " x ", x.size(1),
                  " values, not ", codes.size(0), " x ", codes.size(1));
  const int64_t rows = x.size(0), columns = x.size(1), tiles = scale.size(1), width = columns / tiles;
  const Tensor sums = empty_like_device(x, {rows, 2}, ScalarType::Double);
  const Source source = source_of(x), made = source_of(codes), scales = source_of(scale), units = source_of(row);
  double* out = mutable_data_of<double>(sums);
  for_rows(rows, columns, [&](int64_t first, int64_t last) {
    std::vector<float> v(columns), q(columns), of(tiles), square(width), product(width);
    for (int64_t r = first; r < last; ++r) {
      float unit = 0.0f;
      load(source, r * columns, columns, v.data());
      load(made, r * columns, columns, q.data());
      load(scales, r * tiles, tiles, of.data());
      load(units, r, 1, &unit);
      const float inverse = divide(1.0f, unit * exp2_int(LADDER_TOP));
      out[2 * r] = out[2 * r + 1] = 0.0;
      for (int64_t i = 0; i < tiles; ++i) {
        add_block(v.data() + i * width, q.data() + i * width, width, inverse, of[i] * inverse, 1.0f, square.data(),
                  product.data(), out + 2 * r);
      }
    }
  });
  return sums;
}

std::tuple<Tensor, Tensor> fold_ladder(const Tensor& codes, const Tensor& scale, const Tensor& row,
                                       std::optional<Tensor> factor) {
  check_scales(codes, scale, row);
  check_tops(factor, codes.size(0));
  const int64_t rows = codes.size(0), columns = codes.size(1), tiles = scale.size(1);
  const Tensor carriers = empty_like_device(codes, {rows, columns}, ScalarType::Float8_e4m3fn);
  const Tensor row_scale = empty_like_device(row, {rows, 1}, ScalarType::Float);
  const Source source = source_of(codes), scales = source_of(scale), units = source_of(row);
  std::vector<float> unit(rows), times(rows, 1.0f);
  load(units, 0, rows, unit.data());
  if (factor.has_value()) load(source_of(*factor), 0, rows, times.data());
  float* out_row = mutable_data_of<float>(row_scale);
  uint8_t* out = mutable_data_of<uint8_t>(carriers);
  for_rows(rows, columns, [&](int64_t first, int64_t last) {
    std::vector<float> v(columns), of(tiles);
    for (int64_t r = first; r < last; ++r) {
      load(source, r * columns, columns, v.data());
      load(scales, r * tiles, tiles, of.data());
      const float inverse = divide(1.0f, unit[r]);
      for (float& each : of) each *= inverse;
      scale_tiles(v.data(), columns, columns / tiles, of.data());
      encode_row(Format::E4M3, v.data(), nullptr, columns, out + r * columns);
      out_row[r] = unit[r] * times[r];
    }
  });
  return {carriers, row_scale};
}

std::tuple<Tensor, Tensor> rotate_fold_ladder(const Tensor& x, std::optional<Tensor> scale, bool transpose,
                                              std::optional<Tensor> signs, int64_t rotation, std::vector<int64_t> tile,
                                              std::string candidates, int64_t span, bool corrected) {
  const int64_t rows = x.size(transpose ? 1 : 0), columns = x.size(transpose ? 0 : 1);
  if (rotation != 0) check_block(columns, rotation);
  STD_TORCH_CHECK(span > 0 && span <= 11, "codes fold within 11 binades, not ", span);
  const LadderHow how = how_of(rows, columns, tile, candidates, span);
  const std::vector<float> drawn = signs_of(signs, rotation);
  const Tensor codes = empty_like_device(x, {rows, columns}, ScalarType::Float8_e4m3fn);
  const Tensor row_scale = empty_like_device(x, {rows, 1}, ScalarType::Float);
  const Decoded given(x, scale, transpose);
  uint8_t* out = mutable_data_of<uint8_t>(codes);
  float* out_scale = mutable_data_of<float>(row_scale);
  for_rows(rows, columns, [&](int64_t first, int64_t last) {
    Buffers b(columns, how.width);
    std::vector<float> q(columns), square(how.width), product(how.width);
    for (int64_t r = first; r < last; ++r) {
      given.row(r, columns, b.v.data());
      if (rotation != 0) rotate_row(b.v.data(), columns, drawn.data(), rotation, b.spare.data());
      const LadderRow row = row_rungs(b, columns, how, nullptr);
      std::copy(b.v.begin(), b.v.end(), q.begin());
      scale_tiles(q.data(), columns, how.width, b.inverse.data());
      round_e2m1(q.data(), nullptr, columns);
      double sums[2] = {0.0, 0.0};
      const float unit = exp2_int(-(row.step + LADDER_LOW));
      for (int64_t at = 0; corrected && at < columns; at += how.width) {
        add_block(b.v.data() + at, q.data() + at, how.width, unit, b.shift[at / how.width], exp2_int(-LADDER_TOP),
                  square.data(), product.data(), sums);
      }
      scale_tiles(q.data(), columns, how.width, b.shift.data());
      encode_row(Format::E4M3, q.data(), nullptr, columns, out + r * columns);
      out_scale[r] = corrected ? ladder_scale(row) * row_factor(sums[0], sums[1]) : ladder_scale(row);
    }
  });
  return {codes, row_scale};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(lowprec, CPU, m) {
  m.impl("quantize_ladder", TORCH_BOX(&quantize_ladder));
  m.impl("row_sums", TORCH_BOX(&row_sums));
  m.impl("fold_ladder", TORCH_BOX(&fold_ladder));
  m.impl("rotate_fold_ladder", TORCH_BOX(&rotate_fold_ladder));
}

}  // namespace lowprec
