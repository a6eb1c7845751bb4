// Parts of `int4_gemv.cu`: words of codes, rows of x, and sums that warps leave for each other.
#ifndef CARAMBA_ROW_WORDS_CUH
#define CARAMBA_ROW_WORDS_CUH
#include "warp.cuh"

constexpr int GROUP = 128, FIELDS = 4;
constexpr int WIDTH = N_GROUPS * GROUP, THREADS = 32 * WARPS;
constexpr int STEPS = (N_GROUPS + WARPS - 1) / WARPS;
constexpr int PARTS = (MOST_ROWS + 7) / 8;                // of x's rows, products' columns
constexpr int COLUMNS = (GATED ? 8 : 16) * TILES;        // of the result
constexpr int KEPT = MOST_ROWS;                          // columns of products that are used
constexpr int X_BYTES = NORM ? 2 * WIDTH : 0;
constexpr int CHUNKS = (WIDTH / 8 + THREADS - 1) / THREADS;  // of eight numbers, of a thread
constexpr int CHAINS = PARTS > 1 || TILES > 2 ? 1 : 4 / TILES;  // of products that wait for each other
constexpr int LEAST_BLOCKS = PARTS == 1 ? ((NORM ? 511 : 383) + THREADS) / THREADS : 1;  // that a multiprocessor's registers have place for
constexpr float UNIT = BRAIN ? 18446744073709551616.0f : 1.0f;  // what weights are divided by

DEVICE float number(u16 x) { return BRAIN ? low_bf16(x) : from_f16(x); }
DEVICE u16 bits_of(float x) { return static_cast<u16>(BRAIN ? pack_bf16x2(x, x) : pack_f16x2(x, x)); }
DEVICE float rounded(float x) { return number(bits_of(x)); }
DEVICE u32 pair_of(float low, float high) { return BRAIN ? pack_bf16x2(low, high) : pack_f16x2(low, high); }
DEVICE float low_of(u32 x) { return BRAIN ? low_bf16(x) : low_f16(x); }
DEVICE float high_of(u32 x) { return BRAIN ? high_bf16(x) : high_f16(x); }

// A scale and a zero, pairs of what codes are multiplied by at bits 0 to 3 and 4 to 7, and of what is added.
struct Steps {
    u32 by[2], zero;

    DEVICE explicit Steps(u32 scale) {
        if (BRAIN) {
            u32 both = prmt(scale, scale, 0x1010), nothing = 0x80008000u;
            by[0] = fma_bf16x2(both, 0x62006200u, nothing);  // 2^69
            by[1] = fma_bf16x2(both, 0x60006000u, nothing);  // 2^65
            zero = fma_bf16x2(prmt(scale, scale, 0x3232), 0x1f801f80u, nothing);  // 2^-64
        } else {
            float step = low_bf16(scale) * 4096.0f, least = high_bf16(scale);
            by[0] = by[1] = pack_f16x2(step, step);
            zero = pack_f16x2(least, least);
        }
    }

    // The numbers of a pair of words' codes at a place.
    DEVICE u32 numbers(u32 word, int field) const {
        u32 codes = (field < 2 ? word : word >> 8) & (field % 2 ? 0x00f000f0u : 0x000f000fu);
        if (BRAIN) return fma_bf16x2(codes, by[field % 2], zero);
        return fma_f16x2(mul_f16x2(codes, field % 2 ? 0x5c005c00u : 0x6c006c00u), by[0], zero);  // 2^8, 2^12
    }
};

// Rows of x as products' right operand: of lane 4g + j row g of each part, or the staged one, which all columns then are.
struct Rows {
    const u16* from[PARTS];
    u32 staged;

    DEVICE Rows(const u16* x, int rows, u32 rows_of_x) : staged(rows_of_x + lane_id() % 4 * 16) {
#pragma unroll
        for (int n = 0; n < PARTS; ++n)
            from[n] = x + i64(min(8 * n + lane_id() / 4, rows - 1)) * WIDTH + lane_id() % 4 * 8;
    }
    DEVICE u32x4 numbers(int part, int group, int field) const {
        if (NORM) return load_shared_u128(staged + 2 * (GROUP * group + GROUP / FIELDS * field));
        return load_u128(from[part] + GROUP * group + GROUP / FIELDS * field);
    }
};

// A warp's sums. Where there are few, several of each: a product takes longer than a warp may give the next one.
struct Sums {
    float of[TILES][PARTS][CHAINS][4];

    DEVICE void clear() {
#pragma unroll
        for (int i = 0; i < TILES; ++i)
            for (int n = 0; n < PARTS; ++n)
                for (int chain = 0; chain < CHAINS; ++chain)
                    for (int k = 0; k < 4; ++k) of[i][n][chain][k] = 0;
    }

    // Leave them for others: [warps, rows of tiles, columns] float32.
    DEVICE void leave(u32 sums, int warp) const {
        int g = lane_id() / 4, j = lane_id() % 4;
#pragma unroll
        for (int i = 0; i < TILES; ++i)
            for (int n = 0; n < PARTS; ++n)
                for (int k = 0; k < 4; ++k) {
                    int row = (warp * TILES + i) * 16 + g + k / 2 * 8, column = 8 * n + 2 * j + k % 2;
                    float found = of[i][n][0][k];
                    for (int chain = 1; chain < CHAINS; ++chain) found += of[i][n][chain][k];
                    if (column < KEPT) store_shared_f32(sums + 4 * (row * KEPT + column), found);
                }
    }
};

