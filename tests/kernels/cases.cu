// Small kernels that try the emulator itself; some of them are wrong on purpose.

__global__ void indices(int *out) {
  int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  out[block * blockDim.x * blockDim.y * blockDim.z + thread] = block * 1000 + thread;
}

__global__ void reverse(const int *in, int *out) {
  DYNAMIC_SMEM(int, shared);
  shared[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = shared[blockDim.x - 1 - threadIdx.x];
}

// Wrong: no barrier between a write and another thread's read.
__global__ void reverse_without_barrier(const int *in, int *out) {
  DYNAMIC_SMEM(int, shared);
  shared[threadIdx.x] = in[threadIdx.x];
  out[threadIdx.x] = shared[blockDim.x - 1 - threadIdx.x];
}

// Wrong, and right by luck if threads run in order: each reads what the one before it wrote.
__global__ void shift_without_barrier(const int *in, int *out) {
  DYNAMIC_SMEM(int, shared);
  shared[threadIdx.x] = in[threadIdx.x];
  out[threadIdx.x] = threadIdx.x == 0 ? in[0] : shared[threadIdx.x - 1];
}

// Wrong, and right unless a warp is far ahead: the second shuffle of another warp may come after
// this one's next write.
__global__ void rotate_without_second_barrier(int *out) {
  DYNAMIC_SMEM(int, shared);
  int sum = 0;
  for (int round = 1; round <= 2; round++) {
    int value = __shfl_xor_sync(0xffffffffu, round * 100 + int(threadIdx.x), 1);
    shared[threadIdx.x] = __shfl_xor_sync(0xffffffffu, value, 1);
    __syncthreads();
    sum += shared[(threadIdx.x + 32) % blockDim.x];
  }
  out[threadIdx.x] = sum;
}

// Wrong: reads shared memory that nobody wrote.
__global__ void uninitialised(float *out) {
  DYNAMIC_SMEM(float, shared);
  out[threadIdx.x] = shared[threadIdx.x];
}

// Wrong if shared memory has no room for one more.
__global__ void overrun(int *out) {
  DYNAMIC_SMEM(int, shared);
  shared[threadIdx.x + 1] = 7;
  __syncthreads();
  out[threadIdx.x] = shared[threadIdx.x + 1];
}

// Half of the threads leave early; barriers no longer wait for them.
__global__ void early_exit(int *out) {
  DYNAMIC_SMEM(int, shared);
  unsigned half = blockDim.x / 2;
  if (threadIdx.x >= half) return;
  shared[threadIdx.x] = int(threadIdx.x);
  __syncthreads();
  out[threadIdx.x] = shared[half - 1 - threadIdx.x];
}

// Wrong: two barriers, one for each half of the block.
__global__ void divergent() {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}

// Wrong: half of the warp does not come to the shuffle.
__global__ void absent_lanes(int *out) {
  if (threadIdx.x < 16) out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, 1, 1);
}

// Wrong: waits for what nobody writes.
__global__ void spins(unsigned *flag) {
  while (load_acquire(flag) == 0) {
  }
}

__global__ void shuffles(const int *in, int *out, int width) {
  int lane = threadIdx.x, value = in[lane];
  out[lane] = __shfl_sync(0xffffffffu, value, 5, width);
  out[32 + lane] = __shfl_xor_sync(0xffffffffu, value, 3, width);
  out[64 + lane] = __shfl_down_sync(0xffffffffu, value, 2, width);
  out[96 + lane] = __shfl_up_sync(0xffffffffu, value, 2, width);
}

// Each half of the warp votes for itself, with a mask of its own.
__global__ void half_warps(const int *in, unsigned *out) {
  unsigned mask = threadIdx.x < 16 ? 0xffffu : 0xffff0000u;
  for (int round = 0; round < 3; round++) {
    out[round * 32 + threadIdx.x] = __ballot_sync(mask, in[threadIdx.x] > round);
  }
}

// Wrong for the masks that it is tested with.
__global__ void given_masks(unsigned low, unsigned high, unsigned *out) {
  out[threadIdx.x] = __ballot_sync(threadIdx.x < 16 ? low : high, 1);
}

__global__ void votes(const int *in, int *out) {
  int own = in[threadIdx.x];
  out[threadIdx.x] = __any_sync(0xffffffffu, own) * 2 + __all_sync(0xffffffffu, own);
}

__global__ void atomics(int *sum, float *total, int *largest, int *smallest, unsigned *wrapped) {
  int own = int(blockIdx.x * blockDim.x + threadIdx.x);
  atomicAdd(sum, own);
  atomicAdd(total, 0.5f);
  atomicMax(largest, own);
  atomicMin(smallest, own);
  atomicInc(wrapped, 6);
}

// The last block to finish adds up what the others left.
__global__ void last_block(int *partial, unsigned *count, int *out) {
  DYNAMIC_SMEM(unsigned, order);
  if (threadIdx.x == 0) {
    partial[blockIdx.x] = int(blockIdx.x) + 1;
    __threadfence();
    order[0] = atomicAdd(count, 1u);
  }
  __syncthreads();
  if (order[0] != gridDim.x - 1 || threadIdx.x != 0) return;
  int sum = 0;
  for (unsigned i = 0; i < gridDim.x; i++) sum += partial[i];
  out[0] = sum;
}

