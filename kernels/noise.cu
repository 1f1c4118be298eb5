#include "random.cuh"

// gumbel_noise: noise of one absolute position per row, for every token id.
//
//   seeds, positions (rows) int64, starts (rows) int64 or null for 0, out (rows, vocab) fp32
//   grid   (ceil(vocab / 256), rows), block 256, shared 0
//   bytes  4 vocab per row
__global__ void __launch_bounds__(256)
    gumbel_noise(const int64_t *seeds, const int64_t *positions, const int64_t *starts, float *out,
                 int vocab, int stream) {
  take_turn();
  int64_t row = blockIdx.y;
  int token = blockIdx.x * 256 + threadIdx.x;
  if (token < vocab) {
    int64_t start = starts == nullptr ? 0 : starts[row];
    out[row * vocab + token] = gumbel(seeds[row], positions[row], start, stream, token);
  }
}

// gumbel_from_bits: noise of given 24-bit uniforms; by it a device shows that it has the CPU's bits.
//
//   bits (count) int32, out (count) fp32
//   grid   (ceil(count / 4096)), block 128, shared 0
//   bytes  8 per uniform
__global__ void __launch_bounds__(128)
    gumbel_from_bits(const int *bits, float *out, int count) {
  take_turn();
  int end = min(count, static_cast<int>(blockIdx.x + 1) * 4096);
  for (int i = blockIdx.x * 4096 + threadIdx.x; i < end; i += 128) {
    out[i] = gumbel_of_uniform(bits[i]);
  }
}
