// What a warp of decode_latent has of the block's rows: running sums, and weights of what they see.
#ifndef CARAMBA_LATENT_ROWS_CUH
#define CARAMBA_LATENT_ROWS_CUH
#include "latent_tiles.cuh"

constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;
constexpr float LIFT = 8;       // powers of two that weights are multiplied by: float16 holds those down to 2^-32 of the largest
constexpr float RISE = 7;       // powers of two by which weights may be larger still before the maximum is raised
constexpr float NOTHING = -1e30f;  // the maximum of no scores, of which differences are finite
constexpr int OWN = ROWS / 4;  // queries of which a lane holds scores: 8n + 2j + k as 2n + k, of j = lane % 4
constexpr int SUM_BYTES = ROWS * 8;  // of a warp's maxima and sums, or maxima alone

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

    // Make scores of TILES times 16 tokens to weights, in shared memory in the layout of queries. `by` turns scores to base 2.
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
        // Four tiles of 8 tokens and 8 queries are stored at once: of one column tile, or of 16 tokens and two.
        int tile = lane_id() / 8, step = TILES == 2 ? tile / 2 : 0, columns = TILES == 2 ? 0 : tile / 2;
        u32 at = weights + query_place(member * TILES + step, tile % 2, columns * 8 + lane_id() % 8, 0);
        u32 made[4];
#pragma unroll
        for (int n = 0; n < COLUMN_TILES; ++n) {
            float first_less = LIFT - top[2 * n], second_less = LIFT - top[2 * n + 1];
#pragma unroll
            for (int i = 0; i < 2 * TILES; ++i) {
                float first = exp2_fast(s[i / 2][n][i % 2 * 2] * by + first_less);
                float second = exp2_fast(s[i / 2][n][i % 2 * 2 + 1] * by + second_less);
                sum[2 * n] += first, sum[2 * n + 1] += second;
                made[TILES == 2 ? i : n % 2 * 2 + i] = pack(first, second);
            }
            if (TILES == 2)
                stmatrix_x4_trans(at + query_place(0, 0, 8 * n, 0), made);
            else if (n % 2)
                stmatrix_x4_trans(at + query_place(0, 0, 8 * n - 8, 0), made);
        }
    }
};

#endif
