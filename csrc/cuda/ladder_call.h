// Arguments of rotate_fold_ladder for the kernels of both orientations.
#pragma once

#include "cuda/rotate.h"

namespace lowprec {

struct LadderRule {
  int span;
  bool chooses;  // the rung with the least squared error of three
};

// Results of kernels for each row of codes: bits of its amax, and its two sums. Must be zeros before.
struct RowLeft {
  uint32_t* keys;
  unsigned long long* sums;

#if defined(__CUDACC__)
  __device__ __forceinline__ void add(int64_t row, int64_t own, int64_t made) const {
    atomicAdd(sums + 2 * row, static_cast<unsigned long long>(own));
    atomicAdd(sums + 2 * row + 1, static_cast<unsigned long long>(made));
  }
#endif
};

// One call: the matrix [rows, columns], its codes in either orientation.
struct LadderCall {
  const void* x;
  int64_t rows, columns;
  uint8_t* codes;
  RowLeft left;
  Rotation how;
  LadderRule rule;
  bool corrected;
  int device;
  cudaStream_t stream;
};

// ladder_transposed.cu: codes of the transpose.
template <typename In>
void launch_ladder_transposed(const LadderCall& call);

}  // namespace lowprec
