// The part of metal_stdlib that kernels/metal uses, and its launch, for a host.
#ifndef CARAMBA_METAL_METAL_H
#define CARAMBA_METAL_METAL_H

#include <bit>
#include <cmath>
#include <limits>
#include <utility>

#include "memory.h"

typedef unsigned int uint;
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned long ulong;
static_assert(sizeof(long) == 8);
typedef _Float16 half;

struct bfloat {
    std::uint16_t bits = 0;
    bfloat() = default;
    explicit bfloat(float x) {
        std::uint32_t all = std::bit_cast<std::uint32_t>(x);
        bits = std::uint16_t(std::isnan(x) ? (all >> 16 | 0x40) : (all + 0x7fff + (all >> 16 & 1)) >> 16);
    }
    operator float() const { return std::bit_cast<float>(std::uint32_t(bits) << 16); }
};

namespace emulated {

template <typename T, int n>
struct Values;
template <typename T>
struct Values<T, 2> {
    T x{}, y{};
};
template <typename T>
struct Values<T, 3> {
    T x{}, y{}, z{};
};
template <typename T>
struct alignas(4 * sizeof(T)) Values<T, 4> {
    T x{}, y{}, z{}, w{};
};

template <typename T, int n>
struct Vector : Values<T, n> {
    Vector() = default;
    explicit Vector(T all) {
        for (int i = 0; i < n; ++i) (*this)[i] = all;
    }
    template <typename... Rest>
        requires(sizeof...(Rest) == n - 1 && n > 1)
    Vector(T first, Rest... rest) : Values<T, n>{first, T(rest)...} {}
    template <typename U>
        requires(!std::is_same_v<U, T>)
    explicit Vector(const Vector<U, n>& other) {
        for (int i = 0; i < n; ++i) (*this)[i] = T(other[i]);
    }
    T& operator[](int i) { return (&this->x)[i]; }
    const T& operator[](int i) const { return (&this->x)[i]; }
    friend Vector operator+(Vector a, const Vector& b) { for (int i = 0; i < n; ++i) a[i] = T(a[i] + b[i]); return a; }
    friend Vector operator-(Vector a, const Vector& b) { for (int i = 0; i < n; ++i) a[i] = T(a[i] - b[i]); return a; }
    friend Vector operator*(Vector a, const Vector& b) { for (int i = 0; i < n; ++i) a[i] = T(a[i] * b[i]); return a; }
    friend Vector operator*(Vector a, T b) { for (int i = 0; i < n; ++i) a[i] = T(a[i] * b); return a; }
    friend Vector operator*(T b, Vector a) { return a * b; }
};

}  // namespace emulated

#define VECTORS(T) using T##2 = emulated::Vector<T, 2>; using T##3 = emulated::Vector<T, 3>; using T##4 = emulated::Vector<T, 4>;
VECTORS(float) VECTORS(half) VECTORS(bfloat) VECTORS(uint) VECTORS(int)
#undef VECTORS

namespace metal {

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
inline mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }

inline void threadgroup_barrier(mem_flags flags, int line = __builtin_LINE()) {
    emulated::wait(emulated::AT_GROUP, "threadgroup_barrier", line, int(flags));
}
inline void simdgroup_barrier(mem_flags flags, int line = __builtin_LINE()) {
    emulated::wait(emulated::AT_SIMDGROUP, "simdgroup_barrier", line, int(flags));
}

// Give a value to the other lanes of the simdgroup; `use` takes theirs, and which of them are there.
template <typename T, typename Use>
auto exchange(T value, const char* at, int line, Use use) {
    static_assert(sizeof(T) <= 8);
    emulated::Simdgroup& own = emulated::group.simdgroups[emulated::self->index / emulated::SIMD];
    std::uint64_t(&values)[emulated::SIMD] = own.values[own.turn & 1];
    unsigned lane = emulated::self->index % emulated::SIMD;
    std::memcpy(&values[lane], &value, sizeof(T));
    emulated::wait(emulated::AT_SIMDGROUP, at, line, 0);
    auto get = [&](unsigned i) {
        if (i >= emulated::SIMD || !own.is_there[i]) emulated::fail(std::string(at) + " from lane " + std::to_string(i) + ", which is not there");
        T found;
        std::memcpy(&found, &values[i], sizeof(T));
        return found;
    };
    return use(lane, get, own.is_there);
}

