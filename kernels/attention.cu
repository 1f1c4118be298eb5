#include "common.cuh"

// Attention of 1..32 new positions per sequence over its cache, in two kernels: one over splits of
// the keys, one that combines the splits.
//
// The query rows of one kv head (position-major, then the group) are packed into tiles of 8: the
// 8-column B operand of mma.m16n8k16, padded with zeros. Keys are the 16-row A operand of the
// first product, values, transposed while they are loaded, that of the second; what is loaded of
// both serves all TILES tiles of a block. So the instructions that a row takes do not depend on how
// many rows there are, nor on its place among them.
//
// Order of a row's sums: keys are counted from slot 0 in chunks of 64, one warp each. In a chunk:
// scores over head_dim in blocks of 32; the largest; the sum of exp by lane (keys g, g + 8, g + 16,
// ... for g = 0..7), then a butterfly over g; values over keys in blocks of 16. Four chunks make a
// split, added in order; splits are added in order. An invisible chunk has weight 0 and changes no
// bit. Everything is a function of the slot, none of it of the number of slots.
constexpr int kTile = 8;
constexpr int kChunkKeys = 64;
constexpr int kSplitWarps = 4;
constexpr int kSplitKeys = kChunkKeys * kSplitWarps;
constexpr int kDims = 64;  // of values, that a block sums at a time
// Up to which a block asks for all its keys and values at once: a tenth of its time on an H200. Of
// 8192 keys it took a tenth more.
constexpr int kFewKeys = 2048;

// The rows that see a key: positions run from `first` to `last` in a tile.
struct Visibility {
  int window;  // a position sees itself and window - 1 before it; 0 sees everything before it
  int slots;

  __device__ __forceinline__ int begin(int position) const {
    return window > 0 ? max(0, position - window + 1) : 0;
  }
  __device__ __forceinline__ int end(int position) const { return min(position + 1, slots); }
};

// A warp's share: 64 keys or values from `first` on, of which those from `end` on are not read.
struct Chunk {
  const uint16_t *rows;  // of slot 0
  int stride;
  int first;
  int end;

  __device__ __forceinline__ uint4 load(int key, int dim, bool inside) const {
    if (!inside || first + key >= end) return uint4{0u, 0u, 0u, 0u};
    int64_t slot = first + key;
    return *reinterpret_cast<const uint4 *>(rows + slot * stride + dim);
  }

  // All of it is on its way to the L2 cache: what a lane has registers for at a time is little.
  template <int D>
  __device__ __forceinline__ void ask() const {
#pragma unroll
    for (int key = threadIdx.x & 31; key < kChunkKeys; key += 32) {
      if (first + key >= end) break;
      const uint16_t *row = rows + static_cast<int64_t>(first + key) * stride;
#pragma unroll
      for (int dim = 0; dim < D; dim += 64) ask_for(row + dim);
    }
  }
};

// Scores of a chunk against each tile, as the accumulators of four mma tiles of 16 keys. `queries`
// is this lane's row of each tile, null past the last row.
template <class T, int D, int TILES>
__device__ __forceinline__ void score_chunk(float (&scores)[TILES][4][4], const Chunk &keys,
                                            const uint16_t *const (&queries)[TILES]) {
  int lane = threadIdx.x & 31, row = lane >> 2, part = (lane & 3) * 8;
#pragma unroll
  for (int j = 0; j < TILES; j++) {
#pragma unroll
    for (int i = 0; i < 16; i++) scores[j][i / 4][i % 4] = 0.f;
  }
#pragma unroll
  for (int block = 0; block < (D + 31) / 32; block++) {
    int dim = block * 32 + part;
    uint4 query[TILES];
#pragma unroll
    for (int j = 0; j < TILES; j++) {
      query[j] = uint4{0u, 0u, 0u, 0u};
      if (dim < D && queries[j] != nullptr) {
        query[j] = *reinterpret_cast<const uint4 *>(queries[j] + dim);
      }
    }
#pragma unroll
    for (int tile = 0; tile < 4; tile++) {
      uint4 a = keys.load(tile * 16 + row, dim, dim < D);
      uint4 b = keys.load(tile * 16 + row + 8, dim, dim < D);
      unsigned a0[4] = {a.x, b.x, a.y, b.y}, a1[4] = {a.z, b.z, a.w, b.w};
#pragma unroll
      for (int j = 0; j < TILES; j++) {
        unsigned b0[2] = {query[j].x, query[j].y}, b1[2] = {query[j].z, query[j].w};
        T::mma(scores[j][tile], a0, b0);
        T::mma(scores[j][tile], a1, b1);
      }
    }
  }
}

// What becomes of a product of query and key: scaled, capped, -inf where it is not to be seen.
struct Scoring {
  Visibility visible;
  float softmax_scale;
  float softcap;

