// What all kernels share: number formats, wrapped PTX, warp reductions, portable exp and log.
//
// Device code only. NVRTC compiles it for the GPU without any header; g++ compiles the same lines
// for the CPU emulator of the tests, which brings the names that CUDA has built in, and the names
// below that stand for an instruction.
#pragma once

#ifndef LAYERSKIP_EMULATOR
#ifdef __CUDACC_RTC__
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
using int64_t = long long;
#else
#include <cstdint>
#endif
#define DYNAMIC_SMEM(type, name)                                     \
  extern __shared__ __align__(128) unsigned char dynamic_smem_raw[]; \
  type *name = reinterpret_cast<type *>(dynamic_smem_raw)
#endif

constexpr unsigned kFullWarp = 0xffffffffu;
constexpr int kNoToken = 0x7fffffff;  // larger than any token id, so that every id wins over it

__device__ __forceinline__ float infinity() { return __uint_as_float(0x7f800000u); }

// ---- PTX, each instruction in one wrapper ------------------------------------------------------

#ifndef LAYERSKIP_EMULATOR

#define LAYERSKIP_MMA(name, type)                                                              \
  __device__ __forceinline__ void name(float (&c)[4], const unsigned (&a)[4],                  \
                                       const unsigned (&b)[2]) {                               \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 "                \
                 "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"                          \
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                              \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));          \
  }
LAYERSKIP_MMA(mma_m16n8k16_bf16, "bf16")
LAYERSKIP_MMA(mma_m16n8k16_f16, "f16")
#undef LAYERSKIP_MMA

__device__ __forceinline__ float half_to_float(uint16_t bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

__device__ __forceinline__ uint16_t float_to_half(float value) {
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

__device__ __forceinline__ uint16_t float_to_bf16(float value) {
  uint16_t bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

// Transposes an 8x8 matrix of 16-bit elements that lies across a warp: lane 4 r + c / 2 holds
// elements (r, c) and (r, c + 1), c even.
__device__ __forceinline__ unsigned transpose_8x8(unsigned pair) {
  unsigned out;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(pair));
  return out;
}

// 16 bytes that are read once: weights pass the L1 cache by.
__device__ __forceinline__ uint4 load_once(const uint16_t *address) {
  uint4 v;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(address));
  return v;
}

#if __CUDA_ARCH__ >= 900
// Until the kernels before this one have ended, and what they wrote can be seen.
__device__ __forceinline__ void wait_for_earlier_kernels() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// The next kernel may start once every block has said so, or has ended.
__device__ __forceinline__ void let_next_kernel_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
#endif

// Asks for what lies there to be brought to the L2 cache.
__device__ __forceinline__ void ask_for(const uint16_t *address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

#else

inline uint16_t float_to_bf16(float value) {  // to nearest, ties to even; one NaN
  unsigned bits = __float_as_uint(value);
  unsigned nearest = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>(value == value ? nearest : 0x7fffu);
}

inline unsigned transpose_8x8(unsigned pair) {
  unsigned lane = threadIdx.x & 31, row = lane >> 2, column = (lane & 3) * 2;
  unsigned low = __shfl_sync(kFullWarp, pair, column * 4 + row / 2);
  unsigned high = __shfl_sync(kFullWarp, pair, (column + 1) * 4 + row / 2);
  unsigned shift = (row & 1) * 16;
  return ((low >> shift) & 0xffffu) | ((high >> shift) << 16);
}

inline uint4 load_once(const uint16_t *address) {
  return *reinterpret_cast<const uint4 *>(address);
}

inline void ask_for(const uint16_t *) {}

#endif

#if defined(LAYERSKIP_EMULATOR) || __CUDA_ARCH__ < 900  // one kernel after another, by itself
__device__ __forceinline__ void wait_for_earlier_kernels() {}
__device__ __forceinline__ void let_next_kernel_start() {}
#endif

// First in every kernel: by every thread of every block, before it returns for any reason and
// before it loads or stores anything. A kernel may be started while the one before it still runs
// (`DriverLauncher.overlapping` in layerskip/ops/launch.py).
//
// The wait ends when that one has ended. It ended after its own wait, so that all before it have
// ended, too: no kernel is left that still reads what this one overwrites. A block that returned
// without waiting would break that chain.
// The next kernel is let in right after the wait. Before it, more than two kernels could be there
// at once, those that wait in the place of those that work; later, less of a start would be hidden.
// What an earlier kernel may have written is taken through pointers without __restrict__. With it,
// a compiler may load as from memory that nobody writes during the kernel's life, which has begun
// before the wait: by another path (ld.global.nc), and even before the wait.
__device__ __forceinline__ void take_turn() {
  wait_for_earlier_kernels();
  let_next_kernel_start();
}

// ---- number formats ----------------------------------------------------------------------------

struct Bf16 {
  static __device__ __forceinline__ float widen(unsigned bits) {
    return __uint_as_float(bits << 16);
  }
  static __device__ __forceinline__ uint16_t round(float value) { return float_to_bf16(value); }
  static __device__ __forceinline__ void mma(float (&c)[4], const unsigned (&a)[4],
                                             const unsigned (&b)[2]) {
    mma_m16n8k16_bf16(c, a, b);
  }
};

struct Fp16 {
  static __device__ __forceinline__ float widen(unsigned bits) {
    return half_to_float(static_cast<uint16_t>(bits));
  }
  static __device__ __forceinline__ uint16_t round(float value) { return float_to_half(value); }
  static __device__ __forceinline__ void mma(float (&c)[4], const unsigned (&a)[4],
                                             const unsigned (&b)[2]) {
    mma_m16n8k16_f16(c, a, b);
  }
};

template <class T>
__device__ __forceinline__ float rounded(float value) {
  return T::widen(T::round(value));
}

template <class T>
__device__ __forceinline__ unsigned pack(float low, float high) {
  return T::round(low) | (static_cast<unsigned>(T::round(high)) << 16);
}

template <class T>
__device__ __forceinline__ float low_half(unsigned pair) {
  return T::widen(pair & 0xffffu);
}

template <class T>
__device__ __forceinline__ float high_half(unsigned pair) {
  return T::widen(pair >> 16);
}

// Eight elements from row[k] on, zeros from row[width] on. `whole` says that all eight are there
// and lie at a multiple of 16 bytes.
__device__ __forceinline__ uint4 load_eight(const uint16_t *row, int k, int width, bool whole) {
  if (whole) return *reinterpret_cast<const uint4 *>(row + k);
  unsigned pairs[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    unsigned low = k + 2 * i < width ? row[k + 2 * i] : 0u;
    unsigned high = k + 2 * i + 1 < width ? row[k + 2 * i + 1] : 0u;
    pairs[i] = low | (high << 16);
  }
  return uint4{pairs[0], pairs[1], pairs[2], pairs[3]};
}

// ---- reductions over a warp: butterflies, so every lane gets the same bits ---------------------

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int offset = 16; offset; offset >>= 1) {
    value += __shfl_xor_sync(kFullWarp, value, offset);
  }
  return value;
}

__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int offset = 16; offset; offset >>= 1) {
    value = fmaxf(value, __shfl_xor_sync(kFullWarp, value, offset));
  }
  return value;
}

