// hadamard, hadamard_half, rotate_fold: rotate, round to E2M1 in blocks of 32, fold the block exponents into the
// carrier. A row goes through all steps while it is in the cache.
#include "cpu/rotate.h"

#include "cpu/fold.h"
#include "numerics/ladder.h"

namespace lowprec {

std::vector<float> signs_of(const std::optional<Tensor>& seed, int64_t block) {
  std::vector<float> signs(block, 1.0f);
  std::vector<uint16_t> bits;
  const uint16_t* drawn = draws_of(seed_of(seed), std::nullopt).of_row(0, block, bits);
  for (int64_t i = 0; drawn != nullptr && i < block; ++i) signs[i] = drawn[i] & 1 ? -1.0f : 1.0f;
  return signs;
}

void check_block(int64_t columns, int64_t block) {
  STD_TORCH_CHECK(block > 0 && (block & (block - 1)) == 0 && columns % block == 0, "blocks of ", block,
                  " do not fit a row of ", columns);
}

Decoded::Decoded(const Tensor& x, const std::optional<Tensor>& scale, bool transpose, bool rounds)
    : source_(source_of(x)), rounds_(rounds) {
  const int64_t rows = rows_of(x), columns = x.size(1);
  if (scale.has_value()) {
    factors_.resize(scale->numel());
    STD_TORCH_CHECK(scale->numel() == 1 || scale->numel() == rows, "a scale of ", scale->numel(), " numbers for ", rows);
    STD_TORCH_CHECK(!rounds || scale->numel() == 1, "values are rounded to E4M3 under one scale");
    load(source_of(*scale), 0, scale->numel(), factors_.data());
  }
  if (!transpose) return;
  std::vector<float> plain;
  if (factors_.size() > 1) {  // rows become columns
    plain.resize(rows * columns);
    for (int64_t r = 0; r < rows; ++r) {
      load(source_, r * columns, columns, plain.data() + r * columns);
      scale_to_bf16(plain.data() + r * columns, columns, factors_[r]);
    }
    factors_.clear();
    source_ = {source_.owner, reinterpret_cast<const char*>(plain.data()), Format::FP32, 4};
  }
  turned_ = transposed(source_, rows, columns, nullptr);
  source_ = {source_.owner, reinterpret_cast<const char*>(turned_.data()), Format::FP32, 4};
}

void Decoded::row(int64_t r, int64_t columns, float* out) const {
  load(source_, r * columns, columns, out);
  if (rounds_) {
    const float inverse = 1.0f / factors_[0];
    for (int64_t i = 0; i < columns; ++i) out[i] = decode<Format::E4M3>(encode<Format::E4M3>(out[i] * inverse));
  }
  if (!factors_.empty()) scale_to_bf16(out, columns, factors_[factors_.size() > 1 ? r : 0]);
}

void check_half_block(int64_t columns, int64_t block) {
  check_block(columns, block);
  STD_TORCH_CHECK(block <= HALF_GROUP, "half precision holds sums of up to ", HALF_GROUP, " numbers, not of ", block);
}

namespace {

constexpr int64_t MX_BLOCK = 32;

// Rows of x after rotate(row, signs, spare), FP32.
template <typename Rotate>
Tensor rotated(const Tensor& x, const std::optional<Tensor>& seed, int64_t block, const Rotate& rotate) {
  const int64_t rows = rows_of(x), columns = x.size(1);
  const Tensor made = empty_like_device(x, {rows, columns}, ScalarType::Float);
  const Source source = source_of(x);
  const std::vector<float> signs = signs_of(seed, block);
  float* out = mutable_data_of<float>(made);
  for_rows(rows, columns, [&](int64_t first, int64_t last) {
    std::vector<float> spare(columns);
    for (int64_t r = first; r < last; ++r) {
      load(source, r * columns, columns, out + r * columns);
      rotate(out + r * columns, signs.data(), spare.data());
    }
  });
  return made;
}

Tensor hadamard(const Tensor& x, std::optional<Tensor> seed, int64_t block) {
  check_block(x.size(1), block);
  return rotated(x, seed, block, [&](float* row, const float* signs, float* spare) {
    rotate_row(row, x.size(1), signs, block, spare);
  });
}

Tensor hadamard_half(const Tensor& x, std::optional<Tensor> seed, int64_t block, double gain) {
  check_half_block(x.size(1), block);
  return rotated(x, seed, block, [&](float* row, const float* signs, float* spare) {
    rotate_row_half(row, x.size(1), signs, block, static_cast<float>(gain), spare);
  });
}

// Parameters of the steps for each row.
struct Pipeline {
  std::vector<float> signs;
  int64_t rotation;
  ScaleRule how;
  Draws draws;
  Format carrier;
  int top;
};

struct Buffers {
  std::vector<float> v, spare, scale, inverse, shift;
  std::vector<uint16_t> bits;
  std::vector<uint32_t> amax;
  explicit Buffers(int64_t n)
      : v(n), spare(n), scale(n / MX_BLOCK), inverse(n / MX_BLOCK), shift(n / MX_BLOCK), amax(n / MX_BLOCK) {}
};

// Converts the row in b.v to codes; returns its scale.
float rotate_fold_row(const Pipeline& how, int64_t r, int64_t n, Buffers& b, uint8_t* codes) {
  const int64_t blocks = n / MX_BLOCK;
  if (how.rotation != 0) rotate_row(b.v.data(), n, how.signs.data(), how.rotation, b.spare.data());
  std::fill(b.amax.begin(), b.amax.end(), 0u);
  tile_amax(b.v.data(), n, MX_BLOCK, b.amax.data());
  tile_scales(b.amax.data(), blocks, how.how, b.scale.data(), b.inverse.data());
  scale_tiles(b.v.data(), n, MX_BLOCK, b.inverse.data());
  round_e2m1(b.v.data(), how.draws.of_row(r, n, b.bits), n);
  const float scale = fold_scales(b.scale.data(), blocks, how.top, b.shift.data());
  cast_tiles(how.carrier, b.v.data(), n, MX_BLOCK, b.shift.data(), codes);
  return scale;
}

std::tuple<Tensor, Tensor> rotate_fold(const Tensor& x, std::optional<Tensor> scale, bool transpose,
                                       std::optional<Tensor> signs, int64_t rotation, std::string scale_rule,
                                       double headroom, int64_t span, std::string carrier, std::string rounding,
                                       std::optional<Tensor> seed, std::optional<Tensor> origin,
                                       std::optional<Tensor>) {
  const int64_t rows = x.size(transpose ? 1 : 0), columns = x.size(transpose ? 0 : 1);
  if (rotation != 0) check_block(columns, rotation);
  resolve_tile(rows, columns, {1, MX_BLOCK});
  STD_TORCH_CHECK(columns > 0, "rotate_fold of a ", rows, " by ", columns, " matrix: its rows have no largest block");
  const Format format = parse_format(carrier);
  const ScaleRule rule = scale_rule_of(Format::E2M1, parse_rule(scale_rule), headroom, span);
  const Draws draws = draws_of(seed_of(rounding, seed), origin);
  const Pipeline how{signs_of(signs, rotation), rotation, rule, draws, format, fold_top(format)};
  const Tensor codes = empty_like_device(x, {rows, columns}, carrier_of(format));
  const Tensor row_scale = empty_like_device(x, {rows, 1}, ScalarType::Float);
  const Decoded given(x, scale, transpose);
  uint8_t* out = mutable_data_of<uint8_t>(codes);
  float* out_scale = mutable_data_of<float>(row_scale);
  for_rows(rows, columns, [&](int64_t first, int64_t last) {
    Buffers buffers(columns);
    for (int64_t r = first; r < last; ++r) {
      given.row(r, columns, buffers.v.data());
      out_scale[r] = rotate_fold_row(how, r, columns, buffers, out + r * columns);
    }
  });
  return {codes, row_scale};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(lowprec, CPU, m) {
  m.impl("hadamard", TORCH_BOX(&hadamard));
  m.impl("hadamard_half", TORCH_BOX(&hadamard_half));
  m.impl("rotate_fold", TORCH_BOX(&rotate_fold));
}

}  // namespace lowprec
