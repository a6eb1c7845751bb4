// Tiles of a quantised stream: their copies to shared memory, and what a warp makes of them in products.
//
// A tile's codes and scales have the layout of global memory, [block][token], in shared memory, but the 16 bytes of a line of
// 128 are rotated: a copy whose lanes' bytes go to other lines than they come from takes twice as long and longer.
// Column n of key product i is token 8 (n / 2) + 2i + n % 2: a lane's own columns of all four products are then tokens side by
// side, and so are their scales.
#ifndef CARAMBA_LATENT_TILES_CUH
#define CARAMBA_LATENT_TILES_CUH
#include "latent_products.cuh"

constexpr int TILE = 32, PRODUCTS = TILE / 8;  // tokens, and products of keys with 8 of them each
constexpr int TEAM = 4, TEAMS = WARPS / TEAM;  // warps that multiply values together, of all their tokens
constexpr int WRITTEN_OUT = 4;  // groups of chunks of keys, one after the other in the code

DEVICE constexpr int max_of(int a, int b) { return a > b ? a : b; }

template <Kind KIND, int D>
struct Stream : Format<KIND> {
    using F = Format<KIND>;
    static constexpr int WIDTH = D, FIELDS = F::FIELDS, PLANES = D / F::BLOCK, CHUNKS = D / (8 * FIELDS);
    static constexpr int PER_PLANE = CHUNKS / PLANES;     // chunks of a block: one or two
    static constexpr int PIECE = CHUNKS < 4 ? 2 : 4;      // words of a token that a lane makes keys of, at a time
    static constexpr int PER_CHUNK = 4 / PIECE;           // lanes that share a chunk then
    static constexpr int STEPS = D / 16;                  // products along the features
    static constexpr int MINE = D / (16 * TEAM);          // products of values of a warp
    static constexpr int WIDE = 16 * PER_PLANE, CODE_BYTES = TILE * WIDE;  // of a token of a block, and of the tile's
    static constexpr int SCALES_AT = PLANES * CODE_BYTES, PLANE_BYTES = TILE * F::SCALE_BYTES;
    static constexpr int BYTES = (SCALES_AT + PLANES * PLANE_BYTES + 127) / 128 * 128;
    static_assert(CHUNKS % PIECE == 0 && PLANES * F::BLOCK == D, "a stream is whole products of whole blocks");

    // Which product's queries word s of a chunk goes with.
    DEVICE static constexpr int step_of(int chunk, int s) { return (chunk / PIECE * PIECE + s % PIECE) * FIELDS / 2; }

    // The position of a token's first chunk in its block, and of further ones: by these bits within a line, and after it. The
    // tokens of a product, and the chunks and two tokens that eight lanes load, are in all banks.
    DEVICE static int place_of(int token) {
        int eight = token / 8;
        return token * WIDE ^ (PER_PLANE == 2 ? eight % 2 * 64 ^ eight / 2 * 16 : eight % 2 * 32 ^ eight / 2 * 64);
    }
    DEVICE static constexpr int turn_of(int chunk) {
        if (PER_PLANE == 2) return chunk % 2 * 16 ^ chunk / 2 % 2 * 64;
        return CHUNKS == 2 ? chunk * 64 : chunk % 2 * 32 ^ chunk / 2 % 2 * 64;
    }
    DEVICE static constexpr int behind(int chunk) { return chunk / PER_PLANE * CODE_BYTES; }
};

DEVICE int token_of(int product, int column) { return column / 2 * 8 + product * 2 + column % 2; }

