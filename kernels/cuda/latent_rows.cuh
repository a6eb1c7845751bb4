// What a block of decode_latent has of its rows: their queries in shared memory, and a warp's running sums.
#ifndef CARAMBA_LATENT_ROWS_CUH
#define CARAMBA_LATENT_ROWS_CUH
#include "latent_tiles.cuh"

constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;
constexpr float LIFT = 8;       // powers of two that weights are multiplied by: float16 holds those down to 2^-32 of the largest
constexpr float RISE = 7;       // powers of two by which weights may be larger still before the maximum is raised
constexpr float LARGEST = 128;  // what the largest query number is made to, or up to twice it, before its stream's shift
constexpr float SMALLEST = 0x1p-64f;
constexpr float NOTHING = -1e30f;  // the maximum of no scores, of which differences are finite
constexpr int OWN = ROWS / 4;  // queries of which a lane holds scores: 8n + 2j + k as 2n + k, of j = lane % 4
constexpr int SUM_BYTES = ROWS * 8;  // of a warp's maxima and sums, or maxima alone

DEVICE float first_of(u32 x) { return IN_BRAIN ? low_bf16(x) : low_f16(x); }
DEVICE float second_of(u32 x) { return IN_BRAIN ? high_bf16(x) : high_f16(x); }
DEVICE float abs_of(float x) { return from_bits(to_bits(x) & 0x7fffffffu); }

DEVICE float largest_of(float top, u32 x) { return max(top, max(abs_of(first_of(x)), abs_of(second_of(x)))); }

// The part of the queries that a lane lays out: of products `warp` and every WARPS-th after it, four features of rows
// 8n + lane / 4. Of formats of 4 bits a product has two features of each of two fours.
template <class S, Kind KIND>
struct Part {
    static constexpr int TURNS = (S::STEPS + WARPS - 1) / WARPS, HALVES = S::FIELDS / 2;
    u32 held[TURNS][ROWS / 8][2][2];  // pairs of neighbours: those of both halves of a product's features

    // The word of a lane's chunk that a product is of; the chunk, and the word in it.
    DEVICE static int chunk_of(int word) { return word / S::PIECE * S::PIECE + lane_id() % 4 / S::PER_CHUNK; }
    DEVICE static int within(int word) { return lane_id() % 4 % S::PER_CHUNK * S::PIECE + word % S::PIECE; }

    DEVICE void load(const u16* q, int head_stride, int query_stride, int first, int warp) {
#pragma unroll
        for (int turn = 0; turn < TURNS; ++turn) {
            int step = warp + turn * WARPS, word = step / HALVES, odd = step % HALVES;
#pragma unroll
            for (int n = 0; n < ROWS / 8; ++n) {
                int row = first + 8 * n + lane_id() / 4;
                bool is_there = row < GROUP * QUERIES && step < S::STEPS;
                const u16* from = q + i64(row / QUERIES) * head_stride + row % QUERIES * query_stride;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    held[turn][n][half][0] = held[turn][n][half][1] = 0;
                    if (!is_there) continue;
                    // Of a product of two fours the lower half is of the first, the upper of the second.
                    if (HALVES == 1 && half == 1) continue;
                    u32x2 four = *reinterpret_cast<const u32x2*>(from + feature_of<KIND>(chunk_of(word), 2 * within(word), half));
                    if (HALVES == 1) {
                        held[turn][n][0][0] = four.x, held[turn][n][0][1] = four.y;
                    } else {
                        // Bytes side by side are fields 0 and 2 (or 1 and 3): the product of odd ones has the second.
                        u32 pick = odd ? 0x7632u : 0x5410u;
                        held[turn][n][half][0] = prmt(four.x, four.y, pick);
                    }
                }
            }
        }
    }

    DEVICE float largest(float top) const {
#pragma unroll
        for (int turn = 0; turn < TURNS; ++turn)
#pragma unroll
            for (int n = 0; n < ROWS / 8; ++n)
#pragma unroll
                for (int half = 0; half < 2; ++half)
#pragma unroll
                    for (int k = 0; k < 2; ++k) top = largest_of(top, held[turn][n][half][k]);
        return top;
    }

    DEVICE void store(u32 queries, float by, int warp) const {
        by *= float(1 << S::SHIFT);
#pragma unroll
        for (int turn = 0; turn < TURNS; ++turn) {
            int step = warp + turn * WARPS;
            if (step >= S::STEPS) continue;
#pragma unroll
            for (int n = 0; n < ROWS / 8; ++n)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    u32 x = held[turn][n][HALVES == 1 ? 0 : half][0], y = held[turn][n][0][1];
                    float low = HALVES == 1 ? (half ? second_of(x) : first_of(x)) : first_of(x);
                    float high = HALVES == 1 ? (half ? second_of(y) : first_of(y)) : second_of(x);
                    store_shared_u32(queries + query_place(step, half, 8 * n + lane_id() / 4, lane_id() % 4),
                                     pack<S::BRAIN>(low * by, high * by));
                }
        }
    }
};