template <typename T, typename Join>
T simd_reduce(T value, const char* at, int line, Join join) {
    return exchange(value, at, line, [&](unsigned, auto get, const bool* there) {
        T all[emulated::SIMD];
        bool has[emulated::SIMD];
        for (unsigned i = 0; i < emulated::SIMD; ++i)
            if ((has[i] = there[i])) all[i] = get(i);
        for (unsigned step = emulated::SIMD / 2; step; step /= 2)
            for (unsigned i = 0; i < step; ++i)
                if (has[i + step]) all[i] = has[i] ? T(join(all[i], all[i + step])) : all[i + step], has[i] = true;
        return all[0];
    });
}
template <typename T>
T simd_sum(T x, int line = __builtin_LINE()) { return simd_reduce(x, "simd_sum", line, [](T a, T b) { return a + b; }); }
template <typename T>
T simd_max(T x, int line = __builtin_LINE()) { return simd_reduce(x, "simd_max", line, [](T a, T b) { return std::fmax(a, b); }); }
template <typename T>
T simd_min(T x, int line = __builtin_LINE()) { return simd_reduce(x, "simd_min", line, [](T a, T b) { return std::fmin(a, b); }); }
inline bool simd_any(bool x, int line = __builtin_LINE()) { return simd_reduce(x, "simd_any", line, [](bool a, bool b) { return a || b; }); }
inline bool simd_all(bool x, int line = __builtin_LINE()) { return simd_reduce(x, "simd_all", line, [](bool a, bool b) { return a && b; }); }
template <typename T>
T simd_shuffle(T x, ushort from, int line = __builtin_LINE()) { return exchange(x, "simd_shuffle", line, [&](unsigned, auto get, auto) { return get(from); }); }
template <typename T>
T simd_broadcast(T x, ushort from, int line = __builtin_LINE()) { return exchange(x, "simd_broadcast", line, [&](unsigned, auto get, auto) { return get(from); }); }
template <typename T>
T simd_shuffle_xor(T x, ushort mask, int line = __builtin_LINE()) { return exchange(x, "simd_shuffle_xor", line, [&](unsigned lane, auto get, auto) { return get(lane ^ mask); }); }
template <typename T>
T simd_shuffle_down(T x, ushort by, int line = __builtin_LINE()) { return exchange(x, "simd_shuffle_down", line, [&](unsigned lane, auto get, auto) { return lane + by < emulated::SIMD ? get(lane + by) : get(lane); }); }
template <typename T>
T simd_shuffle_up(T x, ushort by, int line = __builtin_LINE()) { return exchange(x, "simd_shuffle_up", line, [&](unsigned lane, auto get, auto) { return lane >= by ? get(lane - by) : get(lane); }); }

enum memory_order { memory_order_relaxed };
struct atomic_uint { uint value; };
struct atomic_int { int value; };
struct atomic_float { float value; };

template <emulated::Space space, typename A, typename Work>
auto atomically(emulated::Pointer<space, A> at, Work work) {
    std::uint8_t* to = at.check(0);
    at.region->touch(to, sizeof(A), true, true);
    A held;
    std::memcpy(&held, to, sizeof(A));
    auto before = held.value;
    held.value = work(held.value);
    std::memcpy(to, &held, sizeof(A));
    return before;
}
template <emulated::Space space, typename A, typename V>
auto atomic_fetch_add_explicit(emulated::Pointer<space, A> at, V by, memory_order) { return atomically(at, [&](auto x) { return decltype(x)(x + by); }); }
template <emulated::Space space, typename A, typename V>
    requires(!std::is_same_v<A, atomic_float>)  // Metal has no maximum of floats
auto atomic_fetch_max_explicit(emulated::Pointer<space, A> at, V by, memory_order) { return atomically(at, [&](auto x) { return std::max<decltype(x)>(x, by); }); }
template <emulated::Space space, typename A, typename V>
void atomic_store_explicit(emulated::Pointer<space, A> at, V value, memory_order) { atomically(at, [&](auto x) { return decltype(x)(value); }); }
template <emulated::Space space, typename A>
auto atomic_load_explicit(emulated::Pointer<space, A> at, memory_order) { return atomically(at, [](auto x) { return x; }); }

inline float exp(float x) { return std::exp(x); }
inline float exp2(float x) { return std::exp2(x); }
inline float log(float x) { return std::log(x); }
inline float sqrt(float x) { return std::sqrt(x); }
inline float rsqrt(float x) { return 1.0f / std::sqrt(x); }
inline float fma(float a, float b, float c) { return std::fma(a, b, c); }
inline float fabs(float x) { return std::fabs(x); }
inline float fmax(float a, float b) { return std::fmax(a, b); }
inline bool isnan(float x) { return std::isnan(x); }
template <typename T>
T max(T a, T b) { return a < b ? b : a; }
template <typename T>
T min(T a, T b) { return b < a ? b : a; }
template <typename T>
T clamp(T x, T low, T high) { return min(max(x, low), high); }
template <typename T>
T select(T a, T b, bool c) { return c ? b : a; }
template <typename To, typename From>
To as_type(From x) { return std::bit_cast<To>(x); }

}  // namespace metal

