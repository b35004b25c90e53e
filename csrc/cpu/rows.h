// Loops of the CPU kernels: each processes one row in FP32 in the first-level cache, without branches, so that the
// compiler vectorises it. An op runs several of them on a row, which is read from and written to memory once.
#pragma once

#include <vector>

#include "binding.h"
#include "cpu/parallel.h"
#include "numerics/amax.h"
#include "numerics/philox.h"

namespace lowprec {

// A dense matrix of codes or values in any format, read as FP32.
struct Source {
  Tensor owner;
  const char* data;
  Format format;
  int64_t bytes;
};

inline Format format_of(ScalarType type) {
  switch (type) {
    case ScalarType::Float8_e4m3fn:
      return Format::E4M3;
    case ScalarType::Float8_e5m2:
      return Format::E5M2;
    case ScalarType::Char:
      return Format::INT8;
    case ScalarType::BFloat16:
      return Format::BF16;
    case ScalarType::Half:
      return Format::FP16;
    default:
      return Format::FP32;
  }
}

// Types without a format (FP64, integers) are converted to FP32, as `.float()` does.
inline Source source_of(const Tensor& x) {
  const Format format = format_of(x.scalar_type());
  const bool converted = format == Format::FP32 && x.scalar_type() != ScalarType::Float;
  Tensor owner = dense(converted ? torch::stable::to(x, ScalarType::Float) : x);
  const char* data = static_cast<const char*>(owner.const_data_ptr());
  const int64_t bytes = with_format(format, [](auto tag) -> int64_t {
    return sizeof(typename Grid<decltype(tag)::value>::Code);
  });
  return {owner, data, format, bytes};
}

// Loads n elements of a format.
void load(const char* data, Format format, int64_t n, float* out);

// Loads n elements from element `first` on.
void load(const Source& x, int64_t first, int64_t n, float* out);

// out[i] = the larger of out[i] and the largest magnitude of the i-th `width` elements, as bits.
void tile_amax(const float* v, int64_t n, int64_t width, uint32_t* out);

// v *= factor of its tile. If the factor is NaN, the whole tile becomes that NaN, even if it had another NaN.
void scale_tiles(float* v, int64_t n, int64_t width, const float* factor);

// v /= scale of its tile; a NaN scale makes the tile NaN.
void divide_tiles(float* v, int64_t n, int64_t width, const float* scale);

// v *= factor, elementwise.
void multiply(float* v, int64_t n, const float* factor);

// v = BF16(v * factor).
void scale_to_bf16(float* v, int64_t n, float factor);

// 16 random bits for each of n elements, which start at a multiple of eight; `out` has room for n rounded up to eight.
void draw(uint64_t seed, uint64_t row, uint64_t group, int64_t n, uint16_t* out);

// Codes of scaled values; bits: for stochastic rounding, or nullptr.
void encode_row(Format format, const float* v, const uint16_t* bits, int64_t n, void* codes);

// Clamps scaled values and rounds them to E2M1, in FP32.
void round_e2m1(float* v, const uint16_t* bits, int64_t n);

// FP8 codes of v * factor of its tile by an IEEE cast: to nearest even, overflow gives infinity (NaN in E4M3).
void cast_tiles(Format carrier, const float* v, int64_t n, int64_t width, const float* factor, uint8_t* codes);

// Orthonormal Walsh-Hadamard transform of each `block` elements in place, after signs [block]. `spare` has room for n.
void rotate_row(float* v, int64_t n, const float* signs, int64_t block, float* spare);

// Result of a sum, difference or product of halves, rounded to half precision.
LOWPREC_HD float half_of(float v) { return round_nearest<Format::FP16>(v); }

// The same in half precision times `gain`, a power of two (ops/ladder.py hadamard_half). block: at most 256.
void rotate_row_half(float* v, int64_t n, const float* signs, int64_t block, float gain, float* spare);

// Seed, and position of a matrix in the global one, for random bits.
struct Draws {
  const int64_t* seed = nullptr;
  uint64_t row = 0, group = 0;

  // Random bits of a row, or nullptr if rounding is to nearest.
  const uint16_t* of_row(int64_t r, int64_t n, std::vector<uint16_t>& buffer) const {
    if (seed == nullptr) return nullptr;
    buffer.resize((n + 7) / 8 * 8);
    draw(static_cast<uint64_t>(*seed), row + static_cast<uint64_t>(r), group, n, buffer.data());
    return buffer.data();
  }
};

inline Draws draws_of(const int64_t* seed, const std::optional<Tensor>& origin) {
  Draws draws{seed};
  if (origin.has_value()) {
    const int64_t* place = data_of<int64_t>(*origin);
    draws.row = static_cast<uint64_t>(place[0]);
    draws.group = static_cast<uint64_t>(place[1] >> 3);
  }
  return draws;
}

// Scales and inverses of one row of tiles, from the bits of their amax.
void tile_scales(const uint32_t* bits, int64_t n, const ScaleRule& how, float* scale, float* inverse);

inline float magnitude_of(uint32_t bits) { return bits_float(bits > INFINITE ? 0x7fc00000u : bits); }

// Parameters of `quantize` for a matrix.
struct Cast {
  Format format;
  ScaleRule how;
  Tile tile;
};

// Codes and scale of x * across [1, k]; `across` may be nullptr. known: bits of the amax, for a per-tensor tile.
void quantize_matrix(const Source& x, int64_t rows, int64_t columns, const float* across, const Cast& cast,
                     const Draws& draws, void* codes, float* scale, const uint32_t* known = nullptr);

// The transpose of x * down [m, 1] in FP32, [k, m]; `down` may be nullptr.
std::vector<float> transposed(const Source& x, int64_t rows, int64_t columns, const float* down);

}  // namespace lowprec
