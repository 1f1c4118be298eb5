#include "random.cuh"

// Acceptance on the device: how much of a draft stands, what is emitted, and how far the cache
// has come. Rejecting a draft is nothing but not advancing cache_seqlens.

// What a round leaves of one sequence, and where it is written.
struct Emission {
  int64_t *token_ids;  // (batch, k + 1): the emitted tokens, then -1
  int *num_accepted;
  int64_t *pending;  // the last emitted token, or -1
  int *cache_seqlens;
  int *num_left;  // tokens that may still be emitted; 0 once the sequence has ended
};

// Writes tokens 0 .. num_matches, of which lane i holds the i-th, up to an end-of-sequence token
// or the limit. A sequence that has ended, or that takes no part, emits nothing.
__device__ __forceinline__ void emit(const Emission &to, int64_t token, int num_matches, int k,
                                     const int64_t *eos_ids, int num_eos) {
  int lane = threadIdx.x & 31;
  int64_t batch = blockIdx.x;
  int length = to.cache_seqlens[batch], left = to.num_left[batch];
  int count = length < 0 ? 0 : max(0, min(num_matches + 1, left));
  bool ends = false;
  for (int i = 0; i < num_eos; i++) ends = ends || token == eos_ids[i];
  unsigned ending = __ballot_sync(kFullWarp, ends && lane < count);
  if (ending != 0) count = __ffs(ending);
  if (lane <= k) to.token_ids[batch * (k + 1) + lane] = lane < count ? token : -1;
  int64_t last = __shfl_sync(kFullWarp, token, max(count - 1, 0));
  if (lane != 0) return;
  to.num_accepted[batch] = min(num_matches, count);
  to.pending[batch] = count > 0 ? last : -1;
  if (count == 0) return;
  to.cache_seqlens[batch] = length + count;
  to.num_left[batch] = ending != 0 ? 0 : left - count;
}

// accept_tokens: greedy and coupled verification, where the target says what is emitted.
//
//   draft_token_ids (batch, k) int64, -1 from where a sequence drafted no more; target_token_ids
//   (batch, k + 1) int64; eos_ids (num_eos) int64; outputs as in Emission. k <= 31.
//   grid   (batch), block 32, shared 0
//   bytes  8 (2 k + 1) per sequence
__global__ void __launch_bounds__(32)
    accept_tokens(const int64_t *draft_token_ids, const int64_t *target_token_ids,
                  const int64_t *__restrict__ eos_ids, int num_eos, int *cache_seqlens,
                  int *num_left, int64_t *token_ids, int *num_accepted, int64_t *pending, int k) {
  take_turn();
  int lane = threadIdx.x;
  int64_t batch = blockIdx.x;
  int64_t draft = lane < k ? draft_token_ids[batch * k + lane] : -1;
  int64_t target = lane <= k ? target_token_ids[batch * (k + 1) + lane] : -1;
  unsigned differs = __ballot_sync(kFullWarp, draft < 0 || draft != target);
  int num_matches = min(__ffs(differs) - 1, k);
  if (differs == 0) num_matches = k;
  Emission to{token_ids, num_accepted, pending, cache_seqlens, num_left};
  emit(to, target, num_matches, k, eos_ids, num_eos);
}

// ---- block verification (Sun et al. 2025, algorithm 2) -----------------------------------------

constexpr int kVerifyThreads = 256;
constexpr int kVerifyChunk = 2048;  // entries of the vocabulary; a unit of the sums' order

// One chunk of the vocabulary at one position: the mass of the residual (or of the target, after
// the last drafted token), and which token wins it with noise; the target's own winner beside it.
struct VerifySummary {
  float mass, score;
  int id;
  float target_score;
  int target_id;
};

// A draft as verification sees it.
struct Draft {
  const int64_t *token_ids;  // (k), of one sequence
  const float *draft_probs;  // (k, vocab)
  const float *target_probs;  // (k + 1, vocab)
  int k;
  int64_t vocab;

  __device__ __forceinline__ int count() const {
    int n = 0;
    while (n < k && token_ids[n] >= 0) n++;
    return n;
  }

  // P_i: the running minimum of 1 and the product of target over draft probability; 0 from where a
  // target is no number, of which fminf would make 1.
  __device__ __forceinline__ float joint(int i) const {
    float product = 1.f;
    for (int j = 0; j < i; j++) {
      float p = target_probs[j * vocab + token_ids[j]], q = draft_probs[j * vocab + token_ids[j]];
      product = q > 0.f && p >= 0.f ? fminf(1.f, product * p / q) : 0.f;
    }
    return product;
  }
};

