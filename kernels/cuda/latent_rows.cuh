// What a warp of decode_latent has of the block's rows: running sums, and weights of what they see.
#ifndef CARAMBA_LATENT_ROWS_CUH
#define CARAMBA_LATENT_ROWS_CUH
#include "latent_tiles.cuh"

constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;
constexpr float LIFT = 8;       // powers of two that weights are multiplied by: float16 holds those down to 2^-32 of the largest
constexpr float RISE = 7;       // powers of two by which weights may be larger still before the maximum is raised
constexpr float NOTHING = -1e30f;  // the maximum of no scores, of which differences are finite
constexpr int OWN = ROWS / 4;  // queries of which a lane holds scores: 8n + 2j + k as 2n + k, of j = lane % 4
constexpr int SUMMED = ROWS / 8;  // rows of which a lane holds weighed values: 8n + lane / 4

DEVICE float first_of(u32 x) { return IN_BRAIN ? low_bf16(x) : low_f16(x); }
DEVICE float second_of(u32 x) { return IN_BRAIN ? high_bf16(x) : high_f16(x); }

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
