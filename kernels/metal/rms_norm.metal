// RMSNorm of rows, one threadgroup to some rows: y = v rstd weight with v = x, or x + residual rounded to x's type.
#include <metal_stdlib>
#pragma METAL fp contract(off)
using namespace metal;
#include "rows.h"

inline float sum_of(device const X* x, device const X* residual, bool has_residual, uint i) {
    float value = float(x[i]);
    return has_residual ? float(X(value + float(residual[i]))) : value;
}

kernel void rms_norm(
    device const X* x [[buffer(0)]],
    device const X* residual [[buffer(1)]],
    device const W* weight [[buffer(2)]],
    device X* y [[buffer(3)]],
    device X* total [[buffer(4)]],
    device float* rstd [[buffer(5)]],
    constant long& width [[buffer(6)]],
    constant long& x_stride [[buffer(7)]],
    constant long& residual_stride [[buffer(8)]],
    constant long& has_residual [[buffer(9)]],
    constant long& has_weight [[buffer(10)]],
    constant float& eps [[buffer(11)]],
    constant long& rows [[buffer(12)]],
    constant long& rows_per_group [[buffer(13)]],
    uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint size [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
    threadgroup float partial[32];
    const long first = group * rows_per_group;
    const long last = min(long(first + rows_per_group), long(rows));
    for (long row = first; row < last; ++row) {
        device const X* own = x + row * x_stride;
        device const X* other = residual + row * residual_stride;
        const long start = row * width;
        float squares = 0.0f;
        for (uint i = thread_index; i < width; i += size) {
            float value = sum_of(own, other, has_residual, i);
            squares += value * value;
            if (has_residual) total[start + i] = X(value);
        }
        float mean = group_sum(squares, partial, lane, simdgroup, simdgroups) / float(width);
        float scale = 1.0f / sqrt(mean + eps);
        if (thread_index == 0) rstd[row] = scale;
        for (uint i = thread_index; i < width; i += size) {
            float unit = sum_of(own, other, has_residual, i) * scale;
            y[start + i] = X(has_weight ? unit * float(weight[i]) : unit);
        }
    }
}
