// Philox4x32-10 (Salmon et al., SC 2011) as a pure function of (seed, row, column): ops/philox.py.
//
//     counter = (column >> 3, row, 0, 0)      key = (seed & 0xffffffff, seed >> 32)
//     element (row, column) takes bits 16 * (column & 1) .. +15 of output word (column & 7) >> 1
#pragma once

#include "numerics/platform.h"

namespace lowprec {

struct Words {
  uint32_t w[4];
};

LOWPREC_HD uint32_t high_product(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  return __umulhi(a, b);
#else
  return static_cast<uint32_t>(static_cast<uint64_t>(a) * b >> 32);
#endif
}

LOWPREC_HD Words philox(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint64_t seed) {
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
#if defined(__CUDACC__)
#pragma unroll
#endif
  for (int round = 0; round < 10; ++round) {
    const uint32_t h0 = high_product(c0, 0xD2511F53u), l0 = c0 * 0xD2511F53u;
    const uint32_t h1 = high_product(c2, 0xCD9E8D57u), l1 = c2 * 0xCD9E8D57u;
    c0 = h1 ^ c1 ^ k0;
    c1 = l1;
    c2 = h0 ^ c3 ^ k1;
    c3 = l0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// Random words of eight elements. row: global; group: global column >> 3.
LOWPREC_HD Words random_words(uint64_t seed, uint64_t row, uint64_t group) {
  return philox(static_cast<uint32_t>(group), static_cast<uint32_t>(row), 0u, 0u, seed);
}

// Random bits of the j-th of eight elements, in [0, 65536).
LOWPREC_HD uint32_t bits_of(const Words& words, int j) { return words.w[j >> 1] >> (16 * (j & 1)) & 0xffffu; }

}  // namespace lowprec
