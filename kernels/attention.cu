#include "common.cuh"

// Attention of 1..16 new positions per sequence over its cache, in two kernels: one over splits of
// the keys, one that combines the splits.
//
// The query rows of one kv head (position-major, then the group) are packed into tiles of 8: the
// 8-column B operand of mma.m16n8k16, padded with zeros. Keys are the 16-row A operand of the
// first product, values, transposed while they are loaded, that of the second. So the instructions
// that a row takes do not depend on how many rows there are, nor on its place among them.
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

// The rows that see a key: positions run from `first` to `last` in a tile.
struct Visibility {
  int window;  // a position sees itself and window - 1 before it; 0 sees everything before it
  int slots;

  __device__ __forceinline__ int begin(int position) const {
    return window > 0 ? max(0, position - window + 1) : 0;
  }
  __device__ __forceinline__ int end(int position) const { return min(position + 1, slots); }
};

// Scores of one chunk against a tile of rows, as the accumulators of four mma tiles of 16 keys.
template <class T, int D>
__device__ __forceinline__ void score_chunk(float (&scores)[4][4], const uint16_t *keys,
                                            int key_stride, int first, int end,
                                            const uint4 (&query)[(D + 31) / 32]) {
  int lane = threadIdx.x & 31, row = lane >> 2, part = (lane & 3) * 8;
#pragma unroll
  for (int tile = 0; tile < 4; tile++) {
    int low = first + tile * 16 + row, high = low + 8;
#pragma unroll
    for (int i = 0; i < 4; i++) scores[tile][i] = 0.f;
#pragma unroll
    for (int block = 0; block < (D + 31) / 32; block++) {
      int dim = block * 32 + part;
      uint4 zero{0u, 0u, 0u, 0u}, a = zero, b = zero;
      if (dim < D && low < end) {
        a = *reinterpret_cast<const uint4 *>(keys + static_cast<int64_t>(low) * key_stride + dim);
      }
      if (dim < D && high < end) {
        b = *reinterpret_cast<const uint4 *>(keys + static_cast<int64_t>(high) * key_stride + dim);
      }
      unsigned a0[4] = {a.x, b.x, a.y, b.y}, a1[4] = {a.z, b.z, a.w, b.w};
      unsigned b0[2] = {query[block].x, query[block].y};
      unsigned b1[2] = {query[block].z, query[block].w};
      T::mma(scores[tile], a0, b0);
      T::mma(scores[tile], a1, b1);
    }
  }
}

// Adds a chunk's values, weighted, to the accumulators of 64 dims each. A lane loads 8 dims of four
// keys: dims 8 g .. 8 g + 7 are rows g and g + 8 of four 16-row tiles, so that transposing is
// pairing halves of registers.
template <class T, int D>
__device__ __forceinline__ void add_values(float (&out)[(D + 63) / 64][4][4],
                                           const uint16_t *values, int value_stride, int first,
                                           int end, const unsigned (&weights)[4][2]) {
  int lane = threadIdx.x & 31, part = (lane >> 2) * 8, pair = (lane & 3) * 2;
#pragma unroll
  for (int group = 0; group < (D + 63) / 64; group++) {
    int dim = group * 64 + part;
#pragma unroll
    for (int tile = 0; tile < 4; tile++) {
      unsigned v[4][4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        int key = first + tile * 16 + pair + (i & 1) + (i >> 1) * 8;
        uint4 loaded{0u, 0u, 0u, 0u};
        if (dim < D && key < end) {
          loaded = *reinterpret_cast<const uint4 *>(values +
                                                    static_cast<int64_t>(key) * value_stride + dim);
        }
        v[i][0] = loaded.x, v[i][1] = loaded.y, v[i][2] = loaded.z, v[i][3] = loaded.w;
      }
#pragma unroll
      for (int j = 0; j < 4; j++) {
        unsigned a[4] = {(v[0][j] & 0xffffu) | (v[1][j] << 16),
                         (v[0][j] >> 16) | (v[1][j] & 0xffff0000u),
                         (v[2][j] & 0xffffu) | (v[3][j] << 16),
                         (v[2][j] >> 16) | (v[3][j] & 0xffff0000u)};
        T::mma(out[group][j], a, weights[tile]);
      }
    }
  }
}

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

