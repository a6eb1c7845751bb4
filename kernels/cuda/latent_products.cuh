// Products of 16 tokens' keys, a warp's registers, with a block's queries in shared memory: [16 tokens, ROWS queries].
//
// Hopper has an instruction for four warps that all come to it (64 tokens), each with its own keys, which reads the queries from
// shared memory (GROUPED). Elsewhere products of one warp do the same; they take half as long again on Hopper. Values' products
// are of the same kind: of 16 features, a warp's registers, with weights in the layout of queries, tokens in features' place.
#ifndef CARAMBA_LATENT_PRODUCTS_CUH
#define CARAMBA_LATENT_PRODUCTS_CUH
#include "codes.cuh"

constexpr bool IS_GROUPED = GROUPED;

// Queries of a product: 16 features of ROWS queries, as lines of 8 queries of 8 features each, those of the first 8 features
// first.
constexpr int STEP_BYTES = ROWS * 32, COLUMN_TILES = ROWS / 8;

typedef float Scores[2][COLUMN_TILES][4];  // of 32 tokens: rows of products are tokens, columns queries

// The address of a pair of features 2j, 2j + 1 (8 more: `half`) of a query.
DEVICE int query_place(int step, int half, int row, int j) {
    return step * STEP_BYTES + half * (STEP_BYTES / 2) + row / 8 * 128 + row % 8 * 16 + j * 4;
}

// Add the products of one warp, of TILES times 16 tokens.
template <int TILES>
DEVICE void multiply_rows(float (&c)[TILES][COLUMN_TILES][4], const u32 (&a)[TILES][4], u32 queries) {
    int l = lane_id();
#pragma unroll
    for (int n = 0; n < COLUMN_TILES; n += 2) {
        u32 b[4];
        ldmatrix_x4(b, queries + l / 8 % 2 * (STEP_BYTES / 2) + (n + l / 16) * 128 + l % 8 * 16);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            mma_f16(c[tile][n], a[tile], b[0], b[1]);
            mma_f16(c[tile][n + 1], a[tile], b[2], b[3]);
        }
    }
}

#if GROUPED && defined(__CUDACC__)
// The instruction's descriptor of the queries at a shared address: strides to the other 8 features and the next 8 queries.
DEVICE u64 described(u32 queries) {
    return u64((queries & 0x3ffffu) >> 4) | u64(STEP_BYTES / 2 / 16) << 16 | u64(128 / 16) << 32;
}
DEVICE void begin_products() { asm volatile("wgmma.fence.sync.aligned;" : : : "memory"); }
DEVICE void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory"); }
template <int N>
DEVICE void wait_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(N) : "memory");
}
// What was stored in shared memory is there for products of four warps after this and a sync.
DEVICE void show_products() { asm volatile("fence.proxy.async.shared::cta;" : : : "memory"); }

DEVICE void multiply_group(float (&c)[COLUMN_TILES][4], const u32 (&a)[4], u64 queries) {
    static_assert(COLUMN_TILES == 4 || COLUMN_TILES == 2, "32 rows or 16");
    if constexpr (COLUMN_TILES == 4)
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16"
            " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, {%16, %17, %18, %19}, %20, 1, 1, 1, 0;"
            : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]),
              "+f"(c[1][3]), "+f"(c[2][0]), "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3]), "+f"(c[3][0]), "+f"(c[3][1]),
              "+f"(c[3][2]), "+f"(c[3][3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(queries));
    else
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16"
            " {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, %12, 1, 1, 1, 0;"
            : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]),
              "+f"(c[1][3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(queries));
}
#else
DEVICE u64 described(u32 queries) { return queries / 16; }
DEVICE void begin_products() {}
DEVICE void commit_products() {}
template <int N>
DEVICE void wait_products() {}
DEVICE void show_products() {}
DEVICE void multiply_group(float (&c)[COLUMN_TILES][4], const u32 (&a)[4], u64 queries) {
    float sums[1][COLUMN_TILES][4];
    u32 keys[1][4];
    for (int n = 0; n < COLUMN_TILES; ++n)
        for (int k = 0; k < 4; ++k) sums[0][n][k] = c[n][k], keys[0][k] = a[k];
    multiply_rows<1>(sums, keys, static_cast<u32>(queries) * 16);
    for (int n = 0; n < COLUMN_TILES; ++n)
        for (int k = 0; k < 4; ++k) c[n][k] = sums[0][n][k];
}
#endif

#endif
