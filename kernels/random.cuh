// Counter-based random numbers: the CPU's bits (layerskip/ops/reference.py, definitions.py).
#pragma once
#include "common.cuh"

// What a number is for: word 3 of the counter. Streams never share a number.
constexpr uint64_t kTarget = 0;  // coupled drafts share it; so do recovered and bonus tokens
constexpr uint64_t kDraft = 1;   // of drafts with numbers of their own, new in every round
constexpr uint64_t kAcceptance = 2;

// Word `word` of block `block` of Philox4x64-10 (Salmon et al. 2011), key (seed, 0), counter
// (block, position, start, stream).
__device__ __forceinline__ uint64_t philox_word(uint64_t seed, uint64_t block, uint64_t position,
                                                uint64_t start, uint64_t stream, int word) {
  uint64_t c0 = block, c1 = position, c2 = start, c3 = stream, k0 = seed, k1 = 0;
#pragma unroll
  for (int round = 0; round < 10; round++) {
    uint64_t low0 = 0xD2E7470EE14C6C93ull * c0, high0 = __umul64hi(0xD2E7470EE14C6C93ull, c0);
    uint64_t low1 = 0xCA5A826395121157ull * c2, high1 = __umul64hi(0xCA5A826395121157ull, c2);
    c0 = high1 ^ c1 ^ k0;
    c2 = high0 ^ c3 ^ k1;
    c1 = low1;
    c3 = low0;
    k0 += 0x9E3779B97F4A7C15ull;
    k1 += 0xBB67AE8584CAA73Bull;
  }
  return word == 0 ? c0 : word == 1 ? c1 : word == 2 ? c2 : c3;
}

// 24 random bits of entry `index` of a stream: eight entries a block, two a word, from block 1 on.
// `start` is the position of a round's first token, where each round needs numbers of its own.
__device__ __forceinline__ unsigned uniform_bits(uint64_t seed, uint64_t position, uint64_t start,
                                                 uint64_t stream, unsigned index) {
  uint64_t word = philox_word(seed, 1 + index / 8, position, start, stream, index / 2 % 4);
  return static_cast<unsigned>(index & 1 ? word >> 32 : word) >> 8;
}

// Standard Gumbel noise of a 24-bit uniform, computed in fp64 and rounded once.
__device__ __forceinline__ float gumbel_of_uniform(unsigned bits) {
  double uniform = (bits + 0.5) * 5.9604644775390625e-08;
  return static_cast<float>(-portable_log(-portable_log(uniform)));
}

__device__ __forceinline__ float gumbel(uint64_t seed, uint64_t position, uint64_t start,
                                        uint64_t stream, unsigned index) {
  return gumbel_of_uniform(uniform_bits(seed, position, start, stream, index));
}
