// What the kernels here use of a GPU's instructions. Nothing else in them is more than C++: the header of the same guard in
// tests/ops/warp_emulator defines these names for a host, which includes it first.
#ifndef CARAMBA_WARP_CUH
#define CARAMBA_WARP_CUH

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct u32x2 {
    u32 x, y;
};
struct u32x4 {
    u32 x, y, z, w;
};

#define DEVICE __device__ __forceinline__

// Places

DEVICE int lane_id() { return threadIdx.x % 32; }
// The same number in every lane, which the compiler cannot see of threadIdx. All lanes of a warp ask together.
DEVICE int warp_id() { return __shfl_sync(0xffffffffu, threadIdx.x / 32, 0); }
DEVICE int block_x() { return blockIdx.x; }
DEVICE int block_y() { return blockIdx.y; }
DEVICE int grid_y() { return gridDim.y; }

extern __shared__ __align__(128) unsigned char caramba_shared_memory[];
// The block's shared memory, as many bytes as its launch requests, at a multiple of 128.
DEVICE u8* shared_memory() { return caramba_shared_memory; }
DEVICE u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

// Bits

DEVICE u32 to_bits(float x) { return __float_as_uint(x); }
DEVICE float from_bits(u32 x) { return __uint_as_float(x); }
// (a & mask) | magic
DEVICE u32 lop3_or(u32 a, u32 mask, u32 magic) {
    u32 d;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(d) : "r"(a), "r"(mask), "r"(magic));
    return d;
}
// (a & mask) ^ magic
DEVICE u32 lop3_xor(u32 a, u32 mask, u32 magic) {
    u32 d;
    asm("lop3.b32 %0, %1, %2, %3, 0x6A;" : "=r"(d) : "r"(a), "r"(mask), "r"(magic));
    return d;
}
// Nibble i of the selector names byte i of the result: 0-3 of a, 4-7 of b, with 8 added the byte's sign eight times.
DEVICE u32 prmt(u32 a, u32 b, u32 selector) {
    u32 d;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
    return d;
}

// The upper half of a product: by 2^n a shift to the right by 32 - n, where instructions that shift are too many.
DEVICE u32 high_product(u32 a, u32 b) {
    u32 d;
    asm("mul.hi.u32 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

// The bytes of a times those of b, and c.
DEVICE u32 byte_products(u32 a, u32 b, u32 c) {
    u32 d;
    asm("dp4a.u32.u32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

// Pairs of 16-bit numbers, the first in the low half

DEVICE u32 mul_f16x2(u32 a, u32 b) {
    u32 d;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
DEVICE u32 fma_f16x2(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
DEVICE u32 fma_bf16x2(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
DEVICE u32 pack_f16x2(float low, float high) {
    u32 d;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}
// Beyond float16's range its largest number.
DEVICE u32 pack_finite_f16x2(float low, float high) {
    u32 d;
    asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}
DEVICE u32 pack_bf16x2(float low, float high) {
    u32 d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}
// The larger of the absolute values, of numbers and not of what is none; the sign is anything.
DEVICE u32 abs_max_f16x2(u32 a, u32 b) {
    u32 d;
#if __CUDA_ARCH__ >= 860
    asm("max.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
#else
    asm("max.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a & 0x7fff7fffu), "r"(b & 0x7fff7fffu));
#endif
    return d;
}
DEVICE u32 abs_max_bf16x2(u32 a, u32 b) {
    u32 d;
#if __CUDA_ARCH__ >= 860
    asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
#else
    asm("max.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a & 0x7fff7fffu), "r"(b & 0x7fff7fffu));
#endif
    return d;
}
DEVICE float from_f16(u16 x) {
    float d;
    asm("cvt.f32.f16 %0, %1;" : "=f"(d) : "h"(x));
    return d;
}
DEVICE float low_f16(u32 x) { return from_f16(static_cast<u16>(x)); }
DEVICE float high_f16(u32 x) { return from_f16(static_cast<u16>(x >> 16)); }
DEVICE float low_bf16(u32 x) { return from_bits(x << 16); }
DEVICE float high_bf16(u32 x) { return from_bits(x & 0xffff0000u); }

// Products of a warp: c[16, 8] += a[16, 16] b[16, 8]. Of lane l, with g = l / 4 and j = l % 4, c is rows g, g, g + 8, g + 8
// at columns 2j, 2j + 1, 2j, 2j + 1; a[0] is row g, a[1] row g + 8 at columns 2j and 2j + 1, a[2] and a[3] the same at
// columns 8 further; b0 is rows 2j and 2j + 1 of column g, b1 rows 8 further.

DEVICE void mma_f16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEVICE void mma_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Of 8 rows of 8 numbers of 16 bits, of which lane l holds two, 2 (l % 4) and the next of row l / 4: the columns as rows.
DEVICE u32 transpose(u32 x) {
    u32 d;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(x));
    return d;
}

// Global memory, at a multiple of 16 bytes

DEVICE u32x4 load_u128(const void* from) {
    u32x4 d;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(d.x), "=r"(d.y), "=r"(d.z), "=r"(d.w) : "l"(from));
    return d;
}

// The same of what no other block reads.
DEVICE u32x4 load_once_u128(const void* from) {
    u32x4 d;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(d.x), "=r"(d.y), "=r"(d.z), "=r"(d.w)
                 : "l"(from));
    return d;
}

// Shared memory, at addresses of `shared_address`

// Four tiles of 8 rows of 16 bytes: lane 8t + i names row i of tile t. Of lane l, r[t] is 4 bytes l % 4 of row l / 4;
// transposed, numbers of 16 bits l / 4 of rows 2 (l % 4) and one more.
DEVICE void ldmatrix_x4(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}
DEVICE void ldmatrix_x4_trans(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}
// Store what `ldmatrix_x4` would load from the same rows.
DEVICE void stmatrix_x4(u32 address, const u32 (&r)[4]) {
#if __CUDA_ARCH__ >= 900
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 :
                 : "r"(address), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
#else
    for (int t = 0; t < 4; ++t) {
        u32 row = __shfl_sync(0xffffffffu, address, 8 * t + threadIdx.x % 32 / 4);
        asm volatile("st.shared.u32 [%0], %1;" : : "r"(row + threadIdx.x % 4 * 4), "r"(r[t]) : "memory");
    }
#endif
}
// The same of columns: lane 8t + i names where column i of tile t is stored, as a row.
DEVICE void stmatrix_x4_trans(u32 address, const u32 (&r)[4]) {
#if __CUDA_ARCH__ >= 900
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 :
                 : "r"(address), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
#else
    stmatrix_x4(address, {transpose(r[0]), transpose(r[1]), transpose(r[2]), transpose(r[3])});
#endif
}
DEVICE u16 load_shared_u16(u32 address) {
    u16 d;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(d) : "r"(address));
    return d;
}
DEVICE u32 load_shared_u32(u32 address) {
    u32 d;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(d) : "r"(address));
    return d;
}
DEVICE float load_shared_f32(u32 address) { return from_bits(load_shared_u32(address)); }
DEVICE u32x2 load_shared_u64(u32 address) {
    u32x2 d;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(d.x), "=r"(d.y) : "r"(address));
    return d;
}
DEVICE u32x4 load_shared_u128(u32 address) {
    u32x4 d;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(d.x), "=r"(d.y), "=r"(d.z), "=r"(d.w)
                 : "r"(address));
    return d;
}
DEVICE void store_shared_u32(u32 address, u32 x) {
    asm volatile("st.shared.u32 [%0], %1;" : : "r"(address), "r"(x) : "memory");
}
DEVICE void store_shared_f32(u32 address, float x) { store_shared_u32(address, to_bits(x)); }
DEVICE void store_shared_u64(u32 address, u32x2 x) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" : : "r"(address), "r"(x.x), "r"(x.y) : "memory");
}
DEVICE void store_shared_u128(u32 address, u32x4 x) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};"
                 :
                 : "r"(address), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
}