// Start the copies of the tile at token `from`; those of tokens `until` and later become zeros. Strides of planes are bytes.
template <class S>
DEVICE void copy_tile(u32 to, const u8* codes, const u8* scales, i64 code_plane, i64 scale_plane, int from, int until) {
    int token = lane_id() / S::PER_PLANE, left = until - from;
    const u8* source = codes + i64(from) * S::WIDE + lane_id() * 16;
    u32 place = to + (S::place_of(token) ^ S::turn_of(lane_id() % S::PER_PLANE));
#pragma unroll
    for (int plane = 0; plane < S::PLANES; ++plane, source += code_plane)
#pragma unroll
        for (int turn = 0; turn < S::PER_PLANE; ++turn) {
            // The second half of a block's tokens is a turn of the lines, as `place_of` has it.
            u32 at = place ^ S::turn_of(plane * S::PER_PLANE) ^ turn * 16;
            copy_async_16(at + plane * S::CODE_BYTES + turn * 512, source + turn * 512, token + 16 * turn < left);
        }
    constexpr int EACH = S::PLANE_BYTES / 16, PIECES = S::PLANES * EACH;
    const u8* scale = scales + i64(from) * S::SCALE_BYTES + lane_id() % EACH * 16 + lane_id() / EACH * scale_plane;
    bool is_there = lane_id() % EACH * (16 / S::SCALE_BYTES) < left;
#pragma unroll
    for (int i = 0; i < PIECES; i += 32) {
        if (i + lane_id() < PIECES)
            copy_async_16(to + S::SCALES_AT + (i + lane_id()) * 16, scale + i / EACH * scale_plane, is_there);
    }
}

// Make the scales of tokens `left` and later zero: what is stored there may be anything.
template <class S>
DEVICE void clear_scales(u32 tile, int left) {
    constexpr int PER_WORD = 4 / S::SCALE_BYTES;
    for (int i = lane_id(); i < S::PLANES * TILE / PER_WORD; i += 32) {
        int kept = left - i * PER_WORD % TILE;
        u32 at = tile + S::SCALES_AT + 4 * i;
        if (kept <= 0)
            store_shared_u32(at, 0);
        else if (kept < PER_WORD)
            store_shared_u32(at, load_shared_u32(at) & 0xffffu);
    }
}

// The scales of a lane's keys of one block, twice each; `at` is where the scales of the lane's eight tokens begin.
template <class S>
DEVICE void key_scales(u32 (&scale)[PRODUCTS], u32 at, int n) {
    if constexpr (S::SCALE_BYTES == 4) {
#pragma unroll
        for (int i = 0; i < PRODUCTS; ++i) {
            float x = load_shared_f32(at + (2 * i + n % 2) * 4);
            scale[i] = pack(x, x);
        }
    } else {
        u32 pick = n % 2 ? 0x3232u : 0x1010u;
        u32x4 x = load_shared_u128(at);
        scale[0] = prmt(x.x, x.x, pick), scale[1] = prmt(x.y, x.y, pick);
        scale[2] = prmt(x.z, x.z, pick), scale[3] = prmt(x.w, x.w, pick);
    }
}

// The scales of a lane's values of one block, pairs of tokens.
template <class S>
DEVICE void value_scales(u32 (&scale)[PRODUCTS], u32 at) {
    if constexpr (S::SCALE_BYTES == 4) {
#pragma unroll
        for (int i = 0; i < PRODUCTS; i += 2) {
            u32x4 x = load_shared_u128(at + 8 * i);
            scale[i] = pack(from_bits(x.x), from_bits(x.y));
            scale[i + 1] = pack(from_bits(x.z), from_bits(x.w));
        }
    } else {
        u32x4 x = load_shared_u128(at);
        scale[0] = x.x, scale[1] = x.y, scale[2] = x.z, scale[3] = x.w;
    }
}

