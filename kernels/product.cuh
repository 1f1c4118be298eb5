// The product that linear, swiglu and lm_head share: 16 weight rows with up to 8 TILES tokens.
//
// Weights are the 16-row A operand of mma.m16n8k16, tokens its 8-column B operand, padded with
// zeros: a token's sum takes the same instructions in the same order whatever its column, its tile
// and the number of tokens. K is permuted alike in A and B, so that the 16 bytes a lane loads are
// its part of two k16 fragments, and weights go from memory to registers once for all tiles.
//
// Order of the sums, the same for every token: K in blocks of 32; warp w adds blocks w, w + 8, ...
// one after another, as two mma each (K % 8 in {0..3}, then {4..7}); then warps are added from 0.
#pragma once
#include "common.cuh"

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kBlockOfK = 32;

// The tokens of one block of threads, and the norm that they pass on the way in, if any.
template <class T>
struct Tokens {
  const uint16_t *x;  // the first token's row
  int64_t stride;
  int count;
  int width;
  bool aligned;
  const uint16_t *norm_weight;  // null without a norm
  const float *inverse_rms;     // of each token, in shared memory

  // Eight elements; `whole` says that none is past the end and that they are 16-byte aligned.
  __device__ __forceinline__ uint4 load(int token, int k, bool whole) const {
    uint4 v = load_eight(x + token * stride, k, width, whole);
    if (norm_weight == nullptr) return v;
    uint4 w = load_eight(norm_weight, k, width, whole);
    float scale = inverse_rms[token];
    return uint4{norm(v.x, w.x, scale), norm(v.y, w.y, scale), norm(v.z, w.z, scale),
                 norm(v.w, w.w, scale)};
  }

  static __device__ __forceinline__ unsigned norm(unsigned x, unsigned w, float scale) {
    float low = rounded<T>(low_half<T>(x) * scale) * low_half<T>(w);
    float high = rounded<T>(high_half<T>(x) * scale) * high_half<T>(w);
    return pack<T>(low, high);
  }
};

// 1 / sqrt(mean square + eps) of each row, into inverse_rms, for 256 threads. Order of a row's sum:
// thread i adds elements 8 i .. 8 i + 7, then those 2048 later, ...; a butterfly over each warp;
// warps from 0. `partial` is (rows, 8) floats of shared memory.
template <class T>
__device__ __forceinline__ void inverse_rms_of_rows(const Tokens<T> &rows, float eps,
                                                    float *partial, float *inverse_rms) {
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  for (int row = 0; row < rows.count; row++) {
    float sum = 0.f;
    for (int k = threadIdx.x * 8; k < rows.width; k += kThreads * 8) {
      uint4 v = load_eight(rows.x + row * rows.stride, k, rows.width, rows.aligned);
      unsigned pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int i = 0; i < 4; i++) {
        sum = fmaf(low_half<T>(pairs[i]), low_half<T>(pairs[i]), sum);
        sum = fmaf(high_half<T>(pairs[i]), high_half<T>(pairs[i]), sum);
      }
    }
    sum = warp_sum(sum);
    if (lane == 0) partial[row * kWarps + warp] = sum;
  }
  __syncthreads();
  for (int row = threadIdx.x; row < rows.count; row += kThreads) {
    float sum = 0.f;
    for (int i = 0; i < kWarps; i++) sum += partial[row * kWarps + i];
    inverse_rms[row] = 1.f / sqrtf(sum / rows.width + eps);
  }
  __syncthreads();
}

// How many blocks of K of its weights a warp has on their way at once.
__device__ constexpr int blocks_ahead(int tiles) { return tiles > 2 ? 2 : 4; }

// Before take_turn(): weights are no kernel's work, so what a warp will load of them first, as in
// multiply, may be on its way while earlier kernels still run. Lane 4 g + i asks for block i of
// rows g and g + 8, 64 bytes each. There is no result, so no bit depends on it.
template <int AHEAD>
__device__ __forceinline__ void ask_for_weights(const uint16_t *first, const uint16_t *second,
                                                int width) {
  int block = threadIdx.x & 3, k = (block * kWarps + (threadIdx.x >> 5)) * kBlockOfK;
  if (block >= AHEAD || k >= width) return;
  ask_for(first + k);
  ask_for(second + k);
}

