// What a warp of decode_heads.cu does with a tile of tokens of two key/value heads.
//
// Rows of a product are sixteen tokens, or sixteen features of values; its eight columns are queries, four of each head, or eight
// of one of them. Of lane l, g = l / 4 and j = l % 4 are as products have them. Sixteen features are a step: lane j takes its
// features 4j and 4j + 2, then 4j + 1 and 4j + 3, as masks leave numbers of four bytes; of nf4 4j and 4j + 1 first.
#ifndef CARAMBA_HEADS_CUH
#define CARAMBA_HEADS_CUH
#include "heads_codes.cuh"

constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;
constexpr int TOKENS = 32, M_TILES = 2;  // of a tile
constexpr int PAIRS = KV_HEADS / 2, ROWS = GROUP * QUERIES;
constexpr int N_TILES = ROWS <= 4 ? 1 : 2;            // of columns: heads side by side in one, or each in its own
constexpr int COLUMNS = N_TILES == 1 ? 4 : 8;         // of a head
constexpr int SETTLED = 8;                            // tiles after which what is too much is taken from sums
constexpr float LARGEST = 128.0f;                     // what a row's largest number is made to, or up to twice it
constexpr float SMALLEST = 0x1p-60f;                  // what a row's largest number, or scale, counts as at least
constexpr float LIFT = 7.0f, ROOM = 6.0f, WIDE = 4.0f;  // the largest weight times its scale is 2^LIFT; it may grow by 2^ROOM
                                                      // and by WIDE, below float16's largest, before sums are made smaller
static_assert(KV_HEADS % 2 == 0 && ROWS <= 8, "two heads, eight columns");

// A stream of two heads in shared memory: planes (blocks side by side) of tokens' codes, then planes of scales. None of keys of
// one part, the second of which has no features.
template <int KIND, int WIDTH>
struct Layout : Format<KIND> {
    using F = Format<KIND>;
    static constexpr int D = WIDTH, PLANES = 2 * D > F::BLOCK ? 2 * D / F::BLOCK : D > 0;
    static constexpr int PARTS = D > F::BLOCK ? D / F::BLOCK : 1;  // blocks of a head
    static constexpr bool IS_SHARED = F::BLOCK > 2 * D;            // by another pair: half of each byte is of this one
    static constexpr int HEAD_STEPS = D / 16, PAIR_STEPS = 2 * HEAD_STEPS;
    static constexpr int CODES = PLANES * TOKENS * F::BYTES, SIZE = CODES + PLANES * TOKENS * F::SCALE_BYTES;
    static_assert(D == 0 || (D % 16 == 0 && (D % F::BLOCK == 0 || F::BLOCK % D == 0) && F::BLOCK <= 4 * D), "whole blocks, or parts");

    // The address of a head's block's scale of a token, `codes` being where the stream begins.
    static DEVICE u32 scale_at(u32 codes, int head, int part, int token) {
        int plane = IS_SHARED ? 0 : head * D / F::BLOCK + part;
        return codes + CODES + (plane * TOKENS + token) * F::SCALE_BYTES;
    }
};
using Sem = Layout<KIND_SEM, D_SEM>;
using Geo = Layout<KIND_GEO, D_GEO>;
using Values = Layout<KIND_V, D_V>;
static_assert(D_V % Values::BLOCK == 0, "values of a head are whole blocks");
constexpr int GEO_AT = Sem::SIZE, VALUES_AT = GEO_AT + Geo::SIZE, STAGE = VALUES_AT + Values::SIZE;

// The addresses of a stream of a pair of heads: codes and scales, strides of planes and tokens; scales of tokens are adjacent.
struct Source {
    const u8* codes;
    int plane, token;
    const u8* scales;
    int scale_plane;

    // Copy a tile of tokens from i on, of which those below `until` are there.
    template <typename L>
    DEVICE void copy(u32 to, int i, int until) const {
        constexpr int EACH = L::BYTES / 16, CHUNKS = TOKENS * L::SCALE_BYTES / 16;
        for (int p = 0; p < L::PLANES; ++p)
            for (int k = 0; k < EACH; ++k) {
                int place = lane_id() + 32 * k, n = place / EACH, chunk = place % EACH;
                const u8* from = codes + i64(p) * plane + i64(i + n) * token + 16 * chunk;
                copy_async_16(to + p * TOKENS * L::BYTES + L::chunk_at(n, chunk), from, i + n < until);
            }
        for (int place = lane_id(); place < L::PLANES * CHUNKS; place += 32) {
            int p = place / CHUNKS, chunk = place % CHUNKS;
            const u8* from = scales + (i64(p) * scale_plane + i) * L::SCALE_BYTES + 16 * chunk;
            copy_async_16(to + L::CODES + 16 * place, from, i + chunk * (16 / L::SCALE_BYTES) < until);
        }
    }
};

struct Copies {
    Source stream[3];

