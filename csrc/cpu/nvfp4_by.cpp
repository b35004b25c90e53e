// quantize_nvfp4_by (ops/reference.py), quantize_four_over_six (ops/four_over_six.py): NVFP4 from a given amax of tiles
// and of the regions with one outer scale.
#include "cpu/nvfp4.h"
#include "numerics/ladder.h"

namespace lowprec {
namespace {

// Amax by tile, and the outer scales from the amax of regions.
struct Outer {
  std::vector<float> amax, scale;
  int64_t down, along, bands, across;

  Outer(const Tensor& tiles, const Tensor& tops, int64_t bands, int64_t across, double reach)
      : amax(bands * across), scale(tops.numel()), bands(bands), across(across) {
    STD_TORCH_CHECK(tiles.numel() == bands * across, bands * across, " tiles have as many maxima, not ", tiles.numel());
    STD_TORCH_CHECK(tops.dim() == 2 && (tops.size(0) == 1 || tops.size(0) == bands) &&
                        (tops.size(1) == 1 || tops.size(1) == across),
                    "maxima above tiles are of all of them, of a row or of a column, not [", tops.size(0), ", ",
                    tops.size(1), "]");
    load(source_of(tiles), 0, tiles.numel(), amax.data());
    load(source_of(tops), 0, tops.numel(), scale.data());
    for (float& each : scale) each = outer_scale(each, reach);
    down = tops.size(0) > 1 ? tops.size(1) : 0, along = tops.size(1) > 1 ? 1 : 0;
  }
  float at(int64_t band, int64_t i) const { return scale[band * down + i * along]; }
};

struct Made {
  Tensor codes, scale, block, outer;
};

Made empty_for(const Tensor& x, const Tensor& top, const Outer& outer) {
  Made made{empty_like_device(x, {x.size(0), x.size(1)}, ScalarType::Float8_e4m3fn),
            empty_like_device(x, {outer.bands, outer.across}, ScalarType::Float),
            empty_like_device(x, {outer.bands, outer.across}, ScalarType::Float8_e4m3fn),
            empty_like_device(x, {top.size(0), top.size(1)}, ScalarType::Float)};
  std::copy(outer.scale.begin(), outer.scale.end(), mutable_data_of<float>(made.outer));
  return made;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> quantize_nvfp4_by(const Tensor& x, const Tensor& amax, const Tensor& top,
                                                             std::vector<int64_t> tile, double headroom,
                                                             std::string rounding, std::optional<Tensor> seed,
                                                             std::optional<Tensor> origin) {
  const int64_t rows = rows_of(x), columns = x.size(1);
  const Tile shape = resolve_tile(rows, columns, tile);
  const int64_t bands = rows / shape.rows, tiles = columns / shape.columns;
  const Outer outer(amax, top, bands, tiles, 6.0 * 448.0);
  const Made made = empty_for(x, top, outer);
  float* scale = mutable_data_of<float>(made.scale);
  uint8_t *block = mutable_data_of<uint8_t>(made.block), *codes = mutable_data_of<uint8_t>(made.codes);
  for (int64_t i = 0; i < bands * tiles; ++i) {
    const BlockScale of = block_scale(outer.amax[i], outer.at(i / tiles, i % tiles), headroom);
    scale[i] = of.scale, block[i] = of.code;
  }
  const Source source = source_of(x);
  const Draws draws = draws_of(seed_of(rounding, seed), origin);
  for_rows(rows, columns, [&](int64_t first, int64_t last) {
    std::vector<float> v(columns);
    std::vector<uint16_t> bits;
    for (int64_t r = first; r < last; ++r) {
      load(source, r * columns, columns, v.data());
      divide_tiles(v.data(), columns, shape.columns, scale + r / shape.rows * tiles);
      encode_row(Format::E2M1, v.data(), draws.of_row(r, columns, bits), columns, codes + r * columns);
    }
  });
  return {made.codes, made.scale, made.block, made.outer};
}

// --- four over six ---

LOWPREC_HD float join(float a, float b, Candidates by) {
  if (by != Candidates::MAX) return a + b;
  return is_nan(a) || a > b ? a : b;
}

// Writes a tile's scaled elements to `place`; returns its error in units of the outer scale. off: scratch.
LOWPREC_CLONES float error_of(const float* x, int64_t n, float scale, float block, Candidates by, float* place, float* off) {
  for (int64_t i = 0; i < n; ++i) {
    place[i] = divide(x[i], scale);
    const float v = clamp(place[i], 6.0f), code = is_finite(v) ? round_nearest<Format::E2M1>(v) : v;
    const float each = bits_float(float_bits(bits_float(magnitude_bits(code - place[i])) * block) & ~0xfffu);
    off[i] = by == Candidates::MSE ? each * each : each;
  }
  for (int64_t half = n / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i) off[i] = join(off[i], off[i + half], by);
  }
  return off[0];
}

struct Chosen {
  BlockScale of;
  const float* place;
};

struct Scratch {
  std::vector<float> x, six, four, off;
  explicit Scratch(int64_t count) : x(count), six(count), four(count), off(count) {}
};

Chosen chosen(Scratch& s, float amax, float outer, Candidates by) {
  const float share = divide(divide(amax, 6.0f), outer);
  const uint8_t six = block_code(share), four = block_code(share * 1.5f);
  const float block_six = decode<Format::E4M3>(six), block_four = decode<Format::E4M3>(four);
  const int64_t n = static_cast<int64_t>(s.x.size());
  const float error = error_of(s.x.data(), n, block_six * outer, block_six, by, s.six.data(), s.off.data());
  const bool lower = error_of(s.x.data(), n, block_four * outer, block_four, by, s.four.data(), s.off.data()) < error;
  const float scale = amax == 0.0f ? 1.0f : (lower ? block_four : block_six) * outer;
  return {{scale, lower ? four : six}, lower ? s.four.data() : s.six.data()};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> quantize_four_over_six(const Tensor& x, const Tensor& amax, const Tensor& top,
                                                                  std::vector<int64_t> tile, std::string candidates) {
  const int64_t rows = rows_of(x), columns = x.size(1);
  const Tile shape = resolve_tile(rows, columns, tile);
  const int64_t bands = rows / shape.rows, tiles = columns / shape.columns, count = shape.rows * shape.columns;
  const Candidates by = parse<Candidates>("choice of a scale", CANDIDATE_NAMES, candidates);
  STD_TORCH_CHECK(by != Candidates::NONE && (count & (count - 1)) == 0, "tiles of ", shape.rows, "x", shape.columns,
                  " by ", candidates, ": a power of two by one of mse, mae, max");
  const Outer outer(amax, top, bands, tiles, 6.0 * 256.0);
  const Made made = empty_for(x, top, outer);
  float* scale = mutable_data_of<float>(made.scale);
  uint8_t *block = mutable_data_of<uint8_t>(made.block), *codes = mutable_data_of<uint8_t>(made.codes);
  const Source source = source_of(x);
  for_rows(bands, shape.rows * columns, [&](int64_t first, int64_t last) {
    Scratch s(count);
    for (int64_t at = first * tiles; at < last * tiles; ++at) {
      const int64_t corner = at / tiles * shape.rows * columns + at % tiles * shape.columns;
      for (int64_t r = 0; r < shape.rows; ++r) {
        load(source, corner + r * columns, shape.columns, s.x.data() + r * shape.columns);
      }
      const Chosen made_of = chosen(s, outer.amax[at], outer.at(at / tiles, at % tiles), by);
      scale[at] = made_of.of.scale, block[at] = made_of.of.code;
      for (int64_t r = 0; r < shape.rows; ++r) {
        encode_row(Format::E2M1, made_of.place + r * shape.columns, nullptr, shape.columns, codes + corner + r * columns);
      }
    }
  });
  return {made.codes, made.scale, made.block, made.outer};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(lowprec, CPU, m) {
  m.impl("quantize_nvfp4_by", TORCH_BOX(&quantize_nvfp4_by));
  m.impl("quantize_four_over_six", TORCH_BOX(&quantize_four_over_six));
}

}  // namespace lowprec
