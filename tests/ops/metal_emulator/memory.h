// Pointers that know their bounds and address space, count what is read and written, and see races.
//
// Bytes are counted per distinct address of a threadgroup: what it reads again comes from a cache. A race is two accesses to
// a byte, one of them a write, without a barrier between them that orders that space, or by two threadgroups.
#ifndef CARAMBA_METAL_MEMORY_H
#define CARAMBA_METAL_MEMORY_H

#include <map>
#include <type_traits>

#include "threads.h"

namespace emulated {

enum class Space { DEVICE, THREADGROUP, CONSTANT };
constexpr std::size_t THREADGROUP_BYTES = 32 * 1024;

struct Access {
    std::uint32_t group = ~0u, epoch = 0, simd_epoch = 0;
    std::uint16_t thread = 0;
    bool is_atomic = false;

    bool precedes(const Access& next) const {
        if (group == ~0u) return true;
        if (group != next.group) return false;
        if (thread == next.thread || epoch != next.epoch) return true;
        return thread / SIMD == next.thread / SIMD && simd_epoch != next.simd_epoch;
    }
    bool conflicts(const Access& next) const { return !(is_atomic && next.is_atomic) && !precedes(next); }
};

struct Cell {
    Access write, reads[2];
    std::uint32_t read_by = ~0u, written_by = ~0u;  // the last group, for the count
};

// What an argument or a threadgroup array lies in. Arguments that overlap share one.
struct Region {
    std::uint8_t *begin = nullptr, *end = nullptr;
    bool is_threadgroup = false;
    std::vector<Cell> cells;
    std::uint64_t read = 0, written = 0;

    void touch(const std::uint8_t* at, std::size_t bytes, bool writes, bool is_atomic) {
        Access now;
        int space = is_threadgroup;
        now.group = group.number, now.thread = std::uint16_t(self->index), now.is_atomic = is_atomic;
        now.epoch = group.epochs[space];
        now.simd_epoch = group.simdgroups[self->index / SIMD].epochs[space];
        for (Cell *x = &cells[at - begin], *last = x + bytes; x != last; ++x) {
            if (x->write.conflicts(now)) race(x->write, "writes", writes, at);
            if (writes) {
                for (const Access& earlier : x->reads)
                    if (earlier.conflicts(now)) race(earlier, "reads", writes, at);
                x->write = now;
                if (x->written_by != group.number) x->written_by = group.number, ++written;
            }
            if (!writes || is_atomic) {
                Access &a = x->reads[0], &b = x->reads[1];
                if (a.precedes(now))
                    a = now;
                else if (b.precedes(now) || (a.thread / SIMD == b.thread / SIMD && a.thread / SIMD != now.thread / SIMD))
                    b = now;
                // Reading again what this group wrote or read moves nothing.
                if (x->read_by != group.number) {
                    x->read_by = group.number;
                    if (x->written_by != group.number || is_atomic) ++read;
                }
            }
        }
    }

    [[noreturn]] void race(const Access& earlier, const char* what, bool writes, const std::uint8_t* at) const {
        fail("race at byte " + std::to_string(at - begin) + (is_threadgroup ? " of threadgroup memory" : " of a buffer") +
             ": thread " + std::to_string(earlier.thread) + " of group " + std::to_string(earlier.group) + " " + what +
             " it, this one " + (writes ? "writes" : "reads") + " it");
    }
};

template <typename T>
struct Vector4;

// An element of memory that can be written.
template <Space space, typename T>
struct Ref;

template <Space space, typename T>
struct Pointer {
    using Plain = std::remove_const_t<T>;
    std::uint8_t *at = nullptr, *begin = nullptr, *end = nullptr;
    Region* region = nullptr;

    Pointer() = default;
    Pointer(std::uint8_t* at, std::uint8_t* begin, std::uint8_t* end, Region* region) : at(at), begin(begin), end(end), region(region) {}
    template <typename U>
        requires(!std::is_same_v<std::remove_const_t<U>, Plain>)
    explicit Pointer(const Pointer<space, U>& other) : Pointer(other.at, other.begin, other.end, other.region) {}
    operator Pointer<space, const Plain>() const { return {at, begin, end, region}; }

    std::uint8_t* check(std::int64_t i) const {
        std::uint8_t* to = at + i * std::int64_t(sizeof(T));
        if (to < begin || to + sizeof(T) > end)
            fail(std::string("access outside of a ") + (space == Space::THREADGROUP ? "threadgroup array" : "buffer") + ": byte " +
                 std::to_string(to - begin) + " of " + std::to_string(end - begin));
        if (reinterpret_cast<std::uintptr_t>(to) % alignof(T)) fail("access that is not aligned");
        return to;
    }
    Plain load(std::int64_t i) const {
        std::uint8_t* from = check(i);
        if (region) region->touch(from, sizeof(T), false, false);
        Plain value;
        std::memcpy(&value, from, sizeof(T));
        return value;
    }
    void store(std::int64_t i, const Plain& value) const {
        static_assert(!std::is_const_v<T> && space != Space::CONSTANT);
        std::uint8_t* to = check(i);
        region->touch(to, sizeof(T), true, false);
        std::memcpy(to, &value, sizeof(T));
    }
    template <typename I>
    auto operator[](I i) const {
        if constexpr (std::is_const_v<T>)
            return load(std::int64_t(i));
        else
            return Ref<space, T>{*this + i};
    }
    auto operator*() const { return (*this)[0]; }
    template <typename I>
    Pointer operator+(I i) const {
        return {at + std::int64_t(i) * std::int64_t(sizeof(T)), begin, end, region};
    }
    template <typename I>
    Pointer operator-(I i) const {
        return *this + -std::int64_t(i);
    }
    template <typename I>
    Pointer& operator+=(I i) {
        return *this = *this + i;
    }
};

template <Space space, typename T>
struct Ref {
    Pointer<space, T> pointer;
    operator T() const { return pointer.load(0); }
    template <typename U>
        requires(!std::is_same_v<U, T>)
    explicit operator U() const {
        return U(pointer.load(0));
    }
    const Ref& operator=(const T& value) const { return pointer.store(0, value), *this; }
    const Ref& operator=(const Ref& other) const { return pointer.store(0, T(other)), *this; }
    Ref(const Ref&) = default;
    Ref(Pointer<space, T> pointer) : pointer(pointer) {}
    const Ref& operator+=(const T& value) const { return *this = T(T(*this) + value); }
    const Ref& operator-=(const T& value) const { return *this = T(T(*this) - value); }
    const Ref& operator*=(const T& value) const { return *this = T(T(*this) * value); }
    Pointer<space, T> operator&() const { return pointer; }
};

// Arrays of the group that runs, by the place of their declaration. At first all bytes are 0xff: NaN as any float.
inline std::map<int, std::pair<std::vector<std::uint8_t>, Region>> arrays;

template <typename T, std::size_t n, int place>
Pointer<Space::THREADGROUP, T> shared() {
    auto [found, is_new] = arrays.try_emplace(place);
    auto& [bytes, region] = found->second;
    if (is_new) {
        std::size_t all = n * sizeof(T);
        for (auto& [_, other] : arrays) all += other.first.size();
        if (all > THREADGROUP_BYTES) fail("threadgroup arrays of " + std::to_string(all) + " bytes, expected at most 32768");
        bytes.assign(n * sizeof(T), 0xff);
        region.is_threadgroup = true;
        region.begin = bytes.data(), region.end = region.begin + bytes.size();
        region.cells.resize(bytes.size());
    }
    return {region.begin, region.begin, region.end, &region};
}

}  // namespace emulated

#endif
