// A call of rotate_fold_ladder, as its kernels of either orientation take it.
#pragma once

#include "cuda/rotate.h"

namespace lowprec {

struct LadderRule {
  int span;
  bool chooses;  // of three rungs the one of least squared error
};

// One call: the matrix as it lies [rows, columns], its codes in either orientation.
struct LadderCall {
  const void* x;
  int64_t rows, columns;
  uint8_t* codes;
  float* scale;
  Rotation how;
  LadderRule rule;
  bool corrected;
  int device;
  cudaStream_t stream;
};

// ladder_transposed.cu: codes of the transpose. keys: int32 [columns], sums: int64 [columns, 2], zeros.
template <typename In>
void launch_ladder_transposed(const LadderCall& call, uint32_t* keys, unsigned long long* sums);

}  // namespace lowprec