// block_verify: what accept_block needs to know of every position, by chunks of the vocabulary.
//
//   draft_token_ids (batch, k) int64, draft_probs (batch, k, vocab), target_probs (batch, k + 1,
//   vocab) fp32, seeds and positions (batch) int64, positions of the first drafted token; summaries
//   (batch, k + 1, chunks, 5) words. Rows after a sequence's last position are not written.
//   grid   (chunks = ceil(vocab / 2048), k + 1, batch), block 256, shared 160 bytes
//   bytes  4 (2 k + 1) vocab per sequence, once
//   order  thread i adds entries i, i + 256, ...; a butterfly over each warp; warps from 0
__global__ void __launch_bounds__(kVerifyThreads, 4)
    block_verify(const int64_t *draft_token_ids, const float *draft_probs,
                 const float *target_probs, const int64_t *seeds, const int64_t *positions,
                 VerifySummary *summaries, int k, int vocab) {
  take_turn();
  DYNAMIC_SMEM(VerifySummary, of_warps);
  int64_t batch = blockIdx.z;
  int i = blockIdx.y;
  Draft draft{draft_token_ids + batch * k, draft_probs + batch * k * vocab,
              target_probs + batch * (k + 1) * vocab, k, vocab};
  int count = draft.count();
  if (i > count) return;
  float joint = i < count ? draft.joint(i) : 1.f;
  const float *p = draft.target_probs + static_cast<int64_t>(i) * vocab;
  const float *q = i < count ? draft.draft_probs + static_cast<int64_t>(i) * vocab : nullptr;

  float mass = 0.f;
  Best best = nobody(), target_best = nobody();
  int end = min(vocab, static_cast<int>(blockIdx.x + 1) * kVerifyChunk);
  for (int x = blockIdx.x * kVerifyChunk + threadIdx.x; x < end; x += kVerifyThreads) {
    float target = p[x], weight = target;
    if (q != nullptr) weight = fmaxf(fmaf(joint, target, -q[x]), 0.f);
    mass += weight;
    if (!(target > 0.f)) continue;
    float noise = gumbel(seeds[batch], positions[batch] + i, 0, kTarget, x);
    float score = static_cast<float>(portable_log(target)) + noise;
    target_best = better(target_best, candidate(score, x));
    if (!(weight > 0.f)) continue;
    score = static_cast<float>(portable_log(weight)) + noise;
    best = better(best, candidate(score, x));
  }
  mass = warp_sum(mass);
  best = warp_best(best);
  target_best = warp_best(target_best);
  if ((threadIdx.x & 31) == 0) {
    of_warps[threadIdx.x >> 5] =
        VerifySummary{mass, best.score, best.id, target_best.score, target_best.id};
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
#pragma unroll 1
  for (int w = 1; w < kVerifyThreads / 32; w++) {
    VerifySummary other = of_warps[w];
    mass += other.mass;
    best = better(best, Best{other.score, other.id});
    target_best = better(target_best, Best{other.target_score, other.target_id});
  }
  summaries[(batch * (k + 1) + i) * gridDim.x + blockIdx.x] =
      VerifySummary{mass, best.score, best.id, target_best.score, target_best.id};
}

// accept_block: the longest prefix whose test succeeds, and the token after it.
//
//   arguments as in block_verify and accept_tokens. With P_i the joint ratio and S_i the residual
//   mass after i tokens, prefix i stands if its uniform is at most S_i / (S_i + 1 - P_i), or P_i
//   where i is the whole draft; the uniform is number i - 1 of the acceptance stream of this round.
//   grid   (batch), block 32, shared 0
//   bytes  20 (k + 1) chunks per sequence
//   order  lane l adds chunks l, l + 32, ...; a butterfly
__global__ void __launch_bounds__(32)
    accept_block(const int64_t *draft_token_ids, const float *draft_probs,
                 const float *target_probs, const int64_t *seeds, const int64_t *positions,
                 const VerifySummary *summaries, int chunks, const int64_t *__restrict__ eos_ids,
                 int num_eos, int *cache_seqlens, int *num_left, int64_t *token_ids,
                 int *num_accepted, int64_t *pending, int k, int vocab) {
  take_turn();
  int lane = threadIdx.x;
  int64_t batch = blockIdx.x;
  Draft draft{draft_token_ids + batch * k, draft_probs + batch * k * vocab,
              target_probs + batch * (k + 1) * vocab, k, vocab};
  int count = draft.count(), accepted = 0;
  int64_t next = -1;
  for (int i = 0; i <= count; i++) {
    float mass = 0.f;
    Best best = nobody(), target_best = nobody();
    const VerifySummary *own = summaries + (batch * (k + 1) + i) * chunks;
    for (int chunk = lane; chunk < chunks; chunk += 32) {
      mass += own[chunk].mass;
      best = better(best, Best{own[chunk].score, own[chunk].id});
      target_best = better(target_best, Best{own[chunk].target_score, own[chunk].target_id});
    }
    mass = warp_sum(mass);
    best = warp_best(best);
    target_best = warp_best(target_best);
    float joint = draft.joint(i), bar = joint;
    if (i < count) {
      float whole = mass + 1.f - joint;
      bar = whole > 0.f ? mass / whole : 1.f;
    }
    unsigned bits = i > 0 ? uniform_bits(seeds[batch], positions[batch], 0, kAcceptance, i - 1) : 0;
    double uniform = (bits + 0.5) * 5.9604644775390625e-08;
    if (i == 0 || uniform <= bar) {
      accepted = i;
      next = best.id == kNoToken ? target_best.id : best.id;
    }
  }
  if (next == kNoToken) next = 0;  // of a target without a probability: as argmax has it
  int64_t token = lane < accepted ? draft.token_ids[lane] : next;
  Emission to{token_ids, num_accepted, pending, cache_seqlens, num_left};
  emit(to, token, accepted, k, eos_ids, num_eos);
}
