// What a block of decode_latent has of its rows: their queries in shared memory, and a warp's running sums.
#ifndef CARAMBA_LATENT_ROWS_CUH
#define CARAMBA_LATENT_ROWS_CUH
#include "latent_tiles.cuh"

constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;
constexpr float LIFT = 8;       // powers of two that weights are multiplied by: float16 holds those down to 2^-32 of the largest
constexpr float RISE = 7;       // powers of two by which weights may be larger still before the maximum is raised
constexpr float LARGEST = 128;  // what a row's largest query number is made to, or up to twice it, before its stream's shift
constexpr float SMALLEST = 0x1p-64f;
constexpr float NOTHING = -1e30f;  // the maximum of no scores, of which differences are finite
constexpr int OWN = 2 * ROW_TILES;  // rows of which a lane holds results: lane / 4, and 8, 16, 24 more

// Four numbers of 16 bits from each row, 8 bytes each.
DEVICE float first_of(u32 x) { return IN_BRAIN ? low_bf16(x) : low_f16(x); }
DEVICE float second_of(u32 x) { return IN_BRAIN ? high_bf16(x) : high_f16(x); }

DEVICE float abs_of(float x) { return from_bits(to_bits(x) & 0x7fffffffu); }

DEVICE float largest_of(float top, u32x2 x) {
    top = max(top, max(abs_of(first_of(x.x)), abs_of(second_of(x.x))));
    return max(top, max(abs_of(first_of(x.y)), abs_of(second_of(x.y))));
}

// The part of a row's queries that a lane lays out: words lane_id() and those 32 further, four features of each, and of
// formats of 4 bits the four that are their upper nibbles.
template <class S, Kind KIND>
struct Part {
    static constexpr int WORDS = S::CHUNKS * 4, TURNS = (WORDS + 31) / 32, QUADS = S::FIELDS / 2;
    u32x2 held[TURNS][QUADS];

    DEVICE void load(const u16* row, bool is_row) {
#pragma unroll
        for (int turn = 0; turn < TURNS; ++turn) {
            int word = lane_id() + 32 * turn;
#pragma unroll
            for (int quad = 0; quad < QUADS; ++quad) {
                held[turn][quad] = {0, 0};
                if (is_row && word < WORDS)
                    held[turn][quad] =
                        *reinterpret_cast<const u32x2*>(row + feature_of<KIND>(word / 4, word % 4 * 2, quad));
            }
        }
    }

    DEVICE float largest(float top) const {
#pragma unroll
        for (int turn = 0; turn < TURNS; ++turn)
#pragma unroll
            for (int quad = 0; quad < QUADS; ++quad) top = largest_of(top, held[turn][quad]);
        return top;
    }

    // Field `field` of both units of a word.
    DEVICE u32 pair(int turn, int field, float by) const {
        u32x2 x = held[turn][QUADS == 1 ? 0 : field % 2];
        bool is_odd = QUADS == 1 ? field : field / 2;
        return pack<S::BRAIN>((is_odd ? second_of(x.x) : first_of(x.x)) * by, (is_odd ? second_of(x.y) : first_of(x.y)) * by);
    }
};

// Store rows g and g + 8 of row tile m as registers of products.
template <class S, Kind KIND>
DEVICE void store(u32 queries, const Part<S, KIND>& low, const Part<S, KIND>& high, float low_by, float high_by, int m, int g) {
    using P = Part<S, KIND>;
    low_by *= float(1 << S::SHIFT), high_by *= float(1 << S::SHIFT);
#pragma unroll
    for (int turn = 0; turn < P::TURNS; ++turn) {
        int word = lane_id() + 32 * turn, chunk = word / 4, s = word % 4;
        if (word >= P::WORDS) continue;
#pragma unroll
        for (int half = 0; half < S::FIELDS / 2; ++half) {
            u32 at = queries + ((S::step_of(chunk, s) + half) * ROW_TILES + m) * FRAGMENTS + (4 * g + S::column_of(chunk, s)) * 16;
            store_shared_u128(at, {low.pair(turn, 2 * half, low_by), high.pair(turn, 2 * half, high_by),
                                   low.pair(turn, 2 * half + 1, low_by), high.pair(turn, 2 * half + 1, high_by)});
        }
    }
}

DEVICE float largest_of_lanes(float x) {
#pragma unroll
    for (int mask = 16; mask; mask /= 2) x = max(x, shuffle_xor(x, mask));
    return x;
}

// What a warp has of its rows so far: maxima in base 2, sums of weights (each lane's own), and weighed values.
template <class S>
struct Running {
    float top[OWN], sum[OWN], acc[ROW_TILES][S::CHUNKS * S::FIELDS][4];

    DEVICE void start() {
#pragma unroll
        for (int r = 0; r < OWN; ++r) top[r] = NOTHING, sum[r] = 0;
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
            for (int n = 0; n < S::CHUNKS * S::FIELDS; ++n)
#pragma unroll
                for (int k = 0; k < 4; ++k) acc[m][n][k] = 0;
    }

    // Make scores to weights. `by` turns them to base 2. Maxima are raised when a weight would be beyond 2^(LIFT + RISE):
    // seldom, so that what has been summed is seldom multiplied.
    template <int N>
    DEVICE void weigh(float (&s)[ROW_TILES][N][4], u32 (&weights)[ROW_TILES][N / 2][4], const float (&by)[OWN]) {
        float own[OWN];
        bool is_higher = false;
#pragma unroll
        for (int r = 0; r < OWN; ++r) {
            own[r] = s[r / 2][0][r % 2 * 2];
#pragma unroll
            for (int i = 0; i < N; ++i) own[r] = max(own[r], max(s[r / 2][i][r % 2 * 2], s[r / 2][i][r % 2 * 2 + 1]));
            own[r] *= by[r];
            is_higher |= own[r] > top[r] + RISE;
        }
        if (any_lane(is_higher)) {
#pragma unroll
            for (int r = 0; r < OWN; ++r) {
                own[r] = max(own[r], shuffle_xor(own[r], 1));
                own[r] = max(max(own[r], shuffle_xor(own[r], 2)), top[r]);
                float left = exp2_fast(top[r] - own[r]);
                top[r] = own[r];
                sum[r] *= left;
#pragma unroll
                for (int n = 0; n < S::CHUNKS * S::FIELDS; ++n)
                    acc[r / 2][n][r % 2 * 2] *= left, acc[r / 2][n][r % 2 * 2 + 1] *= left;
            }
        }
#pragma unroll
        for (int r = 0; r < OWN; ++r) {
            float less = LIFT - top[r];
#pragma unroll
            for (int i = 0; i < N; ++i) {
                float first = exp2_fast(s[r / 2][i][r % 2 * 2] * by[r] + less);
                float second = exp2_fast(s[r / 2][i][r % 2 * 2 + 1] * by[r] + less);
                sum[r] += first + second;
                weights[r / 2][i / 2][i % 2 * 2 + r % 2] = pack<S::BRAIN>(first, second);
            }
        }
    }
};

#endif
