// Runs kernels without Python, and prints a line of bits for each: what one kind of processor
// prints, another must print too. test_emulator.py builds it for aarch64, and runs it under qemu.
#include <cstdio>

#include "emulator.h"

#include "cases.cu"

#include "../../kernels/attention.cu"
#include "../../kernels/linear.cu"
#include "../../kernels/noise.cu"

EMULATOR_KERNEL("indices", indices)
EMULATOR_KERNEL("reverse", reverse)
EMULATOR_KERNEL("shuffles", shuffles)
EMULATOR_KERNEL("two_stages", two_stages)
EMULATOR_KERNEL("divergent", divergent)
EMULATOR_KERNEL("absent_lanes", absent_lanes)
EMULATOR_KERNEL("overrun", overrun)
EMULATOR_KERNEL("linear", linear<Bf16, 1>)
EMULATOR_KERNEL("swiglu", swiglu<Fp16, 2>)
EMULATOR_KERNEL("decode_attention", decode_attention<Bf16, 64, 1>)
EMULATOR_KERNEL("combine_splits", combine_splits<Bf16>)
EMULATOR_KERNEL("gumbel_from_bits", gumbel_from_bits)

extern "C" int emulator_launch(const char *, const unsigned *, const unsigned *, size_t, void **,
                               int, unsigned, unsigned, char *, size_t);

struct Shape {
  unsigned grid[3], block[3];
  size_t shared = 0;
  int cooperative = 0;
};

// Launches with the parameters given; what the emulator reports, or nothing.
template <class... A>
std::string launch(const char *kernel, unsigned seed, const Shape &shape, A... parameters) {
  void *pointers[] = {&parameters..., nullptr};
  char report[2048];
  emulator_launch(kernel, shape.grid, shape.block, shape.shared, pointers, shape.cooperative, seed,
                  2, report, sizeof report);
  return report;
}

template <class T>
void print(const char *kernel, unsigned seed, const std::vector<T> &out, const std::string &report) {
  auto *bytes = reinterpret_cast<const unsigned char *>(out.data());
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  for (size_t i = 0; i < out.size() * sizeof(T); i++) hash = (hash ^ bytes[i]) * 0x100000001b3;
  std::printf("%s %u %016llx %s\n", kernel, seed, (unsigned long long)hash, report.c_str());
}

// Numbers of 16 bits, small and of both signs: sign, exponent and fraction of a counter's hash.
std::vector<uint16_t> numbers(size_t count, unsigned low_exponent, unsigned fraction_bits) {
  std::vector<uint16_t> out(count);
  uint32_t state = 12345;
  for (uint16_t &x : out) {
    state = state * 1664525u + 1013904223u;
    unsigned exponent = low_exponent + (state >> 28 & 3), fraction = state >> 8;
    x = uint16_t(state >> 31 << 15 | exponent << fraction_bits |
                 (fraction & ((1u << fraction_bits) - 1)));
  }
  return out;
}

void print_cases(unsigned seed) {
  std::vector<int> in(96), out(96), more(4 * 32);
  for (int i = 0; i < 96; i++) in[i] = i * i;
  auto report = launch("reverse", seed, {{1, 1, 1}, {96, 1, 1}, 4 * 96}, in.data(), out.data());
  print("reverse", seed, out, report);
  report = launch("indices", seed, {{2, 2, 2}, {3, 2, 2}}, out.data());
  print("indices", seed, out, report);
  report = launch("shuffles", seed, {{1, 1, 1}, {32, 1, 1}}, in.data(), more.data(), 16);
  print("shuffles", seed, more, report);
  std::vector<int> first(128), second(128), counter(1);
  report = launch("two_stages", seed, {{4, 1, 1}, {32, 1, 1}, 0, 1}, first.data(), second.data(),
                  counter.data());
  print("two_stages", seed, second, report);
  print("divergent", seed, in, launch("divergent", seed, {{1, 1, 1}, {64, 1, 1}}));
  report = launch("absent_lanes", seed, {{1, 1, 1}, {32, 1, 1}}, out.data());
  print("absent_lanes", seed, in, report);
  report = launch("overrun", seed, {{1, 1, 1}, {32, 1, 1}, 128}, out.data());
  print("overrun", seed, in, report);
}

void print_products(unsigned seed) {
  constexpr int m = 5, n = 20, k = 264;
  auto x = numbers(m * k, 125, 7), weight = numbers(n * k, 124, 7);
  uint16_t *none = nullptr;
  std::vector<uint16_t> y(m * n);
  auto report = launch("linear", seed, {{2, 1, 1}, {256, 1, 1}, 4 * (1024 + 8)}, x.data(), k,
                       weight.data(), none, none, 0, none, 1e-6f, y.data(), m, n, k, true);
  print("linear", seed, y, report);
  x = numbers(m * k, 13, 10), weight = numbers(n * k, 12, 10);
  report = launch("swiglu", seed, {{3, 1, 1}, {256, 1, 1}, 4 * (2048 + 16)}, x.data(), k,
                  weight.data(), weight.data(), x.data(), 1e-6f, y.data(), m, n, k, true);
  print("swiglu", seed, y, report);
}

void print_attention(unsigned seed) {
  constexpr int heads = 2, slots = 300, dim = 64, splits = 2;
  auto q = numbers(heads * dim, 125, 7), keys = numbers(slots * dim, 125, 7);
  std::vector<int> length{290};
  std::vector<float> part(heads * splits * dim), stats(heads * splits * 2);
  std::vector<uint16_t> out(heads * dim);
  float *none = nullptr;
  Shape split{{splits, 1, 1}, {128, 1, 1}, 4 * 4 * 8 * (64 + 3)};
  launch("decode_attention", seed, split, q.data(), heads * dim, heads * dim, dim, keys.data(),
         keys.data(), int64_t(slots) * dim, dim, dim, length.data(), part.data(), stats.data(), 1,
         heads, 1, slots, 0.125f, 5.f, 0);
  auto report = launch("combine_splits", seed, {{heads, 1, 1}, {128, 1, 1}}, part.data(),
                       stats.data(), length.data(), none, out.data(), heads, splits, dim, slots, 0);
  print("decode_attention", seed, out, report);
}

int main() {
  for (unsigned seed = 0; seed < 4; seed++) {
    print_cases(seed);
    print_products(seed);
    print_attention(seed);
  }
  std::vector<int> bits(1 << 14);
  for (int i = 0; i < 1 << 14; i++) bits[i] = i << 10 | i;
  std::vector<float> noise(bits.size());
  auto report = launch("gumbel_from_bits", 0, {{4, 1, 1}, {128, 1, 1}}, bits.data(), noise.data(),
                       int(bits.size()));
  print("gumbel_from_bits", 0, noise, report);
}
