// Codes of quantised blocks made into pairs of 16-bit numbers, times their scales, in registers.
//
// A unit is two bytes of a token's codes: two codes of q8_0, four of q4_0 and nf4. A word of 32 bits is two units: neighbours
// of one token where keys are read, the same unit of two tokens where values are. Field f of both units is one pair; fields are
// made two at a time, those of a word's half.
#ifndef CARAMBA_CODES_CUH
#define CARAMBA_CODES_CUH
#include "warp.cuh"

enum Kind { Q8_0, Q4_0, NF4 };

// A format. BLOCK elements share a scale of SCALE_BYTES. Numbers are float16, over 2^SHIFT: the largest code times
// the largest scale is in range then. Scales of nf4, float32, count as 65504 where they are more.
template <Kind KIND>
struct Format;

template <>
struct Format<Q8_0> {
    static constexpr int FIELDS = 2, BLOCK = 32, SCALE_BYTES = 2, SHIFT = 7;

    // 2^10 + 128 + q has the byte q as the lowest bits of float16, its sign inverted; over 128, less 9, it is q / 128
    // exactly. The one rounding is that of the product with the scale.
    DEVICE static void pairs(u32 word, int, u32 scale, u32& first, u32& second) {
        first = lop3_xor(word, 0x00ff00ffu, 0x64806480u);
        second = lop3_xor(word >> 8, 0x00ff00ffu, 0x64806480u);
        first = mul_f16x2(fma_f16x2(first, 0x20002000u, 0xc880c880u), scale);
        second = mul_f16x2(fma_f16x2(second, 0x20002000u, 0xc880c880u), scale);
    }
};

template <>
struct Format<Q4_0> {
    static constexpr int FIELDS = 4, BLOCK = 32, SCALE_BYTES = 2, SHIFT = 3;

    // 2^10 + n has the nibble n as the lowest bits of float16, 2^10 + 16 n as those above: over 8, less 129, and over 128,
    // less 9, both are (n - 8) / 8 exactly.
    DEVICE static void pairs(u32 word, int half, u32 scale, u32& first, u32& second) {
        word >>= 8 * half;
        first = fma_f16x2(lop3_or(word, 0x000f000fu, 0x64006400u), 0x30003000u, 0xd808d808u);
        second = fma_f16x2(lop3_or(word, 0x00f000f0u, 0x64006400u), 0x20002000u, 0xc880c880u);
        first = mul_f16x2(first, scale);
        second = mul_f16x2(second, scale);
    }
};

template <>
struct Format<NF4> {
    static constexpr int FIELDS = 4, BLOCK = 64, SCALE_BYTES = 4, SHIFT = 2;

    // Levels are bytes b of (b - 128) / 112.03, within 0.0039 of what they stand for (0.0017 in the mean of squares), and
    // nothing exactly. A nibble with its highest bit left out names one of the last eight; from it is taken how much less the
    // level is that has the bit not set. Selectors with the bit set give these differences' signs, which are nothing. No byte
    // borrows. A byte alone is a float16 below the normal ones, b / 2^24: over 112.03 / 2^22, less 128 of that, it is a
    // quarter of its level.
    DEVICE static void pairs(u32 word, int half, u32 scale, u32& first, u32& second) {
        u32 mixed = prmt(word, word, 0x3120u);  // nibbles 0 and 1 of both units, then 2 and 3 of both
        u32 last = (mixed & 0x77777777u) >> 16 * half;
        u32 bytes = prmt(0xa69c9289u, 0xf0d1bfb1u, last) - prmt(0x52576079u, 0x705b5451u, mixed >> 16 * half);
        first = mul_f16x2(fma_f16x2(prmt(bytes, 0, 0x4240u), 0x78927892u, 0xb492b492u), scale);
        second = mul_f16x2(fma_f16x2(prmt(bytes, 0, 0x4341u), 0x78927892u, 0xb492b492u), scale);
    }
};

// The position of a feature in a stream of adjacent blocks: chunk (16 bytes of a token), unit of the chunk and field.
template <Kind KIND>
DEVICE constexpr int feature_of(int chunk, int unit, int field) {
    using F = Format<KIND>;
    if (KIND == Q8_0) return 16 * chunk + 2 * unit + field;
    constexpr int PER_BLOCK = F::BLOCK / 32;
    int byte = chunk % PER_BLOCK * 16 + 2 * unit + field / 2;
    return chunk / PER_BLOCK * F::BLOCK + byte + field % 2 * (F::BLOCK / 2);
}

// Numbers of products. What is beyond float16 becomes its largest number.
DEVICE u32 pack(float low, float high) { return pack_finite_f16x2(low, high); }

#endif
