// E2M1 codes as E4M3 bytes and as nibbles: bit 3 of a nibble is the sign, bits 0..2 the grid index. Four codes per word:
// packing uses byte-parallel arithmetic, unpacking uses the byte permutation as an eight-entry table.
#pragma once

#include "cuda/launch.h"

namespace lowprec {

Tensor unpack_e2m1(const Tensor& packed);  // the op

#if defined(__CUDACC__)

// Converts four E4M3 bytes to four nibbles, each in the low half of its byte.
__device__ __forceinline__ uint32_t places(uint32_t codes) {
  const uint32_t size = codes & 0x7f7f7f7fu;
  const uint32_t above = size + 0x48484848u;  // bit 7: size >= 0x38; the bits below: size - 0x38
  const uint32_t normal = (above >> 2 & 0x07070707u) + 0x02020202u & 0x07070707u;
  const uint32_t mask = (above >> 7 & 0x01010101u) * 0xffu;
  return (normal & mask) | (size >> 5 & 0x01010101u & ~mask) | (codes >> 4 & 0x08080808u);
}

// Packs eight codes into four bytes.
__device__ __forceinline__ uint32_t packed(uint32_t low, uint32_t high) {
  low = places(low);
  high = places(high);
  return __byte_perm(low | low >> 4, high | high >> 4, 0x6420);
}

// Unpacks the low 16 bits, four nibbles, into four bytes: those of a table of eight, with the sign in bit 7.
__device__ __forceinline__ uint32_t unpacked(uint32_t nibbles, uint2 table = make_uint2(0x3c383000u, 0x4c484440u)) {
  const uint32_t size = __byte_perm(table.x, table.y, nibbles & 0x7777u);
  return size | __byte_perm(0x00008000u, 0u, nibbles >> 3 & 0x1111u);
}

#endif

}  // namespace lowprec
