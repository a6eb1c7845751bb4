// Every instruction of warp.cuh by itself, for the test of the emulator, and on a GPU for the test that it does the same.
#include "warp.cuh"

// One warp. c [16, 8] float32 += a [16, 16] b [16, 8], 16-bit numbers, row after row.
template <bool BRAIN>
DEVICE void product(float* out, const u16* a, const u16* b) {
    int g = lane_id() / 4, j = lane_id() % 4;
    float c[4];
    for (int k = 0; k < 4; ++k) c[k] = out[(g + k / 2 * 8) * 8 + 2 * j + k % 2];
    u32 left[4], right[2];
    for (int k = 0; k < 4; ++k) {
        const u16* at = a + (g + k % 2 * 8) * 16 + 2 * j + k / 2 * 8;
        left[k] = at[0] | u32(at[1]) << 16;
    }
    for (int k = 0; k < 2; ++k) {
        const u16* at = b + (2 * j + 8 * k) * 8 + g;
        right[k] = at[0] | u32(at[8]) << 16;
    }
    if (BRAIN)
        mma_bf16(c, left, right[0], right[1]);
    else
        mma_f16(c, left, right[0], right[1]);
    for (int k = 0; k < 4; ++k) out[(g + k / 2 * 8) * 8 + 2 * j + k % 2] = c[k];
}

extern "C" __global__ void product_f16(float* out, const u16* a, const u16* b) { product<false>(out, a, b); }
extern "C" __global__ void product_bf16(float* out, const u16* a, const u16* b) { product<true>(out, a, b); }

// One warp. Of x [32, 8] 16-bit numbers, four tiles of 8 rows: out [2, 32 lanes, 4] 32-bit registers, then transposed ones,
// and [32 lanes] of the first tile's transposed in registers; then [2, 4, 8, 4] the tiles as they are stored from registers, and
// transposed.
extern "C" __global__ void matrices(u32* out, const u16* x) {
    u32 own = shared_address(shared_memory()) + 16 * lane_id();
    const u32* from = reinterpret_cast<const u32*>(x + 8 * lane_id());
    store_shared_u128(own, load_u128(from));
    sync_warp();
    u32 r[4];
    ldmatrix_x4(r, own);
    for (int t = 0; t < 4; ++t) out[4 * lane_id() + t] = r[t];
    out[256 + lane_id()] = transpose(r[0]);
    stmatrix_x4(own + 512, r);
    stmatrix_x4_trans(own + 1024, r);
    sync_warp();
    for (int k = 0; k < 4; ++k) out[288 + 4 * lane_id() + k] = load_shared_u32(own + 512 + 4 * k);
    for (int k = 0; k < 4; ++k) out[416 + 4 * lane_id() + k] = load_shared_u32(own + 1024 + 4 * k);
    ldmatrix_x4_trans(r, own);
    for (int t = 0; t < 4; ++t) out[128 + 4 * lane_id() + t] = r[t];
}

// Blocks of `warps` warps. Each lane copies 16 bytes in each of three groups, the even lanes' of the second group not being
// there; what the next lane of the block copied goes to out [blocks, 3, lanes, 4] 32-bit numbers.
extern "C" __global__ void copies(u32* out, const u32* x, int warps) {
    int lanes = 32 * warps, i = 32 * warp_id() + lane_id(), next = (i + 1) % lanes;
    u32 base = shared_address(shared_memory());
    x += block_x() * 3 * lanes * 4;
    out += block_x() * 3 * lanes * 4;
    for (int group = 0; group < 3; ++group) {
        copy_async_16(base + (group * lanes + i) * 16, x + (group * lanes + i) * 4, group != 1 || i % 2);
        commit_copies();
    }
    for (int group = 0; group < 3; ++group) {
        if (group == 0)
            wait_copies<2>();
        else if (group == 1)
            wait_copies<1>();
        else
            wait_copies<0>();
#ifndef WITHOUT_SYNC
        sync_block();
#endif
        u32x4 found = load_shared_u128(base + (group * lanes + next) * 16);
        u32* to = out + (group * lanes + i) * 4;
        to[0] = found.x, to[1] = found.y, to[2] = found.z, to[3] = found.w;
    }
}

// One warp of 32 lanes, a, b, c [32]: out [20, 32].
extern "C" __global__ void numbers(u32* out, const u32* a, const u32* b, const u32* c) {
    int i = lane_id();
    u32 found[20] = {
        lop3_or(a[i], b[i], c[i]),
        lop3_xor(a[i], b[i], c[i]),
        prmt(a[i], b[i], c[i]),
        mul_f16x2(a[i], b[i]),
        fma_f16x2(a[i], b[i], c[i]),
        pack_f16x2(from_bits(a[i]), from_bits(b[i])),
        pack_bf16x2(from_bits(a[i]), from_bits(b[i])),
        to_bits(low_f16(a[i])),
        to_bits(high_f16(a[i])),
        to_bits(low_bf16(a[i])),
        to_bits(high_bf16(a[i])),
        shuffle_xor(a[i], 5),
        shuffle_from(a[i], 31 - i),
        high_product(a[i], b[i]),
        byte_products(a[i], b[i], c[i]),
        pack_finite_f16x2(from_bits(a[i]), from_bits(b[i])),
        abs_max_f16x2(a[i], b[i]),
        abs_max_bf16x2(a[i], b[i]),
        max_of_lanes(a[i]),
        fma_bf16x2(a[i], b[i], c[i]),
    };
    for (int k = 0; k < 20; ++k) out[32 * k + i] = found[k];
}

// One warp. x [32]: out [3, 32], 2^x, log2 |x|, whether any lane of those below 16 bits' largest is 1.
extern "C" __global__ void functions(float* out, const float* x) {
    int i = lane_id();
    out[i] = exp2_fast(x[i]);
    out[32 + i] = log2_fast(x[i] < 0 ? -x[i] : x[i]);
    out[64 + i] = any_lane(x[i] == 1.0f) ? minus_infinity() : 0.0f;
}

// Lanes that do not meet: the upper half of a warp waits for others that are gone.
extern "C" __global__ void parted(u32* out) {
    if (lane_id() < 16) return;
    sync_warp();
    out[0] = 1;
}

// What begins early may begin, after all lanes' wait for the kernel ahead or, WITHOUT_WAIT, after that of half a warp.
extern "C" __global__ void announced(u32* out) {
#ifdef WITHOUT_WAIT
    if (lane_id() < 16)
#endif
        wait_for_kernel_ahead();
    launch_dependents();
    out[32 * block_x() + lane_id()] = lane_id();
}
