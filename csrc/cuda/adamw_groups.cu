// Passes of the fused AdamW if a moment is expanded, in any format and with any other codec: a warp per group.
#include "cuda/adamw_groups.h"
#include "cuda/adamw_kernels.h"

namespace lowprec {
namespace {

constexpr int THREADS = 256, WARPS = THREADS / 32;

template <Pass pass>
__global__ void __launch_bounds__(THREADS, 2) step_groups(const Item* __restrict__ items, Numbers* __restrict__ numbers,
                                                       int count, How how, double* __restrict__ partial) {
  __shared__ CodeLogs logs;
  __shared__ uint32_t scratch[WARPS];
  __shared__ double sums[WARPS];
  const int which = item_of(items, count, blockIdx.x);
  const Item item = items[which];
  if (skipped(item)) return;
  logs.fill();
  __syncthreads();
  const int64_t index = (blockIdx.x - item.first) * WARPS + (threadIdx.x >> 5);
  Found found;
  if (index < item.numbers / item.length * item.per_segment) {  // uniform over a warp
    step_group<pass>(item, numbers[which], how, index, logs, found);
  }
  if constexpr (pass == Pass::AMAX) leave_amax(found.amax, numbers[which], how, scratch);
  if constexpr (pass == Pass::SQUARES) leave_sum(found.squares, partial + blockIdx.x, sums);
}

}  // namespace

int64_t group_units(const Item& item, const How&) {
  return ceil_div(item.numbers / item.length * item.per_segment, WARPS);
}

void launch_groups(Pass pass, const Table& table, const How& how, cudaStream_t stream) {
  const auto kernel = pass == Pass::SQUARES  ? step_groups<Pass::SQUARES>
                      : pass == Pass::AMAX ? step_groups<Pass::AMAX>
                                             : step_groups<Pass::UPDATE>;
  kernel<<<table.units, THREADS, 0, stream>>>(table.items, table.numbers, table.count, how, table.partial);
  check_launch("adamw");
}

}  // namespace lowprec
