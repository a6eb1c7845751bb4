// The names of kernels/cuda/warp.cuh for a host.
#ifndef CARAMBA_WARP_CUH
#define CARAMBA_WARP_CUH
#include "lanes.h"

namespace emulated {

inline float from_half(u16 x) {
    int exponent = x >> 10 & 31, digits = x & 1023;
    float found = exponent == 31 ? (digits ? NAN : INFINITY)
                  : exponent     ? std::ldexp(1024.0f + digits, exponent - 25)
                                 : std::ldexp(float(digits), -24);
    return x >> 15 ? -found : found;
}

// Round to nearest, ties to even, with `digits` digits in all and no exponent below that of `least`.
inline double round_to(double x, int digits, int least) {
    if (x == 0 || !std::isfinite(x)) return x;
    int exponent = std::max(std::ilogb(x) - digits + 1, least);
    return std::ldexp(std::nearbyint(std::ldexp(x, -exponent)), exponent);
}

inline u16 to_half(double x) {
    u16 sign = std::signbit(x) ? 0x8000 : 0;
    if (std::isnan(x)) return 0x7fff;
    double kept = std::fabs(round_to(x, 11, -24));
    if (kept > 65504) return sign | 0x7c00;
    if (kept < 0x1p-14) return sign | u16(std::ldexp(kept, 24));
    int exponent = std::ilogb(kept);
    return sign | u16((exponent + 15) << 10 | (int(std::ldexp(kept, 10 - exponent)) & 1023));
}

inline u16 to_brain(double x) {
    if (std::isnan(x)) return 0x7fff;
    return std::bit_cast<u32>(float(round_to(x, 8, -133))) >> 16;
}

inline float from_brain(u16 x) { return std::bit_cast<float>(u32(x) << 16); }

inline u32 pair(u16 low, u16 high) { return low | u32(high) << 16; }

template <typename From, typename To, typename Do>
u32 each(u32 a, u32 b, u32 c, From from, To to, Do what) {
    return pair(to(what(double(from(u16(a))), double(from(u16(b))), double(from(u16(c))))),
                to(what(double(from(u16(a >> 16))), double(from(u16(b >> 16))), double(from(u16(c >> 16))))));
}

template <typename From>
void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, From from, const char* what) {
    Warp& own = warp();
    int i = place();
    for (int k = 0; k < 4; ++k) own.brought[i][k] = a[k], own.sums[i][k] = c[k];
    own.brought[i][4] = b0, own.brought[i][5] = b1;
    meet_warp(what, [&] {
        double left[16][16], right[16][8];
        for (int l = 0; l < WARP; ++l) {
            int g = l / 4, j = l % 4;
            for (int k = 0; k < 4; ++k)
                for (int half = 0; half < 2; ++half)
                    left[g + k % 2 * 8][2 * j + k / 2 * 8 + half] = from(u16(own.brought[l][k] >> 16 * half));
            for (int k = 0; k < 2; ++k)
                for (int half = 0; half < 2; ++half)
                    right[2 * j + 8 * k + half][g] = from(u16(own.brought[l][4 + k] >> 16 * half));
        }
        for (int l = 0; l < WARP; ++l)
            for (int k = 0; k < 4; ++k) {
                int row = l / 4 + k / 2 * 8, column = l % 4 * 2 + k % 2;
                double sum = own.sums[l][k];
                for (int n = 0; n < 16; ++n) sum += left[row][n] * right[n][column];
                own.sums[l][k] = float(sum);
            }
    });
    for (int k = 0; k < 4; ++k) c[k] = own.sums[i][k];
    // No lane brings the next operands before all have taken these results.
    meet_warp("the end of a product", [] {});
}

