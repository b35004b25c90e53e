// quantize_ladder, row_sums, fold_ladder, rotate_fold_ladder (ops/ladder.py): E2M1 with the best of four
// rungs, its carriers, a factor per row. A row goes through all steps while it is in the cache.
//
// Blocks of a row are stored element by element: element i of block b is at i * blocks + b, so that loops over blocks
// are vectorised.
#include "numerics/ladder.h"

#include "cpu/rotate.h"
#include "ladder_arguments.h"
#include "norm_arguments.h"

namespace lowprec {
namespace {

// a b + c rounded once to half precision. Operands are halves: their product, and whatever of the sum decides its
// rounding, fit FP64.
LOWPREC_HD float fused_half(float a, float b, float c) {
  const double sum = static_cast<double>(a) * static_cast<double>(b) + static_cast<double>(c);
  int64_t bits;
  std::memcpy(&bits, &sum, 8);
  int64_t e = (bits >> 52 & 2047) - 1023;
  e = e < -14 ? -14 : e > 15 ? 15 : e;
  const int64_t magic_bits = (e + (52 - 10 + 1023)) << 52 | int64_t{1} << 51;  // its last bit is half precision's
  double magic;
  std::memcpy(&magic, &magic_bits, 8);
  return static_cast<float>((sum + magic) - magic);
}

struct LadderHow {
  int64_t width;
  Candidates by;
  int span;
};

// The blocks of a row: `rung` is the first rung, then the chosen one; `unit` is the exponent of the first.
struct RowBlocks {
  int64_t blocks, width;
  std::vector<int> rung, unit, tried;
  std::vector<uint32_t> amax;
  std::vector<float> size, inverse, ratio, error, least, scale, shift, spare;

  RowBlocks(int64_t n, int64_t of)
      : blocks(n / of), width(of), rung(blocks), unit(blocks), tried(blocks), amax(blocks), size(n), inverse(blocks),
        ratio(blocks), error(2 * blocks), least(blocks), scale(blocks), shift(blocks), spare(2 * blocks) {}