// What a lane has of a group of its tiles' rows.
struct Codes {
    u32x4 words[TILES][2];
    u32 scale[TILES][2];

    // Of a group that there is none of the last one, with scales and zeros of 0.
    DEVICE void load(const u16* from, const u32* scales, const i64 (&row)[TILES][2], int group) {
        bool is_there = N_GROUPS % WARPS == 0 || group < N_GROUPS;
        group = is_there ? group : N_GROUPS - 1;
#pragma unroll
        for (int i = 0; i < TILES; ++i)
            for (int k = 0; k < 2; ++k) {
                words[i][k] = load_once_u128(from + row[i][k] * (WIDTH / FIELDS) + group * (GROUP / FIELDS) + lane_id() % 4 * 8);
                scale[i][k] = is_there ? scales[row[i][k] * N_GROUPS + group] : 0;
            }
    }

    DEVICE void multiply(Sums& c, const Rows& right, int group) const {
        group = N_GROUPS % WARPS == 0 ? group : min(group, N_GROUPS - 1);
#pragma unroll
        for (int field = 0; field < FIELDS; ++field) {
            u32 left[TILES][2][4];  // of two products, features 4h of eight
#pragma unroll
            for (int i = 0; i < TILES; ++i)
                for (int k = 0; k < 2; ++k) {
                    Steps steps(scale[i][k]);
                    left[i][0][k] = steps.numbers(words[i][k].x, field);
                    left[i][0][2 + k] = steps.numbers(words[i][k].y, field);
                    left[i][1][k] = steps.numbers(words[i][k].z, field);
                    left[i][1][2 + k] = steps.numbers(words[i][k].w, field);
                }
#pragma unroll
            for (int n = 0; n < PARTS; ++n) {
                u32x4 x = right.numbers(n, group, field);
#pragma unroll
                for (int i = 0; i < TILES; ++i) {
                    product(c.of[i][n][2 * field % CHAINS], left[i][0], x.x, x.y);
                    product(c.of[i][n][(2 * field + 1) % CHAINS], left[i][1], x.z, x.w);
                }
            }
        }
    }

    DEVICE static void product(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
        if (BRAIN)
            mma_bf16(c, a, b0, b1);
        else
            mma_f16(c, a, b0, b1);
    }
};

// Write the one row x, normalised and rounded, to shared memory. Where sums are is free until all have done it.
DEVICE void stage_normed(u32 rows_of_x, u32 sums, const u16* x, const void* norm, float eps) {
    int thread = 32 * warp_id() + lane_id();
    u32x4 own[CHUNKS];
    float squares = 0;
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
        int chunk = i * THREADS + thread;
        own[i] = {0, 0, 0, 0};
        if (chunk < WIDTH / 8) own[i] = load_u128(x + 8 * chunk);
        u32 pairs[4] = {own[i].x, own[i].y, own[i].z, own[i].w};
        for (int k = 0; k < 4; ++k)
            squares += low_of(pairs[k]) * low_of(pairs[k]) + high_of(pairs[k]) * high_of(pairs[k]);
    }
#pragma unroll
    for (int mask = 16; mask; mask /= 2) squares += shuffle_xor(squares, mask);
    if (lane_id() == 0) store_shared_f32(sums + 4 * (thread / 32), squares);
    sync_block();
    squares = 0;
    for (int i = 0; i < WARPS; ++i) squares += load_shared_f32(sums + 4 * i);
    float by = 1.0f / sqrtf(squares / WIDTH + eps);
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
        int chunk = i * THREADS + thread;
        if (chunk >= WIDTH / 8) continue;
        u32 pairs[4] = {own[i].x, own[i].y, own[i].z, own[i].w};
        float gain[8] = {1, 1, 1, 1, 1, 1, 1, 1};
        if (NORM == 2) {
            u32x4 held = load_u128(static_cast<const u16*>(norm) + 8 * chunk);
            u32 gains[4] = {held.x, held.y, held.z, held.w};
            for (int k = 0; k < 4; ++k) gain[2 * k] = low_of(gains[k]), gain[2 * k + 1] = high_of(gains[k]);
        }
        if (NORM == 3)
            for (int k = 0; k < 8; ++k) gain[k] = static_cast<const float*>(norm)[8 * chunk + k];
        for (int k = 0; k < 4; ++k)
            pairs[k] = pair_of(low_of(pairs[k]) * by * gain[2 * k], high_of(pairs[k]) * by * gain[2 * k + 1]);
        store_shared_u128(rows_of_x + 16 * chunk, {pairs[0], pairs[1], pairs[2], pairs[3]});
    }
}

DEVICE float total(u32 sums, int row, int column) {
    float found = 0;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) found += load_shared_f32(sums + 4 * ((i * TILES * 16 + row) * KEPT + column));
    return found * UNIT;
}

#endif