// Add the products of a tile's keys with queries.
template <class S>
DEVICE void add_keys(Scores& s, u32 tile, u32 queries) {
    int n = lane_id() / 4, j = lane_id() % 4;
    u32 codes = tile + S::behind(j / S::PER_CHUNK) + (S::place_of(token_of(0, n)) ^ S::turn_of(j / S::PER_CHUNK)) +
                j % S::PER_CHUNK * 8;
    u32 scales = tile + S::SCALES_AT + j / S::PER_CHUNK / S::PER_PLANE * S::PLANE_BYTES + n / 2 * 8 * S::SCALE_BYTES;
    u64 description = described(queries);
    u32 keys[2][2][4];  // of two products: one is made while the other is read
#pragma unroll WRITTEN_OUT
    for (int chunk = 0; chunk < S::CHUNKS; chunk += S::PIECE) {
        u32 words[PRODUCTS][4], scale[PRODUCTS];
#pragma unroll
        for (int i = 0; i < PRODUCTS; ++i) {
            // Products are two tokens further each: within a line, and to the next.
            u32 at = (codes ^ 2 * i * S::WIDE % 128) + 2 * i * S::WIDE / 128 * 128 + S::behind(chunk);
            if constexpr (S::PIECE == 4) {
                u32x4 x = load_shared_u128(at);
                words[i][0] = x.x, words[i][1] = x.y, words[i][2] = x.z, words[i][3] = x.w;
            } else {
                u32x2 x = load_shared_u64(at);
                words[i][0] = x.x, words[i][1] = x.y;
            }
        }
        key_scales<S>(scale, scales + chunk / S::PER_PLANE * S::PLANE_BYTES, n);
#pragma unroll
        for (int word = 0; word < S::PIECE; ++word)
#pragma unroll
            for (int half = 0; half < S::FIELDS / 2; ++half) {
                u32(&own)[2][4] = keys[(word * S::FIELDS / 2 + half) % 2];
                int at = (S::step_of(chunk, word) + half) * STEP_BYTES;
                if (IS_GROUPED) wait_products<1>();
#pragma unroll
                for (int i = 0; i < PRODUCTS; ++i)
                    S::pairs(words[i][word], half, scale[i], own[i / 2][i % 2], own[i / 2][2 + i % 2]);
                if constexpr (IS_GROUPED) {
                    begin_products();
                    multiply_group(s[0], own[0], description + at / 16);
                    multiply_group(s[1], own[1], description + at / 16);
                    commit_products();
                } else {
                    multiply_rows<2>(s, own, queries + at);
                }
            }
    }
    if (IS_GROUPED) wait_products<0>();
}

// Add the values of a team's tiles by their weights: a warp has the features of its own products, of all four warps' tokens.
//
// `tiles` is the address of the first warp's tile, `tile_bytes` the stride to the next one's. acc[m] is features of product
// MINE * member + m: rows g and g + 8 of it are units g of fields 2 quad and 2 quad + 1.
template <class S>
DEVICE void add_values(float (&acc)[S::MINE][COLUMN_TILES][4], u32 weights, u32 tiles, int tile_bytes, int member) {
    constexpr int QUADS = S::FIELDS / 2, CHUNKS = S::MINE < QUADS ? 1 : S::MINE / QUADS, EACH = S::MINE / CHUNKS;
    u32 places[CHUNKS], scale_places[CHUNKS];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        int chunk = member * S::MINE / QUADS + c;
        places[c] = tiles + (S::place_of(token_of(lane_id() / 8, lane_id() % 8)) ^ S::turn_of(chunk)) + S::behind(chunk);
        scale_places[c] = tiles + S::SCALES_AT + lane_id() % 4 * 8 * S::SCALE_BYTES + chunk / S::PER_PLANE * S::PLANE_BYTES;
    }
    u64 description = described(weights);
    u32 numbers[2][2][S::MINE][4];  // of two tiles: one is made while products read the other
#pragma unroll
    for (int t = 0; t < TEAM; ++t) {
        u32(&own)[2][S::MINE][4] = numbers[t % 2];
        if (IS_GROUPED) wait_products<1>();
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            u32 words[PRODUCTS], scale[PRODUCTS];
            ldmatrix_x4_trans(words, places[c] + t * tile_bytes);
            value_scales<S>(scale, scale_places[c] + t * tile_bytes);
#pragma unroll
            for (int i = 0; i < PRODUCTS; ++i)
#pragma unroll
                for (int m = 0; m < EACH; ++m) {
                    int quad = EACH == QUADS ? m : member % QUADS;
                    u32(&of)[4] = own[i / 2][c * EACH + m];
                    S::pairs(words[i], quad, scale[i], of[i % 2 * 2], of[i % 2 * 2 + 1]);
                }
        }
        if (IS_GROUPED) begin_products();
#pragma unroll
        for (int step = 0; step < 2; ++step) {
            int at = (2 * t + step) * STEP_BYTES;
            if constexpr (IS_GROUPED) {
#pragma unroll
                for (int m = 0; m < S::MINE; ++m) multiply_group(acc[m], own[step][m], description + at / 16);
            } else {
                multiply_rows<S::MINE>(acc, own[step], weights + at);
            }
        }
        if (IS_GROUPED) commit_products();
    }
    if (IS_GROUPED) wait_products<0>();
}

#endif