  // Inverses, in half precision, and scales of `tried`, in units of 2^unit.
  void try_rungs() {
    for (int64_t b = 0; b < blocks; ++b) {
      const int step = rung_step(tried[b] + 3) - 1, place = tried[b] - 3 * step, up = step + LADDER_LOW - unit[b];
      inverse[b] = half_of(inverse_times(place, up));
      ratio[b] = rung_times(place, up);
    }
  }
};

// |v| / 2^unit in half precision.
LOWPREC_CLONES void fill_sizes(const float* v, const int* unit, int64_t blocks, int64_t width, float* size, float* factor) {
  for (int64_t b = 0; b < blocks; ++b) factor[b] = exp2_int(-unit[b]);
  for (int64_t b = 0; b < blocks; ++b) {
    for (int64_t i = 0; i < width; ++i) {
      size[i * blocks + b] = half_of(bits_float(magnitude_bits(v[b * width + i])) * factor[b]);
    }
  }
}

// The grid value next to `place`, at most 6 `grid`; the grid is that of E2M1 times 1 or 2.
LOWPREC_HD float on_grid(float place, float grid) {
  const float value = place / grid;
  return round_nearest<Format::E2M1>(value < 6.0f ? value : 6.0f) * grid;
}

// Errors of blocks: sums (or maxima) over even and odd elements, then both.
template <Candidates by>
LOWPREC_CLONES void block_errors(const float* size, const float* inverse, int64_t blocks, int64_t width, float grid,
                                 float* error) {
  std::fill(error, error + 2 * blocks, 0.0f);
  for (int64_t i = 0; i < width; ++i) {
    const float* of = size + i * blocks;
    float* total = error + (i & 1) * blocks;
    for (int64_t b = 0; b < blocks; ++b) {
      const float place = half_of(of[b] * inverse[b]);
      const float off = bits_float(magnitude_bits(on_grid(place, grid) - place));
      if (by == Candidates::MAX) {
        total[b] = total[b] > off ? total[b] : off;
      } else {
        total[b] = by == Candidates::MSE ? fused_half(off, off, total[b]) : half_of(off + total[b]);
      }
    }
  }
  for (int64_t b = 0; b < blocks; ++b) {
    const float even = error[b], odd = error[blocks + b];
    error[b] = by == Candidates::MAX ? (even > odd ? even : odd) : half_of(even + odd);
  }
}

void block_errors(const RowBlocks& of, Candidates by, float grid, float* error) {
  const auto call = [&](auto errors) { errors(of.size.data(), of.inverse.data(), of.blocks, of.width, grid, error); };
  if (by == Candidates::MSE) return call(block_errors<Candidates::MSE>);
  if (by == Candidates::MAE) return call(block_errors<Candidates::MAE>);
  call(block_errors<Candidates::MAX>);
}

// Replaces each rung by the best of its candidates. The rung two above has the codes of the rung below on a grid twice
// as wide.
void choose_rungs(RowBlocks& b, int floor, Candidates by) {
  const std::vector<int> first = b.rung;
  for (int step = 2; step >= -1; --step) {
    for (int64_t i = 0; i < b.blocks; ++i) b.tried[i] = first[i] + (step == 2 ? -1 : step);
    b.try_rungs();
    block_errors(b, by, step == 2 ? 2.0f : 1.0f, b.error.data());
    for (int64_t i = 0; i < b.blocks; ++i) {
      const float error = by == Candidates::MSE ? b.error[i] * (b.ratio[i] * b.ratio[i]) : b.error[i] * b.ratio[i];
      if (step < 2 && (!(error < b.least[i]) || first[i] + step < floor)) continue;
      b.least[i] = error, b.rung[i] = first[i] + step;
    }
  }
}

// Computes rungs, scales and, for carriers, shifts of the row v. top: bits of the row's amax.
LadderRow row_rungs(RowBlocks& b, const float* v, const LadderHow& how, const uint32_t* top) {
  std::fill(b.amax.begin(), b.amax.end(), 0u);
  tile_amax(v, b.blocks * b.width, b.width, b.amax.data());
  uint32_t most = 0;
  for (const uint32_t bits : b.amax) most = larger(most, bits);
  const LadderRow row = ladder_row(top == nullptr ? most : *top, how.span);
  for (int64_t i = 0; i < b.blocks; ++i) {
    b.rung[i] = std::max(first_rung(b.amax[i]), 3 * row.floor);
    b.unit[i] = rung_step(b.rung[i]) + LADDER_LOW;
  }
  fill_sizes(v, b.unit.data(), b.blocks, b.width, b.size.data(), b.spare.data());
  if (how.by != Candidates::NONE) choose_rungs(b, 3 * row.floor, how.by);
  for (int64_t i = 0; i < b.blocks; ++i) {
    const bool lost = how.span > 0 ? row.lost : b.amax[i] >= INFINITE;
    const int step = rung_step(b.rung[i]);
    b.scale[i] = lost ? bits_float(0x7fc00000u) : rung_scale(b.rung[i]);
    if (how.span > 0) b.shift[i] = lost ? b.scale[i] : rung_times(b.rung[i] - 3 * step, step - row.step + LADDER_TOP);
  }
  return row;
}

// Signed E2M1 values of a row under its rungs; NaN in lost blocks.
LOWPREC_CLONES void round_blocks(const float* v, const float* size, const float* inverse, const float* scale,
                                 int64_t blocks, int64_t width, float* out) {
  for (int64_t b = 0; b < blocks; ++b) {
    for (int64_t i = 0; i < width; ++i) {
      const float value = on_grid(half_of(size[i * blocks + b] * inverse[b]), 1.0f);
      const float code = with_sign(value, v[b * width + i]) + 0.0f;  // zeros are positive
      out[b * width + i] = is_nan(scale[b]) ? scale[b] : code;
    }
  }
}

void round_row(RowBlocks& b, const float* v, float* out) {
  b.tried = b.rung;
  b.try_rungs();
  round_blocks(v, b.size.data(), b.inverse.data(), b.scale.data(), b.blocks, b.width, out);
}

// Adds up size^2 and size |codes| of each block in half precision: of even and odd elements, then both.
LOWPREC_CLONES void block_sums(const float* size, const float* codes, int64_t blocks, int64_t width, float* own, float* made) {
  std::fill(own, own + 2 * blocks, 0.0f);
  std::fill(made, made + 2 * blocks, 0.0f);
  for (int64_t i = 0; i < width; ++i) {
    const int64_t at = (i & 1) * blocks;
    for (int64_t b = 0; b < blocks; ++b) {
      const float of = size[i * blocks + b];
      own[at + b] = fused_half(of, of, own[at + b]);
      made[at + b] = fused_half(of, bits_float(magnitude_bits(codes[b * width + i])), made[at + b]);
    }
  }
  for (int64_t b = 0; b < blocks; ++b) {
    own[b] = half_of(own[b] + own[blocks + b]);
    made[b] = half_of(made[b] + made[blocks + b]);
  }
}

// The two sums of a row in units of 2^-16 4^e_row. codes [n]: E2M1 values; scale: of blocks. e_row: of the row.
void add_blocks(RowBlocks& b, const float* codes, const float* scale, int e_row, double* sums) {
  block_sums(b.size.data(), codes, b.blocks, b.width, b.error.data(), b.spare.data());
  const float inverse = e_row > 127 ? bits_float(0x7fc00000u) : exp2_int(-e_row);  // of a row with NaN or Inf: NaN
  sums[0] = sums[1] = 0.0;
  for (int64_t i = 0; i < b.blocks; ++i) {
    const int up = b.unit[i] - e_row;
    const float times = exp2_int(up < -60 ? -60 : up > 60 ? 60 : up);
    sums[0] += std::trunc(static_cast<double>(b.error[i] * times * times * SUM_UNITS));
    sums[1] += std::trunc(static_cast<double>(b.spare[i] * times * (scale[i] * inverse) * SUM_UNITS));
  }
}

LadderHow how_of(int64_t rows, int64_t columns, const std::vector<int64_t>& tile, const std::string& by, int64_t span) {
  return {ladder_width(rows, columns, tile), parse<Candidates>("choice of a scale", CANDIDATE_NAMES, by),
          static_cast<int>(span)};
}

std::tuple<Tensor, Tensor, Tensor> quantize_ladder(const Tensor& x, std::optional<Tensor> tops, std::vector<int64_t> tile,
                                                   std::string candidates, int64_t span) {
  const int64_t rows = rows_of(x), columns = x.size(1);
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
    RowBlocks b(columns, how.width);
    std::vector<float> v(columns), q(columns);
    for (int64_t r = first; r < last; ++r) {
      load(source, r * columns, columns, v.data());
      const uint32_t top = magnitude_bits(given[r]);
      out_row[r] = ladder_scale(row_rungs(b, v.data(), how, tops.has_value() ? &top : nullptr));
      std::copy(b.scale.begin(), b.scale.end(), out_scale + r * (columns / how.width));
      round_row(b, v.data(), q.data());
      encode_row(Format::E2M1, q.data(), nullptr, columns, out + r * columns);
    }
  });
  return {codes, scale, row_scale};
}

