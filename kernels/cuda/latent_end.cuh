// The end of decode_latent: teams put together what they have, and the block writes it.
#ifndef CARAMBA_LATENT_END_CUH
#define CARAMBA_LATENT_END_CUH
#include "latent_rows.cuh"

constexpr int OUT_BYTES = SEM_D * 4 + 16;  // of what a team hands over of a row; rows begin at other banks each

DEVICE u32 pack_out(float low, float high) { return IN_BRAIN ? pack_bf16x2(low, high) : pack_f16x2(low, high); }

// Write the block's rows: what each attended over its weights, and the logarithm of those, to base 2 (FINAL: natural).
// `at` is where the block's first row goes, `n_rows` rows have stride `row_stride`.
template <class S, Kind KIND>
DEVICE void finish(Running<S>& rows, int warp, u32 sums_at, u32 parts, u16* out, float* sums, i64 at, int row_stride,
                   int n_rows) {
    int g = lane_id() / 4, j = lane_id() % 4;
    u32 own_sums = sums_at + warp * SUM_BYTES;
#pragma unroll
    for (int c = 0; c < OWN; ++c) {
#pragma unroll
        for (int mask = 4; mask < 32; mask *= 2) rows.sum[c] += shuffle_xor(rows.sum[c], mask);
        if (g == 0) store_shared_u64(own_sums + (c / 2 * 8 + 2 * j + c % 2) * 8, {to_bits(rows.top[c]), to_bits(rows.sum[c])});
    }
    sync_block();
    // A lane a row: its maximum and sum over all warps, and what multiplies what this warp has.
    int row = lane_id() % ROWS;
    float tops[WARPS], totals[WARPS], top = NOTHING, total = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        u32x2 x = load_shared_u64(sums_at + w * SUM_BYTES + row * 8);
        tops[w] = from_bits(x.x), totals[w] = from_bits(x.y);
        top = max(top, tops[w]);
    }
#pragma unroll
    for (int w = 0; w < WARPS; ++w) total += totals[w] * exp2_fast(tops[w] - top);
    bool is_some = total > 0;
    float inverse = is_some ? float(1 << S::SHIFT) / total : 0;
    if (warp == 0 && lane_id() < ROWS && row < n_rows) {
        float log = top + log2_fast(total) - LIFT;
        sums[at + i64(row) * row_stride] = is_some ? (FINAL ? log * LN_2 : log) : minus_infinity();
    }
    u32 own = parts + warp / TEAM * ROWS * OUT_BYTES;
    constexpr int QUADS = S::FIELDS / 2;
#pragma unroll
    for (int n = 0; n < COLUMN_TILES; ++n)
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            int query = 8 * n + 2 * j + k;
            float by = exp2_fast(rows.top[2 * n + k] - shuffle_from(top, query)) * shuffle_from(inverse, query);
#pragma unroll
            for (int m = 0; m < S::MINE; ++m) {
                int product = warp % TEAM * S::MINE + m;
#pragma unroll
                for (int odd = 0; odd < 2; ++odd)
                    store_shared_f32(own + query * OUT_BYTES + feature_of<KIND>(product / QUADS, g, product % QUADS * 2 + odd) * 4,
                                     rows.acc[m][n][2 * odd + k] * by);
            }
        }
    sync_block();
    for (int i = 32 * warp + lane_id(); i < ROWS * SEM_D / 4; i += 32 * WARPS) {
        int r = i / (SEM_D / 4), d = i % (SEM_D / 4) * 4;
        float found[4] = {0, 0, 0, 0};
#pragma unroll
        for (int team = 0; team < TEAMS; ++team) {
            u32x4 x = load_shared_u128(parts + (team * ROWS + r) * OUT_BYTES + d * 4);
            found[0] += from_bits(x.x), found[1] += from_bits(x.y), found[2] += from_bits(x.z), found[3] += from_bits(x.w);
        }
        if (r < n_rows)
            *reinterpret_cast<u32x2*>(out + (at + i64(r) * row_stride) * SEM_D + d) = {pack_out(found[0], found[1]),
                                                                                     pack_out(found[2], found[3])};
    }
}

#endif
