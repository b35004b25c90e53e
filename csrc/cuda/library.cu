// Queries of the library (ops/kernels.py).
//
//   lowprec_architectures   GPUs for which it has machine code. It has no PTX, so other GPUs cannot run it, and the
//                           self-test checks this before it launches a kernel
//   lowprec_served          its formats and roundings
#include "numerics/formats.h"

#define LOWPREC_QUOTE(text) #text
#define LOWPREC_TEXT(macro) LOWPREC_QUOTE(macro)

// such as 90a, or 89_90a_100a

extern "C" __attribute__((visibility("default"))) const char* lowprec_architectures() {
  return LOWPREC_TEXT(LOWPREC_ARCHITECTURES);
}

extern "C" __attribute__((visibility("default"))) const char* lowprec_served() {
  static const std::string names = lowprec::served_names({"none", "mse", "mae", "max"});
  return names.c_str();
}
