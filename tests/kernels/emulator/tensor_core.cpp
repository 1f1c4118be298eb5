// The arithmetic of mma.sync: what the last lane to come does for all of its warp.
#include "emulator.h"

namespace emulator {

template <float (*value)(uint16_t)>
static void multiply(Slots &slots) {
  float a[16][16], b[16][8], c[16][8];
  for (int lane = 0; lane < 32; lane++) {
    auto own = load<Fragments>(slots[lane]);
    int row = lane >> 2, pair = (lane & 3) * 2;
    for (int half = 0; half < 2; half++) {
      for (int r = 0; r < 4; r++) {
        a[row + (r & 1) * 8][pair + half + (r >> 1) * 8] = value(uint16_t(own.a[r] >> 16 * half));
      }
      for (int r = 0; r < 2; r++) b[pair + half + r * 8][row] = value(uint16_t(own.b[r] >> 16 * half));
    }
    for (int r = 0; r < 4; r++) c[row + (r >> 1) * 8][pair + (r & 1)] = own.c[r];
  }
  for (int i = 0; i < 16; i++) {
    for (int k = 0; k < 16; k++) {
      for (int j = 0; j < 8; j++) c[i][j] = __builtin_fmaf(a[i][k], b[k][j], c[i][j]);
    }
  }
  for (int lane = 0; lane < 32; lane++) {
    float own[4];
    for (int r = 0; r < 4; r++) own[r] = c[(lane >> 2) + (r >> 1) * 8][(lane & 3) * 2 + (r & 1)];
    std::memcpy(slots[lane] + offsetof(Fragments, c), own, sizeof own);
  }
}

void multiply_bf16(Slots &slots) { multiply<bf16_value>(slots); }
void multiply_f16(Slots &slots) { multiply<f16_value>(slots); }

}  // namespace emulator
