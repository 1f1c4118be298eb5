#include "product.cuh"

// rms_norm<T>: y = x / sqrt(mean square + eps), rounded, times weight; x + residual in its place.
//
//   x, residual (m, width) with row strides, weight (width), y and sum (m, width) dense; all T.
//   residual and sum are null together; sum receives x + residual, rounded, which is then normed.
//   `aligned`: width is a multiple of 8 and everything is 16-byte aligned by row.
//   grid   (m), block 256, shared 36 bytes
//   bytes  x, residual, y, sum once
//   order  add_all_rows, which the prologue of linear uses too: the bits are the same
template <class T>
__global__ void __launch_bounds__(kThreads)
    rms_norm(const uint16_t *x, int x_stride, const uint16_t *residual, int residual_stride,
             const uint16_t *__restrict__ weight, float eps, uint16_t *y, uint16_t *sum, int width,
             bool aligned) {
  take_turn();
  DYNAMIC_SMEM(float, partial);
  float *inverse_rms = partial + kWarps;
  int64_t row = blockIdx.x;
  Tokens rows{x + row * x_stride, 0, 1, width, aligned};
  if (residual != nullptr) {
    uint16_t *out = sum + row * width;
    for (int i = threadIdx.x; i < width; i += kThreads) {
      out[i] = T::round(T::widen(residual[row * residual_stride + i]) + T::widen(rows.x[i]));
    }
    __syncthreads();
    rows.x = out;
  }
  add_all_rows<T>(rows, partial, nullptr);
  inverse_rms_of_rows(rows, eps, partial, inverse_rms);
  for (int k = threadIdx.x * 8; k < width; k += kThreads * 8) {
    uint4 w = load_eight(weight, k, width, aligned);
    uint4 v = normed<T>(rows.load(0, k, aligned), w, *inverse_rms);
    unsigned pairs[4] = {v.x, v.y, v.z, v.w};
    uint16_t *out = y + row * width;
    if (aligned) {
      *reinterpret_cast<uint4 *>(out + k) = v;
    } else {
      for (int i = 0; i < 8 && k + i < width; i++) out[k + i] = pairs[i / 2] >> (16 * (i & 1));
    }
  }
}
