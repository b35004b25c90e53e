// Division of rows among torch's threads (OMP_NUM_THREADS, torch.set_num_threads), and loops compiled for several
// instruction sets, chosen when the library is loaded; bits are equal, because there is no contraction.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>

#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define LOWPREC_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define LOWPREC_CLONES
#endif

namespace lowprec {

constexpr int64_t GRAIN = 1 << 15;  // fewer elements are not worth another thread

// Calls body(first, last) for ranges of rows of `columns` elements.
template <typename Body>
void for_rows(int64_t rows, int64_t columns, const Body& body) {
  if (rows == 0) return;
  torch::stable::parallel_for(0, rows, std::max<int64_t>(1, GRAIN / std::max<int64_t>(1, columns)), body);
}

}  // namespace lowprec