namespace emulated {

// An argument of a launch: a tensor's or a number's bytes.
struct Argument {
    std::uint8_t* data;
    std::uint64_t bytes;
    int is_number;
    std::uint64_t read, written;
    Region* region;
};

inline Argument* arguments = nullptr;
inline int n_arguments = 0;

inline Argument& argument(int i, bool is_number) {
    if (i >= n_arguments) fail("argument " + std::to_string(i) + " is not given");
    if (arguments[i].is_number != is_number) fail("argument " + std::to_string(i) + (is_number ? " is a tensor, expected a number" : " is a number, expected a tensor"));
    return arguments[i];
}
template <typename T>
Pointer<Space::DEVICE, T> buffer(int i) {
    Argument& x = argument(i, false);
    return {x.data, x.data, x.data + x.bytes, x.region};
}
template <typename T>
T value(int i) {
    Argument& x = argument(i, true);
    if (x.bytes != sizeof(T)) fail("argument " + std::to_string(i) + " has " + std::to_string(x.bytes) + " bytes, the kernel reads " + std::to_string(sizeof(T)));
    T found;
    std::memcpy(&found, x.data, sizeof(T));
    return found;
}

// A position or size, as one number or as three, by what the kernel declares.
struct Position {
    Triple of;
    operator uint() const { return of.x; }
    operator uint2() const { return {of.x, of.y}; }
    operator uint3() const { return {of.x, of.y, of.z}; }
};
inline Triple in_group() {
    uint i = self->index;
    return {i % group.size.x, i / group.size.x % group.size.y, i / group.size.x / group.size.y};
}
inline Position thread_position_in_threadgroup() { return {in_group()}; }
inline Position threadgroup_position_in_grid() { return {group.at}; }
inline Position thread_position_in_grid() {
    Triple own = in_group();
    return {{group.at.x * group.asked.x + own.x, group.at.y * group.asked.y + own.y, group.at.z * group.asked.z + own.z}};
}
inline Position threads_per_threadgroup() { return {group.size}; }
inline Position threads_per_grid() { return {group.threads_per_grid}; }
inline Position threadgroups_per_grid() { return {group.groups_per_grid}; }
inline uint thread_index_in_threadgroup() { return self->index; }
inline uint thread_index_in_simdgroup() { return self->index % SIMD; }
inline uint simdgroup_index_in_threadgroup() { return self->index / SIMD; }
inline uint simdgroups_per_threadgroup() { return uint((group.size.all() + SIMD - 1) / SIMD); }
inline uint threads_per_simdgroup() { return SIMD; }

// Run all threadgroups in random order; return what went wrong, or nothing. `all` and `size` are counts of threads.
inline std::string launch(void (*with)(), Argument* given, int n, Triple all, Triple size, uint widest, std::uint64_t seed) {
    if (!all.all() || !size.all()) return "a launch of no threads";
    if (size.all() > widest) return "threadgroups of " + std::to_string(size.all()) + " threads, expected at most " + std::to_string(widest);
    std::mt19937_64 random(seed);
    std::vector<std::unique_ptr<Region>> regions;
    for (int i = 0; i < n; ++i) {
        Argument& x = given[i];
        if (x.is_number || !x.bytes) continue;
        auto made = std::make_unique<Region>();
        made->begin = x.data, made->end = x.data + x.bytes;
        std::erase_if(regions, [&](auto& old) {
            if (old->end <= made->begin || made->end <= old->begin) return false;
            made->begin = std::min(made->begin, old->begin), made->end = std::max(made->end, old->end);
            return true;
        });
        regions.push_back(std::move(made));
    }
    for (auto& region : regions) region->cells.resize(region->end - region->begin);
    for (int i = 0; i < n; ++i)
        for (auto& region : regions)
            if (!given[i].is_number && region->begin <= given[i].data && given[i].data < region->end) given[i].region = region.get();
    body = with, arguments = given, n_arguments = n;
    group = Group();
    group.threads_per_grid = all, group.asked = size;
    Triple groups{(all.x + size.x - 1) / size.x, (all.y + size.y - 1) / size.y, (all.z + size.z - 1) / size.z};
    group.groups_per_grid = groups;
    std::vector<std::uint32_t> order(groups.all());
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = std::uint32_t(i);
    std::shuffle(order.begin(), order.end(), random);
    for (std::uint32_t number : order) {
        group.number = number;
        group.at = {number % groups.x, number / groups.x % groups.y, number / groups.x / groups.y};
        group.size = {std::min(size.x, all.x - group.at.x * size.x), std::min(size.y, all.y - group.at.y * size.y), std::min(size.z, all.z - group.at.z * size.z)};
        arrays.clear();
        std::string error = run_group(random);
        if (!error.empty())
            return "group (" + std::to_string(group.at.x) + ", " + std::to_string(group.at.y) + ", " + std::to_string(group.at.z) + "): " + error;
    }
    for (auto& region : regions) {
        bool is_first = true;  // an argument that shares its region with an earlier one has nothing of its own
        for (int i = 0; i < n; ++i)
            if (given[i].region == region.get() && std::exchange(is_first, false)) given[i].read = region->read, given[i].written = region->written;
    }
    arrays.clear();
    return "";
}

}  // namespace emulated

#endif
