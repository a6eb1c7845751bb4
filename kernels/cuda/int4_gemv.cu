// Linear maps of 1 to 64 rows by codes of 4 bits, as `caramba::small_batch_linear` has them: a block makes all rows of 16 TILES columns.
//
// A block's warps share the width, a group of 128 inputs each at a time, and add their sums at the end, in one order. Words of
// codes go from memory to registers, where lanes hold them as products read their left operand: lane 4g + j has 16 bytes, eight
// words, of row g's group, whose codes are of features 32f + 8j and the seven next, f being the code's place in its word. The
// right operand's lane reads the same features of x, 16 bytes too. Nothing is shuffled, and no code is met twice.
//
// Codes at bits 0 to 3 or 4 to 7 of bfloat16 are 2^-133 or 2^-129 times what they say, below the smallest normal number but
// exact: a mask makes them numbers, and one multiply-add q s + z of a pair, times 2^-64 to stay within range. Of float16 they
// are 2^-24 and 2^-20 times as large, and are multiplied first.
//
// Macros: N_GROUPS (of 128 inputs), MOST_ROWS (of x: 1, or a multiple of 8 that is not less), TILES (of 16 rows of the weight to a block), WARPS, AHEAD (groups that a warp has
// asked for), BRAIN (bfloat16, else float16), GATED (half a tile of gate rows, half of up rows), NORM (0 none, else of one row: 1
// without a weight, 2 with one of x's dtype, 3 of float32), HAS_BIAS, HAS_RESIDUAL.
#include "int4_gemv.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, LEAST_BLOCKS) int4_gemv(
    const u16* x, const u16* words, const u32* scale, const u16* bias, const u16* residual, const void* norm, u16* y, int n_out,
    int rows, float eps) {
    wait_for_kernel_ahead();
    u32 rows_of_x = shared_address(shared_memory()), sums = rows_of_x + X_BYTES;
    int g = lane_id() / 4, warp = warp_id();

    // Rows of the weight of this lane: of each tile that of its place, and that 8 further or the same one of up.
    i64 row[TILES][2];
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
        int n = block_x() * COLUMNS + i * (GATED ? 8 : 16) + g;
        row[i][0] = min(n, n_out - 1);
        row[i][1] = GATED ? row[i][0] + n_out : min(n + 8, n_out - 1);
    }
    Codes held[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i)
        if (i < STEPS) held[i].load(words, scale, row, i * WARPS + warp);
    if (NORM) stage_normed(rows_of_x, sums, x, norm, eps);
    sync_block();  // without a row to wait for too: the compiler moves what is asked for ahead to where it is used otherwise
    Rows right(x, rows, rows_of_x);

    Sums c;
    c.clear();
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        held[step % AHEAD].multiply(c, right, step * WARPS + warp);
        if (step + AHEAD < STEPS) held[step % AHEAD].load(words, scale, row, (step + AHEAD) * WARPS + warp);
    }
    c.leave(sums, warp);
    sync_block();
    for (int e = 32 * warp + lane_id(); e < COLUMNS * rows; e += THREADS) {
        int at = e % COLUMNS, m = e / COLUMNS, n = block_x() * COLUMNS + at;
        if (n >= n_out) continue;
        int tile_row = GATED ? at / 8 * 16 + at % 8 : at;
        float found = rounded(total(sums, tile_row, m) + (HAS_BIAS ? number(bias[n]) : 0.0f));
        if (GATED) {
            float up = rounded(total(sums, tile_row + 8, m) + (HAS_BIAS ? number(bias[n + n_out]) : 0.0f));
            found = rounded(found / (1.0f + exp2_fast(found * -1.4426950408889634f)) * up);
        }
        if (HAS_RESIDUAL) found = rounded(found + number(residual[i64(m) * n_out + n]));
        y[i64(m) * n_out + n] = bits_of(found);
    }
}