inline void matrices(u32 (&r)[4], u32 address, bool is_turned, const char* what) {
    Warp& own = warp();
    int i = place();
    std::memcpy(own.rows[i], at(address, 16, what), 16);  // as it is now: other lanes' copies need a sync before
    meet_warp(what, [&] {
        for (int l = 0; l < WARP; ++l)
            for (int t = 0; t < 4; ++t) {
                auto number = [&](int row, int n) { return u16(own.rows[8 * t + row][n / 2] >> 16 * (n % 2)); };
                own.taken[l][t] = is_turned ? pair(number(l % 4 * 2, l / 4), number(l % 4 * 2 + 1, l / 4))
                                            : own.rows[8 * t + l / 4][l % 4];
            }
    });
    for (int t = 0; t < 4; ++t) r[t] = own.taken[i][t];
    meet_warp("the end of ldmatrix", [] {});
}

inline u32 shuffled(u32 x, int from, const char* what) {
    Warp& own = warp();
    own.brought[place()][0] = x;
    meet_warp(what, [] {});
    u32 found = own.brought[from % WARP][0];
    meet_warp("the end of a shuffle", [] {});
    return found;
}

}  // namespace emulated

inline int lane_id() { return emulated::place(); }
inline int warp_id() {
    emulated::meet_warp("warp_id", [] {});
    return emulated::lane->thread / emulated::WARP;
}
inline int block_x() { return emulated::block->x; }
inline int block_y() { return emulated::block->y; }
inline int grid_y() { return emulated::block->grid_y; }
inline u8* shared_memory() { return emulated::block->shared; }
inline u32 shared_address(const void* p) {
    auto offset = static_cast<const u8*>(p) - emulated::block->shared;
    if (offset < 0 || offset > std::ptrdiff_t(emulated::block->memory.size())) emulated::fail("not a pointer to shared memory");
    return u32(offset) + emulated::BASE;
}

inline u32 to_bits(float x) { return std::bit_cast<u32>(x); }
inline float from_bits(u32 x) { return std::bit_cast<float>(x); }
inline u32 lop3_or(u32 a, u32 mask, u32 magic) { return (a & mask) | magic; }
inline u32 lop3_xor(u32 a, u32 mask, u32 magic) { return (a & mask) ^ magic; }
inline u32 high_product(u32 a, u32 b) { return u64(a) * b >> 32; }
inline u32 byte_products(u32 a, u32 b, u32 c) {
    for (int i = 0; i < 32; i += 8) c += (a >> i & 255) * (b >> i & 255);
    return c;
}
inline u32 prmt(u32 a, u32 b, u32 selector) {
    u64 both = a | u64(b) << 32;
    u32 found = 0;
    for (int i = 0; i < 4; ++i) {
        u32 pick = selector >> 4 * i & 15;
        u32 byte = both >> 8 * (pick & 7) & 255;
        if (pick & 8) byte = byte >> 7 ? 255 : 0;
        found |= byte << 8 * i;
    }
    return found;
}

inline u32 mul_f16x2(u32 a, u32 b) {
    return emulated::each(a, b, 0, emulated::from_half, emulated::to_half, [](double x, double y, double) { return x * y; });
}
inline u32 fma_f16x2(u32 a, u32 b, u32 c) {
    return emulated::each(a, b, c, emulated::from_half, emulated::to_half,
                          [](double x, double y, double z) { return x * y + z; });
}
inline u32 fma_bf16x2(u32 a, u32 b, u32 c) {
    return emulated::each(a, b, c, emulated::from_brain, emulated::to_brain,
                          [](double x, double y, double z) { return x * y + z; });
}
inline u32 pack_f16x2(float low, float high) { return emulated::pair(emulated::to_half(low), emulated::to_half(high)); }
inline u32 pack_finite_f16x2(float low, float high) {
    auto within = [](float x) { return x > 65504 ? 65504 : x < -65504 ? -65504 : x; };  // neither for NaN, which is kept
    return pack_f16x2(within(low), within(high));
}
inline u32 pack_bf16x2(float low, float high) { return emulated::pair(emulated::to_brain(low), emulated::to_brain(high)); }
inline u32 abs_max_f16x2(u32 a, u32 b) {
    return ((a ^ b) & 0x80008000u) | emulated::each(a & 0x7fff7fffu, b & 0x7fff7fffu, 0, emulated::from_half, emulated::to_half,
                          [](double x, double y, double) { return std::fmax(x, y); });
}
inline u32 abs_max_bf16x2(u32 a, u32 b) {
    return ((a ^ b) & 0x80008000u) | emulated::each(a & 0x7fff7fffu, b & 0x7fff7fffu, 0, emulated::from_brain, emulated::to_brain,
                          [](double x, double y, double) { return std::fmax(x, y); });
}
inline float from_f16(u16 x) { return emulated::from_half(x); }
inline float low_f16(u32 x) { return from_f16(u16(x)); }
inline float high_f16(u32 x) { return from_f16(u16(x >> 16)); }
inline float low_bf16(u32 x) { return from_bits(x << 16); }
inline float high_bf16(u32 x) { return from_bits(x & 0xffff0000u); }

