// Kernels of the fused AdamW, and the reductions of their passes: amax by atomics, which are exact in any order, and
// FP64 sums, one per block, added in a fixed order.
#pragma once

#include "cuda/adamw.h"

namespace lowprec {

// Tensors of one kernel in device memory. units: blocks, or the kernel's own unit of work.
struct Table {
  Item* items;
  Numbers* numbers;
  double* partial;
  int count;
  int64_t units;
};

// Kernels of plain and scaled moments (adamw_flat.cu), of expanded ones (adamw_groups.cu), and of the usual expanded
// ones (adamw_expanded.cu): units of work of a tensor, and a launch of a pass over all tensors.
int64_t flat_units(const Item& item, const How& how);
void launch_flat(Pass pass, const Table& table, const How& how, cudaStream_t stream);
int64_t group_units(const Item& item, const How& how);
void launch_groups(Pass pass, const Table& table, const How& how, cudaStream_t stream);
bool fits_expanded(const Item& item, const How& how);
int64_t expanded_units(const Item& item, const How& how);
void launch_expanded(const Table& table, const How& how, cudaStream_t stream);

#if defined(__CUDACC__)

// scratch: a word per warp. All threads of the block must call it.
__device__ __forceinline__ void leave_amax(const uint32_t (&amax)[3], Numbers& numbers, const How& how,
                                             uint32_t* scratch) {
  const bool wanted[3] = {scaled(how.stores[0]), scaled(how.stores[1]), scaled(how.master)};
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    if (!wanted[i]) continue;  // the same for all threads
    const uint32_t found = block_largest(amax[i], scratch);
    if (threadIdx.x == 0 && found > *const_cast<volatile uint32_t*>(&numbers.amax[i])) {
      atomicMax(&numbers.amax[i], found);
    }
  }
}

__device__ __forceinline__ double warp_sum(double x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

// sums: one per warp, in shared memory.
__device__ __forceinline__ void leave_sum(double x, double* to, double* sums) {
  x = warp_sum(x);
  if ((threadIdx.x & 31) == 0) sums[threadIdx.x >> 5] = x;
  __syncthreads();
  if (threadIdx.x != 0) return;
  double total = 0.0;
  for (int i = 0; i < blockDim.x / 32; ++i) total += sums[i];
  *to = total;
}

#endif

}  // namespace lowprec
