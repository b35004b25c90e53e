// What the library says of itself: its formats and roundings (ops/kernels.py).
#include "numerics/formats.h"

extern "C" __attribute__((visibility("default"))) const char* lowprec_served() {
  static const std::string names = lowprec::served_names({"none", "mse", "mae", "max"});
  return names.c_str();
}
