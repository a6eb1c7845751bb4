"""CUDA C++ kernels, compiled on the machine they run on by NVRTC, which torch's CUDA wheels bring along."""
