"""What the Triton kernels of every folder share: launching, memory, compiling without a GPU."""
