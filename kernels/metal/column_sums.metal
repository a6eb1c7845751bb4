// Sums of columns, one thread to a column.
#include <metal_stdlib>
#pragma METAL fp contract(off)
using namespace metal;

kernel void column_sums(
    device const float* shares [[buffer(0)]],
    device W* sums [[buffer(1)]],
    constant long& n_shares [[buffer(2)]],
    constant long& width [[buffer(3)]],
    uint column [[thread_position_in_grid]]) {
    float sum = 0.0f;
    for (long i = 0; i < n_shares; ++i) sum += shares[i * width + column];
    sums[column] = W(sum);
}
