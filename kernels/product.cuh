// The product that linear, swiglu and lm_head share: 16 weight rows with up to 8 TILES tokens.
//
// Weights are the 16-row A operand of mma.m16n8k16, tokens its 8-column B operand, filled up with the
// last token: a token's sum takes the same instructions in the same order whatever its column, its
// tile and the number of tokens. K is permuted alike in A and B, so that the 16 bytes a lane loads
// are its part of two k16 fragments, and weights go from memory to registers once for all tiles.
//
// Order of the sums, the same for every token: K in blocks of 32; warp w adds blocks w, w + 8, ...
// one after another, as two mma each (K % 8 in {0..3}, then {4..7}); then warps are added from 0.
#pragma once
#include "common.cuh"

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kBlockOfK = 32;
constexpr int kStride = kWarps * kBlockOfK;  // from one block of K to a warp's next

// The tokens of one block of threads.
struct Tokens {
  const uint16_t *x;  // the first token's row, in memory or in shared memory
  int64_t stride;
  int count;
  int width;
  bool aligned;  // rows begin at multiples of 16 bytes, and so does what follows the last of them

  // Eight elements; `whole` says that none is past the end and that they are 16-byte aligned.
  __device__ __forceinline__ uint4 load(int token, int k, bool whole) const {
    return load_eight(x + token * stride, k, width, whole);
  }
};

// Eight elements times the row's scale, rounded, times their weights.
template <class T>
__device__ __forceinline__ uint4 normed(uint4 x, uint4 weight, float scale) {
  auto pair = [&](unsigned x, unsigned w) {
    float low = rounded<T>(low_half<T>(x) * scale) * low_half<T>(w);
    float high = rounded<T>(high_half<T>(x) * scale) * high_half<T>(w);
    return pack<T>(low, high);
  };
  return uint4{pair(x.x, weight.x), pair(x.y, weight.y), pair(x.z, weight.z), pair(x.w, weight.w)};
}

// Of rows in shared memory: four banks apart in eights, so that eight lanes' loads meet in none.
__device__ constexpr int normed_stride(int width) { return (width + 7) / 8 * 8 + 32; }

__device__ __forceinline__ void store_eight(uint16_t *to, uint4 v) {
  *reinterpret_cast<uint4 *>(to) = v;
}

template <class T>
__device__ __forceinline__ void add_squares(float &sum, uint4 v) {
  unsigned pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    sum = fmaf(low_half<T>(pairs[i]), low_half<T>(pairs[i]), sum);
    sum = fmaf(high_half<T>(pairs[i]), high_half<T>(pairs[i]), sum);
  }
}

