// Arguments of rotate_fold_ladder for the kernels of both orientations, and of the kernels of its steps.
#pragma once

#include "cuda/rotate.h"
#include "numerics/ladder.h"

namespace lowprec {

template <Candidates by>
struct ChoiceTag {
  static constexpr Candidates value = by;
};

// Calls the body with the error by which rungs are chosen.
template <typename Body>
auto with_choice(Candidates by, Body&& body) {
  if (by == Candidates::MAE) return body(ChoiceTag<Candidates::MAE>{});
  if (by == Candidates::MAX) return body(ChoiceTag<Candidates::MAX>{});
  if (by == Candidates::NONE) return body(ChoiceTag<Candidates::NONE>{});
  return body(ChoiceTag<Candidates::MSE>{});
}

// What happens to x before it is rounded. scale: of E4M3 codes, one (step 0) or one per row of x (1). gain: log2 of
// the factor after a rotation. rate, weight: per row and per column, by which values are multiplied first, or nullptr.
struct LadderInput {
  const int64_t* signs;
  const float* scale;
  int scale_step, gain;
  const float *rate, *weight;
};

// Results of kernels for each row of codes: bits of its amax, and its two sums, which must be zeros before.
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

// One call: the matrix [rows, columns], its codes in either orientation. rotation: its block, 0 for none. column_amax:
// for the transpose, `column_amax_size` zeros.
struct LadderCall {
  const void* x;
  int64_t rows, columns;
  uint8_t* codes;
  float* scale;  // of rows of codes
  RowLeft left;
  uint16_t* column_amax;
  int rotation;
  LadderInput how;
  int span;
  bool corrected;
  int device;
  cudaStream_t stream;
};

// gated.cu: the gradient of SwiGLU in the dtype of dy, and the amax of its rows.
std::tuple<Tensor, Tensor> gated_silu_backward(const Tensor& dy, const Tensor& gate_up);
// hadamard.cu: x [m, k] rotated in half precision, FP32.
Tensor hadamard_half(const Tensor& x, std::optional<Tensor> seed, int64_t block, double gain);
// log2 of a power of two.
int binades_of(double gain);

// ladder_transposed.cu: codes of the transpose.
constexpr int TRANSPOSED_SHARED = 43 * 1024;  // bytes that a thread block needs at most
int64_t column_amax_size(int64_t rows, int64_t columns);
template <typename In>
void launch_ladder_transposed(const LadderCall& call);

}  // namespace lowprec
