// Amax of a whole tensor: a grid-stride loop, one atomic maximum per block. From the end to the beginning: the end of
// what was just written is in the L2 cache, and then the beginning is, where the kernel that rounds begins.
#pragma once

#include "cuda/vectors.h"

namespace lowprec {

#if defined(__CUDACC__)

constexpr int THREADS = 256;

// amax: must be zero before. `x` is aligned to 16 bytes.
template <typename In>
__global__ void __launch_bounds__(THREADS) amax_all(const In* __restrict__ x, uint32_t* __restrict__ amax, int64_t count) {
  constexpr int EACH = sizeof(In) == 2 ? 8 : 4;
  __shared__ uint32_t scratch[THREADS / 32];
  constexpr int64_t PART = THREADS * EACH * VECTOR;
  uint32_t found = 0;
  for (int64_t base = ((count - 1) / PART - blockIdx.x) * PART; base >= 0; base -= gridDim.x * PART) {
    Vector<In> held[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int64_t at = base + (static_cast<int64_t>(i) * THREADS + threadIdx.x) * VECTOR;
      if (at + VECTOR <= count) held[i].load(x + at);
      else if (at < count) held[i].load_some(x + at, static_cast<int>(count - at));
      else held[i].clear();
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) found = larger(found, held[i].largest());
  }
  found = block_largest(found, scratch);
  if (threadIdx.x == 0 && found > *reinterpret_cast<volatile uint32_t*>(amax)) atomicMax(amax, found);
}

template <typename In>
void launch_amax(const In* x, uint32_t* amax, int64_t count, cudaStream_t stream) {
  const int64_t blocks = ceil_div(count, THREADS * VECTOR * (sizeof(In) == 2 ? 8 : 4));
  amax_all<In><<<blocks < 132 * 8 ? blocks : 132 * 8, THREADS, 0, stream>>>(x, amax, count);
}

#endif

}  // namespace lowprec