// Asynchronous copies from global to shared memory while a warp works: a lane's own, in groups that end at `commit_copies`.
// `wait_copies<N>` waits until at most N of the lane's latest groups are still in flight; other lanes see what was copied
// after a sync as well.

// Copy 16 bytes, both addresses multiples of 16; zeros where nothing is there, and `from` is then not read.
DEVICE void copy_async_16(u32 to, const void* from, bool is_there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" : : "r"(to), "l"(from), "r"(is_there ? 16 : 0) : "memory");
}
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" : : : "memory"); }
template <int N>
DEVICE void wait_copies() {
    asm volatile("cp.async.wait_group %0;" : : "n"(N) : "memory");
}

// Lanes

DEVICE float shuffle_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
DEVICE u32 shuffle_xor(u32 x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
DEVICE float shuffle_from(float x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }
DEVICE u32 shuffle_from(u32 x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }
DEVICE u32 max_of_lanes(u32 x) { return __reduce_max_sync(0xffffffffu, x); }
DEVICE bool any_lane(bool x) { return __any_sync(0xffffffffu, x); }
DEVICE void sync_warp() { __syncwarp(); }
DEVICE void sync_block() { __syncthreads(); }
// Four warps of a block, those of 4 team to 4 team + 3, wait for each other.
DEVICE void sync_team(int team) { asm volatile("bar.sync %0, 128;" : : "r"(team + 1) : "memory"); }
// The same, and whether `x` is true in any of their lanes.
DEVICE bool any_of_team(int team, bool x) {
    u32 d;
    asm volatile(
        "{ .reg .pred own, any; setp.ne.u32 own, %2, 0; bar.red.or.pred any, %1, 128, own; selp.u32 %0, 1, 0, any; }"
        : "=r"(d)
        : "r"(team + 1), "r"(u32(x))
        : "memory");
    return d != 0;
}

// Numbers

DEVICE float exp2_fast(float x) {
    float d;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(x));
    return d;
}
DEVICE float log2_fast(float x) {
    float d;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(x));
    return d;
}
DEVICE float minus_infinity() { return from_bits(0xff800000u); }

// Until the kernel ahead has ended and what it stored can be read, where this one was launched to begin before; else no wait.
DEVICE void wait_for_kernel_ahead() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" : : : "memory");
#endif
}
// A kernel that was launched to begin early (programmatic dependent launch) may, once all blocks are here; it waits for what
// they store. Nothing else begins by it.
DEVICE void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" : : : "memory");
#endif
}

#endif
