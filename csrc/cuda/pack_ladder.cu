// pack_ladder and unpack_ladder (ops/ladder.py): blocks of 16 E4M3 carriers as E2M1 codes and an E4M3 scale.
//
// A thread has a block. The largest magnitude of a block is one of the seven positive E2M1 numbers times the scale, so
// there are at most seven scales; the smallest that serves is taken. Products of a code and a scale are exact in half
// precision, and a candidate serves if all products have the bits of the carriers: the quotients that propose codes may
// be off by a last bit. Memory traffic is 1.56 bytes per carrier.
//
// Nearly all blocks take a path without conversions, four carriers per word. Bits of an E4M3 number without its sign are
// 8 times its logarithm, at mantissas 1, 1.25, 1.5 and 1.75 of normal numbers plus 0, 2, 4 and 6; so products of a scale
// S with powers of two are S plus multiples of 8. Products with 1.5 are S + `half_step` plus multiples of 8. The seven
// products of a scale are a table of bytes, from which a byte permutation takes four at a time.
#include "cuda/ladder.h"
#include "cuda/nibbles.h"
#include "cuda/saved.h"

namespace lowprec {
namespace {

constexpr int THREADS = 256;
constexpr int PLACES = 7;
__constant__ float PLACE[PLACES] = {6.0f, 4.0f, 3.0f, 2.0f, 1.5f, 1.0f, 0.5f};

__device__ __forceinline__ __half2 decoded(uint32_t pair) {
  return __half2(__nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(pair), __NV_E4M3));
}

__device__ __forceinline__ uint8_t code_of(float value) {
  return __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3);
}

// Four codes whose products with the scale are `carriers`; sets `serves` to false if there are none.
__device__ __forceinline__ uint32_t codes_under(uint32_t carriers, __half2 scale, __half2 inverse, bool& serves) {
  const __half2 low = decoded(carriers & 0xffffu), high = decoded(carriers >> 16);
  const uint32_t near = code_pair(__hmul2_rn(low, inverse)) | code_pair(__hmul2_rn(high, inverse)) << 16;
  const uint32_t nibbles = packed(near, 0u), codes = unpacked(nibbles);
  serves &= bits_of_pair(__hmul2_rn(decoded(codes & 0xffffu), scale)) == bits_of_pair(low);
  serves &= bits_of_pair(__hmul2_rn(decoded(codes >> 16), scale)) == bits_of_pair(high);
  return nibbles;
}

// The nibbles of 16 codes under a scale, or false.
__device__ __forceinline__ bool factored(const uint4& carriers, float scale, uint2& nibbles) {
  const __half2 times = __float2half2_rn(scale), inverse = __float2half2_rn(1.0f / scale);
  bool serves = true;
  const uint32_t a = codes_under(carriers.x, times, inverse, serves);
  const uint32_t b = codes_under(carriers.y, times, inverse, serves);
  const uint32_t c = codes_under(carriers.z, times, inverse, serves);
  const uint32_t d = codes_under(carriers.w, times, inverse, serves);
  if (serves) nibbles = make_uint2(a | b << 16, c | d << 16);
  return serves;
}

// The products of a scale with the eight magnitudes of E2M1, by their index, as bits of E4M3.
struct Products {
  uint32_t low, high;
  __device__ __forceinline__ uint32_t of(uint32_t nibbles) const { return __byte_perm(low, high, nibbles); }
};

constexpr uint32_t SMALLEST = 16;  // bits of 2^-5: half of this scale is a normal number

// Distance of 1.5 S from S, for a scale with the mantissa 1, 1.25 or 1.5.
__device__ __forceinline__ uint32_t half_step(uint32_t scale) { return (scale & 7u) == 0 ? 4u : 5u; }

__device__ __forceinline__ bool has_products(uint32_t scale) { return (scale & 1u) == 0 && (scale & 7u) != 6u; }

// For scales with these mantissas from SMALLEST on. Sums above 0x7f are not numbers; no carrier has their bits.
__device__ __forceinline__ Products products_of(uint32_t scale) {
  const uint32_t half = half_step(scale), own = scale * 0x01010101u;
  return {own + (half << 24) - 0x0800u - scale, own + 0x10100808u + (half << 24) + (half << 8)};
}

