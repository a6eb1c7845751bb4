// The gradient of LayerNorm, one threadgroup to some rows: dx, and its shares of the gradients of weight and bias, which
// sum grad x^ and grad.
#include <metal_stdlib>
#pragma METAL fp contract(off)
using namespace metal;
#include "rows.h"

kernel void layer_norm_backward(
    device const X* grad [[buffer(0)]],
    device const X* grad_sum [[buffer(1)]],
    device const X* x [[buffer(2)]],
    device const float* means [[buffer(3)]],
    device const float* rstd [[buffer(4)]],
    device const W* weight [[buffer(5)]],
    device X* grad_x [[buffer(6)]],
    device float* shares [[buffer(7)]],
    device float* bias_shares [[buffer(8)]],
    constant long& rows [[buffer(9)]],
    constant long& rows_per_group [[buffer(10)]],
    constant long& width [[buffer(11)]],
    constant long& has_sum [[buffer(12)]],
    constant long& has_weight [[buffer(13)]],
    constant long& has_bias [[buffer(14)]],
    uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint size [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
    threadgroup float partial[32];
    float sums[COLUMNS];
    float bias_sums[COLUMNS];
    for (uint c = 0; c < COLUMNS; ++c) sums[c] = bias_sums[c] = 0.0f;
    const long first = group * rows_per_group;
    const long last = min(long(first + rows_per_group), long(rows));
    for (long row = first; row < last; ++row) {
        const long start = row * width;
        const float mean = means[row];
        const float scale = rstd[row];
        float slopes = 0.0f, products = 0.0f;
        for (uint i = thread_index; i < width; i += size) {
            float slope = float(grad[start + i]);
            float inner = has_weight ? slope * float(weight[i]) : slope;
            slopes += inner;
            products += inner * ((float(x[start + i]) - mean) * scale);
        }
        const float slope_mean = group_sum(slopes, partial, lane, simdgroup, simdgroups) / float(width);
        const float product_mean = group_sum(products, partial, lane, simdgroup, simdgroups) / float(width);
        for (uint c = 0, i = thread_index; c < COLUMNS; ++c, i += size) {
            if (i >= width) continue;
            float slope = float(grad[start + i]);
            float inner = has_weight ? slope * float(weight[i]) : slope;
            float unit = (float(x[start + i]) - mean) * scale;
            float found = scale * (inner - slope_mean - unit * product_mean);
            if (has_sum) found += float(grad_sum[start + i]);
            grad_x[start + i] = X(found);
            sums[c] += slope * unit;
            bias_sums[c] += slope;
        }
    }
    for (uint c = 0, i = thread_index; c < COLUMNS; ++c, i += size) {
        if (i >= width) continue;
        if (has_weight) shares[group * width + i] = sums[c];
        if (has_bias) bias_shares[group * width + i] = bias_sums[c];
    }
}