// Adds one block of K, of which a lane holds eight weights of each half of the A operand.
template <class T, int TILES>
__device__ __forceinline__ void multiply_block(float (&sums)[TILES][4], uint4 low, uint4 high,
                                               const Tokens<T> &tokens, int k, bool whole) {
  unsigned a0[4] = {low.x, high.x, low.y, high.y}, a1[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
  for (int j = 0; j < TILES; j++) {
    int token = j * 8 + ((threadIdx.x & 31) >> 2);
    uint4 b{0u, 0u, 0u, 0u};
    if (token < tokens.count) b = tokens.load(token, k, whole);
    unsigned b0[2] = {b.x, b.y}, b1[2] = {b.z, b.w};
    T::mma(sums[j], a0, b0);
    T::mma(sums[j], a1, b1);
  }
}

// One warp's share of the product of weight rows `first` and `second` (rows g and g + 8 of the A
// operand, g = lane / 4) with the tokens. Rows past the last weight repeat a real one: a row of A
// reaches its own sums alone, and theirs are not stored. Weights of AHEAD blocks are on their way at
// once: a warp waits for memory once per group. It changes no order.
template <class T, int TILES, int AHEAD = blocks_ahead(TILES)>
__device__ __forceinline__ void multiply(float (&sums)[TILES][4], const uint16_t *first,
                                         const uint16_t *second, const Tokens<T> &tokens) {
  int lane = threadIdx.x & 31, part = (lane & 3) * 8;
#pragma unroll
  for (int j = 0; j < TILES; j++) {
#pragma unroll
    for (int i = 0; i < 4; i++) sums[j][i] = 0.f;
  }
  constexpr int kStride = kWarps * kBlockOfK;
  int k = (threadIdx.x >> 5) * kBlockOfK;
  if (tokens.aligned) {
#pragma unroll 1
    for (; k + (AHEAD - 1) * kStride + kBlockOfK <= tokens.width; k += AHEAD * kStride) {
      uint4 low[AHEAD], high[AHEAD];
#pragma unroll
      for (int i = 0; i < AHEAD; i++) {
        low[i] = load_once(first + k + i * kStride + part);
        high[i] = load_once(second + k + i * kStride + part);
      }
#pragma unroll
      for (int i = 0; i < AHEAD; i++) {
        int at = k + i * kStride + part;
        multiply_block<T, TILES>(sums, low[i], high[i], tokens, at, true);
      }
    }
  }
#pragma unroll 1
  for (; k < tokens.width; k += kStride) {
    if (tokens.aligned && k + kBlockOfK <= tokens.width) {
      multiply_block<T, TILES>(sums, load_once(first + k + part), load_once(second + k + part),
                               tokens, k + part, true);
      continue;
    }
    multiply_block<T, TILES>(sums, load_eight(first, k + part, tokens.width, false),
                             load_eight(second, k + part, tokens.width, false), tokens, k + part,
                             false);
  }
}

// Where a sum lies: entry e of lane l of a tile is weight row (l / 4) + 8 (e / 2) and token
// 8 tile + 2 (l % 4) + e % 2. `warp_sums` is (8 warps, 4 TILES, 32 lanes) floats of shared memory.
template <int TILES>
__device__ __forceinline__ void store_warp_sums(const float (&sums)[TILES][4], float *warp_sums) {
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
  for (int j = 0; j < TILES; j++) {
#pragma unroll
    for (int i = 0; i < 4; i++) warp_sums[((warp * TILES + j) * 4 + i) * 32 + lane] = sums[j][i];
  }
}

template <int TILES>
__device__ __forceinline__ float add_warps(const float *warp_sums, int entry) {
  int lane = threadIdx.x & 31;
  float sum = 0.f;
#pragma unroll
  for (int w = 0; w < kWarps; w++) sum += warp_sums[(w * TILES * 4 + entry) * 32 + lane];
  return sum;
}