// Four carriers as nibbles of `products`, in the low 16 bits. wrong: not 0 if a carrier is none of them.
__device__ __forceinline__ uint32_t nibbles_of(uint32_t carriers, uint32_t scale, const Products& products,
                                               uint32_t& wrong) {
  const uint32_t size = carriers & 0x7f7f7f7fu;
  const uint32_t distance = (size | 0x80808080u) - (scale - 8) * 0x01010101u;  // from S / 2
  const uint32_t place = distance >> 2 & 0x07070707u;
  const uint32_t lowest = ~(place + 0x07070707u) >> 3 & 0x01010101u;     // S / 2 itself
  const uint32_t zero = (~(size + 0x7f7f7f7fu) >> 7 & 0x01010101u) * 7u;  // 7 for zeros
  const uint32_t index = (place | lowest) & ~zero;
  const uint32_t sizes = __byte_perm(index | index >> 4, 0u, 0x4420);
  wrong |= products.of(sizes) ^ size;
  const uint32_t signs = carriers >> 4 & 0x08080808u;
  return sizes | __byte_perm(signs | signs >> 4, 0u, 0x4420);
}

// Packs a block whose carriers are normal numbers or zeros. top: the largest magnitude's bits. Returns the scale's bits,
// or 0 if another scale has to be tried.
__device__ __forceinline__ uint32_t packed_fast(const uint4& carriers, uint32_t top, uint2& nibbles) {
  const uint32_t mantissa = top & 7u, odd = (carriers.x | carriers.y | carriers.z | carriers.w) & 0x01010101u;
  // Six times S has the mantissa 1.875 or 1.125 where S has 1.25 or 1.5, and 1.5 where S has 1.
  const bool six = (mantissa == 4u && odd == 0) || mantissa == 7u || mantissa == 1u;
  const uint32_t down = !six ? 16u : mantissa == 4u ? 20u : 21u;
  const uint32_t scale = top - down;
  if (top < SMALLEST + down || top == 0x7f || !has_products(scale)) return 0;
  const Products products = products_of(scale);
  uint32_t wrong = 0;
  const uint32_t a = nibbles_of(carriers.x, scale, products, wrong), b = nibbles_of(carriers.y, scale, products, wrong);
  const uint32_t c = nibbles_of(carriers.z, scale, products, wrong), d = nibbles_of(carriers.w, scale, products, wrong);
  nibbles = make_uint2(a | b << 16, c | d << 16);
  return wrong == 0 ? scale : 0;
}

__device__ __forceinline__ uint32_t largest_of(uint32_t carriers, uint32_t top) {
  return __vmaxu4(carriers & 0x7f7f7f7fu, top);
}

__global__ void __launch_bounds__(THREADS) pack_blocks(const uint4* __restrict__ carriers, uint2* __restrict__ out,
                                                       uint8_t* __restrict__ scales, int64_t blocks) {
  const int64_t block = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
  if (block >= blocks) return;
  const uint4 held = __ldg(carriers + block);
  uint32_t most = largest_of(held.x, largest_of(held.y, largest_of(held.z, held.w & 0x7f7f7f7fu)));
  most = __vmaxu4(most, most >> 16);
  const uint32_t top = max(most & 0xffu, most >> 8 & 0xffu);
  uint2 nibbles;
  uint8_t found = static_cast<uint8_t>(packed_fast(held, top, nibbles));
  if (found != 0) {
    out[block] = nibbles;
    scales[block] = found;
    return;
  }
  nibbles = make_uint2(0u, 0u);
  found = 0x7f;
  if (top == 0) {
    factored(held, 1.0f, nibbles);  // zeros keep their signs
    found = code_of(1.0f);
  } else if (top < 0x7f) {
    const float largest = __low2float(decoded(top));
#pragma unroll 1
    for (int i = 0; i < PLACES; ++i) {
      const uint8_t code = code_of(largest / PLACE[i]);
      const float scale = __low2float(decoded(code));
      if (PLACE[i] * scale != largest || !factored(held, scale, nibbles)) continue;
      found = code;
      break;
    }
  }
  out[block] = nibbles;
  scales[block] = found;
}

