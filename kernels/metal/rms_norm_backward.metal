// The gradient of RMSNorm, one threadgroup to some rows: dx, and its share of the weight's gradient, which sums grad x^.
#include <metal_stdlib>
#pragma METAL fp contract(off)
using namespace metal;
#include "rows.h"

kernel void rms_norm_backward(
    device const X* grad [[buffer(0)]],
    device const X* grad_sum [[buffer(1)]],
    device const X* x [[buffer(2)]],
    device const float* rstd [[buffer(3)]],
    device const W* weight [[buffer(4)]],
    device X* grad_x [[buffer(5)]],
    device float* shares [[buffer(6)]],
    constant long& rows [[buffer(7)]],
    constant long& rows_per_group [[buffer(8)]],
    constant long& width [[buffer(9)]],
    constant long& has_sum [[buffer(10)]],
    constant long& has_weight [[buffer(11)]],
    uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint size [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
    threadgroup float partial[32];
    float sums[COLUMNS];
    for (uint c = 0; c < COLUMNS; ++c) sums[c] = 0.0f;
    const long first = group * rows_per_group;
    const long last = min(long(first + rows_per_group), long(rows));
    for (long row = first; row < last; ++row) {
        const long start = row * width;
        const float scale = rstd[row];
        float products = 0.0f;
        for (uint i = thread_index; i < width; i += size) {
            float slope = float(grad[start + i]);
            float inner = has_weight ? slope * float(weight[i]) : slope;
            products += inner * (float(x[start + i]) * scale);
        }
        float mean = group_sum(products, partial, lane, simdgroup, simdgroups) / float(width);
        for (uint c = 0, i = thread_index; c < COLUMNS; ++c, i += size) {
            if (i >= width) continue;
            float slope = float(grad[start + i]);
            float inner = has_weight ? slope * float(weight[i]) : slope;
            float unit = float(x[start + i]) * scale;
            float found = scale * (inner - unit * mean);
            if (has_sum) found += float(grad_sum[start + i]);
            grad_x[start + i] = X(found);
            sums[c] += slope * unit;
        }
    }
    if (!has_weight) return;
    for (uint c = 0, i = thread_index; c < COLUMNS; ++c, i += size)
        if (i < width) shares[group * width + i] = sums[c];
}
