// The threads of a threadgroup on a host: fibers of one thread, each of which runs until it meets others, in random order.
//
// Stricter than a GPU: all threads of a group must come to one barrier, and all lanes of a simdgroup to one operation, by
// the line that it stands on. Anything else stops the launch with group and thread.
#ifndef CARAMBA_METAL_THREADS_H
#define CARAMBA_METAL_THREADS_H

#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace emulated {

constexpr unsigned SIMD = 32;
constexpr std::size_t STACK = 64 * 1024;
enum Scope { RUNS, AT_SIMDGROUP, AT_GROUP, DONE };

[[noreturn]] inline void fail(const std::string& what) { throw std::runtime_error(what); }

struct Thread {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    void* fake_stack = nullptr;
    unsigned index = 0;
    Scope scope = RUNS;
    const char* at = nullptr;
    int line = 0, flags = 0;
};

// Lanes hand values to each other in two places by turns: one that goes on overwrites nothing that another still reads.
struct Simdgroup {
    std::uint64_t values[2][SIMD] = {};
    bool is_there[SIMD] = {};
    unsigned turn = 0;
    std::uint32_t epochs[2] = {};  // of memory, by space: device, threadgroup
};

struct Triple {
    unsigned x = 1, y = 1, z = 1;
    std::uint64_t all() const { return std::uint64_t(x) * y * z; }
};

struct Group {
    Triple at, size, threads_per_grid, groups_per_grid, asked;
    std::uint32_t number = 0;
    std::vector<Simdgroup> simdgroups;
    std::uint32_t epochs[2] = {};
    std::string error;
};

inline std::vector<Thread> threads;
inline Group group;
inline Thread* self = nullptr;
inline ucontext_t scheduler;
inline void (*body)() = nullptr;

#if defined(__SANITIZE_ADDRESS__)
inline const void* scheduler_stack = nullptr;
inline std::size_t scheduler_bytes = 0;
inline void* scheduler_fake = nullptr;
inline void leaves(void** fake, const void* to, std::size_t bytes) { __sanitizer_start_switch_fiber(fake, to, bytes); }
inline void arrives(void* fake, const void** from, std::size_t* bytes) { __sanitizer_finish_switch_fiber(fake, from, bytes); }
#endif

inline void to_scheduler(Thread& own, bool is_last) {
#if defined(__SANITIZE_ADDRESS__)
    leaves(is_last ? nullptr : &own.fake_stack, scheduler_stack, scheduler_bytes);
#endif
    swapcontext(&own.context, &scheduler);
#if defined(__SANITIZE_ADDRESS__)
    arrives(own.fake_stack, &scheduler_stack, &scheduler_bytes);
#endif
}

inline void resume(Thread& own) {
    self = &own;
#if defined(__SANITIZE_ADDRESS__)
    leaves(&scheduler_fake, own.stack.get(), STACK);
#endif
    swapcontext(&scheduler, &own.context);
#if defined(__SANITIZE_ADDRESS__)
    arrives(scheduler_fake, nullptr, nullptr);
#endif
}

inline void run_thread() {
#if defined(__SANITIZE_ADDRESS__)
    arrives(nullptr, &scheduler_stack, &scheduler_bytes);
#endif
    Thread& own = *self;
    try {
        body();
    } catch (const std::exception& error) {
        group.error = "thread " + std::to_string(own.index) + ": " + error.what();
    }
    own.scope = DONE;
    to_scheduler(own, true);
}

inline void wait(Scope scope, const char* at, int line, int flags) {
    self->scope = scope, self->at = at, self->line = line, self->flags = flags;
    to_scheduler(*self, false);
}

inline std::string place(const Thread& x) {
    std::string name = "thread " + std::to_string(x.index);
    return x.scope == DONE ? name + " has ended" : name + " is at " + x.at + " of line " + std::to_string(x.line);
}

inline bool alike(const Thread& a, const Thread& b) {
    return a.scope == b.scope && a.line == b.line && a.flags == b.flags && std::strcmp(a.at, b.at) == 0;
}

// Let waiting threads go on together; an empty text, or what keeps them apart.
inline std::string release(unsigned n) {
    bool any = false;
    for (unsigned start = 0; start < n; start += SIMD) {
        unsigned end = std::min(start + SIMD, n), waits = 0;
        for (unsigned i = start; i < end; ++i) waits += threads[i].scope == AT_SIMDGROUP;
        if (!waits) continue;
        for (unsigned i = start + 1; i < end; ++i)
            if (waits != end - start || !alike(threads[i], threads[start]))
                return "divergent simdgroup: " + place(threads[start]) + ", " + place(threads[i]);
        Simdgroup& own = group.simdgroups[start / SIMD];
        ++own.turn;
        for (int space : {0, 1}) own.epochs[space] += threads[start].flags >> space & 1;
        for (unsigned i = start; i < end; ++i) threads[i].scope = RUNS;
        any = true;
    }
    if (any) return "";
    for (unsigned i = 1; i < n; ++i)
        if (!alike(threads[i], threads[0])) return "divergent barrier: " + place(threads[0]) + ", " + place(threads[i]);
    for (int space : {0, 1}) group.epochs[space] += threads[0].flags >> space & 1;
    for (unsigned i = 0; i < n; ++i) threads[i].scope = RUNS;
    return "";
}

// Run the threads of the group to their end; return what went wrong, or nothing.
inline std::string run_group(std::mt19937_64& random) {
    unsigned n = unsigned(group.size.all());
    if (threads.size() < n) threads.resize(n);
    group.simdgroups.assign((n + SIMD - 1) / SIMD, Simdgroup());
    group.error.clear();
    for (unsigned i = 0; i < n; ++i) {
        Thread& x = threads[i];
        x.index = i, x.scope = RUNS;
        group.simdgroups[i / SIMD].is_there[i % SIMD] = true;
        if (!x.stack) x.stack.reset(new char[STACK]);
#if defined(__SANITIZE_ADDRESS__)
        ASAN_UNPOISON_MEMORY_REGION(x.stack.get(), STACK);
#endif
        getcontext(&x.context);
        x.context.uc_stack.ss_sp = x.stack.get();
        x.context.uc_stack.ss_size = STACK;
        x.context.uc_link = nullptr;
        makecontext(&x.context, run_thread, 0);
    }
    std::vector<unsigned> ready;
    for (;;) {
        ready.clear();
        unsigned done = 0;
        for (unsigned i = 0; i < n; ++i) {
            if (threads[i].scope == RUNS) ready.push_back(i);
            done += threads[i].scope == DONE;
        }
        if (done == n) return "";
        if (ready.empty()) {
            std::string apart = release(n);
            if (!apart.empty()) return apart;
            continue;
        }
        std::shuffle(ready.begin(), ready.end(), random);
        for (unsigned i : ready) {
            resume(threads[i]);
            if (!group.error.empty()) return group.error;
        }
    }
}

}  // namespace emulated

#endif
