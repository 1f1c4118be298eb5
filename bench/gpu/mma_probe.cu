#include "common.cuh"

// mma_probe<T>: c = a b^T for many small products, one warp each, to ask the hardware whether the
// eight columns of mma.m16n8k16 are alike.
//
//   a (products, 16, k), b (products, 8, k), c (products, 16, 8) fp32; k % 16 == 0
//   grid   (products), block 32, shared 0
//   order  blocks of 16 of k, one after another
template <class T>
__global__ void __launch_bounds__(32)
    mma_probe(const uint16_t *__restrict__ a, const uint16_t *__restrict__ b,
              float *__restrict__ c, int k) {
  int64_t product = blockIdx.x;
  int lane = threadIdx.x, row = lane >> 2, pair = (lane & 3) * 2;
  const uint16_t *low = a + (product * 16 + row) * k + pair, *high = low + int64_t(8) * k;
  const uint16_t *column = b + (product * 8 + row) * k + pair;
  float sums[4] = {0.f, 0.f, 0.f, 0.f};
  for (int first = 0; first < k; first += 16) {
    auto two = [first](const uint16_t *from, int offset) {
      return *reinterpret_cast<const unsigned *>(from + first + offset);
    };
    unsigned fragment_a[4] = {two(low, 0), two(high, 0), two(low, 8), two(high, 8)};
    unsigned fragment_b[2] = {two(column, 0), two(column, 8)};
    T::mma(sums, fragment_a, fragment_b);
  }
  for (int i = 0; i < 4; i++) {
    c[(product * 16 + row + (i >> 1) * 8) * 8 + pair + (i & 1)] = sums[i];
  }
}
