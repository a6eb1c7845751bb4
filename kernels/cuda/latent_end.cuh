// The end of decode_latent: warps put together what they have, and the block writes it.
#ifndef CARAMBA_LATENT_END_CUH
#define CARAMBA_LATENT_END_CUH
#include "latent_rows.cuh"

// Of what a warp hands over of a row, rounded as the output is; rows begin at other banks each.
constexpr int OUT_BYTES = SEM_D * 2 + 32;

// Write the block's rows: what each attended over its weights, and the logarithm of those, to base 2 (FINAL: natural).
// `at` is where the block's first row goes, rows are `row_stride` apart, of which there are `n_rows`.
template <class S, Kind KIND>
DEVICE void finish(Running<S>& rows, int warp, u32 sums_at, u32 parts, u16* out, float* sums, i64 at, int row_stride,
                   int n_rows) {
    int g = lane_id() / 4, j = lane_id() % 4;
    u32 own_sums = sums_at + warp * ROWS * 8;
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
        u32x2 x = load_shared_u64(sums_at + (w * ROWS + row) * 8);
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
    u32 own = parts + warp * ROWS * OUT_BYTES;
#pragma unroll
    for (int r = 0; r < SUMMED; ++r) {
        float top_of_row = shuffle_from(top, 8 * r + g), own_top = load_shared_f32(own_sums + (8 * r + g) * 8);
        float by = exp2_fast(own_top - top_of_row) * shuffle_from(inverse, 8 * r + g);
#pragma unroll
        for (int chunk = 0; chunk < S::CHUNKS; ++chunk)
#pragma unroll
            for (int quad = 0; quad < S::FIELDS / 2; ++quad) {
                const float* even = &rows.acc[r / 2][chunk * S::FIELDS + quad][r % 2 * 2];
                const float* odd = &rows.acc[r / 2][chunk * S::FIELDS + quad + S::FIELDS / 2][r % 2 * 2];
                u32 to = own + (8 * r + g) * OUT_BYTES + (feature_of<KIND>(chunk, 0, quad * (S::FIELDS / 4)) + 4 * j) * 2;
                store_shared_u64(to, {pack<IN_BRAIN>(even[0] * by, odd[0] * by), pack<IN_BRAIN>(even[1] * by, odd[1] * by)});
            }
    }
    sync_block();
    for (int i = 32 * warp + lane_id(); i < ROWS * SEM_D / 4; i += 32 * WARPS) {
        int r = i / (SEM_D / 4), d = i % (SEM_D / 4) * 4;
        float found[4] = {0, 0, 0, 0};
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            u32x2 x = load_shared_u64(parts + (w * ROWS + r) * OUT_BYTES + d * 2);
            found[0] += first_of(x.x), found[1] += second_of(x.x), found[2] += first_of(x.y), found[3] += second_of(x.y);
        }
        if (r < n_rows)
            *reinterpret_cast<u32x2*>(out + (at + i64(r) * row_stride) * SEM_D + d) = {pack<IN_BRAIN>(found[0], found[1]),
                                                                                     pack<IN_BRAIN>(found[2], found[3])};
    }
}

#endif