    DEVICE void tile(u32 to, int i, int until) const {
        stream[0].copy<Sem>(to, i, until);
        stream[1].copy<Geo>(to + GEO_AT, i, until);
        stream[2].copy<Values>(to + VALUES_AT, i, until);
    }
};

// A column's value in the two columns that a lane has of products, of lanes that each have one column's, g.
DEVICE void spread(float x, float (&out)[2]) {
    out[0] = shuffle_from(x, 8 * (lane_id() % 4));
    out[1] = shuffle_from(x, 8 * (lane_id() % 4) + 4);
}

// The sum, or maximum, over lanes of the same columns.
DEVICE float sum_over_rows(float x) {
    for (int mask = 4; mask < 32; mask *= 2) x += shuffle_xor(x, mask);
    return x;
}
DEVICE float largest_of_rows(float x) {
    for (int mask = 4; mask < 32; mask *= 2) x = fmaxf(x, shuffle_xor(x, mask));
    return x;
}

// Queries of a stream's keys as right operands, over `over` of their step; what products of each block begin with.
template <typename L, bool IS_THERE = (L::D > 0)>
struct Keys {
    u32 q[L::PAIR_STEPS][2];
    float less[N_TILES][L::PARTS][2];

    // Load the numbers of this lane's column of a step of a head; zeros where the column is another head's.
    static DEVICE void numbers(float (&x)[4], const u16* from, int s_h, int s_t, int pair, int step) {
        int g = lane_id() / 4, head = step / L::HEAD_STEPS, row = N_TILES == 1 ? g % 4 : g;
        bool is_own = row < ROWS && (N_TILES == 2 || g / 4 == head);
        for (int k = 0; k < 4; ++k) x[k] = 0.0f;
        if (!is_own) return;
        from += i64((2 * pair + head) * GROUP + row / QUERIES) * s_h + row % QUERIES * s_t;
        const u32* at = reinterpret_cast<const u32*>(from + step % L::HEAD_STEPS * 16 + 4 * (lane_id() % 4));
        u32 low = at[0], high = at[1];
        x[0] = BRAIN ? low_bf16(low) : low_f16(low);
        x[1] = BRAIN ? high_bf16(low) : high_f16(low);
        x[2] = BRAIN ? low_bf16(high) : low_f16(high);
        x[3] = BRAIN ? high_bf16(high) : high_f16(high);
    }
    // The largest number of this lane's column of each tile, its sign aside; `top` holds that of another stream.
    static DEVICE void largest(float (&top)[N_TILES], const u16* from, int s_h, int s_t, int pair) {
        for (int step = 0; step < L::PAIR_STEPS; ++step) {
            float x[4];
            numbers(x, from, s_h, s_t, pair, step);
            float& of = top[N_TILES == 1 ? 0 : step / L::HEAD_STEPS];
            for (int k = 0; k < 4; ++k) of = fmaxf(of, fabsf(x[k]));
        }
    }
    DEVICE void load(const u16* from, int s_h, int s_t, int pair, const float (&lift)[N_TILES]) {
        float sums[N_TILES][L::PARTS] = {};
#pragma unroll
        for (int step = 0; step < L::PAIR_STEPS; ++step) {
            float x[4];
            numbers(x, from, s_h, s_t, pair, step);
            int n = N_TILES == 1 ? 0 : step / L::HEAD_STEPS;
            float own = lift[n] / L::over(step % L::STEPS);
            q[step][0] = pack_f16x2(x[0] * own, x[L::IS_LEVELS ? 1 : 2] * own);
            q[step][1] = pack_f16x2(x[L::IS_LEVELS ? 2 : 1] * own, x[3] * own);
            sums[n][step % L::HEAD_STEPS / L::STEPS] += (x[0] + x[1] + x[2] + x[3]) * lift[n];
        }
#pragma unroll
        for (int n = 0; n < N_TILES; ++n)
#pragma unroll
            for (int part = 0; part < L::PARTS; ++part) {
                float sum = sums[n][part];
                sum += shuffle_xor(sum, 1);
                sum += shuffle_xor(sum, 2);
                spread(sum * (-L::LESS * L::UNIT), less[n][part]);
            }
    }
    // Add the scores of a tile of tokens, over `factor`. `at` is where the stream begins.
    DEVICE void score(float (&s)[N_TILES][M_TILES][4], u32 at, int pair, float factor, const Levels& levels, Table table) const {
        int g = lane_id() / 4, j = lane_id() % 4;
#pragma unroll
        for (int m = 0; m < M_TILES; ++m) {
            float c[N_TILES][L::PARTS][4];
            for (int n = 0; n < N_TILES; ++n)
                for (int part = 0; part < L::PARTS; ++part)
                    for (int k = 0; k < 4; ++k) c[n][part][k] = less[n][part][k % 2];
#pragma unroll
            for (int p = 0; p < L::PLANES; ++p)
#pragma unroll
                for (int word = 0; word < L::WORDS; ++word) {
                    u32 low[2 * L::NIBBLES], high[2 * L::NIBBLES];
                    u32 from = at + p * TOKENS * L::BYTES + 4 * j;
                    u32 first = load_shared_u32(from + L::chunk_at(16 * m + g, word));
                    u32 second = load_shared_u32(from + L::chunk_at(16 * m + g + 8, word));
                    if constexpr (L::IS_SHARED) {
                        // The nibbles of this pair of heads, of both tokens in one word.
                        int moved = pair % 2 * 4;
                        first >>= moved, second <<= 4 - moved;
                        L::template numbers<true>(lop3_or(first, 0x0f0f0f0fu, second & 0xf0f0f0f0u), TABLED > 2, levels, table, low);
                        high[0] = low[2], high[1] = low[3];
                    } else {
                        L::template numbers<true>(first, TABLED > 2, levels, table, low);
                        L::template numbers<true>(second, TABLED > 2, levels, table, high);
                    }
                    for (int nibble = 0; nibble < (L::IS_SHARED ? 1 : L::NIBBLES); ++nibble) {
                        int step = p * L::STEPS + L::step(word, nibble), head = step / L::HEAD_STEPS;
                        u32 a[4] = {low[2 * nibble], high[2 * nibble], low[2 * nibble + 1], high[2 * nibble + 1]};
                        mma_f16(c[N_TILES == 1 ? 0 : head][p % L::PARTS], a, q[step][0], q[step][1]);
                    }
                }
            for (int n = 0; n < N_TILES; ++n)
                for (int part = 0; part < L::PARTS; ++part) {
                    int head = N_TILES == 1 ? j / 2 : n;
                    for (int half = 0; half < 2; ++half) {
                        float z = L::scale(L::scale_at(at, head, part, 16 * m + g + 8 * half)) * factor;
                        for (int k = 2 * half; k < 2 * half + 2; ++k) s[n][m][k] += c[n][part][k] * z;
                    }
                }
        }
    }
};

