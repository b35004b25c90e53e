// quantize, quantize_both: amax of each tile, its scale, and the codes of the scaled values.
//
// Tiles of one row need one pass over the matrix; taller ones need their amax first, so rows are read twice.
#include "cpu/rows.h"

namespace lowprec {
namespace {

struct Row {
  std::vector<float> v;
  std::vector<uint16_t> bits;
};

}  // namespace

void quantize_matrix(const Source& x, int64_t rows, int64_t columns, const float* across, const Cast& cast,
                     const Draws& draws, void* codes, float* scale, const uint32_t* known) {
  const int64_t width = cast.tile.columns, height = cast.tile.rows, tiles = columns / width;
  const int64_t bytes = with_format(cast.format, [](auto tag) -> int64_t {
    return sizeof(typename Grid<decltype(tag)::value>::Code);
  });
  const auto read = [&](int64_t r, Row& row) {
    row.v.resize(columns);
    load(x, r * columns, columns, row.v.data());
    if (across != nullptr) multiply(row.v.data(), columns, across);
  };
  const auto write = [&](int64_t r, Row& row, const float* inverse) {
    if (cast.how.divides()) divide_tiles(row.v.data(), columns, width, scale + r / height * tiles);
    else if (!cast.how.unscaled) scale_tiles(row.v.data(), columns, width, inverse);
    const uint16_t* bits = draws.of_row(r, columns, row.bits);
    encode_row(cast.format, row.v.data(), bits, columns, static_cast<char*>(codes) + r * columns * bytes);
  };
  if (height == 1 && known == nullptr) {
    for_rows(rows, columns, [&](int64_t first, int64_t last) {
      Row row;
      std::vector<uint32_t> amax(tiles);
      std::vector<float> inverse(tiles);
      for (int64_t r = first; r < last; ++r) {
        read(r, row);
        std::fill(amax.begin(), amax.end(), 0u);
        tile_amax(row.v.data(), columns, width, amax.data());
        tile_scales(amax.data(), tiles, cast.how, scale + r * tiles, inverse.data());
        write(r, row, inverse.data());
      }
    });
    return;
  }
  std::vector<uint32_t> amax(rows * tiles, known == nullptr ? 0u : *known);
  if (known == nullptr) {
    for_rows(rows, columns, [&](int64_t first, int64_t last) {
      Row row;
      for (int64_t r = first; r < last; ++r) {
        read(r, row);
        tile_amax(row.v.data(), columns, width, amax.data() + r * tiles);
      }
    });
  }
  std::vector<float> inverse(rows / height * tiles);
  for (int64_t band = 0; band < rows / height; ++band) {
    uint32_t* most = amax.data() + band * height * tiles;
    for (int64_t r = 1; r < height; ++r) {
      for (int64_t i = 0; i < tiles; ++i) most[i] = larger(most[i], most[r * tiles + i]);
    }
    tile_scales(most, tiles, cast.how, scale + band * tiles, inverse.data() + band * tiles);
  }
  for_rows(rows, columns, [&](int64_t first, int64_t last) {
    Row row;
    for (int64_t r = first; r < last; ++r) {
      read(r, row);
      write(r, row, inverse.data() + r / height * tiles);
    }
  });
}

std::vector<float> transposed(const Source& x, int64_t rows, int64_t columns, const float* down) {
  constexpr int64_t wide = 64, tall = 16;
  std::vector<float> out(rows * columns);
  for_rows((columns + wide - 1) / wide, rows * wide, [&](int64_t first, int64_t last) {
    float block[tall * wide];
    for (int64_t c = first * wide; c < std::min(last * wide, columns); c += wide) {
      const int64_t n = std::min(wide, columns - c);
      for (int64_t r = 0; r < rows; r += tall) {
        const int64_t m = std::min(tall, rows - r);
        for (int64_t i = 0; i < m; ++i) {
          load(x, (r + i) * columns + c, n, block + i * wide);
          if (down != nullptr) {
            for (int64_t j = 0; j < n; ++j) block[i * wide + j] *= down[r + i];
          }
        }
        for (int64_t j = 0; j < n; ++j) {
          for (int64_t i = 0; i < m; ++i) out[(c + j) * rows + r + i] = block[i * wide + j];
        }
      }
    }
  });
  return out;
}

namespace {

Cast cast_of(const std::string& format, int64_t rows, int64_t columns, const std::vector<int64_t>& tile,
             const std::string& rule, double headroom, int64_t span) {
  const Format made = parse_format(format);
  return {made, scale_rule_of(made, parse_rule(rule), headroom, span), resolve_tile(rows, columns, tile)};
}

struct Quantized {
  Tensor codes, scale;
};

Quantized empty_for(const Tensor& x, int64_t rows, int64_t columns, const Cast& cast) {
  return {empty_like_device(x, {rows, columns}, carrier_of(cast.format)),
          empty_like_device(x, {rows / cast.tile.rows, columns / cast.tile.columns}, ScalarType::Float)};
}

std::tuple<Tensor, Tensor> quantize(const Tensor& x, std::string format, std::vector<int64_t> tile,
                                    std::string scale_rule, double headroom, int64_t span, std::string rounding,
                                    std::optional<Tensor> seed, std::optional<Tensor> origin) {
  const int64_t rows = rows_of(x), columns = x.size(1);
  const Cast cast = cast_of(format, rows, columns, tile, scale_rule, headroom, span);
  const Quantized made = empty_for(x, rows, columns, cast);
  const Draws draws = draws_of(seed_of(rounding, seed), origin);
  quantize_matrix(source_of(x), rows, columns, nullptr, cast, draws, made.codes.mutable_data_ptr(),
                  mutable_data_of<float>(made.scale));
  return {made.codes, made.scale};
}

// A dense FP32 factor [1, k] or [m, 1]; a single number is repeated n times.
struct Factor {
  std::vector<float> values;
  Factor(const std::optional<Tensor>& factor, int64_t n) {
    if (!factor.has_value()) return;
    const int64_t given = factor->numel();
    STD_TORCH_CHECK(given == n || given == 1, "a factor of ", given, " numbers for ", n);
    values.resize(given);
    load(source_of(*factor), 0, given, values.data());
    values.resize(n, values[0]);
  }
  const float* data() const { return values.empty() ? nullptr : values.data(); }
};

// Bits of the largest magnitude of a tensor.
uint32_t largest_of(const Tensor& given) {
  std::vector<float> values(given.numel());
  load(source_of(given), 0, given.numel(), values.data());
  uint32_t found = 0;
  for (const float value : values) found = larger_magnitude(found, value);
  return found;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> quantize_both(const Tensor& x, std::optional<Tensor> amax,
                                                         std::optional<Tensor> across, std::optional<Tensor> down,
                                                         std::string format, std::vector<int64_t> tile,
                                                         std::vector<int64_t> tile_t, std::string scale_rule,
                                                         double headroom) {
  const int64_t rows = rows_of(x), columns = x.size(1);
  const Cast cast = cast_of(format, rows, columns, tile, scale_rule, headroom, 0);
  const Cast cast_t = cast_of(format, columns, rows, tile_t, scale_rule, headroom, 0);
  const Quantized made = empty_for(x, rows, columns, cast), made_t = empty_for(x, columns, rows, cast_t);
  const Source source = source_of(x);
  const Factor by_column(across, columns), by_row(down, rows);
  const bool folded = across.has_value() || down.has_value();
  const bool everything = made.scale.numel() == 1 && made_t.scale.numel() == 1 && !folded;
  const uint32_t largest = everything && amax.has_value() ? largest_of(*amax) : 0u;
  const uint32_t* known = everything && amax.has_value() ? &largest : nullptr;  // x may be a part of a larger tensor
  quantize_matrix(source, rows, columns, by_column.data(), cast, Draws{}, made.codes.mutable_data_ptr(),
                  mutable_data_of<float>(made.scale), known);
  const std::vector<float> flipped = transposed(source, rows, columns, by_row.data());
  const Source source_t{source.owner, reinterpret_cast<const char*>(flipped.data()), Format::FP32, 4};
  quantize_matrix(source_t, columns, rows, nullptr, cast_t, Draws{}, made_t.codes.mutable_data_ptr(),
                  mutable_data_of<float>(made_t.scale), known);
  return {made.codes, made.scale, made_t.codes, made_t.scale};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(lowprec, CPU, m) {
  m.impl("quantize", TORCH_BOX(&quantize));
  m.impl("quantize_both", TORCH_BOX(&quantize_both));
}

}  // namespace lowprec
