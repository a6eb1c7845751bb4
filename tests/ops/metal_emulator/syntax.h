// Names of metal_stdlib for clang -fsyntax-only, with each address space a type of its own. Nothing here runs.
#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#define thread
#define kernel
#define INFINITY __builtin_inff()
typedef unsigned int uint;
typedef unsigned long ulong;
typedef _Float16 half;
typedef __fp16 bfloat;
struct uint3 {
    uint x, y, z;
};
namespace metal {
enum class mem_flags { mem_none, mem_device, mem_threadgroup };
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);
template <typename T>
T simd_sum(T);
template <typename T>
T simd_max(T);
template <typename T>
T max(T, T);
template <typename T>
T min(T, T);
float exp(float);
float log(float);
float sqrt(float);
}  // namespace metal
