#include "product.cuh"

// linear<T, TILES>: y = x W^T (+ bias) (+ residual), x optionally normed first.
//
//   x (m, k) with a row stride, weight (n, k) dense, bias (n), residual (m, n) with a row stride,
//   norm_weight (k), y (m, n) dense; all T. bias, residual and norm_weight may be null.
//   `aligned`: k is a multiple of 8 and x, weight and norm_weight are 16-byte aligned by row.
//   grid   (ceil(n / rows_each), ceil(m / (8 TILES))), block 256; rows_each is a multiple of 16
//   shared 4 * (1024 TILES + 8 TILES) bytes; for a norm, 2 * normed_stride(k) (m + 1) more
//   bytes  n k weights once per 8 TILES tokens; x from L2 once per 16 weight rows, with a norm twice; y
//   order  product.cuh; then + bias, round, + residual, round
template <class T, int TILES>
__global__ void __launch_bounds__(kThreads, blocks_together(TILES))
    linear(const uint16_t *x, int x_stride, const uint16_t *__restrict__ weight,
           const uint16_t *__restrict__ bias, const uint16_t *residual, int residual_stride,
           const uint16_t *__restrict__ norm_weight, float eps, uint16_t *y, int m, int n, int k,
           bool aligned, int rows_each) {
  DYNAMIC_SMEM(float, warp_sums);
  float *inverse_rms = warp_sums + kWarps * TILES * 4 * 32;
  uint16_t *normed_rows = reinterpret_cast<uint16_t *>(inverse_rms + 8 * TILES);
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int first_token = blockIdx.y * 8 * TILES, first_row = blockIdx.x * rows_each;
  int end_row = min(first_row + rows_each, n);
  Ring<TILES> ring;
  auto turn_to = [&](int first) {
    int64_t row = min(first + (lane >> 2), n - 1), row_and_8 = min(first + (lane >> 2) + 8, n - 1);
    ring.turn_to(weight + row * k, weight + row_and_8 * k, k, aligned);
  };
  turn_to(first_row);
  ask_for_weights<blocks_ahead(TILES)>(ring.first, ring.second, k);
  take_turn();
  Tokens tokens{x + static_cast<int64_t>(first_token) * x_stride,
                x_stride, min(m - first_token, 8 * TILES), k, aligned};
  tokens = first_asked<T>(ring, tokens, norm_weight, eps, warp_sums, inverse_rms, normed_rows);

#pragma unroll 1
  for (int first = first_row; first < end_row; first += 16) {
    float sums[TILES][4];
    multiply<T>(sums, ring, tokens);
    if (first + 16 < end_row) {  // on their way while these are added
      turn_to(first + 16);
      ring.ask(tokens);
    }
    store_warp_sums<TILES>(sums, warp_sums);
    __syncthreads();
    for (int entry = warp; entry < TILES * 4; entry += kWarps) {
      int token = (entry >> 2) * 8 + (lane & 3) * 2 + (entry & 1);
      int column = first + (lane >> 2) + ((entry >> 1) & 1) * 8;
      if (token >= tokens.count || column >= n) continue;
      int64_t at = first_token + token;
      float sum = add_warps<TILES>(warp_sums, entry);
      if (bias != nullptr) sum += T::widen(bias[column]);
      uint16_t out = T::round(sum);
      if (residual != nullptr) {
        out = T::round(T::widen(residual[at * residual_stride + column]) + T::widen(out));
      }
      y[at * n + column] = out;
    }
    __syncthreads();
  }
}

// swiglu<T, TILES>: y = silu(x G^T) * (x U^T), x optionally normed first.
//
//   x (m, k) with a row stride, gate and up (n, k) dense, norm_weight (k) or null, y (m, n) dense.
//   The A operand's upper half are 8 rows of gate, its lower half the same 8 rows of up, so that
//   one lane holds both factors of its outputs. `aligned` as in linear.
//   grid   (ceil(n / columns_each), ceil(m / (8 TILES))), block 256; columns_each: a multiple of 8
//   shared as in linear
//   bytes  2 n k weights once per 8 TILES tokens; x from L2 once per 8 outputs; y
//   order  product.cuh; both products are rounded, then silu, then the product of the two
template <class T, int TILES>
__global__ void __launch_bounds__(kThreads, blocks_together(TILES))
    swiglu(const uint16_t *x, int x_stride, const uint16_t *__restrict__ gate,
           const uint16_t *__restrict__ up, const uint16_t *__restrict__ norm_weight, float eps,
           uint16_t *y, int m, int n, int k, bool aligned, int columns_each) {
  DYNAMIC_SMEM(float, warp_sums);
  float *inverse_rms = warp_sums + kWarps * TILES * 4 * 32;
  uint16_t *normed_rows = reinterpret_cast<uint16_t *>(inverse_rms + 8 * TILES);
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int first_token = blockIdx.y * 8 * TILES, first_column = blockIdx.x * columns_each;
  int end_column = min(first_column + columns_each, n);
  Ring<TILES> ring;
  auto turn_to = [&](int first) {
    int64_t offset = static_cast<int64_t>(min(first + (lane >> 2), n - 1)) * k;
    ring.turn_to(gate + offset, up + offset, k, aligned);
  };
  turn_to(first_column);
  ask_for_weights<blocks_ahead(TILES)>(ring.first, ring.second, k);
  take_turn();
  Tokens tokens{x + static_cast<int64_t>(first_token) * x_stride,
                x_stride, min(m - first_token, 8 * TILES), k, aligned};
  tokens = first_asked<T>(ring, tokens, norm_weight, eps, warp_sums, inverse_rms, normed_rows);

#pragma unroll 1
  for (int first = first_column; first < end_column; first += 8) {
    float sums[TILES][4];
    multiply<T>(sums, ring, tokens);
    if (first + 8 < end_column) {
      turn_to(first + 8);
      ring.ask(tokens);
    }
    store_warp_sums<TILES>(sums, warp_sums);
    __syncthreads();
    for (int pair = warp; pair < TILES * 2; pair += kWarps) {
      int entry = (pair >> 1) * 4 + (pair & 1);
      int token = (pair >> 1) * 8 + (lane & 3) * 2 + (pair & 1), column = first + (lane >> 2);
      if (token >= tokens.count || column >= n) continue;
      float gated = rounded<T>(add_warps<TILES>(warp_sums, entry));
      float linear_part = rounded<T>(add_warps<TILES>(warp_sums, entry + 2));
      float activated = rounded<T>(gated / (1.f + portable_exp(-gated)));
      y[static_cast<int64_t>(first_token + token) * n + column] =
          T::round(activated * linear_part);
    }
    __syncthreads();
  }
}
