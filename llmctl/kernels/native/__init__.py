"""The native CPU backend: C++ kernels chosen at run time by instruction set. `_native` is the compiled extension."""
