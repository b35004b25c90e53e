// Which GPUs the library holds machine code for. It holds no PTX, so a GPU that is not listed cannot run it, and the
// self-test asks here before it launches anything (ops/kernels.py).

#define LOWPREC_QUOTE(...) #__VA_ARGS__
#define LOWPREC_TEXT(...) LOWPREC_QUOTE(__VA_ARGS__)

extern "C" __attribute__((visibility("default"))) const char* lowprec_architectures() {
  return LOWPREC_TEXT(LOWPREC_ARCHITECTURES);
}