Tensor row_sums(const Tensor& x, const Tensor& codes, const Tensor& scale, const Tensor& row, int64_t span) {
  check_sums(x, codes, scale, row);
  const int64_t rows = rows_of(x), columns = x.size(1), tiles = scale.size(1), width = columns / tiles;
  const Tensor sums = empty_like_device(x, {rows, 2}, ScalarType::Double);
  const Source source = source_of(x), made = source_of(codes), scales = source_of(scale), units = source_of(row);
  double* out = mutable_data_of<double>(sums);
  for_rows(rows, columns, [&](int64_t first, int64_t last) {
    RowBlocks b(columns, width);
    std::vector<float> v(columns), q(columns), of(tiles);
    for (int64_t r = first; r < last; ++r) {
      float unit = 0.0f;
      load(source, r * columns, columns, v.data());
      load(made, r * columns, columns, q.data());
      load(scales, r * tiles, tiles, of.data());
      load(units, r, 1, &unit);
      const int e_row = exponent(unit) + LADDER_TOP;
      const int floor = span == 0 ? 0 : std::max(e_row - static_cast<int>(span) - LADDER_LOW, 0);
      std::fill(b.amax.begin(), b.amax.end(), 0u);
      tile_amax(v.data(), columns, width, b.amax.data());
      for (int64_t i = 0; i < tiles; ++i) b.unit[i] = rung_step(std::max(first_rung(b.amax[i]), 3 * floor)) + LADDER_LOW;
      fill_sizes(v.data(), b.unit.data(), tiles, width, b.size.data(), b.spare.data());
      add_blocks(b, q.data(), of.data(), e_row, out + 2 * r);
    }
  });
  return sums;
}

