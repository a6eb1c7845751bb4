// Copies a block's queries from global memory to where products read them, times a power of two.
//
// Products take features by chunk and field, which numbers side by side in memory are not. Products of a warp put them in
// order: of queries with a matrix that has that power of two once in each column. Its other numbers are zeros, so that nothing
// is rounded before the sums, of one number each, become numbers of 16 bits.
#ifndef CARAMBA_LATENT_QUERIES_CUH
#define CARAMBA_LATENT_QUERIES_CUH
#include "latent_rows.cuh"

constexpr float LARGEST = 128;  // what the largest query number is made to, or up to twice it, before its stream's shift
constexpr float SMALLEST = 0x1p-64f;

DEVICE float first_of(u32 x) { return IN_BRAIN ? low_bf16(x) : low_f16(x); }
DEVICE u32 abs_max(u32 a, u32 b) { return IN_BRAIN ? abs_max_bf16x2(a, b) : abs_max_f16x2(a, b); }

DEVICE void multiply_asked(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if (IN_BRAIN)
        mma_bf16(c, a, b0, b1);
    else
        mma_f16(c, a, b0, b1);
}

// Find the power of two of the block's largest query number from pairs of the largest of each lane; `at` is the place of WARPS
// words in shared memory. All lanes of the block come to it.
DEVICE float unit_of_block(u32 top, u32 at, int warp) {
    top = max_of_lanes(abs_max(top, top >> 16) & 0x7fffu);  // numbers of one sign are in order as their bits are
    if (lane_id() == 0) store_shared_u32(at + warp * 4, top);
    sync_block();
    top = max_of_lanes(load_shared_u32(at + lane_id() % WARPS * 4));
    return min(max(from_bits(to_bits(first_of(top)) & 0x7f800000u), SMALLEST), 0x1p126f);
}

// The part of a stream's queries that a warp lays out: of every WARPS-th task from the warp's own on 32 features of 8 rows.
// Lane 4g + j has eight features side by side of row g: fours of two of a chunk's words, which go to column j of four lines.
template <class S, Kind KIND>
struct Part {
    static constexpr int HALVES = S::FIELDS / 2, EIGHTS = ROWS / 8, TASKS = EIGHTS * S::WIDTH / 32;
    static constexpr int TURNS = (TASKS + WARPS - 1) / WARPS;
    static constexpr int NEXT = HALVES * STEP_BYTES / 2;  // from the line of a four's first and third numbers to the others'
    // A warp's tasks are of the same rows, and places of later ones are its first one's and a constant.
    static constexpr bool IS_EVEN = WARPS % EIGHTS == 0 && (WARPS & (WARPS - 1)) == 0;
    u32x4 held[TURNS];

    // A task's rows and features, 8 and 32 at a time; of the features `later` further ones that are a constant.
    struct Task {
        u32 eight, unit, later;
        bool is_there;
        DEVICE Task(int turn, u32 warp) {
            u32 own = IS_EVEN ? warp % WARPS : turn * WARPS + warp;  // the remainder shows the compiler that it is less
            eight = own % EIGHTS, unit = own / EIGHTS, later = IS_EVEN ? turn * (WARPS / EIGHTS) : 0;
            is_there = (turn + 1) * WARPS <= TASKS || turn * WARPS + warp < TASKS;
        }
    };

    // Where features of lane j begin in a row, and the first of their lines.
    DEVICE static constexpr int feature_at(u32 unit, int j) {
        int two = unit / HALVES;  // words of all chunks, two by two
        int chunk = two / (S::PIECE / 2) * S::PIECE + j / S::PER_CHUNK, eight = S::PER_CHUNK == 1 ? two % 2 : j % 2;
        return feature_of<KIND>(chunk, 4 * eight, unit % HALVES);
    }
    DEVICE static constexpr u32 line_at(u32 unit) { return unit / HALVES * (4 * NEXT) + unit % HALVES * (STEP_BYTES / 2); }

    DEVICE void load(const u16* q, int head_stride, int query_stride, int first, int warp) {
#pragma unroll
        for (int turn = 0; turn < TURNS; ++turn) {
            Task task(turn, warp);
            int row = first + int(task.eight * 8) + lane_id() / 4;
            held[turn] = {0, 0, 0, 0};
            if (row >= GROUP * QUERIES || !task.is_there) continue;
            const u16* from = q + i64(row / QUERIES) * head_stride + i64(row % QUERIES) * query_stride;
            held[turn] = load_u128(from + feature_at(task.unit, lane_id() % 4) + feature_at(task.later, 0));
        }
    }

    // Pairs of the largest numbers, of `top` and these; their signs are no one's.
    DEVICE u32 largest(u32 top) const {
#pragma unroll
        for (int turn = 0; turn < TURNS; ++turn) {
            u32x4 x = held[turn];
            top = abs_max(top, abs_max(abs_max(x.x, x.y), abs_max(x.z, x.w)));
        }
        return top;
    }

    DEVICE void store(u32 queries, float by, int warp) const {
        int g = lane_id() / 4, j = lane_id() % 4, tile = lane_id() / 8;
        by *= float(1 << S::SHIFT);
        // A lane's first and third words are row g of the product, the others row g + 8. Column 2j is the lower numbers of the
        // first words (or the upper ones of all), column 2j + 1 those of the third. Float16 has no numbers as small or large as
        // the power of two may be.
        u32 one = j == g / 2 ? (IN_BRAIN ? to_bits(by) >> 16 : 0x3c00u) : 0, even = g % 2 ? 0 : one, odd = g % 2 ? one : 0;
        float after = IN_BRAIN ? 1 : by;
        u32 to = queries + lane_id() % 8 * 16 + tile % 2 * (2 * NEXT) + tile / 2 * NEXT;
#pragma unroll
        for (int turn = 0; turn < TURNS; ++turn) {
            Task task(turn, warp);
            if (!task.is_there) continue;
            u32 four[4] = {held[turn].x, held[turn].y, held[turn].z, held[turn].w}, lines[4];
#pragma unroll
            for (int upper = 0; upper < 2; ++upper) {
                float c[4] = {0, 0, 0, 0};
                multiply_asked(c, four, even << 16 * upper, odd << 16 * upper);
                lines[2 * upper] = pack(c[0] * after, c[2] * after);
                lines[2 * upper + 1] = pack(c[1] * after, c[3] * after);
            }
            stmatrix_x4(to + task.eight * 128 + line_at(task.unit) + line_at(task.later), lines);
        }
    }
};

#endif