inline void mma_f16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    emulated::mma(c, a, b0, b1, emulated::from_half, "mma_f16");
}
inline void mma_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    emulated::mma(c, a, b0, b1, emulated::from_brain, "mma_bf16");
}
inline void ldmatrix_x4(u32 (&r)[4], u32 address) { emulated::matrices(r, address, false, "ldmatrix_x4"); }
inline void ldmatrix_x4_trans(u32 (&r)[4], u32 address) { emulated::matrices(r, address, true, "ldmatrix_x4_trans"); }

inline u32 transpose(u32 x) {
    emulated::Warp& own = emulated::warp();
    int i = emulated::place();
    own.brought[i][0] = x;
    emulated::meet_warp("transpose", [] {});
    auto number = [&](int row, int column) { return u16(own.brought[4 * row + column / 2][0] >> 16 * (column % 2)); };
    u32 found = emulated::pair(number(i % 4 * 2, i / 4), number(i % 4 * 2 + 1, i / 4));
    emulated::meet_warp("the end of transpose", [] {});
    return found;
}

namespace emulated {
template <typename T>
T load(u32 address) {
    T found;
    std::memcpy(&found, at(address, sizeof(T), "a load"), sizeof(T));
    return found;
}
template <typename T>
void store(u32 address, T x) {
    std::memcpy(at(address, sizeof(T), "a store"), &x, sizeof(T));
}
}  // namespace emulated

inline u16 load_shared_u16(u32 address) { return emulated::load<u16>(address); }
inline u32 load_shared_u32(u32 address) { return emulated::load<u32>(address); }
inline float load_shared_f32(u32 address) { return emulated::load<float>(address); }
inline u32x2 load_shared_u64(u32 address) { return emulated::load<u32x2>(address); }
inline u32x4 load_shared_u128(u32 address) { return emulated::load<u32x4>(address); }
inline void store_shared_u32(u32 address, u32 x) { emulated::store(address, x); }
inline void store_shared_f32(u32 address, float x) { emulated::store(address, x); }
inline void store_shared_u64(u32 address, u32x2 x) { emulated::store(address, x); }
inline void store_shared_u128(u32 address, u32x4 x) { emulated::store(address, x); }

inline void stmatrix_x4(u32 address, const u32 (&r)[4]) {
    emulated::Warp& own = emulated::warp();
    int i = emulated::place();
    for (int t = 0; t < 4; ++t) own.brought[i][t] = r[t];
    emulated::meet_warp("stmatrix_x4", [] {});
    for (int j = 0; j < 4; ++j) emulated::store(address + 4 * j, own.brought[i % 8 * 4 + j][i / 8]);
    emulated::meet_warp("the end of stmatrix", [] {});
}

