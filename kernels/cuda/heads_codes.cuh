// Codes of heads made into the left operands of products, for decode_heads.cu.
#ifndef CARAMBA_HEADS_CODES_CUH
#define CARAMBA_HEADS_CODES_CUH
#include "warp.cuh"

// Float16's bytes of nf4's levels, and what look-ups are shifted by. An instruction takes one constant: as constants too these
// would be moved to registers again for each look-up, and multiplications by powers of two would be shifts.
struct Levels {
    u32 low[2], high[2], by_1, by_16;
    // `nothing` is 0, which the compiler must not know.
    DEVICE explicit Levels(u32 nothing)
        : low{nothing ^ 0x52339200u, nothing ^ 0x68e02618u}, high{nothing ^ 0xb6b8b9bcu, nothing ^ 0x3533312du},
          by_1(nothing ^ 0x80000000u), by_16(nothing ^ 0x00010000u) {}

    // Levels of eight nibbles: pairs of bytes 0 and 1, and of 2 and 3, of the low nibbles, then of the high ones. Low and high
    // bytes are looked up by themselves: four nibbles select among the first eight levels and among the last, and their
    // highest bits between the two. Byte permutations go at half the rate of products, and are all that is waited for.
    DEVICE void look_up(u32 word, u32 (&out)[4]) const {
        u32 inside = word & 0x77777777u, side = lop3_or(high_product(word, by_1), 0x44444444u, 0x32103210u);
        for (int half = 0; half < 2; ++half) {
            u32 lows = prmt(prmt(low[0], 0x00d4ea8du, inside), prmt(low[1], 0x00c9800du, inside), side);
            u32 highs = prmt(prmt(high[0], 0x00adb1b4u, inside), prmt(high[1], 0x3c393837u, inside), side);
            out[half] = prmt(lows, highs, 0x6240u);
            out[2 + half] = prmt(lows, highs, 0x7351u);
            if (half == 0) inside = high_product(inside, by_16), side = high_product(side, by_16);
        }
    }
};

// Pairs of levels in shared memory, for each two nibbles a word of every lane's own bank: a load makes two codes numbers, where
// byte permutations are what is waited for.
struct Table {
    u32 own;  // of this lane
    static constexpr int BYTES = 256 * 128;

    // Each lane looks up one of 32 words, of which a store takes four, for all lanes.
    DEVICE static void fill(u32 at, const Levels& levels) {
        for (int first = 32 * warp_id(); first < 256; first += 32 * WARPS) {
            u32 both = first + lane_id(), pairs[4];
            levels.look_up((both & 15) | both >> 4 << 8, pairs);
            for (int k = 0; k < 8; ++k) {
                int of = 4 * k + lane_id() / 8;
                u32 pair = shuffle_from(pairs[0], of);
                store_shared_u128(at + 128 * (first + of) + 16 * (lane_id() % 8), {pair, pair, pair, pair});
            }
        }
    }
    // Bytes 0 and 2 of a word as pairs, and 1 and 3, of the low nibbles, then of the high ones; `NEXT` bytes 0 and 1, and 2
    // and 3. Of two bytes with a nibble each in the upper half a sum of products is where their pair is.
    template <bool NEXT>
    DEVICE void look_up(u32 word, u32 (&out)[4]) const {
        constexpr u32 FIRST = NEXT ? 0x00008008u : 0x00800008u, SECOND = NEXT ? 0x80080000u : 0x80000800u;
        u32 low = word << 4 & 0xf0f0f0f0u, high = word & 0xf0f0f0f0u;
        out[0] = load_shared_u32(byte_products(low, FIRST, own));
        out[1] = load_shared_u32(byte_products(low, SECOND, own));
        out[2] = load_shared_u32(byte_products(high, FIRST, own));
        out[3] = load_shared_u32(byte_products(high, SECOND, own));
    }
};

// A format of which a step is one mask and a unit of two bytes two or four numbers. A mask leaves UNIT times a code, which is
// LESS too many. BYTES and SCALE_BYTES are those of a block of one token.
template <int KIND>
struct Format {
    static constexpr bool IS_LEVELS = KIND == 2;
    static constexpr int BLOCK = KIND == 2 ? 64 : 32, BYTES = KIND == 1 ? 16 : 32, SCALE_BYTES = KIND == 2 ? 4 : 2;
    static constexpr int NIBBLES = KIND == 0 ? 1 : 2, WORDS = BYTES / 16, STEPS = BLOCK / 16;
    static constexpr float UNIT = IS_LEVELS ? 1.0f : 0x1p-24f;
    static constexpr float LESS = KIND == 0 ? 128.0f : KIND == 1 ? 8.0f : 0.0f;

    // The step of a block, or its sixteen rows of values, that a nibble of word (or chunk) `word` is of.
    static DEVICE constexpr int step(int word, int nibble) { return KIND == 1 ? nibble : word + 2 * nibble; }
    // q4_0's upper nibbles are left where they are: sixteen times as much.
    static DEVICE constexpr float over(int step) { return KIND == 1 && step % 2 ? 16.0f : 1.0f; }
    // Chunks of 16 bytes of every other four tokens change places, so that eight tokens' chunks are in all banks.
    static DEVICE int chunk_at(int token, int chunk) {
        return BYTES == 16 ? 16 * token : 32 * token + 16 * (chunk ^ (token >> 2 & 1));
    }

    // Codes of a word as pairs: of the first two pairs' bytes, of 4 bits the low nibbles and then the high ones. Bytes 0 and 2
    // are a pair, and 1 and 3, or of levels as keys (`NEXT`) bytes 0 and 1, and 2 and 3. Levels come from a table if it is there.
    template <bool NEXT>
    static DEVICE void numbers(u32 word, bool is_tabled, const Levels& levels, Table table, u32 (&out)[2 * NIBBLES]) {
        if constexpr (KIND == 0) {
            out[0] = lop3_xor(word, 0x00ff00ffu, 0x00800080u);
            out[1] = lop3_xor(word >> 8, 0x00ff00ffu, 0x00800080u);
        } else if constexpr (KIND == 1) {
            u32 upper = word >> 8;
            out[0] = word & 0x000f000fu;
            out[1] = upper & 0x000f000fu;
            out[2] = word & 0x00f000f0u;
            out[3] = upper & 0x00f000f0u;
        } else if (is_tabled) {
            table.look_up<NEXT>(word, out);
        } else {
            levels.look_up(NEXT ? word : prmt(word, word, 0x3120u), out);
        }
    }
    static DEVICE float scale(u32 address) {
        return IS_LEVELS ? load_shared_f32(address) : from_f16(load_shared_u16(address));
    }
};
#endif
