// Tiles of a quantised stream: their copies to shared memory, and what a warp makes of them in products.
//
// A tile's codes lie in shared memory as [chunk of 16 bytes][slot], its scales as [block][token]. Slot 8i + n is column n of
// key product i, and token 2 T (n / 2) + 2i + n % 2 of T = TILE / 8 such products: a lane's own columns of all of them are then
// tokens side by side, and so are their scales. Eight slots of a chunk are a line of 128 bytes, whose places are turned round
// by product and chunk: what eight lanes copy (side by side in global memory), and what they load, lies in all banks.
#ifndef CARAMBA_LATENT_TILES_CUH
#define CARAMBA_LATENT_TILES_CUH
#include "codes.cuh"

constexpr int PRODUCTS = TILE / 8;   // of keys, 8 tokens each
constexpr int ROW_TILES = ROWS / 16;
constexpr int FRAGMENTS = 512;       // bytes of a product's queries in all lanes' registers
constexpr int WRITTEN_OUT = UNROLLED;  // groups of chunks of keys, one after the other in the code

DEVICE constexpr int max_of(int a, int b) { return a > b ? a : b; }

typedef float Scores[ROW_TILES][PRODUCTS][4];

template <Kind KIND, int D>
struct Stream : Format<KIND> {
    using F = Format<KIND>;
    static constexpr int WIDTH = D, FIELDS = F::FIELDS, PLANES = D / F::BLOCK, CHUNKS = D / (8 * FIELDS);
    static constexpr int PER_PLANE = CHUNKS / PLANES;     // chunks of a block: one or two
    static constexpr int PIECE = CHUNKS < 4 ? 2 : 4;      // words of a token that a lane makes keys of, at a time
    static constexpr int PER_CHUNK = 4 / PIECE;           // lanes that share a chunk then
    static constexpr int STEPS = D / 16;                  // products along the features
    static constexpr int CHUNK_BYTES = TILE * 16;         // of a chunk of all slots
    static constexpr int SCALES_AT = CHUNKS * CHUNK_BYTES, PLANE_BYTES = TILE * F::SCALE_BYTES;
    static constexpr int BYTES = (SCALES_AT + PLANES * PLANE_BYTES + 127) / 128 * 128;
    static_assert(CHUNKS % PIECE == 0 && PLANES * F::BLOCK == D, "a stream is whole products of whole blocks");

    // Which product's queries word s of a chunk goes with, and as which lane of four.
    DEVICE static constexpr int step_of(int chunk, int s) { return (chunk / PIECE * PIECE + s % PIECE) * FIELDS / 2; }
    DEVICE static constexpr int column_of(int chunk, int s) { return chunk % PIECE * PER_CHUNK + s / PIECE; }
};

DEVICE int token_of(int slot) {
    int n = slot % 8;
    return n / 2 * (2 * PRODUCTS) + slot / 8 * 2 + n % 2;
}

// Bytes from a line's begin by which slots' places are turned round, bit by bit: of product i, and of a chunk.
DEVICE constexpr int turn_of_product(int i) { return i * 128 / PRODUCTS; }
DEVICE constexpr int turn_of_chunk(int chunk) {
    return TILE == 32 ? chunk % 2 * 64 + chunk / 2 % 2 * 32 : chunk % 2 * 32 + chunk / 2 % 2 * 64;
}

