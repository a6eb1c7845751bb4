// LayerNorm of rows, one threadgroup to some rows: y = (v - mean) rstd weight + bias with v = x, or x + residual rounded to
// x's type. The variance is the mean of (v - mean)^2, taken after the mean.
#include <metal_stdlib>
#pragma METAL fp contract(off)
using namespace metal;
#include "rows.h"

inline float sum_of(device const X* x, device const X* residual, bool has_residual, uint i) {
    float value = float(x[i]);
    return has_residual ? float(X(value + float(residual[i]))) : value;
}

kernel void layer_norm(
    device const X* x [[buffer(0)]],
    device const X* residual [[buffer(1)]],
    device const W* weight [[buffer(2)]],
    device const W* bias [[buffer(3)]],
    device X* y [[buffer(4)]],
    device X* total [[buffer(5)]],
    device float* means [[buffer(6)]],
    device float* rstd [[buffer(7)]],
    constant long& width [[buffer(8)]],
    constant long& x_stride [[buffer(9)]],
    constant long& residual_stride [[buffer(10)]],
    constant long& has_residual [[buffer(11)]],
    constant long& has_weight [[buffer(12)]],
    constant long& has_bias [[buffer(13)]],
    constant float& eps [[buffer(14)]],
    constant long& rows [[buffer(15)]],
    constant long& rows_per_group [[buffer(16)]],
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
        float sum = 0.0f;
        for (uint i = thread_index; i < width; i += size) {
            float value = sum_of(own, other, has_residual, i);
            sum += value;
            if (has_residual) total[start + i] = X(value);
        }
        const float mean = group_sum(sum, partial, lane, simdgroup, simdgroups) / float(width);
        float squares = 0.0f, rests = 0.0f;
        for (uint i = thread_index; i < width; i += size) {
            float centred = sum_of(own, other, has_residual, i) - mean;
            squares += centred * centred;
            rests += centred;
        }
        // What rounding took from the mean: much, where numbers of a row differ by little.
        const float rest = group_sum(rests, partial, lane, simdgroup, simdgroups) / float(width);
        const float square = group_sum(squares, partial, lane, simdgroup, simdgroups) / float(width);
        const float variance = max(square - rest * rest, 0.0f);
        const float scale = 1.0f / sqrt(variance + eps);
        if (thread_index == 0) {
            means[row] = mean + rest;
            rstd[row] = scale;
        }
        for (uint i = thread_index; i < width; i += size) {
            float value = (sum_of(own, other, has_residual, i) - mean - rest) * scale;
            if (has_weight) value = value * float(weight[i]);
            if (has_bias) value = value + float(bias[i]);
            y[start + i] = X(value);
        }
    }
}
