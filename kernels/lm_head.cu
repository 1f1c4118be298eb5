#include "product.cuh"
#include "random.cuh"

constexpr int kChunk = 64;  // vocabulary rows of one block: a unit of the log-sum-exp's order

// What a chunk of the vocabulary knows about a token: the largest score, the sum of exp(score -
// largest), and the winner once noise is added.
struct ChunkSummary {
  float largest, sum, best_score;
  int best_id;
};

// Eight warps' values added, and compared, in the order of the warps.
__device__ __forceinline__ float block_sum(float value, float *scratch) {
  value = warp_sum(value);
  __syncthreads();
  if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = value;
  __syncthreads();
  float sum = 0.f;
  for (int w = 0; w < kWarps; w++) sum += scratch[w];
  return sum;
}

__device__ __forceinline__ float block_max(float value, float *scratch) {
  value = warp_max(value);
  __syncthreads();
  if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = value;
  __syncthreads();
  float largest = scratch[0];
  for (int w = 1; w < kWarps; w++) largest = fmaxf(largest, scratch[w]);
  return largest;
}

__device__ __forceinline__ Best block_best(Best best, Best *scratch) {
  best = warp_best(best);
  __syncthreads();
  if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = best;
  __syncthreads();
  for (int w = 0; w < kWarps; w++) best = better(best, scratch[w]);
  return best;
}

// How tokens are chosen from logits. Null temperature means greedy for all.
struct Choice {
  const int *vocab_ids;
  const float *temperature;
  const int64_t *seeds;
  const int64_t *positions;
  const int64_t *starts;  // null: the target's noise; else the draft's, of rounds that begin there

  __device__ __forceinline__ float noise(int64_t token, int id) const {
    uint64_t start = starts == nullptr ? 0 : starts[token];
    uint64_t stream = starts == nullptr ? kTarget : kDraft;
    return gumbel(seeds[token], positions[token], start, stream, id);
  }
};

// Summary of one chunk for one token; a warp per token, two entries per lane.
template <class T>
__device__ __forceinline__ ChunkSummary summarise(const uint16_t *logits, int stride, int first,
                                                  int vocab, const Choice &choice, int64_t token) {
  int lane = threadIdx.x & 31;
  float temperature = choice.temperature == nullptr ? 0.f : choice.temperature[token];
  float scores[2], largest = -infinity();
  Best best = nobody();
#pragma unroll
  for (int i = 0; i < 2; i++) {
    int entry = lane + 32 * i, index = first + entry;
    scores[i] = -infinity();
    if (index >= vocab) continue;
    int id = choice.vocab_ids == nullptr ? index : choice.vocab_ids[index];
    float logit = T::widen(logits[entry * stride]);
    scores[i] = temperature > 0.f ? logit / temperature : logit;
    float noise = temperature > 0.f ? choice.noise(token, id) : 0.f;
    best = better(best, candidate(scores[i] + noise, id));
    largest = fmaxf(largest, scores[i]);
  }
  largest = warp_max(largest);
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    if (scores[i] != -infinity()) sum += portable_exp(scores[i] - largest);
  }
  sum = warp_sum(sum);
  best = warp_best(best);
  return ChunkSummary{largest, sum, best.score, best.id};
}

