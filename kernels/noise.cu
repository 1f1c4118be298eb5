#include "random.cuh"

// gumbel_noise: noise of one absolute position per row, for every token id.
//
//   seeds, positions (rows) int64, out (rows, vocab) fp32
//   grid   (ceil(vocab / 256), rows), block 256, shared 0
//   bytes  4 vocab per row
__global__ void __launch_bounds__(256)
    gumbel_noise(const int64_t *__restrict__ seeds, const int64_t *__restrict__ positions,
                 float *__restrict__ out, int vocab, int stream) {
  int64_t row = blockIdx.y;
  int token = blockIdx.x * 256 + threadIdx.x;
  if (token < vocab) {
    out[row * vocab + token] = gumbel(seeds[row], positions[row], stream, token);
  }
}