  __device__ __forceinline__ float operator()(float product, int key, int position) const {
    float score = product * softmax_scale;
    if (softcap > 0.f) score = softcap * portable_tanh(score / softcap);
    bool seen = key >= visible.begin(position) && key < visible.end(position);
    return seen ? score : -infinity();
  }
};

// exp(score - largest) of one chunk as the B operand of the second product, with their sums. Lane
// 4 g + t holds keys g and g + 8 of rows 2 t and 2 t + 1; `largest` and `sum` are of those rows.
template <class T>
__device__ __forceinline__ void weigh_chunk(unsigned (&weights)[4][2], float (&largest)[2],
                                            float (&sum)[2], const float (&scores)[4][4]) {
#pragma unroll
  for (int column = 0; column < 2; column++) {
    largest[column] = -infinity();
#pragma unroll
    for (int tile = 0; tile < 4; tile++) {
      largest[column] = fmaxf(largest[column], scores[tile][column]);
      largest[column] = fmaxf(largest[column], scores[tile][column + 2]);
    }
#pragma unroll
    for (int offset = 4; offset < 32; offset <<= 1) {
      largest[column] =
          fmaxf(largest[column], __shfl_xor_sync(kFullWarp, largest[column], offset));
    }
    sum[column] = 0.f;
  }
#pragma unroll
  for (int tile = 0; tile < 4; tile++) {
    float w[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float top = largest[i & 1];
      w[i] = scores[tile][i] == -infinity() ? 0.f
                                            : rounded<T>(portable_exp(scores[tile][i] - top));
      sum[i & 1] += w[i];
    }
    weights[tile][0] = transpose_8x8(pack<T>(w[0], w[1]));
    weights[tile][1] = transpose_8x8(pack<T>(w[2], w[3]));
  }
#pragma unroll
  for (int column = 0; column < 2; column++) {
#pragma unroll
    for (int offset = 4; offset < 32; offset <<= 1) {
      sum[column] += __shfl_xor_sync(kFullWarp, sum[column], offset);
    }
  }
}

// The weighted sums of 64 dims of a chunk's values, of each tile. A lane loads 8 dims of four keys:
// dims 8 g .. 8 g + 7 are rows g and g + 8 of four 16-row tiles, so that transposing is pairing
// halves of registers.
template <class T, int TILES>
__device__ __forceinline__ void sum_values(float (&out)[TILES][4][4], const Chunk &values, int dim,
                                           bool inside, const unsigned (&weights)[TILES][4][2]) {
  int pair = (threadIdx.x & 3) * 2;
#pragma unroll
  for (int j = 0; j < TILES; j++) {
#pragma unroll
    for (int i = 0; i < 16; i++) out[j][i / 4][i % 4] = 0.f;
  }
#pragma unroll
  for (int tile = 0; tile < 4; tile++) {
    unsigned v[4][4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      uint4 loaded = values.load(tile * 16 + pair + (i & 1) + (i >> 1) * 8, dim, inside);
      v[i][0] = loaded.x, v[i][1] = loaded.y, v[i][2] = loaded.z, v[i][3] = loaded.w;
    }
#pragma unroll
    for (int part = 0; part < 4; part++) {
      unsigned a[4] = {(v[0][part] & 0xffffu) | (v[1][part] << 16),
                       (v[0][part] >> 16) | (v[1][part] & 0xffff0000u),
                       (v[2][part] & 0xffffu) | (v[3][part] << 16),
                       (v[2][part] >> 16) | (v[3][part] & 0xffff0000u)};
#pragma unroll
      for (int j = 0; j < TILES; j++) T::mma(out[j][part], a, weights[j][tile]);
    }
  }
}

// Shared memory of a block: what its four warps have to add, for TILES tiles of rows.
template <int TILES>
struct Parts {
  static constexpr int kRows = kTile * TILES;
  float *out;     // (warps, rows, 64)
  float2 *stats;  // (warps, rows): largest score and sum of exp
  float *scales;  // (warps, rows): exp(largest - largest of the split)

  __device__ __forceinline__ explicit Parts(float *memory)
      : out(memory),
        stats(reinterpret_cast<float2 *>(out + kSplitWarps * kRows * kDims)),
        scales(reinterpret_cast<float *>(stats + kSplitWarps * kRows)) {}

  // Row 2 t + column of this lane; dims 8 g + 2 part and, from the mma's lower half, one more.
  __device__ __forceinline__ void store(const float (&sums)[TILES][4][4]) const {
    int lane = threadIdx.x & 31, first_row = (threadIdx.x >> 5) * kRows + (lane & 3) * 2;
#pragma unroll
    for (int j = 0; j < TILES; j++) {
#pragma unroll
      for (int i = 0; i < 16; i++) {
        int row = first_row + j * kTile + (i & 1);
        int dim = (lane >> 2) * 8 + 2 * (i / 4) + (i >> 1 & 1);
        out[row * kDims + dim] = sums[j][i / 4][i % 4];
      }
    }
  }