// What each warp has of the squares of ROWS rows, whose loads are on their way at once; `copies`, if
// not null, receives the rows.
template <class T, int ROWS>
__device__ __forceinline__ void add_rows(const Tokens &rows, int first, float *partial,
                                         uint16_t *copies) {
  float sums[ROWS] = {};
#pragma unroll 1
  for (int k = threadIdx.x * 8; k < rows.width; k += kThreads * 8) {
    uint4 v[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; i++) v[i] = rows.load(first + i, k, rows.aligned);
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
      if (copies != nullptr) store_eight(copies + (first + i) * normed_stride(rows.width) + k, v[i]);
      add_squares<T>(sums[i], v[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < ROWS; i++) {
    float sum = warp_sum(sums[i]);
    if ((threadIdx.x & 31) == 0) partial[(first + i) * kWarps + (threadIdx.x >> 5)] = sum;
  }
}

// The first half of a norm, for 256 threads: `partial` is (rows, 8) floats of shared memory. Order of
// a row's sum: thread i adds elements 8 i .. 8 i + 7, then those 2048 later, ...; a butterfly over
// each warp; warps from 0.
template <class T>
__device__ __forceinline__ void add_all_rows(const Tokens &rows, float *partial, uint16_t *copies) {
  int first = 0;
#pragma unroll 1
  for (; first + 4 <= rows.count; first += 4) add_rows<T, 4>(rows, first, partial, copies);
  if (first + 2 <= rows.count) {
    add_rows<T, 2>(rows, first, partial, copies);
    first += 2;
  }
  if (first < rows.count) add_rows<T, 1>(rows, first, partial, copies);
}

// The second half: 1 / sqrt(mean square + eps) of each row.
__device__ __forceinline__ void inverse_rms_of_rows(const Tokens &rows, float eps,
                                                    const float *partial, float *inverse_rms) {
  __syncthreads();
  for (int row = threadIdx.x; row < rows.count; row += kThreads) {
    float sum = 0.f;
    for (int i = 0; i < kWarps; i++) sum += partial[row * kWarps + i];
    inverse_rms[row] = 1.f / sqrtf(sum / rows.width + eps);
  }
  __syncthreads();
}

// A product's own norm: `rows`, (count + 1, normed_stride(width)) of shared memory, receives the
// tokens as they are and the norm's weight, and `partial` what norming them needs. They are asked
// for before the weights of the product, behind which they would have to queue.
template <class T>
__device__ __forceinline__ void copy_tokens(const Tokens &tokens, const uint16_t *norm_weight,
                                            float *partial, uint16_t *rows) {
  Tokens weight{norm_weight, 0, 1, tokens.width, tokens.aligned};
  uint16_t *last = rows + tokens.count * normed_stride(tokens.width);
#pragma unroll 1
  for (int k = threadIdx.x * 8; k < tokens.width; k += kThreads * 8) {
    store_eight(last + k, weight.load(0, k, tokens.aligned));
  }
  add_all_rows<T>(tokens, partial, rows);
}

// The tokens normed, where copy_tokens left them.
template <class T>
__device__ __forceinline__ Tokens normed_tokens(const Tokens &tokens, float eps,
                                                const float *partial, float *inverse_rms,
                                                uint16_t *rows) {
  inverse_rms_of_rows(tokens, eps, partial, inverse_rms);
  int stride = normed_stride(tokens.width);
  const uint16_t *weight = rows + tokens.count * stride;
#pragma unroll 1
  for (int k = threadIdx.x * 8; k < tokens.width; k += kThreads * 8) {
#pragma unroll 2
    for (int row = 0; row < tokens.count; row++) {
      uint4 *own = reinterpret_cast<uint4 *>(rows + row * stride + k);
      *own = normed<T>(*own, *reinterpret_cast<const uint4 *>(weight + k), inverse_rms[row]);
    }
  }
  __syncthreads();
  return Tokens{rows, stride, tokens.count, tokens.width, tokens.aligned};
}

// How many blocks of K a warp has on their way at any time: as many as there are registers for.
__device__ constexpr int blocks_ahead(int tiles) {
  return tiles > 4 ? 3 : tiles > 2 ? 2 : tiles > 1 ? 4 : 6;
}

// Blocks of threads on a multiprocessor: with eight tiles' registers there is room for one.
__device__ constexpr int blocks_together(int tiles) { return tiles > 4 ? 1 : 2; }

// Before take_turn(): weights are no kernel's work, so what a warp will load of them first, as in
// Ring::ask_weights, may be on its way while earlier kernels still run. Lane 4 g + i asks for blocks i,
// i + 4, ... of rows g and g + 8, 64 bytes each. There is no result, so no bit depends on it.
template <int AHEAD>
__device__ __forceinline__ void ask_for_weights(const uint16_t *first, const uint16_t *second,
                                                int width) {
#pragma unroll
  for (int i = 0; i < AHEAD; i += 4) {
    int block = i + (threadIdx.x & 3), k = (block * kWarps + (threadIdx.x >> 5)) * kBlockOfK;
    if (block < AHEAD && k < width) {
      ask_for(first + k);
      ask_for(second + k);
    }
  }
}

// What the tokens bring to one block of K: a lane's eight elements of its token in each tile. A
// column past the last token is the last one's once more; nobody stores its sums.
template <int TILES>
__device__ __forceinline__ void load_tokens(uint4 (&b)[TILES], const Tokens &tokens, int k,
                                            bool whole) {
#pragma unroll
  for (int j = 0; j < TILES; j++) {
    int token = min(j * 8 + (static_cast<int>(threadIdx.x & 31) >> 2), tokens.count - 1);
    b[j] = tokens.load(token, k, whole);
  }
}

// A warp's share of a product: rows g and g + 8 of 16 weight rows, g = lane / 4, of which a lane
// holds eight elements of each block of K, and the tokens'. AHEAD blocks are on their way at any
// time; those below `whole` can be loaded as they are. Tokens are asked for before weights: they
// would have to queue behind what comes from memory.
template <int TILES, int AHEAD = blocks_ahead(TILES)>
struct Ring {
  const uint16_t *first, *second;
  int whole;
  uint4 low[AHEAD], high[AHEAD], b[AHEAD][TILES];

  // Rows past the last weight repeat a real one: a row of A reaches its own sums alone, and theirs
  // are not stored.
  __device__ __forceinline__ void turn_to(const uint16_t *row, const uint16_t *row_and_8, int width,
                                          bool aligned) {
    first = row, second = row_and_8;
    whole = aligned ? width / kBlockOfK * kBlockOfK : 0;
  }

  __device__ __forceinline__ void ask_tokens(const Tokens &tokens) {
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      int k = (threadIdx.x >> 5) * kBlockOfK + i * kStride;
      if (k < whole) load_tokens(b[i], tokens, k + (threadIdx.x & 3) * 8, true);
    }
  }

  __device__ __forceinline__ void ask_weights() {
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      int k = (threadIdx.x >> 5) * kBlockOfK + i * kStride;
      if (k < whole) load_weights(i, k + (threadIdx.x & 3) * 8);
    }
  }

  __device__ __forceinline__ void ask(const Tokens &tokens) {
    ask_tokens(tokens);
    ask_weights();
  }

  __device__ __forceinline__ void load_weights(int i, int k) {
    low[i] = load_once(first + k);
    high[i] = load_once(second + k);
  }
};

