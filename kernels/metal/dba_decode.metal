// A few queries of decoupled attention on a cache of numbers. One threadgroup attends with ROWS queries that share a
// key/value head to one split of the keys, tile by tile, by online softmax; `dba_decode_merge` joins splits.
//
// A row is a query of a head: rows of a key/value head are its heads' queries side by side.
#include <metal_stdlib>
#pragma METAL fp contract(off)
using namespace metal;

constant constexpr uint CHUNK = 32;                          // features staged at a time
constant constexpr uint PAIRS = ROWS * KEYS / THREADS;       // scores of a thread
constant constexpr uint STAGED = CHUNK + 1;                  // odd, so that keys are in different banks

// Add the products of all rows and the tile's keys over one part of their features.
template <typename T>
inline void add_products(
    device const Q* q, device const T* keys, long width, long key_stride, uint rows, uint n_keys,
    threadgroup float* q_tile, threadgroup float* key_tile, thread float* dots, uint index) {
    for (uint from = 0; from < width; from += CHUNK) {
        for (uint i = index; i < ROWS * CHUNK; i += THREADS) {
            const uint row = i / CHUNK, feature = from + i % CHUNK;
            q_tile[i] = row < rows && feature < width ? float(q[row * width + feature]) : 0.0f;
        }
        for (uint i = index; i < KEYS * CHUNK; i += THREADS) {
            const uint key = i / CHUNK, feature = from + i % CHUNK;
            const bool is_there = key < n_keys && feature < width;
            key_tile[key * STAGED + i % CHUNK] = is_there ? float(keys[key * key_stride + feature]) : 0.0f;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint p = 0; p < PAIRS; ++p) {
            const uint row = (index + p * THREADS) / KEYS, key = (index + p * THREADS) % KEYS;
            for (uint d = 0; d < CHUNK; ++d) dots[p] += q_tile[row * CHUNK + d] * key_tile[key * STAGED + d];
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
}

[[max_total_threads_per_threadgroup(THREADS)]] kernel void dba_decode(
    device const Q* q_sem [[buffer(0)]],
    device const Q* q_geo [[buffer(1)]],
    device const SEM* k_sem [[buffer(2)]],
    device const GEO* k_geo [[buffer(3)]],
    device const VALUE* v [[buffer(4)]],
    device const int* seqlens [[buffer(5)]],
    device const Q* null_sem [[buffer(6)]],
    device const Q* null_geo [[buffer(7)]],
    device const Q* null_v [[buffer(8)]],
    device Q* out [[buffer(9)]],
    device float* sums [[buffer(10)]],
    device float* parts [[buffer(11)]],
    constant long& sem_width [[buffer(12)]],
    constant long& geo_width [[buffer(13)]],
    constant long& v_width [[buffer(14)]],
    constant long& kv_heads [[buffer(15)]],
    constant long& n_rows [[buffer(16)]],
    constant long& queries [[buffer(17)]],
    constant long& sem_batch [[buffer(18)]],
    constant long& sem_head [[buffer(19)]],
    constant long& sem_token [[buffer(20)]],
    constant long& geo_batch [[buffer(21)]],
    constant long& geo_head [[buffer(22)]],
    constant long& geo_token [[buffer(23)]],
    constant long& v_batch [[buffer(24)]],
    constant long& v_head [[buffer(25)]],
    constant long& v_token [[buffer(26)]],
    constant long& n_stored [[buffer(27)]],
    constant long& window [[buffer(28)]],
    constant long& n_splits [[buffer(29)]],
    constant long& has_null [[buffer(30)]],
    uint3 place [[threadgroup_position_in_grid]],
    uint index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
    threadgroup float q_tile[ROWS * CHUNK];
    threadgroup float key_tile[KEYS * STAGED];
    threadgroup float scores[ROWS * KEYS];
    threadgroup float top[ROWS];
    threadgroup float total[ROWS];
    threadgroup float shrink[ROWS];

    const long split = place.x % uint(n_splits), first_row = place.x / uint(n_splits) * ROWS;
    const long head = place.y, batch = place.z;
    const uint rows = uint(min(long(ROWS), long(n_rows - first_row)));
    const long row_at = (batch * kv_heads + head) * n_rows + first_row;
    const long length = max(0l, min(long(seqlens[batch]), long(n_stored)));
    const long start = window ? max(0l, long(length - queries + 1 - window)) : 0l;
    const long share = ((length - start + n_splits - 1) / n_splits + KEYS - 1) / KEYS * KEYS;
    const long first = start + split * share;
    const long last = min(long(first + share), length);
    device const Q* own_sem = q_sem + row_at * sem_width;
    device const Q* own_geo = q_geo + row_at * geo_width;
    device const VALUE* values = v + batch * v_batch + head * v_head;
    const bool starts_with_null = has_null && split == 0;

    float sum[ROWS * COLUMNS];
    for (uint row = 0; row < ROWS; ++row)
        for (uint c = 0; c < COLUMNS; ++c) {
            const uint d = index + c * THREADS;
            const bool is_null = starts_with_null && row < rows && d < v_width;
            sum[row * COLUMNS + c] = is_null ? float(null_v[head * v_width + d]) : 0.0f;
        }
    for (uint row = simdgroup; row < ROWS; row += simdgroups) {
        float dot = 0.0f;
        if (starts_with_null && row < rows) {
            for (uint d = lane; d < sem_width; d += 32)
                dot += float(own_sem[row * sem_width + d]) * float(null_sem[head * sem_width + d]);
            for (uint d = lane; d < geo_width; d += 32)
                dot += float(own_geo[row * geo_width + d]) * float(null_geo[head * geo_width + d]);
        }
        dot = simd_sum(dot);
        if (lane == 0) {
            top[row] = starts_with_null ? dot : -INFINITY;
            total[row] = starts_with_null ? 1.0f : 0.0f;
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    for (long tile = first; tile < last; tile += KEYS) {
        const uint n_keys = uint(min(long(KEYS), long(last - tile)));
        float dots[PAIRS];
        for (uint p = 0; p < PAIRS; ++p) dots[p] = 0.0f;
        device const SEM* sem = k_sem + batch * sem_batch + head * sem_head + tile * sem_token;
        device const GEO* geo = k_geo + batch * geo_batch + head * geo_head + tile * geo_token;
        add_products(own_sem, sem, sem_width, sem_token, rows, n_keys, q_tile, key_tile, dots, index);
        add_products(own_geo, geo, geo_width, geo_token, rows, n_keys, q_tile, key_tile, dots, index);
        for (uint p = 0; p < PAIRS; ++p) {
            const uint row = (index + p * THREADS) / KEYS, key = (index + p * THREADS) % KEYS;
            const long at = tile + key;
            const long end = length - queries + (first_row + row) % queries + 1;
            const bool is_seen = row < rows && key < n_keys && at < end && (!window || at >= end - window);
            scores[row * KEYS + key] = is_seen ? dots[p] : -INFINITY;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint row = simdgroup; row < rows; row += simdgroups) {
            float best = -INFINITY;
            for (uint key = lane; key < KEYS; key += 32) best = max(best, float(scores[row * KEYS + key]));
            const float before = top[row];
            const float now = max(before, simd_max(best));
            float weights = 0.0f;
            for (uint key = lane; key < KEYS; key += 32) {
                const float weight = now == -INFINITY ? 0.0f : exp(scores[row * KEYS + key] - now);
                scores[row * KEYS + key] = weight;
                weights += weight;
            }
            weights = simd_sum(weights);
            simdgroup_barrier(mem_flags::mem_threadgroup);  // all lanes have read `top`
            if (lane == 0) {
                const float factor = before == -INFINITY ? 0.0f : exp(before - now);
                shrink[row] = factor;
                top[row] = now;
                total[row] = total[row] * factor + weights;
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint c = 0; c < COLUMNS; ++c) {
            const uint d = index + c * THREADS;
            if (d >= v_width) continue;
            for (uint row = 0; row < rows; ++row) sum[row * COLUMNS + c] *= shrink[row];
            for (uint key = 0; key < n_keys; ++key) {
                const float value = float(values[(tile + key) * v_token + d]);
                for (uint row = 0; row < rows; ++row) sum[row * COLUMNS + c] += scores[row * KEYS + key] * value;
            }
        }
    }

    for (uint row = 0; row < rows; ++row) {
        const float all = total[row];
        for (uint c = 0; c < COLUMNS; ++c) {
            const uint d = index + c * THREADS;
            if (d >= v_width) continue;
            const float found = sum[row * COLUMNS + c];
            if (n_splits == 1)
                out[(row_at + row) * v_width + d] = Q(all == 0.0f ? 0.0f : found / all);
            else
                parts[((row_at + row) * n_splits + split) * (v_width + 2) + d] = found;
        }
    }
    if (index >= rows) return;
    if (n_splits == 1) {
        sums[row_at + index] = total[index] == 0.0f ? -INFINITY : top[index] + log(total[index]);
    } else {
        const long end = ((row_at + index) * n_splits + split) * (v_width + 2) + v_width;
        parts[end] = float(top[index]);
        parts[end + 1] = float(total[index]);
    }
}

// Join a row's splits: each has its sum of weighted values, its largest score and its sum of weights.
kernel void dba_decode_merge(
    device const float* parts [[buffer(0)]],
    device Q* out [[buffer(1)]],
    device float* sums [[buffer(2)]],
    constant long& v_width [[buffer(3)]],
    constant long& n_splits [[buffer(4)]],
    uint row [[threadgroup_position_in_grid]],
    uint index [[thread_index_in_threadgroup]],
    uint size [[threads_per_threadgroup]]) {
    const long stride = v_width + 2;
    device const float* own = parts + row * n_splits * stride;
    float best = -INFINITY;
    for (long i = 0; i < n_splits; ++i) best = max(best, own[i * stride + v_width]);
    float total = 0.0f;
    for (long i = 0; i < n_splits; ++i) {
        const float top = own[i * stride + v_width];
        if (top != -INFINITY) total += own[i * stride + v_width + 1] * exp(top - best);
    }
    for (uint d = index; d < v_width; d += size) {
        float sum = 0.0f;
        for (long i = 0; i < n_splits; ++i) {
            const float top = own[i * stride + v_width];
            if (top != -INFINITY) sum += own[i * stride + d] * exp(top - best);
        }
        out[row * v_width + d] = Q(total == 0.0f ? 0.0f : sum / total);
    }
    if (index == 0) sums[row] = total == 0.0f ? -INFINITY : best + log(total);
}
