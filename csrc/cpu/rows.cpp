// Vectorised loops of rows.h.
#include "cpu/rows.h"

#include "numerics/ladder.h"

#include <cmath>

namespace lowprec {
namespace {

template <Format F>
LOWPREC_CLONES void load_as(const typename Grid<F>::Code* x, int64_t n, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = decode<F>(x[i]);
}

LOWPREC_CLONES uint32_t largest(const float* v, int64_t n) {
  uint32_t most = 0;
  for (int64_t i = 0; i < n; ++i) most = larger_magnitude(most, v[i]);
  return most;
}

// Tiles of a width known at compile time: one call per row.
template <int width>
LOWPREC_CLONES void amax_of(const float* v, int64_t n, uint32_t* out) {
  for (int64_t i = 0; i < n / width; ++i) {
    uint32_t most = 0;
    for (int j = 0; j < width; ++j) most = larger_magnitude(most, v[i * width + j]);
    out[i] = larger(out[i], most);
  }
}

template <int width, bool divides>
LOWPREC_CLONES void scale_by(float* v, int64_t n, const float* factor) {
  for (int64_t i = 0; i < n / width; ++i) {
    const float f = factor[i];
    for (int j = 0; j < width; ++j) {
      const float x = v[i * width + j];
      v[i * width + j] = is_nan(f) ? f : divides ? x / f : x * f;
    }
  }
}

template <bool divides>
LOWPREC_CLONES void scale_all(float* v, int64_t n, float factor) {
  for (int64_t i = 0; i < n; ++i) v[i] = divides ? v[i] / factor : v[i] * factor;
}

template <bool divides>
void scale_any(float* v, int64_t n, int64_t width, const float* factor) {
  if (width == 1) return scale_by<1, divides>(v, n, factor);
  if (width == 16) return scale_by<16, divides>(v, n, factor);
  if (width == 32) return scale_by<32, divides>(v, n, factor);
  for (int64_t i = 0; i < n / width; ++i) {
    if (is_nan(factor[i])) {
      std::fill_n(v + i * width, width, factor[i]);
    } else {
      scale_all<divides>(v + i * width, width, factor[i]);
    }
  }
}

template <Format F>
LOWPREC_CLONES void encode_nearest(const float* v, int64_t n, typename Grid<F>::Code* codes) {
  for (int64_t i = 0; i < n; ++i) codes[i] = encode<F>(v[i]);
}

template <Format F>
LOWPREC_CLONES void encode_random(const float* v, const uint16_t* bits, int64_t n, typename Grid<F>::Code* codes) {
  for (int64_t i = 0; i < n; ++i) codes[i] = encode_stochastic<F>(v[i], bits[i]);
}

LOWPREC_CLONES void round_nearest_e2m1(float* v, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const float x = clamp(v[i], Grid<Format::E2M1>::max);
    v[i] = is_finite(x) ? round_nearest<Format::E2M1>(x) : x;
  }
}

LOWPREC_CLONES void round_random_e2m1(float* v, const uint16_t* bits, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const float x = clamp(v[i], Grid<Format::E2M1>::max);
    v[i] = is_finite(x) ? round_stochastic<Format::E2M1>(x, bits[i]) : x;
  }
}

template <Format F>
LOWPREC_HD uint8_t cast_ieee(float v) {
  float rounded = is_finite(v) ? round_nearest<F>(v) : v;
  rounded = bits_float(magnitude_bits(rounded)) > Grid<F>::max ? with_sign(bits_float(INFINITE), rounded) : rounded;
  return store<F>(rounded);
}

template <Format F>
LOWPREC_CLONES void cast_tiles_to(const float* v, int64_t n, int64_t width, const float* factor, uint8_t* codes) {
  for (int64_t i = 0; i < n; i += width) {
    const float f = factor[i / width];
    for (int64_t j = i; j < i + width; ++j) codes[j] = cast_ieee<F>(v[j] * f);
  }
}

