// Launches on the current stream of a tensor's device, and device functions that all kernels use.
#pragma once

#include <cuda_runtime.h>

#include "binding.h"
#include "numerics/amax.h"

namespace lowprec {

inline cudaStream_t stream_of(const Tensor& x) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

inline void check_launch(const char* what) {
  const cudaError_t error = cudaGetLastError();
  STD_TORCH_CHECK(error == cudaSuccess, what, ": ", cudaGetErrorString(error));
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <int bytes>
struct alignas(bytes) Pack {
  uint8_t raw[bytes];
};

inline bool aligned(const void* pointer, size_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

#if defined(__CUDACC__)

__device__ __forceinline__ uint32_t warp_largest(uint32_t bits) { return __reduce_max_sync(0xffffffffu, bits); }

// Maximum over a block, in every thread; `scratch` has a word per warp. Ends with a barrier.
__device__ __forceinline__ uint32_t block_largest(uint32_t bits, uint32_t* scratch) {
  bits = warp_largest(bits);
  const int warp = threadIdx.x >> 5, warps = (blockDim.x + 31) >> 5;
  if ((threadIdx.x & 31) == 0) scratch[warp] = bits;
  __syncthreads();
  bits = 0;
  for (int i = 0; i < warps; ++i) bits = larger(bits, scratch[i]);
  __syncthreads();
  return bits;
}

#endif

}  // namespace lowprec
