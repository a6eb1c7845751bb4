// What a block of decode_latent has of its rows: their queries in shared memory, and a warp's running sums.
#ifndef CARAMBA_LATENT_ROWS_CUH
#define CARAMBA_LATENT_ROWS_CUH
#include "latent_tiles.cuh"

constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;
constexpr float LIFT = 8;       // powers of two that weights are multiplied by: float16 holds those down to 2^-32 of the largest
constexpr float RISE = 7;       // powers of two by which weights may be larger still before the maximum is raised
constexpr float LARGEST = 64;   // what the largest query number is made to, or up to twice it, before its stream's shift
constexpr float SMALLEST = 0x1p-64f;
constexpr float NOTHING = -1e30f;  // the maximum of no scores, of which differences are finite
constexpr int OWN = ROWS / 4;  // queries of which a lane holds scores: 8n + 2j + k as 2n + k, of j = lane % 4
constexpr int SUMMED = ROWS / 8;  // rows of which a lane holds weighed values: 8n + lane / 4

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

// What a warp has of its rows so far: maxima in base 2 and sums of weights (each lane's own) of OWN queries, and weighed values.
template <class S>
struct Running {
    float top[OWN], sum[OWN], acc[ROW_TILES][S::CHUNKS * S::FIELDS][4];

    DEVICE void start() {
#pragma unroll
        for (int c = 0; c < OWN; ++c) top[c] = NOTHING, sum[c] = 0;
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
            for (int n = 0; n < S::CHUNKS * S::FIELDS; ++n)
#pragma unroll
                for (int k = 0; k < 4; ++k) acc[m][n][k] = 0;
    }

    // Raise the maxima to those of all lanes, which have rows of scores each, and take what has been summed down.
    DEVICE void raise(float (&own)[OWN]) {
        bool is_first = true;  // nothing has been summed
#pragma unroll
        for (int c = 0; c < OWN; ++c) {
            is_first = is_first && top[c] == NOTHING;
#pragma unroll
            for (int mask = 4; mask < 32; mask *= 2) own[c] = max(own[c], shuffle_xor(own[c], mask));
            own[c] = max(own[c], top[c]);
            float left = exp2_fast(top[c] - own[c]);
            top[c] = own[c];
            sum[c] *= left;
            own[c] = left;
        }
        if (!any_lane(!is_first)) return;
#pragma unroll
        for (int r = 0; r < SUMMED; ++r) {
            int g = lane_id() / 4;
            float even = shuffle_from(own[2 * r], g / 2), odd = shuffle_from(own[2 * r + 1], g / 2), left = g % 2 ? odd : even;
#pragma unroll
            for (int n = 0; n < S::CHUNKS * S::FIELDS; ++n)
                acc[r / 2][n][r % 2 * 2] *= left, acc[r / 2][n][r % 2 * 2 + 1] *= left;
        }
    }

    // Make scores of TILES times 16 tokens to weights, as products of rows read them. `by` turns scores to base 2. Maxima are
    // raised when a weight would be beyond 2^(LIFT + RISE): seldom.
    template <int TILES>
    DEVICE void weigh(float (&s)[TILES][COLUMN_TILES][4], u32 (&weights)[ROW_TILES][TILES][4], float by) {
        float own[OWN];
        bool is_higher = false;
#pragma unroll
        for (int c = 0; c < OWN; ++c) {
            own[c] = max(s[0][c / 2][c % 2], s[0][c / 2][2 + c % 2]);
            if (TILES == 2) own[c] = max(own[c], max(s[TILES - 1][c / 2][c % 2], s[TILES - 1][c / 2][2 + c % 2]));
            own[c] *= by;
            is_higher |= own[c] > top[c] + RISE;
        }
        if (any_lane(is_higher)) raise(own);
#pragma unroll
        for (int n = 0; n < COLUMN_TILES; ++n) {
            float first_less = LIFT - top[2 * n], second_less = LIFT - top[2 * n + 1];
#pragma unroll
            for (int i = 0; i < 2 * TILES; ++i) {
                float first = exp2_fast(s[i / 2][n][i % 2 * 2] * by + first_less);
                float second = exp2_fast(s[i / 2][n][i % 2 * 2 + 1] * by + second_less);
                sum[2 * n] += first, sum[2 * n + 1] += second;
                weights[n / 2][i / 2][i % 2 * 2 + n % 2] = transpose(pack<S::BRAIN>(first, second));
            }
        }
    }
};

#endif