template <Format F>
LOWPREC_CLONES void cast_blocks_to(const float* v, int64_t n, const float* factor, uint8_t* codes) {
  for (int64_t i = 0; i < n / 32; ++i) {
    for (int j = 0; j < 32; ++j) codes[i * 32 + j] = cast_ieee<F>(v[i * 32 + j] * factor[i]);
  }
}

// One stage: sums and differences of elements at a distance of `stride`.
template <int stride>
LOWPREC_CLONES void butterflies(const float* in, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i += 2 * stride) {
    for (int j = 0; j < stride; ++j) {
      const float a = in[i + j], b = in[i + j + stride];
      out[i + j] = a + b;
      out[i + j + stride] = a - b;
    }
  }
}

void butterflies(int64_t stride, const float* in, int64_t n, float* out) {
  switch (stride) {
    case 1:
      return butterflies<1>(in, n, out);
    case 2:
      return butterflies<2>(in, n, out);
    case 4:
      return butterflies<4>(in, n, out);
    case 8:
      return butterflies<8>(in, n, out);
    case 16:
      return butterflies<16>(in, n, out);
    case 32:
      return butterflies<32>(in, n, out);
    case 64:
      return butterflies<64>(in, n, out);
    case 128:
      return butterflies<128>(in, n, out);
  }
  for (int64_t i = 0; i < n; i += 2 * stride) {
    for (int64_t j = i; j < i + stride; j += 128) {
      for (int64_t l = j; l < j + 128; ++l) {
        const float a = in[l], b = in[l + stride];
        out[l] = a + b;
        out[l + stride] = a - b;
      }
    }
  }
}

LOWPREC_CLONES void sign_blocks(float* v, int64_t n, const float* signs, int64_t block) {
  for (int64_t i = 0; i < n; i += block) {
    for (int64_t j = 0; j < block; ++j) v[i + j] *= signs[j];
  }
}

LOWPREC_CLONES void multiply_into(const float* v, int64_t n, float factor, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = v[i] * factor;
}

}  // namespace

void load(const Source& x, int64_t first, int64_t n, float* out) { load(x.data + first * x.bytes, x.format, n, out); }

void load(const char* data, Format format, int64_t n, float* out) {
  with_format(format, [&](auto tag) {
    constexpr Format F = decltype(tag)::value;
    load_as<F>(reinterpret_cast<const typename Grid<F>::Code*>(data), n, out);
  });
}

void tile_amax(const float* v, int64_t n, int64_t width, uint32_t* out) {
  if (width == 1) return amax_of<1>(v, n, out);
  if (width == 16) return amax_of<16>(v, n, out);
  if (width == 32) return amax_of<32>(v, n, out);
  for (int64_t i = 0; i < n / width; ++i) out[i] = larger(out[i], largest(v + i * width, width));
}

void scale_tiles(float* v, int64_t n, int64_t width, const float* factor) { scale_any<false>(v, n, width, factor); }

void divide_tiles(float* v, int64_t n, int64_t width, const float* scale) { scale_any<true>(v, n, width, scale); }

LOWPREC_CLONES void multiply(float* v, int64_t n, const float* factor) {
  for (int64_t i = 0; i < n; ++i) v[i] *= factor[i];
}

LOWPREC_CLONES void scale_to_bf16(float* v, int64_t n, float factor) {
  for (int64_t i = 0; i < n; ++i) v[i] = bf16_value(bf16_bits(v[i] * factor));
}

