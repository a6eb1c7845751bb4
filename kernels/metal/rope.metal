// Rotate pairs of features p and p + D/2. One threadgroup reads one row of the tables, and turns all heads that share it.
#include <metal_stdlib>
#pragma METAL fp contract(off)
using namespace metal;

kernel void rope(
    device const X* x [[buffer(0)]],
    device const TABLE* cos_table [[buffer(1)]],
    device const TABLE* sin_table [[buffer(2)]],
    device Y* y [[buffer(3)]],
    constant long& half_width [[buffer(4)]],
    constant long& heads [[buffer(5)]],
    constant long& batches [[buffer(6)]],
    constant long& x_batch [[buffer(7)]],
    constant long& x_head [[buffer(8)]],
    constant long& x_token [[buffer(9)]],
    constant long& x_feature [[buffer(10)]],
    constant long& y_batch [[buffer(11)]],
    constant long& y_head [[buffer(12)]],
    constant long& y_token [[buffer(13)]],
    constant long& y_feature [[buffer(14)]],
    constant long& table_batch [[buffer(15)]],
    constant long& table_group [[buffer(16)]],
    constant float& scale [[buffer(17)]],
    constant float& sign_of_sin [[buffer(18)]],
    uint3 place [[threadgroup_position_in_grid]],
    uint3 size [[threads_per_threadgroup]],
    uint thread_index [[thread_index_in_threadgroup]]) {
    const long token = place.x;
    const long group = place.y;
    const long table = place.z * table_batch + group * table_group + token * half_width;
    const uint n_pairs = uint(batches * heads * half_width);
    for (uint k = thread_index; k < n_pairs; k += size.x) {
        const long pair = k % uint(half_width);
        const long row = k / uint(half_width);
        const long head = group * heads + row % heads;
        const long batch = place.z + row / heads;
        const float c = float(cos_table[table + pair]);
        const float s = float(sin_table[table + pair]) * sign_of_sin;
        device const X* from = x + batch * x_batch + head * x_head + token * x_token;
        const float first = float(from[pair * x_feature]);
        const float second = float(from[(pair + half_width) * x_feature]);
        device Y* to = y + batch * y_batch + head * y_head + token * y_token;
        to[pair * y_feature] = Y((first * c - second * s) * scale);
        to[(pair + half_width) * y_feature] = Y((second * c + first * s) * scale);
    }
}
