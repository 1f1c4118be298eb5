#include "common.cuh"

// rope_append_kv<T>: rotary embedding of q (in place) and k, and k and v into the cache.
//
//   q (batch, seqlen, heads, dim), k, v (batch, seqlen, heads_k, dim), k_cache, v_cache
//   (batch, slots, heads_k, dim), all T with dense last dimension and strides for the others; the
//   caches share theirs. cosine, sine (positions, rotary_dim / 2) fp32. cache_seqlens (batch) int32:
//   token t of sequence b is at position and slot cache_seqlens[b] + t. A negative length marks a
//   sequence that takes no part; tokens past the end of the cache or of the tables are left out.
//   grid   (seqlen, heads + 2 heads_k, batch), block 32, shared 0
//   bytes  q twice, k and v twice; tables once per head
//   order  x cos - y sin in fp32, two roundings: the second product is added by fma; then to T

template <class T>
__global__ void __launch_bounds__(32)
    rope_append_kv(uint16_t *q, int q_batch, int q_token, int q_head, const uint16_t *k,
                   int k_batch, int k_token, int k_head, const uint16_t *v, int v_batch,
                   int v_token, int v_head, uint16_t *k_cache, uint16_t *v_cache,
                   int64_t cache_batch, int cache_slot, int cache_head,
                   const float *__restrict__ cosine, const float *__restrict__ sine,
                   const int *cache_seqlens, int heads, int heads_k, int dim, int rotary_dim,
                   int slots, int positions, bool interleaved) {
  take_turn();
  int64_t token = blockIdx.x, head = blockIdx.y, batch = blockIdx.z;
  int length = cache_seqlens[batch];
  int64_t position = length + token;
  if (length < 0 || position >= slots || position >= positions) return;
  const uint16_t *from;
  uint16_t *to;
  bool rotated = head < heads + heads_k;
  if (head < heads) {
    to = q + batch * q_batch + token * q_token + head * q_head;
    from = to;
  } else {
    int64_t slot = batch * cache_batch + position * cache_slot;
    int64_t own = rotated ? head - heads : head - heads - heads_k;
    from = rotated ? k + batch * k_batch + token * k_token + own * k_head
                   : v + batch * v_batch + token * v_token + own * v_head;
    to = (rotated ? k_cache : v_cache) + slot + own * cache_head;
  }
  int half = rotated ? rotary_dim / 2 : 0;
  for (int i = threadIdx.x; i < half; i += 32) {
    int low = interleaved ? 2 * i : i, high = interleaved ? 2 * i + 1 : i + half;
    float c = cosine[position * half + i], s = sine[position * half + i];
    float a = T::widen(from[low]), b = T::widen(from[high]);
    to[low] = T::round(fmaf(-b, s, a * c));
    to[high] = T::round(fmaf(a, s, b * c));
  }
  if (to == from) return;
  for (int i = 2 * half + threadIdx.x; i < dim; i += 32) to[i] = from[i];
}
