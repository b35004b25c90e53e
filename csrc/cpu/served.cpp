// Lists the formats and roundings of the library (ops/kernels.py).
#include "numerics/formats.h"

extern "C" __attribute__((visibility("default"))) const char* lowprec_served() {
  static const std::string names = lowprec::served_names({"none", "mse", "mae", "max"});
  return names.c_str();
}
