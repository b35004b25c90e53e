// Interface of kernels to torch's stable ABI: argument checks, enum names, new tensors, dtype switches, the stream.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "numerics/scale.h"

namespace lowprec {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <typename Enum, size_t count>
Enum parse(const char* what, const char* const (&names)[count], const std::string& name) {
  for (size_t i = 0; i < count; ++i) {
    if (name == names[i]) return static_cast<Enum>(i);
  }
  STD_TORCH_CHECK(false, "unknown ", what, " ", name);
  return Enum{};
}

inline Format parse_format(const std::string& name) { return parse<Format>("format", FORMAT_NAMES, name); }
inline Rounding parse_rounding(const std::string& name) { return parse<Rounding>("rounding", ROUNDING_NAMES, name); }

inline Rule parse_rule(const std::string& name) {
  if (name == "POW2") return Rule::POW2;
  if (name == "E8M0_FLOOR") return Rule::E8M0_FLOOR;
  if (name == "E8M0_CEIL") return Rule::E8M0_CEIL;
  STD_TORCH_CHECK(name == "FP32", "unknown scale rule ", name);
  return Rule::FP32;
}

inline ScalarType carrier_of(Format format) {
  switch (format) {
    case Format::E5M2:
      return ScalarType::Float8_e5m2;
    case Format::INT8:
      return ScalarType::Char;
    case Format::BF16:
      return ScalarType::BFloat16;
    case Format::FP16:
      return ScalarType::Half;
    case Format::FP32:
      return ScalarType::Float;
    default:
      return ScalarType::Float8_e4m3fn;
  }
}

// Call with a compile-time format: with_format(f, [&](auto g) { using G = Grid<decltype(g)::value>; ... }).
template <Format F>
struct FormatTag {
  static constexpr Format value = F;
};

template <typename Body>
auto with_format(Format format, Body&& body) {
  switch (format) {
    case Format::E2M1:
      return body(FormatTag<Format::E2M1>{});
    case Format::E4M3:
      return body(FormatTag<Format::E4M3>{});
    case Format::E5M2:
      return body(FormatTag<Format::E5M2>{});
    case Format::INT4:
      return body(FormatTag<Format::INT4>{});
    case Format::INT8:
      return body(FormatTag<Format::INT8>{});
    case Format::BF16:
      return body(FormatTag<Format::BF16>{});
    case Format::FP16:
      return body(FormatTag<Format::FP16>{});
    default:
      return body(FormatTag<Format::FP32>{});
  }
}

inline ScaleRule scale_rule_of(Format format, Rule rule, double headroom, int64_t span) {
  return with_format(format, [&](auto tag) {
    using G = Grid<decltype(tag)::value>;
    return scale_rule(G::max, G::unscaled, rule, headroom, static_cast<int>(span));
  });
}

// Element types of inputs: 16-bit and 32-bit floats by their bits.
struct Bf16 {
  uint16_t bits;
  LOWPREC_HD float value() const { return bf16_value(bits); }
};
struct Fp16 {
  uint16_t bits;
  LOWPREC_HD float value() const { return fp16_value(bits); }
};
struct Fp32 {
  float bits;
  LOWPREC_HD float value() const { return bits; }
};

template <typename T>
struct InputTag {
  using Type = T;
};

// Call with the element type: with_input(x, [&](auto tag) { using In = typename decltype(tag)::Type; ... })
template <typename Body>
auto with_input(const Tensor& x, Body&& body) {
  const ScalarType type = x.scalar_type();
  if (type == ScalarType::BFloat16) return body(InputTag<Bf16>{});
  if (type == ScalarType::Half) return body(InputTag<Fp16>{});
  STD_TORCH_CHECK(type == ScalarType::Float, "inputs are float32, bfloat16 or float16");
  return body(InputTag<Fp32>{});
}

template <typename T>
const T* data_of(const Tensor& x) {
  return static_cast<const T*>(x.const_data_ptr());
}
template <typename T>
T* mutable_data_of(const Tensor& x) {
  return static_cast<T*>(x.mutable_data_ptr());
}

inline Tensor dense(const Tensor& x) { return x.is_contiguous() ? x : torch::stable::contiguous(x); }

inline Tensor empty_like_device(const Tensor& x, std::vector<int64_t> shape, ScalarType type) {
  return torch::stable::new_empty(x, shape, type);
}

// Rows of a matrix. Kernels read x.size(0) and x.size(1), so a tensor of more dimensions would lose elements.
inline int64_t rows_of(const Tensor& x) {
  STD_TORCH_CHECK(x.dim() == 2, "the op takes a matrix, not a tensor of ", x.dim(), " dimensions");
  return x.size(0);
}

struct Tile {
  int64_t rows, columns;
};

// The tile with -1 replaced by the whole extent; it must divide the matrix (ops/schema.py tile_shape).
inline Tile resolve_tile(int64_t rows, int64_t columns, const std::vector<int64_t>& tile) {
  STD_TORCH_CHECK(tile.size() == 2, "a tile is (rows, columns)");
  const Tile made{tile[0] == -1 ? rows : tile[0], tile[1] == -1 ? columns : tile[1]};
  STD_TORCH_CHECK(made.rows >= 1 && made.columns >= 1 && rows % made.rows == 0 && columns % made.columns == 0, "a ",
                  made.rows, "x", made.columns, " tile does not divide a ", rows, "x", columns, " matrix");
  return made;
}

// The tile of a matrix with these scales, one a tile; both dimensions of the matrix are positive.
inline Tile scaled_tile(int64_t rows, int64_t columns, const Tensor& scale) {
  const int64_t bands = scale.size(0), tiles = scale.size(1);
  STD_TORCH_CHECK(bands > 0 && tiles > 0 && rows % bands == 0 && columns % tiles == 0, "scales [", bands, ", ", tiles,
                  "] do not fit a matrix [", rows, ", ", columns, "]");
  return {rows / bands, columns / tiles};
}

// Width of a ladder tile: one row, and a power of two of columns (ops/ladder.py quantize_ladder).
inline int64_t ladder_width(int64_t rows, int64_t columns, const std::vector<int64_t>& tile) {
  const Tile made = resolve_tile(rows, columns, tile);
  STD_TORCH_CHECK(made.rows == 1 && (made.columns & (made.columns - 1)) == 0,
                  "rungs belong to tiles of one row and a power of two of columns, not to (", tile[0], ", ", tile[1], ")");
  return made.columns;
}

// Pointer to a seed or an origin: 0-dim or [2] int64 on the op's device; nullptr if there is none.
inline const int64_t* seed_of(const std::optional<Tensor>& seed) {
  return seed.has_value() ? data_of<int64_t>(*seed) : nullptr;
}

// Pointer to the seed of a rounding; nullptr for rounding to nearest, which ignores seeds.
inline const int64_t* seed_of(const std::string& rounding, const std::optional<Tensor>& seed) {
  if (parse_rounding(rounding) == Rounding::NEAREST) return nullptr;
  STD_TORCH_CHECK(seed.has_value(), rounding, " rounding draws from a seed, and there is none");
  return seed_of(seed);
}

}  // namespace lowprec
