"""What runs a built model fast: quantised weights, and tuning of kernels."""