// Start the copies of the tile at token `from`; those of tokens `until` and later become zeros. Strides of planes are bytes.
template <class S>
DEVICE void copy_tile(u32 to, const u8* codes, const u8* scales, i64 code_plane, i64 scale_plane, int from, int until) {
    constexpr int WIDE = 16 * S::PER_PLANE, AT_ONCE = 32 / S::PER_PLANE;  // a token's bytes of a plane, tokens of a copy
    constexpr int COPIES = TILE * S::CHUNKS / 32, TURNS = max_of(TILE / AT_ONCE, 1), PLANES = max_of(AT_ONCE / TILE, 1);
    int token = lane_id() / S::PER_PLANE % TILE, half = lane_id() % S::PER_PLANE, plane = lane_id() / S::PER_PLANE / TILE;
    int n = token / (2 * PRODUCTS) * 2 + token % 2, product = token / 2 % PRODUCTS, left = until - from;
    const u8* source = codes + i64(from + token) * WIDE + half * 16 + plane * code_plane;
    u32 place = to + (half + plane) * S::CHUNK_BYTES + product * 128 +
                (n * 16 ^ turn_of_product(product) ^ turn_of_chunk(half + plane));
#pragma unroll
    for (int i = 0; i < COPIES; ++i) {
        int turn = i % TURNS, chunk = i / TURNS * PLANES * S::PER_PLANE;
        // Tokens further by all of AT_ONCE are columns further by half a line.
        copy_async_16((place ^ turn_of_chunk(chunk) ^ turn * 64) + chunk * S::CHUNK_BYTES, source + turn * AT_ONCE * WIDE,
                      token + turn * AT_ONCE < left);
        if (turn == TURNS - 1) source += PLANES * code_plane;
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

// The scales of a lane's keys of one block, twice each; `at` is where the scales of the lane's eight (or four) tokens begin.
template <class S>
DEVICE void key_scales(u32 (&scale)[PRODUCTS], u32 at, int n) {
    if constexpr (S::SCALE_BYTES == 4) {
#pragma unroll
        for (int i = 0; i < PRODUCTS; ++i) {
            float x = load_shared_f32(at + (2 * i + n % 2) * 4);
            scale[i] = pack_bf16x2(x, x);
        }
    } else {
        u32 pick = n % 2 ? 0x3232u : 0x1010u;
        if constexpr (PRODUCTS == 4) {
            u32x4 x = load_shared_u128(at);
            scale[0] = prmt(x.x, x.x, pick), scale[1] = prmt(x.y, x.y, pick);
            scale[2] = prmt(x.z, x.z, pick), scale[3] = prmt(x.w, x.w, pick);
        } else {
            u32x2 x = load_shared_u64(at);
            scale[0] = prmt(x.x, x.x, pick), scale[1] = prmt(x.y, x.y, pick);
        }
    }
}

// The scales of a lane's values of one block, pairs of tokens.
template <class S>
DEVICE void value_scales(u32 (&scale)[PRODUCTS], u32 at) {
    if constexpr (S::SCALE_BYTES == 4) {
#pragma unroll
        for (int i = 0; i < PRODUCTS; i += 2) {
            u32x4 x = load_shared_u128(at + 8 * i);
            scale[i] = pack_bf16x2(from_bits(x.x), from_bits(x.y));
            scale[i + 1] = pack_bf16x2(from_bits(x.z), from_bits(x.w));
        }
    } else if constexpr (PRODUCTS == 4) {
        u32x4 x = load_shared_u128(at);
        scale[0] = x.x, scale[1] = x.y, scale[2] = x.z, scale[3] = x.w;
    } else {
        u32x2 x = load_shared_u64(at);
        scale[0] = x.x, scale[1] = x.y;
    }
}

// Add the products of queries, as their registers lie from `queries` on, with a tile's keys.
template <class S>
DEVICE void add_keys(Scores& s, u32 tile, u32 queries) {
    int n = lane_id() / 4, j = lane_id() % 4;
    u32 codes = tile + j / S::PER_CHUNK * S::CHUNK_BYTES + (n * 16 ^ turn_of_chunk(j / S::PER_CHUNK)) + j % S::PER_CHUNK * 8;
    u32 scales = tile + S::SCALES_AT + j / S::PER_CHUNK / S::PER_PLANE * S::PLANE_BYTES +
                 n / 2 * (2 * PRODUCTS) * S::SCALE_BYTES;
    queries += lane_id() * 16;
#pragma unroll WRITTEN_OUT
    for (int chunk = 0; chunk < S::CHUNKS; chunk += S::PIECE) {
        u32 words[PRODUCTS][4], scale[PRODUCTS];
#pragma unroll
        for (int i = 0; i < PRODUCTS; ++i) {
            u32 at = (codes ^ turn_of_product(i)) + chunk * S::CHUNK_BYTES + i * 128;
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
        for (int word = 0; word < S::PIECE; ++word) {
            u32 q[S::FIELDS / 2][ROW_TILES][4];
#pragma unroll
            for (int half = 0; half < S::FIELDS / 2; ++half)
#pragma unroll
                for (int m = 0; m < ROW_TILES; ++m) {
                    int step = S::step_of(chunk, word) + half;
                    u32x4 x = load_shared_u128(queries + (step * ROW_TILES + m) * FRAGMENTS);
                    q[half][m][0] = x.x, q[half][m][1] = x.y, q[half][m][2] = x.z, q[half][m][3] = x.w;
                }
#pragma unroll
            for (int i = 0; i < PRODUCTS; ++i) {
                u32 numbers[S::FIELDS];
                S::pairs(words[i][word], scale[i], numbers);
#pragma unroll
                for (int half = 0; half < S::FIELDS / 2; ++half)
#pragma unroll
                    for (int m = 0; m < ROW_TILES; ++m)
                        multiply<S::BRAIN>(s[m][i], q[half][m], numbers[2 * half], numbers[2 * half + 1]);
            }
        }
    }
}

// Add a tile's values by their weights: chunk after chunk, whose fields are products of 8 features each.
template <class S>
DEVICE void add_values(float (&acc)[ROW_TILES][S::CHUNKS * S::FIELDS][4], const u32 (&weights)[ROW_TILES][PRODUCTS / 2][4],
                       u32 tile) {
    constexpr int AT_ONCE = 32 / TILE;  // chunks of a load
    int chunk_of_lane = lane_id() / TILE, product = lane_id() % TILE / 8;
    u32 codes = tile + chunk_of_lane * S::CHUNK_BYTES + product * 128 +
                (lane_id() % 8 * 16 ^ turn_of_product(product) ^ turn_of_chunk(chunk_of_lane));
    u32 scales = tile + S::SCALES_AT + lane_id() % 4 * (2 * PRODUCTS) * S::SCALE_BYTES;
    u32 scale[PRODUCTS];
#pragma unroll
    for (int first = 0; first < S::CHUNKS; first += AT_ONCE) {
        u32 words[4];
        ldmatrix_x4_trans(words, (codes ^ turn_of_chunk(first)) + first * S::CHUNK_BYTES);
#pragma unroll
        for (int chunk = first; chunk < first + AT_ONCE; ++chunk) {
            if (chunk % S::PER_PLANE == 0) value_scales<S>(scale, scales + chunk / S::PER_PLANE * S::PLANE_BYTES);
            u32 numbers[PRODUCTS][S::FIELDS];
#pragma unroll
            for (int i = 0; i < PRODUCTS; ++i) S::pairs(words[(chunk - first) * PRODUCTS + i], scale[i], numbers[i]);
#pragma unroll
            for (int f = 0; f < S::FIELDS; ++f)
#pragma unroll
                for (int i = 0; i < PRODUCTS; i += 2)
#pragma unroll
                    for (int m = 0; m < ROW_TILES; ++m)
                        multiply<S::BRAIN>(acc[m][chunk * S::FIELDS + f], weights[m][i / 2], numbers[i][f],
                                           numbers[i + 1][f]);
        }
    }
}

#endif
