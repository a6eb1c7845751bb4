// Tokens of the tails of decode_heads.cu, numbers of 16 bits, sixteen at a time straight from memory.
#ifndef CARAMBA_HEADS_TAIL_CUH
#define CARAMBA_HEADS_TAIL_CUH
#include "heads_sums.cuh"

// A pair of a tail's numbers in the type that its products have.
DEVICE u32 tail_pair(u32 x) {
    return TAIL_BRAIN && !IN_BRAIN ? pack_f16x2(low_bf16(x), high_bf16(x)) : x;
}
DEVICE void tail_product(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if (IN_BRAIN)
        mma_bf16(c, a, b0, b1);
    else
        mma_f16(c, a, b0, b1);
}
// A pair of queries as tails' products have them: not over what their step is.
DEVICE u32 tail_query(u32 x, float over) {
    if (!IN_BRAIN && over == 1.0f) return x;
    float low = low_f16(x) * over, high = high_f16(x) * over;
    return IN_BRAIN ? pack_bf16x2(low, high) : pack_f16x2(low, high);
}

// Nothing of keys that are not there.
template <typename L>
DEVICE void tail_scores(float (&)[N_TILES][1][4], const Keys<L, false>&, const u16*, int, int, int) {}

// Add the scores of tokens at `from` + g and 8 further, of which `n_there` are there.
template <typename L>
DEVICE void tail_scores(float (&s)[N_TILES][1][4], const Keys<L, true>& keys, const u16* from, int s_k, int s_n, int n_there) {
    int g = lane_id() / 4, j = lane_id() % 4;
#pragma unroll
    for (int step = 0; step < L::PAIR_STEPS; ++step) {
        u32 a[4];
        for (int half = 0; half < 2; ++half) {
            u32 low = 0, high = 0;
            if (g + 8 * half < n_there) {
                const u16* at = from + i64(step / L::HEAD_STEPS) * s_k + i64(g + 8 * half) * s_n;
                const u32* four = reinterpret_cast<const u32*>(at + step % L::HEAD_STEPS * 16 + 4 * j);
                low = tail_pair(four[0]), high = tail_pair(four[1]);
            }
            a[half] = L::IS_LEVELS ? low : prmt(low, high, 0x5410u);  // numbers 0 and 2, then 1 and 3
            a[2 + half] = L::IS_LEVELS ? high : prmt(low, high, 0x7632u);
        }
        float over = L::over(step % L::STEPS);
        tail_product(s[N_TILES == 1 ? 0 : step / L::HEAD_STEPS][0], a, tail_query(keys.q[step][0], over),
                     tail_query(keys.q[step][1], over));
    }
}

// Read tokens i and up to fifteen more of the tails, of which those below `length` exist.
DEVICE void read_tail(Sums& own, const Rows& rows, const u16* sem, const u16* geo, const u16* v, int sem_k, int sem_n, int geo_k,
                      int geo_n, int v_k, int v_n, int pair, int i, int held, int length) {
    int g = lane_id() / 4, j = lane_id() % 4, n_there = length - i;
    float s[N_TILES][1][4], one[N_TILES];
    for (int n = 0; n < N_TILES; ++n) {
        one[n] = 1.0f;
        for (int k = 0; k < 4; ++k) s[n][0][k] = 0.0f;
    }
    i64 first = i - held;
    tail_scores(s, rows.sem, sem + i64(2 * pair) * sem_k + first * sem_n, sem_k, sem_n, n_there);
    tail_scores(s, rows.geo, geo + i64(2 * pair) * geo_k + first * geo_n, geo_k, geo_n, n_there);
    for (int n = 0; n < N_TILES; ++n)
        for (int k = 0; k < 4; ++k) s[n][0][k] *= Sem::UNIT;  // which `by` is over
    own.weigh<true>(s, rows, i, length, one);
#pragma unroll
    for (int head = 0; head < 2; ++head) {
        u32 b[2];
        for (int half = 0; half < 2; ++half) {
            float x = s[N_TILES == 1 ? 0 : head][0][2 * half], y = s[N_TILES == 1 ? 0 : head][0][2 * half + 1];
            b[half] = transpose(IN_BRAIN ? pack_bf16x2(x, y) : pack_f16x2(x, y));
        }
        const u16* from = v + i64(2 * pair + head) * v_k + first * v_n;
#pragma unroll
        for (int t = 0; t < V_TILES; ++t) {
            u32 a[4];
            for (int half = 0; half < 2; ++half) {
                u32 x[2];  // two features of two tokens
                for (int k = 0; k < 2; ++k) {
                    int n = 8 * half + 2 * j + k;
                    const u32* at = reinterpret_cast<const u32*>(from + i64(n) * v_n + 16 * t + 2 * g);
                    x[k] = n < n_there ? tail_pair(*at) : 0;
                }
                a[2 * half] = prmt(x[0], x[1], 0x5410u);
                a[2 * half + 1] = prmt(x[0], x[1], 0x7632u);
            }
            tail_product(own.acc[head][t], a, b[0], b[1]);
        }
    }
}
#endif
