// The tokens that are not blocks yet, bfloat16 numbers, 16 of them at a time for a warp of a team.
//
// They pass through the warp's shared memory as 16-bit numbers in the order of their stream's units: position 8 n + u of a
// token is unit u of value product n, so that a pair of keys is one word, and a row of 8 values one line.
#ifndef CARAMBA_LATENT_TAIL_CUH
#define CARAMBA_LATENT_TAIL_CUH
#include "latent_rows.cuh"

constexpr int TAIL_TOKENS = 16;
typedef float TailScores[1][COLUMN_TILES][4];

// Token of a slot, see `latent_tiles.cuh`.
DEVICE int tail_token_of(int slot) { return slot % 8 / 2 * 4 + slot / 8 * 2 + slot % 2; }

template <class Sem, class Geo, Kind SEM_FORMAT, Kind GEO_FORMAT>
struct Tail {
    static constexpr int WIDTH = max_of(Sem::WIDTH, Geo::WIDTH < 128 ? Geo::WIDTH : 128);  // features that are staged at a time
    static constexpr int TOKEN_BYTES = 2 * WIDTH + 16, BYTES = (TAIL_TOKENS * TOKEN_BYTES + 127) / 128 * 128;  // tokens begin at other banks each

    // Chunks copied to shared memory, all at once: a tail has no computation that hides the latency.
    template <class S, Kind KIND>
    struct Chunks {
        static constexpr int MOST = WIDTH / (8 * S::FIELDS);
        // Rounds of as many chunks are all of them: where there are more than two, a multiple of four.
        static constexpr int AT_ONCE = S::CHUNKS < MOST ? S::CHUNKS : S::CHUNKS % MOST == 0 ? MOST : 4;
        static_assert(S::CHUNKS % AT_ONCE == 0 && AT_ONCE <= MOST, "chunks of a token in even rounds");
        static constexpr int WORDS = 4 * AT_ONCE, TURNS = TAIL_TOKENS * WORDS / 32;
        u32x2 fours[TURNS][S::FIELDS / 2];

        // Load the chunks from `begin` on of the tokens at `x`; those from `left` on are zeros.
        DEVICE void load(const u16* x, int token_stride, int begin, int left) {
#pragma unroll
            for (int turn = 0; turn < TURNS; ++turn) {
                int i = lane_id() + 32 * turn, chunk = i % WORDS / 4, token = tail_token_of(i / WORDS);
#pragma unroll
                for (int quad = 0; quad < S::FIELDS / 2; ++quad) {
                    fours[turn][quad] = {0, 0};
                    if (token < left)
                        fours[turn][quad] = *reinterpret_cast<const u32x2*>(
                            x + i64(token) * token_stride + feature_of<KIND>(begin + chunk, i % 4 * 2, quad));
                }
            }
        }

        DEVICE void store(u32 to) const {
            constexpr float LESS = 1.0f / (1 << S::SHIFT);
#pragma unroll
            for (int turn = 0; turn < TURNS; ++turn) {
                int i = lane_id() + 32 * turn, chunk = i % WORDS / 4;
#pragma unroll
                for (int quad = 0; quad < S::FIELDS / 2; ++quad) {
                    u32x2 four = fours[turn][quad];
                    u32 at = to + i / WORDS * TOKEN_BYTES + (chunk * S::FIELDS + quad) * 16 + i % 4 * 4;
                    store_shared_u32(at, pack(low_bf16(four.x) * LESS, low_bf16(four.y) * LESS));
                    store_shared_u32(at + S::FIELDS / 2 * 16,
                                     pack(high_bf16(four.x) * LESS, high_bf16(four.y) * LESS));
                }
            }
        }
    };

    // Add the products of queries with staged keys.
    template <class S>
    DEVICE static void add_keys(TailScores& s, u32 staged, u32 queries, int begin, int chunks) {
        int n = lane_id() / 4, j = lane_id() % 4;
        u32 own = staged + n * TOKEN_BYTES + (j / S::PER_CHUNK * S::FIELDS * 8 + j % S::PER_CHUNK * S::PIECE * 2) * 2;
        for (int chunk = 0; chunk < chunks; chunk += S::PIECE)
#pragma unroll
            for (int word = 0; word < S::PIECE; ++word)
#pragma unroll
                for (int half = 0; half < S::FIELDS / 2; ++half) {
                    u32 keys[1][4], at = own + ((chunk * S::FIELDS + 2 * half) * 8 + 2 * word) * 2;
#pragma unroll
                    for (int k = 0; k < 4; ++k) keys[0][k] = load_shared_u32(at + k % 2 * 8 * TOKEN_BYTES + k / 2 * 16);
                    multiply_rows<1>(s, keys, queries + (S::step_of(begin + chunk, word) + half) * STEP_BYTES);
                }
    }

    // Attend 16 tokens of the tail from i on, as far as `length`, with the rest of the team: its other warps have 16 others each.
    // `staged` is where the team's warps stage, `warp_bytes` each.
    template <class Rows>
    DEVICE static void add(Rows& rows, u32 staged, int warp_bytes, u32 sem_queries, u32 geo_queries, u32 team_weights, u32 exchanged,
                           const u16* sem, const u16* geo, int sem_stride, int geo_stride, int held, int i, int length, int first,
                           int window, float by, int team, int member) {
        u32 own = staged + member * warp_bytes;
        int left = length - held - i;
        TailScores s;
#pragma unroll
        for (int n = 0; n < COLUMN_TILES; ++n)
#pragma unroll
            for (int k = 0; k < 4; ++k) s[0][n][k] = 0;
        using FarChunks = Chunks<Geo, GEO_FORMAT>;
        FarChunks far;
        Chunks<Sem, SEM_FORMAT> near;
        for (int begin = 0; begin < Geo::CHUNKS; begin += FarChunks::AT_ONCE) {
            far.load(geo + i64(i) * geo_stride, geo_stride, begin, left);
            sync_warp();
            far.store(own);
            sync_warp();
            add_keys<Geo>(s, own, geo_queries, begin, FarChunks::AT_ONCE);
        }
        near.load(sem + i64(i) * sem_stride, sem_stride, 0, left);
        sync_warp();
        near.store(own);
        sync_warp();
        add_keys<Sem>(s, own, sem_queries, 0, Sem::CHUNKS);
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            int token = held + i + tail_token_of(8 * k + lane_id() / 4);
            hide(s[0], k, token, token < length, length, first, window);
        }
        rows.template weigh<1>(s, team_weights, by, team, member, exchanged);
        sync_team(team);
        u32 values = staged + lane_id() % 8 * TOKEN_BYTES + lane_id() / 16 * 8 * TOKEN_BYTES + lane_id() / 8 % 2 * 16 +
                     member * Sem::MINE * 32;
        for (int w = 0; w < TEAM; ++w, values += warp_bytes, team_weights += STEP_BYTES) {
            u32 numbers[Sem::MINE][4];
#pragma unroll
            for (int m = 0; m < Sem::MINE; ++m) ldmatrix_x4_trans(numbers[m], values + m * 32);
            multiply_rows<Sem::MINE>(rows.acc, numbers, team_weights);
        }
        sync_team(team);  // all have read what is staged and weighed next
    }
};

#endif
