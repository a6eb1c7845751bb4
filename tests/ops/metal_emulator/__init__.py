"""Metal kernels on this host: translated to C++, compiled by g++, run by fibers with every access checked."""
