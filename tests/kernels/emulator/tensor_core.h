// The emulator's halves of the functions that kernels/common.cuh writes in PTX for the GPU:
//
//   mma_m16n8k16_bf16(c, a, b)  mma_m16n8k16_f16(c, a, b)   mma.sync, fp32 accumulators
//   ldmatrix_x4(r, row)         ldmatrix_x4_trans(r, row)   ldmatrix.sync, four 8x8 tiles of 16 bits
//   ldmatrix_x2(r, row)         ldmatrix_x2_trans(r, row)   the same, two tiles
//   cp_async_16(shared, global, valid)   cp.async of 16 bytes; zeros where !valid
//   cp_async_commit()   cp_async_wait<N>()
//   load_acquire(address)   store_release(address, value)   unsigned, for the whole GPU
//   grid_sync(counter)          every thread of a cooperative launch
//   half_to_float(bits)   float_to_half(value)
#pragma once

namespace emulator {

inline float bf16_value(uint16_t bits) { return bit_cast<float>(uint32_t(bits) << 16); }

inline float f16_value(uint16_t bits) {
  uint32_t sign = uint32_t(bits & 0x8000) << 16, exponent = bits >> 10 & 31, fraction = bits & 1023;
  if (exponent == 0) {  // zero or subnormal: fraction * 2^-24, which fp32 holds exactly
    float magnitude = float(fraction) * 0x1p-24f;
    return sign ? -magnitude : magnitude;
  }
  uint32_t wide = exponent == 31 ? 255 : exponent + 112;
  return bit_cast<float>(sign | wide << 23 | fraction << 13);
}

// Round to nearest even.
inline uint16_t f16_bits(float value) {
  uint32_t bits = bit_cast<uint32_t>(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return uint16_t(0x7fff);
  if (magnitude >= 0x47800000) return uint16_t(sign | 0x7c00);
  if (magnitude < 0x38800000) {  // below the smallest normal: fp32 addition does the rounding
    float shifted = bit_cast<float>(magnitude) + 0.5f;
    return uint16_t(sign | (bit_cast<uint32_t>(shifted) - 0x3f000000));
  }
  uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
  return uint16_t(sign | (rounded - 0x38000000) >> 13);
}

// The fragments of one lane, as PTX lays them out.
struct Fragments {
  uint32_t a[4], b[2];
  float c[4];
};

// c += a b for the whole warp: a is 16x16, b is 16x8; products are added in order of k, in fp32.
// In a source of their own, compiled once and with more optimization than kernels are.
using Slots = unsigned char[32][Meeting::kSlot];
void multiply_bf16(Slots &slots);
void multiply_f16(Slots &slots);

template <void (*multiply)(Slots &)>
void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Where where) {
  Fragments own;
  std::memcpy(own.a, a, sizeof a);
  std::memcpy(own.b, b, sizeof b);
  std::memcpy(own.c, c, sizeof c);
  auto read = [](auto &slots, unsigned lane) { return load<Fragments>(slots[lane]); };
  own = meet(~0u, own, "mma.sync", where, multiply, read);
  std::memcpy(c, own.c, sizeof c);
}

// Lane 8 i + j brings the address of row j of tile i; every lane gets two elements of each tile.
template <int TILES, bool TRANSPOSED>
void ldmatrix(uint32_t (&r)[TILES], const void *row, Where where) {
  if (reinterpret_cast<uintptr_t>(row) % 16 != 0) {
    fail("ldmatrix takes rows at multiples of 16 bytes, at " + describe(where));
  }
  auto read = [&](auto &slots, unsigned lane) {
    unsigned major = lane >> 2, minor = (lane & 3) * 2;
    for (int tile = 0; tile < TILES; tile++) {
      uint16_t pair[2];
      for (unsigned half = 0; half < 2; half++) {
        unsigned from = TRANSPOSED ? minor + half : major, column = TRANSPOSED ? major : minor + half;
        auto *address = load<const uint16_t *>(slots[tile * 8 + from]);
        pair[half] = address[column];
      }
      r[tile] = uint32_t(pair[0]) | uint32_t(pair[1]) << 16;
    }
    return 0;
  };
  meet(~0u, row, "ldmatrix", where, [](auto &) {}, read);
  // Lanes read in their own time here: none may go on to overwrite the tile before all have read.
  meet(~0u, 0, "ldmatrix", where, [](auto &) {}, [](auto &, unsigned) { return 0; });
}

}  // namespace emulator

inline void mma_m16n8k16_bf16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                              EMULATOR_HERE) {
  emulator::mma<emulator::multiply_bf16>(c, a, b, where);
}
inline void mma_m16n8k16_f16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                             EMULATOR_HERE) {
  emulator::mma<emulator::multiply_f16>(c, a, b, where);
}
inline void ldmatrix_x4(uint32_t (&r)[4], const void *row, EMULATOR_HERE) {
  emulator::ldmatrix<4, false>(r, row, where);
}
inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void *row, EMULATOR_HERE) {
  emulator::ldmatrix<4, true>(r, row, where);
}
inline void ldmatrix_x2(uint32_t (&r)[2], const void *row, EMULATOR_HERE) {
  emulator::ldmatrix<2, false>(r, row, where);
}
inline void ldmatrix_x2_trans(uint32_t (&r)[2], const void *row, EMULATOR_HERE) {
  emulator::ldmatrix<2, true>(r, row, where);
}

// The copy happens when it is waited for, so that a missing wait leaves what was there before.
inline void cp_async_16(void *shared, const void *global, bool valid = true, EMULATOR_HERE) {
  if ((reinterpret_cast<uintptr_t>(shared) | (valid ? reinterpret_cast<uintptr_t>(global) : 0)) % 16) {
    emulator::fail("cp.async of 16 bytes takes multiples of 16 bytes, at " + emulator::describe(where));
  }
  emulator::Fiber &fiber = emulator::self();
  fiber.copies.push_back({shared, valid ? global : nullptr, 16, fiber.group});
}
inline void cp_async_commit() { ++emulator::self().group; }
// Waits for all groups but the last N.
template <int N>
void cp_async_wait() {
  emulator::Fiber &fiber = emulator::self();
  auto waited = [&](const emulator::Copy &copy) { return int(fiber.group - copy.group) > N; };
  for (const emulator::Copy &copy : fiber.copies) {
    if (!waited(copy)) continue;
    if (copy.global != nullptr) {
      std::memcpy(copy.shared, copy.global, copy.bytes);
    } else {
      std::memset(copy.shared, 0, copy.bytes);
    }
  }
  auto left = std::remove_if(fiber.copies.begin(), fiber.copies.end(), waited);
  fiber.copies.erase(left, fiber.copies.end());
}

inline unsigned load_acquire(const unsigned *address, EMULATOR_HERE) {
  emulator::spin(where);
  return __atomic_load_n(address, __ATOMIC_ACQUIRE);
}
inline void store_release(unsigned *address, unsigned value) {
  __atomic_store_n(address, value, __ATOMIC_RELEASE);
}
inline void grid_sync(unsigned *, EMULATOR_HERE) {
  emulator::arrive(emulator::machine->grid_barrier, emulator::machine->live, "grid_sync", where);
}

inline float half_to_float(uint16_t bits) { return emulator::f16_value(bits); }
inline uint16_t float_to_half(float value) { return emulator::f16_bits(value); }
