// CUDA's built-in variables, types and functions, on the emulator's fibers.
#pragma once
#include <algorithm>
#include <cmath>

#define threadIdx (emulator::self().thread)
#define blockIdx (emulator::block().index)
#define blockDim (emulator::machine->block)
#define gridDim (emulator::machine->grid)
#define warpSize 32
#define DYNAMIC_SMEM(type, name) \
  type *name = reinterpret_cast<type *>(emulator::block().shared)

struct __align__(8) int2 {
  int x, y;
};
struct __align__(16) int4 {
  int x, y, z, w;
};
struct __align__(8) uint2 {
  unsigned x, y;
};
struct __align__(16) uint4 {
  unsigned x, y, z, w;
};
struct __align__(8) float2 {
  float x, y;
};
struct __align__(16) float4 {
  float x, y, z, w;
};
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// Barriers. A thread that has returned no longer counts, as on the GPU.
inline void __syncthreads(EMULATOR_HERE) {
  emulator::Block &block = emulator::block();
  emulator::arrive(block.barrier, block.live, "__syncthreads", where);
}
inline void __syncwarp(unsigned mask = ~0u, EMULATOR_HERE) {
  emulator::meet(mask, 0, "__syncwarp", where, [](auto &) {}, [](auto &, unsigned) { return 0; });
}
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_block() {}
inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __nanosleep(unsigned, EMULATOR_HERE) { emulator::spin(where); }

// Shuffles: lanes are grouped in segments of `width`.
namespace emulator {
template <class T, class Source>
T shuffle(unsigned mask, T value, const char *what, Where where, Source source) {
  auto read = [&](auto &slots, unsigned lane) {
    unsigned from = source(lane) & 31;
    if (!(mask >> from & 1)) fail_to_read(from, what, where);
    return load<T>(slots[from]);
  };
  return meet(mask, value, what, where, [](auto &) {}, read);
}
}  // namespace emulator

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, EMULATOR_HERE) {
  return emulator::shuffle(mask, value, "__shfl_sync", where, [=](unsigned lane) {
    return (lane & ~(width - 1u)) | (source & (width - 1u));
  });
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, EMULATOR_HERE) {
  return emulator::shuffle(mask, value, "__shfl_xor_sync", where, [=](unsigned lane) {
    unsigned from = lane ^ lanes;
    return (from | (width - 1u)) <= (lane | (width - 1u)) ? from : lane;
  });
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, EMULATOR_HERE) {
  return emulator::shuffle(mask, value, "__shfl_down_sync", where, [=](unsigned lane) {
    return (lane & (width - 1u)) + delta < unsigned(width) ? lane + delta : lane;
  });
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, EMULATOR_HERE) {
  return emulator::shuffle(mask, value, "__shfl_up_sync", where, [=](unsigned lane) {
    return (lane & (width - 1u)) >= delta ? lane - delta : lane;
  });
}

// Votes.
inline unsigned __ballot_sync(unsigned mask, int predicate, EMULATOR_HERE) {
  auto read = [=](auto &slots, unsigned) {
    unsigned votes = 0;
    for (unsigned lane = 0; lane < 32; lane++) {
      if (mask >> lane & 1 && emulator::load<int>(slots[lane]) != 0) votes |= 1u << lane;
    }
    return votes;
  };
  return emulator::meet(mask, predicate, "__ballot_sync", where, [](auto &) {}, read);
}
inline int __any_sync(unsigned mask, int predicate, EMULATOR_HERE) {
  return __ballot_sync(mask, predicate, where) != 0;
}
inline int __all_sync(unsigned mask, int predicate, EMULATOR_HERE) {
  return __ballot_sync(mask, predicate, where) == mask;
}

// Atomics: blocks may run on several OS threads.
namespace emulator {
template <class T, class Next>
T atomic_update(T *address, Next next) {
  T old, wanted;
  __atomic_load(address, &old, __ATOMIC_ACQUIRE);
  do {
    wanted = next(old);
  } while (!__atomic_compare_exchange(address, &old, &wanted, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE));
  return old;
}
}  // namespace emulator
template <class T, class U>
T atomicAdd(T *address, U value) {
  return emulator::atomic_update(address, [=](T old) { return T(old + value); });
}
template <class T, class U>
T atomicMax(T *address, U value) {
  return emulator::atomic_update(address, [=](T old) { return old < T(value) ? T(value) : old; });
}
template <class T, class U>
T atomicMin(T *address, U value) {
  return emulator::atomic_update(address, [=](T old) { return T(value) < old ? T(value) : old; });
}
template <class T, class U>
T atomicExch(T *address, U value) {
  return emulator::atomic_update(address, [=](T) { return T(value); });
}
template <class T, class U, class V>
T atomicCAS(T *address, U expected, V value) {
  return emulator::atomic_update(address, [=](T old) { return old == T(expected) ? T(value) : old; });
}
// Counts up to `limit`, then starts again at 0.
inline unsigned atomicInc(unsigned *address, unsigned limit) {
  return emulator::atomic_update(address, [=](unsigned old) { return old >= limit ? 0u : old + 1; });
}

// Loads through the read-only cache.
template <class T>
T __ldg(const T *address) {
  return *address;
}
template <class T>
T __ldcs(const T *address) {
  return *address;
}

// Bits.
namespace emulator {
template <class To, class From>
To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast");
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}
}  // namespace emulator
inline float __uint_as_float(unsigned x) { return emulator::bit_cast<float>(x); }
inline unsigned __float_as_uint(float x) { return emulator::bit_cast<unsigned>(x); }
inline float __int_as_float(int x) { return emulator::bit_cast<float>(x); }
inline int __float_as_int(float x) { return emulator::bit_cast<int>(x); }
inline double __longlong_as_double(long long x) { return emulator::bit_cast<double>(x); }
inline long long __double_as_longlong(double x) { return emulator::bit_cast<long long>(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned(uint64_t(a) * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return (unsigned long long)((unsigned __int128)a * b >> 64);
}

// Arithmetic. The fast forms are the exact ones here.
using std::max;
using std::min;
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline int __float2int_rn(float x) { return int(std::nearbyint(x)); }