__device__ __forceinline__ uint32_t rounded_products(uint32_t nibbles, __half2 scale) {
  const uint32_t codes = unpacked(nibbles);
  const uint32_t low = code_pair(__hmul2_rn(decoded(codes & 0xffffu), scale));
  return low | code_pair(__hmul2_rn(decoded(codes >> 16), scale)) << 16;
}

__global__ void __launch_bounds__(THREADS) unpack_blocks(const uint2* __restrict__ in,
                                                         const uint8_t* __restrict__ scales,
                                                         uint4* __restrict__ carriers, int64_t blocks) {
  const int64_t block = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
  if (block >= blocks) return;
  const uint2 held = __ldg(in + block);
  const uint32_t bits = scales[block];
  if (bits >= SMALLEST && has_products(bits) && bits + 16 + half_step(bits) < 0x7fu) {
    const Products products = products_of(bits);
    const auto word = [&](uint32_t nibbles) {
      return products.of(nibbles & 0x7777u) | __byte_perm(0x00008000u, 0u, nibbles >> 3 & 0x1111u);
    };
    carriers[block] = make_uint4(word(held.x), word(held.x >> 16), word(held.y), word(held.y >> 16));
    return;
  }
  const __half2 scale = decoded(bits * 0x101u);
  carriers[block] = make_uint4(rounded_products(held.x, scale), rounded_products(held.x >> 16, scale),
                               rounded_products(held.y, scale), rounded_products(held.y >> 16, scale));
}

std::tuple<Tensor, Tensor> pack_ladder(const Tensor& given) {
  const int64_t rows = rows_of(given), columns = given.size(1), blocks = columns / LADDER_BLOCK;
  STD_TORCH_CHECK(given.scalar_type() == ScalarType::Float8_e4m3fn && columns % LADDER_BLOCK == 0,
                  "carriers are E4M3 in blocks of ", LADDER_BLOCK, ", not rows of ", columns);
  const Tensor carriers = vectorised(given);
  Tensor nibbles = empty_like_device(carriers, {rows, columns / 2}, ScalarType::Byte);
  Tensor scale = empty_like_device(carriers, {rows, blocks}, ScalarType::Float8_e4m3fn);
  if (rows * blocks == 0) return {nibbles, scale};
  pack_blocks<<<ceil_div(rows * blocks, THREADS), THREADS, 0, stream_of(carriers)>>>(
      reinterpret_cast<const uint4*>(data_of<uint8_t>(carriers)),
      reinterpret_cast<uint2*>(mutable_data_of<uint8_t>(nibbles)), mutable_data_of<uint8_t>(scale), rows * blocks);
  check_launch("pack_ladder");
  return {nibbles, scale};
}

Tensor unpack_ladder(const Tensor& given, const Tensor& scale_given) {
  const int64_t rows = given.size(0), columns = 2 * given.size(1);
  STD_TORCH_CHECK(given.scalar_type() == ScalarType::Byte && scale_given.numel() * LADDER_BLOCK == rows * columns,
                  "a scale for each ", LADDER_BLOCK, " codes of ", rows, " x ", columns, ", not ", scale_given.numel());
  STD_TORCH_CHECK(scale_given.scalar_type() == ScalarType::Float8_e4m3fn, "scales of packed carriers are E4M3");
  const Tensor nibbles = vectorised(given), scale = dense(scale_given);
  Tensor carriers = empty_like_device(nibbles, {rows, columns}, ScalarType::Float8_e4m3fn);
  if (rows * columns == 0) return carriers;
  const int64_t blocks = rows * columns / LADDER_BLOCK;
  unpack_blocks<<<ceil_div(blocks, THREADS), THREADS, 0, stream_of(nibbles)>>>(
      reinterpret_cast<const uint2*>(data_of<uint8_t>(nibbles)), data_of<uint8_t>(scale),
      reinterpret_cast<uint4*>(mutable_data_of<uint8_t>(carriers)), blocks);
  check_launch("unpack_ladder");
  return carriers;
}

}  // namespace
}  // namespace lowprec

STABLE_TORCH_LIBRARY_IMPL(lowprec, CUDA, m) {
  m.impl("pack_ladder", TORCH_BOX(&lowprec::pack_ladder));
  m.impl("unpack_ladder", TORCH_BOX(&lowprec::unpack_ladder));
}