// decode_attention<T, D>: every split's part of the answer, for D = head_dim.
//
//   q (batch, seqlen, heads, D), k_cache, v_cache (batch, slots, heads_k, D): T, dense last
//   dimension, strides for the others, multiples of 16 bytes; the caches share theirs.
//   cache_seqlens (batch) int32, before the append: query t sees slots 0 .. cache_seqlens + t,
//   `window` of them if it is above 0. A negative length marks a sequence that takes no part.
//   scores = q k softmax_scale, then softcap tanh(scores / softcap) if softcap is above 0.
//   part_out (batch, seqlen, heads, splits, D) fp32, part_stats (..., splits, 2) fp32: largest
//   score and sum of exp. Splits that none of a tile's rows sees are not written.
//   grid   (splits, heads_k * ceil(seqlen * group / 8), batch), block 128
//   shared 4 * (4 * 8 * D + 4 * 8 * 2) bytes
//   bytes  keys and values once per tile of 8 rows, out of memory for one tile, from L2 for others
//   order  above
template <class T, int D>
__global__ void __launch_bounds__(32 * kSplitWarps)
    decode_attention(const uint16_t *__restrict__ q, int q_batch, int q_token, int q_head,
                     const uint16_t *__restrict__ k_cache, const uint16_t *__restrict__ v_cache,
                     int64_t cache_batch, int cache_slot, int cache_head,
                     const int *__restrict__ cache_seqlens, float *__restrict__ part_out,
                     float2 *__restrict__ part_stats, int seqlen, int heads, int heads_k, int slots,
                     float softmax_scale, float softcap, int window) {
  DYNAMIC_SMEM(float, warp_out);                                         // (warps, 8 rows, D)
  float2 *warp_stats = reinterpret_cast<float2 *>(warp_out + kSplitWarps * kTile * D);
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int64_t batch = blockIdx.z, head_k = blockIdx.y % heads_k;
  int group = heads / heads_k, rows = seqlen * group;
  int first_row = blockIdx.y / heads_k * kTile, last_row = min(first_row + kTile, rows) - 1;
  int length = cache_seqlens[batch], split = blockIdx.x;
  Visibility visible{window, slots};
  int begin = visible.begin(length + first_row / group), end = visible.end(length + last_row / group);
  if (length < 0 || split * kSplitKeys >= end || (split + 1) * kSplitKeys <= begin) return;

  uint4 query[(D + 31) / 32];
  int row = first_row + (lane >> 2);
#pragma unroll
  for (int block = 0; block < (D + 31) / 32; block++) {
    int dim = block * 32 + (lane & 3) * 8;
    query[block] = uint4{0u, 0u, 0u, 0u};
    if (row < rows && dim < D) {
      int64_t head = head_k * group + row % group;
      query[block] = *reinterpret_cast<const uint4 *>(q + batch * q_batch + row / group * q_token +
                                                      head * q_head + dim);
    }
  }

  int64_t offset = batch * cache_batch + head_k * cache_head;
  int first_key = split * kSplitKeys + warp * kChunkKeys;
  float scores[4][4], largest[2], sum[2], out[(D + 63) / 64][4][4];
  unsigned weights[4][2];
  score_chunk<T, D>(scores, k_cache + offset, cache_slot, first_key, end, query);
#pragma unroll
  for (int tile = 0; tile < 4; tile++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int position = length + (first_row + (lane & 3) * 2 + (i & 1)) / group;
      int key = first_key + tile * 16 + (lane >> 2) + (i >> 1) * 8;
      float score = scores[tile][i] * softmax_scale;
      if (softcap > 0.f) score = softcap * portable_tanh(score / softcap);
      bool seen = key >= visible.begin(position) && key < visible.end(position);
      scores[tile][i] = seen ? score : -infinity();
    }
  }
  weigh_chunk<T>(weights, largest, sum, scores);
#pragma unroll
  for (int g = 0; g < (D + 63) / 64; g++) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