inline void stmatrix_x4_trans(u32 address, const u32 (&r)[4]) {
    u32 turned[4];
    for (int t = 0; t < 4; ++t) turned[t] = transpose(r[t]);
    stmatrix_x4(address, turned);
}

inline u32x4 load_u128(const void* from) {
    if (reinterpret_cast<std::uintptr_t>(from) % 16) emulated::fail("a load from an address that is not a multiple of 16");
    u32x4 found;
    std::memcpy(&found, from, sizeof found);
    return found;
}

inline u32x4 load_once_u128(const void* from) { return load_u128(from); }

inline void copy_async_16(u32 to, const void* from, bool is_there) {
    if (is_there && reinterpret_cast<std::uintptr_t>(from) % 16) emulated::fail("a copy from an address that is not a multiple of 16");
    emulated::at(to, 16, "a copy");
    if (emulated::block->early)
        emulated::complete({to, from, is_there});
    else
        emulated::lane->groups.back().push_back({to, from, is_there});
}
inline void commit_copies() { emulated::lane->groups.emplace_back(); }
template <int N>
void wait_copies() {
    auto& groups = emulated::lane->groups;
    while (groups.size() > N + 1) {
        for (const auto& copy : groups.front()) emulated::complete(copy);
        groups.erase(groups.begin());
    }
}

inline u32 shuffle_xor(u32 x, int mask) { return emulated::shuffled(x, emulated::place() ^ mask, "shuffle_xor"); }
inline float shuffle_xor(float x, int mask) { return from_bits(shuffle_xor(to_bits(x), mask)); }
inline u32 shuffle_from(u32 x, int lane) { return emulated::shuffled(x, lane, "shuffle_from"); }
inline float shuffle_from(float x, int lane) { return from_bits(shuffle_from(to_bits(x), lane)); }
inline u32 max_of_lanes(u32 x) {
    emulated::Warp& own = emulated::warp();
    own.brought[emulated::place()][0] = x;
    emulated::meet_warp("max_of_lanes", [] {});
    u32 found = 0;
    for (auto& brought : own.brought) found = std::max(found, brought[0]);
    emulated::meet_warp("the end of max_of_lanes", [] {});
    return found;
}
inline bool any_lane(bool x) {
    emulated::Warp& own = emulated::warp();
    own.brought[emulated::place()][0] = x;
    emulated::meet_warp("any_lane", [] {});
    bool found = false;
    for (auto& brought : own.brought) found |= brought[0] != 0;
    emulated::meet_warp("the end of any_lane", [] {});
    return found;
}
inline void sync_warp() { emulated::meet_warp("sync_warp", [] {}); }
inline void sync_block() {
    emulated::meet(emulated::block->meeting, int(emulated::block->lanes.size()), "sync_block", [] {});
}

inline void meet_team(int team, const char* what, bool x) {
    if (team != emulated::lane->thread / 128) emulated::fail("a lane meets a team that is not its own");
    emulated::Team& own = emulated::block->teams[team];
    own.gathers |= x;
    emulated::meet(own.meeting, 128, what, [&own] { own.found = own.gathers, own.gathers = false; });
}
inline void sync_team(int team) { meet_team(team, "sync_team", false); }
inline bool any_of_team(int team, bool x) {
    meet_team(team, "any_of_team", x);
    return emulated::block->teams[team].found;
}

inline float exp2_fast(float x) {
    float found = std::exp2(x);
    return found < 0x1p-126f ? 0.0f : found;
}
inline float log2_fast(float x) { return std::log2(x < 0x1p-126f ? 0.0f : x); }
inline float minus_infinity() { return -INFINITY; }
inline void wait_for_kernel_ahead() { emulated::lane->has_waited = true; }
// Stricter than a GPU, where it says nothing of waits: a kernel that lets others begin may have begun early itself.
inline void launch_dependents() {
    if (!emulated::lane->has_waited) emulated::fail("others may begin, and this lane has not waited for the kernel ahead");
}

#endif