// lm_head<T, TILES>: logits of a chunk of the vocabulary, and what there is to know about them.
//
//   x (m, k) with a row stride, weight (all, k) dense, norm_weight (k) or null: T. vocab_ids (vocab)
//   int32, or null for the first `vocab` rows of weight. temperature (m) fp32 or null, seeds and
//   positions (m) int64 where some temperature is above 0, starts (m) int64 or null. summaries
//   (m, chunks, 4) words.
//   `aligned` as in linear. Logits are rounded to T, as a head of its own would.
//   grid   (chunks = ceil(vocab / 64), ceil(m / (8 TILES))), block 256
//   shared 4 * (1024 TILES + 8 TILES) + 2 * 64 * 8 TILES bytes, and for a norm as in linear
//   bytes  vocab k weights once per 8 TILES tokens; x from L2 four times per chunk; summaries
//   order  product.cuh; in a chunk, entries l and l + 32 by lane l, then a butterfly
template <class T, int TILES>
__global__ void __launch_bounds__(kThreads, blocks_together(TILES))
    lm_head(const uint16_t *x, int x_stride, const uint16_t *__restrict__ weight,
            const uint16_t *__restrict__ norm_weight, float eps, const int *__restrict__ vocab_ids,
            const float *temperature, const int64_t *seeds, const int64_t *positions,
            const int64_t *starts, ChunkSummary *summaries, int m, int vocab, int k,
            bool aligned) {
  DYNAMIC_SMEM(float, warp_sums);
  float *inverse_rms = warp_sums + kWarps * TILES * 4 * 32;
  uint16_t *logits = reinterpret_cast<uint16_t *>(inverse_rms + 8 * TILES);  // (64, 8 TILES)
  uint16_t *normed_rows = logits + kChunk * 8 * TILES;
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int first_token = blockIdx.y * 8 * TILES, first = blockIdx.x * kChunk;
  Ring<TILES> ring;
  auto turn_to = [&](int tile) {
    const uint16_t *rows[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      int index = min(first + tile + half * 8 + (lane >> 2), vocab - 1);
      int64_t row = vocab_ids == nullptr ? index : vocab_ids[index];
      rows[half] = weight + row * k;
    }
    ring.turn_to(rows[0], rows[1], k, aligned);
  };
  if (vocab_ids == nullptr) {  // else the rows' numbers would have to be loaded before the turn
    turn_to(0);
    ask_for_weights<blocks_ahead(TILES)>(ring.first, ring.second, k);
  }
  take_turn();
  Tokens tokens{x + static_cast<int64_t>(first_token) * x_stride,
                x_stride, min(m - first_token, 8 * TILES), k, aligned};
  if (vocab_ids != nullptr) turn_to(0);
  tokens = first_asked<T>(ring, tokens, norm_weight, eps, warp_sums, inverse_rms, normed_rows);

#pragma unroll 1
  for (int tile = 0; tile < kChunk; tile += 16) {
    float sums[TILES][4];
    multiply<T>(sums, ring, tokens);
    if (tile + 16 < kChunk) {  // on their way while these are added
      turn_to(tile + 16);
      ring.ask(tokens);
    }
    store_warp_sums<TILES>(sums, warp_sums);
    __syncthreads();
    for (int entry = warp; entry < TILES * 4; entry += kWarps) {
      int token = (entry >> 2) * 8 + (lane & 3) * 2 + (entry & 1);
      int row = tile + (lane >> 2) + ((entry >> 1) & 1) * 8;
      logits[row * 8 * TILES + token] = T::round(add_warps<TILES>(warp_sums, entry));
    }
    __syncthreads();
  }

  Choice choice{vocab_ids, temperature, seeds, positions, starts};
  for (int token = warp; token < tokens.count; token += kWarps) {
    int64_t at = first_token + token;
    ChunkSummary summary =
        summarise<T>(logits + token, 8 * TILES, first, vocab, choice, at);
    if (lane == 0) summaries[at * gridDim.x + blockIdx.x] = summary;
  }
}

// lm_head_finish: one answer out of the summaries of all chunks.
//
//   summaries (m, chunks, 4) words -> token_ids (m) int64, top_probability and log_sum_exp (m) fp32
//   grid   (m), block 256, shared 64 bytes
//   bytes  16 per chunk and token
//   order  thread i adds chunks i, i + 256, ...; a butterfly over each warp; warps from 0
__global__ void __launch_bounds__(kThreads)
    lm_head_finish(const ChunkSummary *summaries, int chunks, int64_t *token_ids,
                   float *top_probability, float *log_sum_exp) {
  take_turn();
  DYNAMIC_SMEM(float, scratch);
  const ChunkSummary *own = summaries + static_cast<int64_t>(blockIdx.x) * chunks;
  float largest = -infinity(), sum = 0.f;
  Best best = nobody();
  for (int i = threadIdx.x; i < chunks; i += kThreads) {
    largest = fmaxf(largest, own[i].largest);
    best = better(best, Best{own[i].best_score, own[i].best_id});
  }
  largest = block_max(largest, scratch);
  best = block_best(best, reinterpret_cast<Best *>(scratch));
  for (int i = threadIdx.x; i < chunks; i += kThreads) {
    sum = fmaf(own[i].sum, portable_exp(own[i].largest - largest), sum);
  }
  sum = block_sum(sum, scratch);
  if (threadIdx.x != 0) return;
  token_ids[blockIdx.x] = best.id;
  top_probability[blockIdx.x] = 1.f / sum;
  log_sum_exp[blockIdx.x] = largest + static_cast<float>(portable_log(sum));
}