// Make scores minus infinity of a lane's queries that do not see a token: half of its scores of 16 tokens.
DEVICE void hide(float (&s)[COLUMN_TILES][4], int half, int token, bool is_there, int length, int first, int window) {
#pragma unroll
    for (int c = 0; c < OWN; ++c) {
        int row = first + c / 2 * 8 + lane_id() % 4 * 2 + c % 2, end = length - QUERIES + 1 + row % QUERIES;
        bool is_seen = is_there && token < end;
        if (HAS_WINDOW) is_seen = is_seen && token >= end - window;
        if (!is_seen) s[c / 2][half * 2 + c % 2] = minus_infinity();
    }
}

DEVICE float largest_of_lanes(float x) {
#pragma unroll
    for (int mask = 16; mask; mask /= 2) x = max(x, shuffle_xor(x, mask));
    return x;
}

// What a warp has of its rows so far: maxima in base 2 (a team's), sums of weights (each lane's own) of OWN queries, and of all the
// team's tokens the weighed values of its own features, see `add_values`.
template <class S>
struct Running {
    float top[OWN], sum[OWN], acc[S::MINE][COLUMN_TILES][4];

    DEVICE void start() {
#pragma unroll
        for (int c = 0; c < OWN; ++c) top[c] = NOTHING, sum[c] = 0;
#pragma unroll
        for (int m = 0; m < S::MINE; ++m)
#pragma unroll
            for (int n = 0; n < COLUMN_TILES; ++n)
#pragma unroll
                for (int k = 0; k < 4; ++k) acc[m][n][k] = 0;
    }

    // Raise the maxima to those of all lanes of the team, which have rows of scores each, and take what has been summed down.
    // At `exchanged` the team has SUM_BYTES a warp.
    DEVICE void raise(float (&own)[OWN], int team, int member, u32 exchanged) {
        int j = lane_id() % 4;
#pragma unroll
        for (int c = 0; c < OWN; ++c) {
#pragma unroll
            for (int mask = 4; mask < 32; mask *= 2) own[c] = max(own[c], shuffle_xor(own[c], mask));
            if (lane_id() < 4) store_shared_f32(exchanged + member * SUM_BYTES + (c / 2 * 8 + 2 * j + c % 2) * 4, own[c]);
        }
        sync_team(team);
#pragma unroll
        for (int n = 0; n < COLUMN_TILES; ++n) {
            float highest[2] = {top[2 * n], top[2 * n + 1]};
#pragma unroll
            for (int w = 0; w < TEAM; ++w) {
                u32x2 x = load_shared_u64(exchanged + w * SUM_BYTES + (n * 8 + 2 * j) * 4);
                highest[0] = max(highest[0], from_bits(x.x)), highest[1] = max(highest[1], from_bits(x.y));
            }
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                float left = exp2_fast(top[2 * n + k] - highest[k]);
                top[2 * n + k] = highest[k];
                sum[2 * n + k] *= left;
#pragma unroll
                for (int m = 0; m < S::MINE; ++m) acc[m][n][k] *= left, acc[m][n][2 + k] *= left;
            }
        }
    }

    // Make scores of TILES times 16 tokens to weights, which lie in shared memory as queries do. `by` turns scores to base 2.
    // Maxima are raised when a weight would be beyond 2^(LIFT + RISE): seldom. The team has read its last weights when all come
    // here, and these are there for all after `show_products` and a sync.
    template <int TILES>
    DEVICE void weigh(float (&s)[TILES][COLUMN_TILES][4], u32 weights, float by, int team, int member, u32 exchanged) {
        float own[OWN];
        bool is_higher = false;
#pragma unroll
        for (int c = 0; c < OWN; ++c) {
            own[c] = max(s[0][c / 2][c % 2], s[0][c / 2][2 + c % 2]);
            if (TILES == 2) own[c] = max(own[c], max(s[TILES - 1][c / 2][c % 2], s[TILES - 1][c / 2][2 + c % 2]));
            own[c] *= by;
            is_higher |= own[c] > top[c] + RISE;
        }
        if (any_of_team(team, is_higher)) raise(own, team, member, exchanged);
        u32 at = weights + query_place(member * TILES, 0, lane_id() / 4, lane_id() % 4);
#pragma unroll
        for (int n = 0; n < COLUMN_TILES; ++n) {
            float first_less = LIFT - top[2 * n], second_less = LIFT - top[2 * n + 1];
#pragma unroll
            for (int i = 0; i < 2 * TILES; ++i) {
                float first = exp2_fast(s[i / 2][n][i % 2 * 2] * by + first_less);
                float second = exp2_fast(s[i / 2][n][i % 2 * 2 + 1] * by + second_less);
                sum[2 * n] += first, sum[2 * n + 1] += second;
                store_shared_u32(at + query_place(i / 2, i % 2, 8 * n, 0), transpose(pack<S::BRAIN>(first, second)));
            }
        }
    }
};

#endif