// A token and its score. Ties go to the lowest id, and NaN counts as the largest, as in torch.
struct Best {
  float score;
  int id;
};

__device__ __forceinline__ Best candidate(float score, int id) {
  return Best{score == score ? score : infinity(), id};
}

__device__ __forceinline__ Best better(Best a, Best b) {
  return b.score > a.score || (b.score == a.score && b.id < a.id) ? b : a;
}

__device__ __forceinline__ Best nobody() { return Best{-infinity(), kNoToken}; }

__device__ __forceinline__ Best warp_best(Best best) {
#pragma unroll
  for (int offset = 16; offset; offset >>= 1) {
    Best other{__shfl_xor_sync(kFullWarp, best.score, offset),
               __shfl_xor_sync(kFullWarp, best.id, offset)};
    best = better(best, other);
  }
  return best;
}

// ---- exp and log by correctly rounded operations alone: the same bits on every device ----------

// exp(x): 2^n exp(r) with |r| <= ln(2) / 2 and a series of degree 7. Relative error below 2e-7.
// Below -87 it is 0, above 88 it is infinite; NaN stays NaN.
__device__ __forceinline__ float portable_exp(float x) {
  float bounded = fminf(fmaxf(x, -87.f), 88.f);
  float n = rintf(bounded * 1.44269504f);
  float r = fmaf(n, -0.693145752f, bounded);  // ln(2) in two parts: the first times n is exact
  r = fmaf(n, -1.42860677e-6f, r);
  float series = 1.f / 5040.f;
  series = fmaf(series, r, 1.f / 720.f);
  series = fmaf(series, r, 1.f / 120.f);
  series = fmaf(series, r, 1.f / 24.f);
  series = fmaf(series, r, 1.f / 6.f);
  series = fmaf(series, r, 0.5f);
  series = fmaf(series, r, 1.f);
  series = fmaf(series, r, 1.f);
  float power = series * __uint_as_float(static_cast<unsigned>(static_cast<int>(n) + 127) << 23);
  power = x < -87.f ? 0.f : x > 88.f ? infinity() : power;
  return x == x ? power : x;
}

__device__ __forceinline__ float portable_tanh(float x) {
  float power = portable_exp(-2.f * fabsf(x));
  float magnitude = (1.f - power) / (1.f + power);
  return x < 0.f ? -magnitude : magnitude;
}

// log(x) of a positive normal number, within 0.52 units in the last place: x = 2^e m with m between
// sqrt(1/2) and sqrt(2), log m = 2 atanh(s), s = (m - 1) / (m + 1), s to twice the precision.
__device__ __forceinline__ double portable_log(double x) {
  int64_t bits = __double_as_longlong(x);
  int e = static_cast<int>(bits >> 52) - 1023;
  double m = __longlong_as_double((bits & 0x000fffffffffffffll) | 0x3ff0000000000000ll);
  if (m > 1.4142135623730951) {
    m *= 0.5;
    e += 1;
  }
  double numerator = m - 1.0, denominator = m + 1.0;
  double denominator_rest = m - (denominator - 1.0);
  double s = numerator / denominator;
  double s_rest = fma(-s, denominator_rest, fma(-s, denominator, numerator)) / denominator;
  double z = s * s, series = 1.0 / 27.0;
#pragma unroll
  for (int odd = 25; odd >= 3; odd -= 2) series = fma(series, z, 1.0 / odd);
  double tail = fma(s * z, series, s_rest);
  double high = e * 0.69314718036912382;  // ln(2) in two parts: 32 bits, so that this is exact
  double sum = high + 2.0 * s;
  double sum_rest = (high - sum) + 2.0 * s;
  return sum + fma(static_cast<double>(e), 1.9082149292705877e-10, fma(2.0, tail, sum_rest));
}