  __device__ __forceinline__ float largest(int row) const {
    float top = -infinity();
    for (int w = 0; w < kSplitWarps; w++) top = fmaxf(top, stats[w * kRows + row].x);
    return top;
  }

  __device__ __forceinline__ void scale_warps() const {
    for (int i = threadIdx.x; i < kSplitWarps * kRows; i += 32 * kSplitWarps) {
      float own = stats[i].x;
      scales[i] = own == -infinity() ? 0.f : portable_exp(own - largest(i % kRows));
    }
  }

  __device__ __forceinline__ float value(int row, int dim) const {
    float sum = 0.f;
    for (int w = 0; w < kSplitWarps; w++) {
      sum = fmaf(out[(w * kRows + row) * kDims + dim], scales[w * kRows + row], sum);
    }
    return sum;
  }

  __device__ __forceinline__ float2 split_stats(int row) const {
    float total = 0.f;
    for (int w = 0; w < kSplitWarps; w++) {
      total = fmaf(stats[w * kRows + row].y, scales[w * kRows + row], total);
    }
    return float2{largest(row), total};
  }
};

// decode_attention<T, D, TILES>: every split's part of the answer, for D = head_dim.
//
//   q (batch, seqlen, heads, D), k_cache, v_cache (batch, slots, heads_k, D): T, dense last
//   dimension, strides for the others, multiples of 16 bytes; the caches share theirs.
//   cache_seqlens (batch) int32, before the append: query t sees slots 0 .. cache_seqlens + t,
//   `window` of them if it is above 0. A negative length marks a sequence that takes no part.
//   scores = q k softmax_scale, then softcap tanh(scores / softcap) if softcap is above 0.
//   part_out (batch, seqlen, heads, splits, D) fp32, part_stats (..., splits, 2) fp32: largest
//   score and sum of exp. Splits that none of a block's rows sees are not written.
//   grid   (splits * ceil(seqlen * group / (8 TILES)), heads_k, batch), block 128; blocks of the
//          same keys follow each other
//   shared 4 * 4 * 8 TILES * (64 + 3) bytes
//   bytes  keys and values once per 8 TILES rows; out of memory for the first block that reads
//          them, from L2 for those after it
//   order  above
// Without a number of blocks ptxas leaves the smallest kernel too few registers; with any, it gives
// the others so many that values are spilled (0 is none).
template <class T, int D, int TILES>
__global__ void __launch_bounds__(32 * kSplitWarps, D * TILES == 64 ? 4 : 0)
    decode_attention(const uint16_t *q, int q_batch, int q_token, int q_head,
                     const uint16_t *k_cache, const uint16_t *v_cache, int64_t cache_batch,
                     int cache_slot, int cache_head, const int *cache_seqlens, float *part_out,
                     float2 *part_stats, int seqlen, int heads, int heads_k, int slots,
                     float softmax_scale, float softcap, int window) {
  take_turn();
  DYNAMIC_SMEM(float, memory);
  Parts<TILES> parts(memory);
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int64_t batch = blockIdx.z, head_k = blockIdx.y;
  int group = heads / heads_k, rows = seqlen * group, blocks = (rows - 1) / parts.kRows + 1;
  int split = blockIdx.x / blocks, splits = gridDim.x / blocks;
  int first_row = blockIdx.x % blocks * parts.kRows, end_row = min(first_row + parts.kRows, rows);
  int length = cache_seqlens[batch];
  Visibility visible{window, slots};
  int begin = visible.begin(length + first_row / group);
  int end = visible.end(length + (end_row - 1) / group);
  if (length < 0 || split * kSplitKeys >= end || (split + 1) * kSplitKeys <= begin) return;

  const uint16_t *queries[TILES];
#pragma unroll
  for (int j = 0; j < TILES; j++) {
    int row = first_row + j * kTile + (lane >> 2);
    int64_t head = head_k * group + row % group, token = row / group;
    queries[j] = row < rows ? q + batch * q_batch + token * q_token + head * q_head : nullptr;
  }
  int64_t offset = batch * cache_batch + head_k * cache_head;
  int first_key = split * kSplitKeys + warp * kChunkKeys;
  Chunk keys{k_cache + offset, cache_slot, first_key, end};
  Chunk values{v_cache + offset, cache_slot, first_key, end};
  if (end <= kFewKeys) {
    keys.ask<D>();
    values.ask<D>();
  }
  float scores[TILES][4][4];
  unsigned weights[TILES][4][2];
  score_chunk<T, D>(scores, keys, queries);
  Scoring scoring{visible, softmax_scale, softcap};
#pragma unroll
  for (int j = 0; j < TILES; j++) {
    int row = j * kTile + (lane & 3) * 2;
#pragma unroll
    for (int i = 0; i < 16; i++) {
      int position = length + (first_row + row + (i & 1)) / group;
      int key = first_key + i / 4 * 16 + (lane >> 2) + (i >> 1 & 1) * 8;
      scores[j][i / 4][i % 4] = scoring(scores[j][i / 4][i % 4], key, position);
    }
    float largest[2], sum[2];
    weigh_chunk<T>(weights[j], largest, sum, scores[j]);
    if (lane < 4) {
      parts.stats[warp * parts.kRows + row] = float2{largest[0], sum[0]};
      parts.stats[warp * parts.kRows + row + 1] = float2{largest[1], sum[1]};
    }
  }
  __syncthreads();
  parts.scale_warps();

#pragma unroll 1
  for (int first_dim = 0; first_dim < D; first_dim += kDims) {
    int dim = first_dim + (lane >> 2) * 8;
    float out[TILES][4][4];
    sum_values<T>(out, values, dim, dim < D, weights);
    if (first_dim > 0) __syncthreads();  // the sums before these have been read
    parts.store(out);
    __syncthreads();
    for (int i = threadIdx.x; i < parts.kRows * kDims; i += 32 * kSplitWarps) {
      int own = i / kDims, packed = first_row + own, at_dim = first_dim + i % kDims;
      if (packed >= rows || at_dim >= D) continue;
      int64_t head = head_k * group + packed % group;
      int64_t at = ((batch * seqlen + packed / group) * heads + head) * splits + split;
      part_out[at * D + at_dim] = parts.value(own, i % kDims);
      if (at_dim == 0) part_stats[at] = parts.split_stats(own);
    }
  }
}

