// A block's lanes on a host: fibers of one thread, each of which runs until it meets others.
//
// It is stricter than a GPU where that shows mistakes. Shared memory is bytes 0xff at first (NaN as any float); addresses are
// checked for their bounds and alignment; what all lanes of a warp have to do together, they must all do, or the launch fails.
// Copies are done as late as is allowed, when they are waited for (or at once, with `early`), and lanes run in ascending order
// (or descending, with `descending`): a wait or a sync that is missing shows in one of these.
#ifndef CARAMBA_EMULATED_LANES_H
#define CARAMBA_EMULATED_LANES_H

#include <ucontext.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

typedef std::uint8_t u8;
typedef std::uint16_t u16;
typedef std::uint32_t u32;
typedef unsigned long long u64;
typedef long long i64;

struct u32x2 {
    u32 x, y;
};
struct u32x4 {
    u32 x, y, z, w;
};

#define __global__
#define __device__
#define __constant__ static
#define __forceinline__ inline
#define __launch_bounds__(...)
#define DEVICE inline

using std::max;
using std::min;

namespace emulated {

constexpr int WARP = 32;
constexpr u32 BASE = 4096;  // of shared memory's addresses: one that is an offset is out of bounds
constexpr std::size_t STACK = 192 * 1024;

[[noreturn]] inline void fail(const std::string& what) { throw std::runtime_error(what); }

struct Copy {
    u32 to;
    const void* from;
    bool is_there;
};

// Where lanes meet. The last to come does the work of all.
struct Meeting {
    const char* what = nullptr;
    int arrived = 0;
    u64 generation = 0;
};

struct Lane {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    int thread;
    bool is_done = false;
    bool has_waited = false;  // for the kernel ahead
    const Meeting* at = nullptr;
    u64 generation = 0;
    std::vector<std::vector<Copy>> groups;  // the last is still open
};

// What a warp's lanes bring to a meeting, and take from it.
struct Warp {
    Meeting meeting;
    u32 brought[WARP][6];
    float sums[WARP][4];
    u32 rows[WARP][4];
    u32 taken[WARP][4];
};

// Four warps that meet, and what any of their lanes brought last.
struct Team {
    Meeting meeting;
    bool gathers = false, found = false;
};

struct Block {
    int x, y, grid_y;
    bool early, descending;
    std::vector<u8> memory;
    u8* shared;
    std::vector<Lane> lanes;
    std::vector<Warp> warps;
    std::vector<Team> teams;
    Meeting meeting;
    ucontext_t scheduler;
    std::string error;
    int done = 0;
};

inline Block* block = nullptr;
inline Lane* lane = nullptr;
inline void (*body)(void**) = nullptr;
inline void** arguments = nullptr;

inline Warp& warp() { return block->warps[lane->thread / WARP]; }
inline int place() { return lane->thread % WARP; }

inline bool can_run(const Lane& x) { return !x.is_done && (x.at == nullptr || x.at->generation != x.generation); }

// Come to a meeting of `size` lanes; the last does `work`, and then waits for its turn as the others do.
template <typename Work>
void meet(Meeting& meeting, int size, const char* what, Work work) {
    if (meeting.arrived == 0) meeting.what = what;
    if (std::strcmp(meeting.what, what) != 0)
        fail(std::string("lanes of one warp or block are at ") + what + " and at " + meeting.what);
    Lane* self = lane;
    self->at = &meeting;
    self->generation = meeting.generation;
    if (++meeting.arrived == size) {
        work();
        meeting.arrived = 0;
        ++meeting.generation;
    }
    swapcontext(&self->context, &block->scheduler);
    self->at = nullptr;
}

template <typename Work>
void meet_warp(const char* what, Work work) {
    meet(warp().meeting, WARP, what, work);
}

inline u8* at(u32 address, u32 bytes, const char* what) {
    if (address % bytes) fail(std::string(what) + " at an address that is not a multiple of its bytes");
    if (address < BASE || address - BASE + bytes > block->memory.size() - 128)
        fail(std::string(what) + " out of shared memory's bounds");
    return block->shared + (address - BASE);
}

inline void complete(const Copy& copy) {
    u8* to = at(copy.to, 16, "a copy");
    if (copy.is_there)
        std::memcpy(to, copy.from, 16);
    else
        std::memset(to, 0, 16);
}

inline void start() {
    try {
        body(arguments);
        lane->is_done = true;
        ++block->done;
    } catch (const std::exception& error) {
        block->error = error.what();
        lane->is_done = true;
    }
    Lane* self = lane;
    swapcontext(&self->context, &block->scheduler);
}

// Run a block's lanes to their end; return what went wrong, or nothing.
inline std::string run(Block& own) {
    block = &own;
    int threads = int(own.lanes.size());
    for (int i = 0; i < threads; ++i) {
        Lane& x = own.lanes[i];
        x.thread = i;
        x.groups.resize(1);
        if (!x.stack) x.stack.reset(new char[STACK]);
        getcontext(&x.context);
        x.context.uc_stack.ss_sp = x.stack.get();
        x.context.uc_stack.ss_size = STACK;
        x.context.uc_link = nullptr;
        makecontext(&x.context, start, 0);
    }
    while (own.done < threads) {
        bool has_run = false;
        for (int i = 0; i < threads; ++i) {
            Lane& x = own.lanes[own.descending ? threads - 1 - i : i];
            if (!can_run(x)) continue;
            has_run = true;
            lane = &x;
            swapcontext(&own.scheduler, &x.context);
            if (!own.error.empty()) return own.error;
        }
        if (!has_run) {
            for (const Lane& x : own.lanes)
                if (!x.is_done)
                    return std::string("lane ") + std::to_string(x.thread) + " waits for others at " + x.at->what;
        }
    }
    return "";
}

template <typename... Args, std::size_t... I>
void call(void (*kernel)(Args...), void** given, std::index_sequence<I...>) {
    kernel(*static_cast<std::remove_cv_t<std::remove_reference_t<Args>>*>(given[I])...);
}

// Run a grid, block after block. `given` are pointers to the arguments, as cuLaunchKernel takes them.
inline std::string launch(void (*with)(void**), int grid_x, int grid_y, int threads, int shared_bytes, int mode, void** given) {
    body = with;
    arguments = given;
    Block own;
    own.lanes.resize(threads);
    for (int y = 0; y < grid_y; ++y)
        for (int x = 0; x < grid_x; ++x) {
            own.x = x, own.y = y, own.grid_y = grid_y, own.done = 0;
            own.early = mode & 1, own.descending = mode & 2;
            own.memory.assign(shared_bytes + 128, 0xff);
            own.shared = own.memory.data() + (128 - reinterpret_cast<std::uintptr_t>(own.memory.data()) % 128) % 128;
            own.warps.assign((threads + WARP - 1) / WARP, Warp());
            own.teams.assign((own.warps.size() + 3) / 4, Team());
            own.meeting = Meeting();
            for (Lane& x : own.lanes) x.is_done = x.has_waited = false, x.at = nullptr, x.groups.clear();
            std::string error = run(own);
            if (!error.empty())
                return "block (" + std::to_string(x) + ", " + std::to_string(y) + "), lane " +
                       std::to_string(lane->thread) + ": " + error;
        }
    return "";
}

}  // namespace emulated

// Defines a function of C that runs a kernel: 0, or the length of what went wrong, which is written to `error`.
#define EMULATED(KERNEL)                                                                                            \
    static void body_of_##KERNEL(void** given) {                                                                    \
        auto call = []<typename... Args>(void (*kernel)(Args...), void** from) {                                    \
            emulated::call(kernel, from, std::index_sequence_for<Args...>());                                       \
        };                                                                                                          \
        call(KERNEL, given);                                                                                        \
    }                                                                                                               \
    extern "C" int run_##KERNEL(int grid_x, int grid_y, int threads, int shared_bytes, int mode, void** given,      \
                                char* error, int room) {                                                            \
        std::string found = emulated::launch(body_of_##KERNEL, grid_x, grid_y, threads, shared_bytes, mode, given); \
        std::strncpy(error, found.c_str(), room - 1);                                                               \
        return int(found.size());                                                                                   \
    }

#endif
