// Sums over a threadgroup, whose threads are a multiple of 32.
#pragma once

// Return the sum of all threads' x, to each of them. `partial` has room for 32 numbers.
inline float group_sum(float x, threadgroup float* partial, uint lane, uint simdgroup, uint simdgroups) {
    float own = simd_sum(x);
    if (lane == 0) partial[simdgroup] = own;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float sum = simd_sum(lane < simdgroups ? float(partial[lane]) : 0.0f);
    threadgroup_barrier(mem_flags::mem_threadgroup);  // before `partial` is written again
    return sum;
}