#pragma unroll
      for (int i = 0; i < 4; i++) out[g][j][i] = 0.f;
    }
  }
  add_values<T, D>(out, v_cache + offset, cache_slot, first_key, end, weights);

  // Row 2 t + column of this lane; dims 8 g + 2 j and, from the tile's lower half, one more.
#pragma unroll
  for (int g = 0; g < (D + 63) / 64; g++) {
    int dim = g * 64 + (lane >> 2) * 8;
    if (dim >= D) continue;
#pragma unroll
    for (int j = 0; j < 4; j++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        int own = (lane & 3) * 2 + (i & 1);
        warp_out[(warp * kTile + own) * D + dim + 2 * j + (i >> 1)] = out[g][j][i];
      }
    }
  }
  if (lane < 4) {
    warp_stats[warp * kTile + lane * 2] = float2{largest[0], sum[0]};
    warp_stats[warp * kTile + lane * 2 + 1] = float2{largest[1], sum[1]};
  }
  __syncthreads();

  for (int i = threadIdx.x; i < kTile * D; i += 32 * kSplitWarps) {
    int own = i / D, dim = i % D, packed = first_row + own;
    if (packed >= rows) continue;
    float top = -infinity(), total = 0.f, value = 0.f;
    for (int w = 0; w < kSplitWarps; w++) top = fmaxf(top, warp_stats[w * kTile + own].x);
    for (int w = 0; w < kSplitWarps; w++) {
      float2 stats = warp_stats[w * kTile + own];
      float scale = stats.x == -infinity() ? 0.f : portable_exp(stats.x - top);
      total = fmaf(stats.y, scale, total);
      value = fmaf(warp_out[(w * kTile + own) * D + dim], scale, value);
    }
    int64_t at = (batch * seqlen + packed / group) * heads + head_k * group + packed % group;
    part_out[(at * gridDim.x + split) * D + dim] = value;
    if (dim == 0) part_stats[at * gridDim.x + split] = float2{top, total};
  }
}

// combine_splits<T>: out = sum of the splits' parts, weighted, over the sum of exp.
//
//   part_out, part_stats as above; sinks (heads) fp32 or null: a score per head that takes part in
//   the softmax but has no value; out (batch, seqlen, heads, dim) dense T. A row that sees nothing
//   is 0, and so is every row of a sequence of negative length.
//   grid   (seqlen * heads, batch), block 128, shared 0
//   bytes  4 dim per split and row, read once
//   order  splits from the first that the row sees to the last; then the sink
template <class T>
__global__ void __launch_bounds__(128)
    combine_splits(const float *__restrict__ part_out, const float2 *__restrict__ part_stats,
                   const int *__restrict__ cache_seqlens, const float *__restrict__ sinks,
                   uint16_t *__restrict__ out, int heads, int splits, int dim, int slots,
                   int window) {
  int64_t batch = blockIdx.y, row = batch * gridDim.x + blockIdx.x;
  int head = blockIdx.x % heads, length = cache_seqlens[batch];
  int position = length + static_cast<int>(blockIdx.x) / heads;
  Visibility visible{window, slots};
  int begin = length < 0 ? 0 : visible.begin(position) / kSplitKeys;
  int end = length < 0 ? 0 : (visible.end(position) + kSplitKeys - 1) / kSplitKeys;
  end = min(end, splits);
  const float2 *stats = part_stats + row * splits;
  float top = sinks == nullptr ? -infinity() : sinks[head];
  for (int s = begin; s < end; s++) top = fmaxf(top, stats[s].x);
  for (int i = threadIdx.x; i < dim; i += 128) {
    float total = 0.f, value = 0.f;
    for (int s = begin; s < end; s++) {
      float scale = stats[s].x == -infinity() ? 0.f : portable_exp(stats[s].x - top);
      total = fmaf(stats[s].y, scale, total);
      value = fmaf(part_out[(row * splits + s) * dim + i], scale, value);
    }
    if (sinks != nullptr) total += portable_exp(sinks[head] - top);
    out[row * dim + i] = T::round(total == 0.f ? 0.f : value / total);
  }
}
