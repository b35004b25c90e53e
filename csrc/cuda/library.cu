// What the library says of itself (ops/kernels.py).
//
//   lowprec_architectures   the GPUs that it holds machine code for. It holds no PTX, so a GPU that is not listed cannot
//                           run it, and the self-test asks here before it launches anything
//   lowprec_served          its formats and roundings
#include "numerics/formats.h"

#define LOWPREC_QUOTE(text) #text
#define LOWPREC_TEXT(macro) LOWPREC_QUOTE(macro)

// 90a, or 89_90a_100a

extern "C" __attribute__((visibility("default"))) const char* lowprec_architectures() {
  return LOWPREC_TEXT(LOWPREC_ARCHITECTURES);
}

extern "C" __attribute__((visibility("default"))) const char* lowprec_served() {
  static const std::string names = lowprec::served_names({"none", "mse"});
  return names.c_str();
}
