// Numbers of codes, for tests: what a word's fields are with a scale.
#include "codes.cuh"

// One warp a block. words, scales [n]: out [n, FIELDS], pairs of 16-bit numbers.
extern "C" __global__ void pairs(u32* out, const u32* words, const u32* scales, int n) {
    using F = Format<KIND>;
    int i = block_x() * 32 + lane_id();
    if (i >= n) return;
    u32* to = out + i * F::FIELDS;
    for (int half = 0; half < F::FIELDS / 2; ++half) F::pairs(words[i], half, scales[i], to[2 * half], to[2 * half + 1]);
}