// combine_splits<T>: out = sum of the splits' parts, weighted, over the sum of exp.
//
//   part_out, part_stats as above; sinks (heads) fp32 or null: a score per head that takes part in
//   the softmax but has no value; out (batch, seqlen, heads, dim) dense T. A row that sees nothing
//   is 0, and so is every row of a sequence of negative length.
//   grid   (seqlen * heads, batch), block 128, shared 8 * 128 + 16 bytes
//   bytes  4 dim per split and row, read once
//   order  splits from the first that the row sees to the last; then the sink
constexpr int kCombined = 128;  // splits whose scales are known at a time, one a thread
template <class T>
__global__ void __launch_bounds__(kCombined)
    combine_splits(const float *part_out, const float2 *part_stats, const int *cache_seqlens,
                   const float *__restrict__ sinks, uint16_t *out, int heads, int splits, int dim,
                   int slots, int window) {
  take_turn();
  int64_t batch = blockIdx.y, row = batch * gridDim.x + blockIdx.x;
  int head = blockIdx.x % heads, length = cache_seqlens[batch];
  int position = length + static_cast<int>(blockIdx.x) / heads;
  Visibility visible{window, slots};
  int begin = length < 0 ? 0 : visible.begin(position) / kSplitKeys;
  int end = length < 0 ? 0 : (visible.end(position) + kSplitKeys - 1) / kSplitKeys;
  end = min(end, splits);
  const float2 *stats = part_stats + row * splits;
  DYNAMIC_SMEM(float2, parts);  // of some splits: sum of exp, and what its part is scaled by
  float *tops = reinterpret_cast<float *>(parts + kCombined);
  float top = -infinity();
  for (int s = begin + threadIdx.x; s < end; s += kCombined) top = fmaxf(top, stats[s].x);
  top = warp_max(top);
  if ((threadIdx.x & 31) == 0) tops[threadIdx.x >> 5] = top;
  __syncthreads();
  top = sinks == nullptr ? -infinity() : sinks[head];
  for (int w = 0; w < kCombined / 32; w++) top = fmaxf(top, tops[w]);

  for (int first_dim = 0; first_dim < dim; first_dim += kCombined) {
    int at = first_dim + threadIdx.x, read = min(at, dim - 1);
    float total = 0.f, value = 0.f;
    for (int first = begin; first < end; first += kCombined) {
      int own = first + threadIdx.x, count = min(end - first, kCombined);
      if (own < end) {
        float2 part = stats[own];
        float scale = part.x == -infinity() ? 0.f : portable_exp(part.x - top);
        parts[threadIdx.x] = float2{part.y, scale};
      }
      __syncthreads();
      const float *part = part_out + (row * splits + first) * dim + read;
#pragma unroll 8
      for (int s = 0; s < count; s++) {
        total = fmaf(parts[s].x, parts[s].y, total);
        value = fmaf(part[s * dim], parts[s].y, value);
      }
      __syncthreads();
    }
    if (sinks != nullptr && sinks[head] != -infinity()) total += portable_exp(sinks[head] - top);
    if (at < dim) out[row * dim + at] = T::round(total == 0.f ? 0.f : value / total);
  }
}