// c (16, 8) = a (16, k) b (8, k)^T by one warp.
template <bool BF16>
__global__ void mma(const uint16_t *a, const uint16_t *b, float *c, int k) {
  int lane = threadIdx.x, row = lane >> 2, pair = (lane & 3) * 2;
  float sums[4] = {0.f, 0.f, 0.f, 0.f};
  for (int first = 0; first < k; first += 16) {
    auto load = [&](const uint16_t *matrix, int row, int column) {
      return *reinterpret_cast<const uint32_t *>(matrix + row * k + first + column);
    };
    uint32_t fragment_a[4] = {load(a, row, pair), load(a, row + 8, pair), load(a, row, pair + 8),
                              load(a, row + 8, pair + 8)};
    uint32_t fragment_b[2] = {load(b, row, pair), load(b, row, pair + 8)};
    if (BF16) {
      mma_m16n8k16_bf16(sums, fragment_a, fragment_b);
    } else {
      mma_m16n8k16_f16(sums, fragment_a, fragment_b);
    }
  }
  for (int i = 0; i < 4; i++) c[(row + (i >> 1) * 8) * 8 + pair + (i & 1)] = sums[i];
}

// The same product from shared memory: a by ldmatrix, b from its transpose (k, 8) by ldmatrix.trans.
__global__ void mma_from_shared(const uint16_t *a, const uint16_t *b, float *c) {
  DYNAMIC_SMEM(uint16_t, tile_a);  // (16, 16), then b (16, 8)
  uint16_t *tile_b = tile_a + 256;
  int lane = threadIdx.x, row = lane >> 2, pair = (lane & 3) * 2;
  cp_async_16(tile_a + lane * 8, a + lane * 8);
  cp_async_commit();
  cp_async_16(tile_b + (lane & 15) * 8, b + (lane & 15) * 8);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  uint32_t fragment_a[4], fragment_b[2];
  ldmatrix_x4(fragment_a, tile_a + (lane & 15) * 16 + (lane >> 4) * 8);
  ldmatrix_x2_trans(fragment_b, tile_b + (lane & 15) * 8);
  float sums[4] = {0.f, 0.f, 0.f, 0.f};
  mma_m16n8k16_bf16(sums, fragment_a, fragment_b);
  for (int i = 0; i < 4; i++) c[(row + (i >> 1) * 8) * 8 + pair + (i & 1)] = sums[i];
}

__global__ void ldmatrix_tiles(const uint16_t *in, uint32_t *out) {
  DYNAMIC_SMEM(uint16_t, tiles);
  int lane = threadIdx.x;
  for (int i = 0; i < 8; i++) tiles[lane * 8 + i] = in[lane * 8 + i];
  __syncthreads();
  uint32_t plain[4], transposed[4];
  ldmatrix_x4(plain, tiles + lane * 8);
  ldmatrix_x4_trans(transposed, tiles + lane * 8);
  for (int i = 0; i < 4; i++) out[lane * 8 + i] = plain[i], out[lane * 8 + 4 + i] = transposed[i];
}

// Three groups of one copy each; after the wait for all but LEFT groups, what has arrived.
template <int LEFT>
__global__ void copies(const int *in, int *out) {
  DYNAMIC_SMEM(int, shared);
  for (int group = 0; group < 3; group++) {
    cp_async_16(shared + group * 4, in + group * 4, group != 1);
    cp_async_commit();
  }
  cp_async_wait<LEFT>();
  for (int i = 0; i < 12; i++) out[i] = shared[i];
}

__global__ void misaligned_copy(const int *in) {
  DYNAMIC_SMEM(int, shared);
  cp_async_16(shared + 1, in);
}

__global__ void conversions(const float *in, uint16_t *bits, float *back) {
  int i = int(blockIdx.x * blockDim.x + threadIdx.x);
  bits[i] = float_to_half(in[i]);
  back[i] = half_to_float(uint16_t(i));
}

// Cooperative: every block needs what all the others wrote.
__global__ void two_stages(int *first, int *second, unsigned *counter) {
  int own = int(blockIdx.x * blockDim.x + threadIdx.x), count = int(gridDim.x * blockDim.x);
  first[own] = own;
  grid_sync(counter);
  int sum = 0;
  for (int i = 0; i < count; i++) sum += first[i];
  second[own] = sum;
}

// Cooperative: block 0 waits for the flag of the last block.
__global__ void flag(unsigned *ready, int *value, int *out) {
  if (blockIdx.x == gridDim.x - 1 && threadIdx.x == 0) {
    *value = 42;
    store_release(ready, 1);
  }
  if (blockIdx.x == 0) {
    while (load_acquire(ready) == 0) {
    }
    out[threadIdx.x] = *value;
  }
}

__global__ void parameters(int *out, int a, float b, int64_t c, uint64_t d, uint32_t e, bool f,
                           const int *nothing) {
  out[0] = a == -3 && b == 0.5f && c == -(int64_t(1) << 40) && d == uint64_t(1) << 63 &&
           e == 0xffffffffu && f && nothing == nullptr;
}