std::tuple<Tensor, Tensor> fold_ladder(const Tensor& codes, const Tensor& scale, const Tensor& row,
                                       std::optional<Tensor> factor) {
  check_scales(codes, scale, row);
  check_tops(factor, codes.size(0));
  const int64_t rows = rows_of(codes), columns = codes.size(1), tiles = scale.size(1);
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

// x times a rate per row and a weight per column, rounded to its dtype.
Tensor normalized(const Tensor& x, const Tensor& rate, const Tensor& weight) {
  const int64_t rows = rows_of(x), columns = x.size(1);
  const Tensor made = empty_like_device(x, {rows, columns}, x.scalar_type());
  const Source source = source_of(x);
  std::vector<float> rates(rows), weights(columns);
  load(source_of(rate), 0, rows, rates.data());
  load(source_of(weight), 0, columns, weights.data());
  char* out = static_cast<char*>(made.mutable_data_ptr());
  for_rows(rows, columns, [&](int64_t first, int64_t last) {
    std::vector<float> v(columns);
    for (int64_t r = first; r < last; ++r) {
      load(source, r * columns, columns, v.data());
      for (int64_t c = 0; c < columns; ++c) v[c] = v[c] * rates[r] * weights[c];
      encode_row(source.format, v.data(), nullptr, columns, out + r * columns * source.bytes);
    }
  });
  return made;
}

std::tuple<Tensor, Tensor> rotate_fold_ladder(const Tensor& values, std::optional<Tensor> scale, bool transpose,
                                              std::optional<Tensor> signs, int64_t rotation, double gain,
                                              std::vector<int64_t> tile, std::string candidates, int64_t span,
                                              bool corrected, std::optional<Tensor>, std::optional<Tensor> rate,
                                              std::optional<Tensor> weight) {
  const Tensor x = has_norm(values, rate, weight) ? normalized(values, *rate, *weight) : values;
  const int64_t rows = x.size(transpose ? 1 : 0), columns = x.size(transpose ? 0 : 1);
  if (rotation != 0) check_half_block(columns, rotation);
  STD_TORCH_CHECK(span > 0 && span <= 11, "codes fold within 11 binades, not ", span);
  const LadderHow how = how_of(rows, columns, tile, candidates, span);
  const std::vector<float> drawn = signs_of(signs, rotation);
  const Tensor codes = empty_like_device(x, {rows, columns}, ScalarType::Float8_e4m3fn);
  const Tensor row_scale = empty_like_device(x, {rows, 1}, ScalarType::Float);
  const Decoded given(x, scale, transpose, scale.has_value() && x.scalar_type() != ScalarType::Float8_e4m3fn);
  uint8_t* out = mutable_data_of<uint8_t>(codes);
  float* out_scale = mutable_data_of<float>(row_scale);
  for_rows(rows, columns, [&](int64_t first, int64_t last) {
    RowBlocks b(columns, how.width);
    std::vector<float> v(columns), q(columns);
    for (int64_t r = first; r < last; ++r) {
      given.row(r, columns, v.data());
      if (rotation != 0) rotate_row_half(v.data(), columns, drawn.data(), rotation, static_cast<float>(gain), q.data());
      const LadderRow row = row_rungs(b, v.data(), how, nullptr);
      round_row(b, v.data(), q.data());
      double sums[2] = {0.0, 0.0};
      if (corrected) add_blocks(b, q.data(), b.scale.data(), row.step + LADDER_LOW, sums);
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