// Of keys that are not there nothing is added.
template <typename L>
struct Keys<L, false> {
    static DEVICE void largest(float (&)[N_TILES], const u16*, int, int, int) {}
    DEVICE void load(const u16*, int, int, int, const float (&)[N_TILES]) {}
    DEVICE void score(float (&)[N_TILES][M_TILES][4], u32, int, float, const Levels&, Table) const {}
};

// The queries: their operands, what scores are times `by` (in base 2), and the tokens that each column sees.
struct Rows {
    Keys<Sem> sem;
    Keys<Geo> geo;
    float by[N_TILES][2];
    int length, window;

    DEVICE void load(const u16* q_sem, const u16* q_geo, int qs_h, int qs_t, int qg_h, int qg_t, int pair) {
        float lift[N_TILES];
        for (int n = 0; n < N_TILES; ++n) lift[n] = 0.0f;
        Keys<Sem>::largest(lift, q_sem, qs_h, qs_t, pair);
        Keys<Geo>::largest(lift, q_geo, qg_h, qg_t, pair);
        for (int n = 0; n < N_TILES; ++n) {
            float top = lift[n];
            top = fmaxf(top, shuffle_xor(top, 1));
            top = fmaxf(top, shuffle_xor(top, 2));
            // By a power of two, which changes no digit: float16 reaches less far than queries may.
            float unit = fmaxf(from_bits(to_bits(top) & 0x7f800000u), SMALLEST);
            lift[n] = LARGEST / unit;
            spread(unit * (LOG2_E / LARGEST / Sem::UNIT), by[n]);
        }
        sem.load(q_sem, qs_h, qs_t, pair, lift);
        geo.load(q_geo, qg_h, qg_t, pair, lift);
    }
    DEVICE void see(int tokens, int latest) { length = tokens, window = latest; }
    DEVICE bool sees_all(int i, int n) const {
        return i + n <= length - QUERIES + 1 && (!HAS_WINDOW || i >= length - window);
    }
    // Whether column `e` of this lane's two sees a token.
    DEVICE bool sees(int token, int e) const {
        int column = 2 * (lane_id() % 4) + e, end = length - QUERIES + 1 + column % COLUMNS % QUERIES;
        return token < end && (!HAS_WINDOW || token >= end - window);
    }
};

DEVICE void scores(float (&s)[N_TILES][M_TILES][4], u32 at, const Rows& rows, int pair, const Levels& levels, Table table) {
    for (int n = 0; n < N_TILES; ++n)
        for (int m = 0; m < M_TILES; ++m)
            for (int k = 0; k < 4; ++k) s[n][m][k] = 0.0f;
    rows.sem.score(s, at, pair, 1.0f, levels, table);
    rows.geo.score(s, at + GEO_AT, pair, Sem::UNIT / Geo::UNIT, levels, table);
}
#endif