// One buffer of groups at a time: the words of a call are in separate arrays until they are interleaved.
LOWPREC_CLONES void draw(uint64_t seed, uint64_t row, uint64_t group, int64_t n, uint16_t* out) {
  constexpr int lanes = 32;
  uint32_t words[4][lanes];
  for (int64_t first = 0; first < n; first += 8 * lanes) {
    for (int i = 0; i < lanes; ++i) {
      const Words drawn = random_words(seed, row, group + static_cast<uint64_t>(first / 8) + i);
      for (int w = 0; w < 4; ++w) words[w][i] = drawn.w[w];
    }
    const int64_t groups = std::min<int64_t>(lanes, (n - first + 7) / 8);
    for (int64_t i = 0; i < groups; ++i) {
      uint16_t* element = out + first + 8 * i;
      for (int w = 0; w < 4; ++w) {
        element[2 * w] = static_cast<uint16_t>(words[w][i]);
        element[2 * w + 1] = static_cast<uint16_t>(words[w][i] >> 16);
      }
    }
  }
}

void encode_row(Format format, const float* v, const uint16_t* bits, int64_t n, void* codes) {
  with_format(format, [&](auto tag) {
    constexpr Format F = decltype(tag)::value;
    auto* out = static_cast<typename Grid<F>::Code*>(codes);
    if (bits == nullptr) {
      encode_nearest<F>(v, n, out);
    } else {
      encode_random<F>(v, bits, n, out);
    }
  });
}

void round_e2m1(float* v, const uint16_t* bits, int64_t n) {
  if (bits == nullptr) {
    round_nearest_e2m1(v, n);
  } else {
    round_random_e2m1(v, bits, n);
  }
}

void cast_tiles(Format carrier, const float* v, int64_t n, int64_t width, const float* factor, uint8_t* codes) {
  const bool e4m3 = carrier == Format::E4M3;
  if (width == 32) {
    return (e4m3 ? cast_blocks_to<Format::E4M3> : cast_blocks_to<Format::E5M2>)(v, n, factor, codes);
  }
  (e4m3 ? cast_tiles_to<Format::E4M3> : cast_tiles_to<Format::E5M2>)(v, n, width, factor, codes);
}

void rotate_row(float* v, int64_t n, const float* signs, int64_t block, float* spare) {
  sign_blocks(v, n, signs, block);
  float *in = v, *out = spare;
  for (int64_t stride = 1; stride < block; stride *= 2) {
    butterflies(stride, in, n, out);
    std::swap(in, out);
  }
  multiply_into(in, n, static_cast<float>(std::pow(static_cast<double>(block), -0.5)), v);
}

namespace {

LOWPREC_CLONES void round_to_half(float* v, int64_t n) {
  for (int64_t i = 0; i < n; ++i) v[i] = half_of(v[i]);
}

}  // namespace

void rotate_row_half(float* v, int64_t n, const float* signs, int64_t block, float gain, float* spare) {
  sign_blocks(v, n, signs, block);
  std::vector<uint32_t> amax(n / block, 0u);
  std::vector<float> up(n / block), down(n / block);
  tile_amax(v, n, block, amax.data());
  for (int64_t i = 0; i < n / block; ++i) {
    const int shift = rotation_shift(magnitude_of(amax[i]));
    up[i] = exp2_int(shift), down[i] = exp2_int(-shift) * gain;
  }
  scale_tiles(v, n, block, up.data());
  round_to_half(v, n);
  float *in = v, *out = spare;
  for (int64_t stride = 1; stride < block; stride *= 2) {
    butterflies(stride, in, n, out);
    round_to_half(out, n);
    std::swap(in, out);
  }
  if (in != v) std::copy(in, in + n, v);
  scale_tiles(v, n, block, down.data());
}

void tile_scales(const uint32_t* bits, int64_t n, const ScaleRule& how, float* scale, float* inverse) {
  const bool spanned = how.span > 0;
  int row = -126;
  for (int64_t i = 0; spanned && i < n; ++i) row = std::max(row, block_exponent(magnitude_of(bits[i]), how));
  for (int64_t i = 0; i < n; ++i) {
    const float amax = magnitude_of(bits[i]);
    const TileScale made =
        spanned ? spanned_scale(amax, block_exponent(amax, how), row, how) : tile_scale(amax, how);
    scale[i] = made.scale;
    inverse[i] = made.inverse;
  }
}

}  // namespace lowprec