// Asks for what the ring holds first. Returns the tokens as the product takes them: normed, if there
// is a norm, while the weights are on their way.
template <class T, int TILES, int AHEAD>
__device__ __forceinline__ Tokens first_asked(Ring<TILES, AHEAD> &ring, Tokens tokens,
                                              const uint16_t *norm_weight, float eps,
                                              float *partial, float *inverse_rms, uint16_t *rows) {
  if (norm_weight != nullptr) copy_tokens<T>(tokens, norm_weight, partial, rows);
  if (norm_weight == nullptr) ring.ask_tokens(tokens);
  ring.ask_weights();
  if (norm_weight == nullptr) return tokens;
  tokens = normed_tokens<T>(tokens, eps, partial, inverse_rms, rows);
  ring.ask_tokens(tokens);
  return tokens;
}

// Adds one block of K, of which a lane holds eight weights of each half of the A operand.
template <class T, int TILES>
__device__ __forceinline__ void multiply_block(float (&sums)[TILES][4], uint4 low, uint4 high,
                                               const uint4 (&b)[TILES]) {
  unsigned a0[4] = {low.x, high.x, low.y, high.y}, a1[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
  for (int j = 0; j < TILES; j++) {
    unsigned b0[2] = {b[j].x, b[j].y}, b1[2] = {b[j].z, b[j].w};
    T::mma(sums[j], a0, b0);
    T::mma(sums[j], a1, b1);
  }
}

// The share's sums; what the ring holds has been asked for.
template <class T, int TILES, int AHEAD>
__device__ __forceinline__ void multiply(float (&sums)[TILES][4], Ring<TILES, AHEAD> &ring,
                                         const Tokens &tokens) {
  int warp = threadIdx.x >> 5, part = (threadIdx.x & 3) * 8, whole = ring.whole;
#pragma unroll
  for (int j = 0; j < TILES; j++) {
#pragma unroll
    for (int i = 0; i < 4; i++) sums[j][i] = 0.f;
  }
#pragma unroll 1
  for (int k = warp * kBlockOfK; k < whole; k += AHEAD * kStride) {
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      int at = k + i * kStride, later = at + AHEAD * kStride;
      if (at >= whole) break;
      multiply_block<T>(sums, ring.low[i], ring.high[i], ring.b[i]);
      if (later >= whole) continue;
      load_tokens(ring.b[i], tokens, later + part, true);
      ring.load_weights(i, later + part);
    }
  }
  // What is left: the last, ragged block, or all of them where nothing is aligned.
  int behind = (warp - whole / kBlockOfK) & (kWarps - 1);
#pragma unroll 1
  for (int k = whole + behind * kBlockOfK; k < tokens.width; k += kStride) {
    uint4 b[TILES];
    load_tokens(b, tokens, k + part, false);
    multiply_block<T>(sums, load_eight(ring.first, k + part, tokens.width, false),
                      load_eight(ring.second, k + part, tokens.width, false), b);
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
