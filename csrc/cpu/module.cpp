// Kernels register themselves when the library is loaded. This file also makes it an empty Python module with the
// limited API, so that `import lowprec_train.ops._C` works on every Python from 3.11 on.
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

PyMODINIT_FUNC PyInit__C() {
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C", "C++ kernels of torch.ops.lowprec", 0,
                                   nullptr,               nullptr, nullptr,                          nullptr,
                                   nullptr};
  return PyModule_Create(&definition);
}
