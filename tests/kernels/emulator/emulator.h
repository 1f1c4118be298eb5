// Runs device-only CUDA C++ on the CPU: one fiber for each CUDA thread.
//
// The fibers of a block share one OS thread and change only where CUDA threads may wait for each
// other: at barriers and at warp-wide operations. What it cannot show: speed, bank conflicts, the
// order of memory operations between blocks, and how a tensor core rounds inside.
//
// A source is compiled with LAYERSKIP_EMULATOR defined and this header included before it. A kernel
// takes shared memory through DYNAMIC_SMEM(type, name) alone, and reaches PTX through the functions
// that tensor_core.h lists, which kernels/common.cuh defines for the GPU under the same names.
#pragma once
#define LAYERSKIP_EMULATOR 1

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "context.h"

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __restrict__ __restrict
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static_assert(false, "take shared memory through DYNAMIC_SMEM(type, name)");

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};

namespace emulator {

// A place in a source, for reports. As default arguments, the builtins give the caller's place.
struct Where {
  const char *file = "";
  int line = 0;
  bool operator==(const Where &other) const {
    return line == other.line && std::strcmp(file, other.file) == 0;
  }
};
#define EMULATOR_HERE \
  emulator::Where where = { __builtin_FILE(), __builtin_LINE() }

// Everybody who is to come has come when `arrived` says so; then the generation changes.
struct Barrier {
  unsigned arrived = 0, generation = 0;
  Where where;
};

// Where lanes of a warp meet to exchange values. Slots are kept for two generations, so that a fast
// lane's next value cannot overwrite one that a slow lane has yet to read.
struct Meeting {
  static constexpr size_t kSlot = 64;
  unsigned mask, arrived = 0, generation = 0;
  Where where;
  alignas(16) unsigned char slots[2][32][kSlot];
  explicit Meeting(unsigned lanes) : mask(lanes) {}
};

struct Copy {
  void *shared;
  const void *global;
  size_t bytes;  // 0 writes zeros
  unsigned group;
};

struct Block {
  dim3 index;
  unsigned live;  // threads that have not returned
  Barrier barrier;
  std::vector<std::deque<Meeting>> warps;  // of each warp, one meeting for each mask in use
  unsigned char *shared = nullptr;
};

struct Fiber {
  Context context;
  dim3 thread;
  unsigned linear = 0;
  Block *block = nullptr;
  bool done = false, spinning = false;
  const unsigned *waits_for = nullptr;  // a generation that has to change first
  unsigned seen = 0;
  const char *what = "";
  Where where;
  std::vector<Copy> copies;  // asynchronous, not yet waited for
  unsigned group = 0;
};

// What the fibers of one OS thread share. They never move to another one.
struct Machine {
  Fiber *current = nullptr;
  Context scheduler;
  dim3 grid, block;
  Barrier grid_barrier;
  unsigned live = 0;
  const std::function<void()> *body = nullptr;
  std::string error;
};
extern thread_local Machine *machine;

inline Fiber &self() { return *machine->current; }
inline Block &block() { return *machine->current->block; }

// Ends the launch with this message. Fibers are dropped where they stand.
[[noreturn]] void fail(const std::string &message);
[[noreturn]] void fail_to_read(unsigned lane, const char *what, Where where);
std::string describe(const Where &where);
std::string describe(const Fiber &fiber);

inline void wait_until_changed(const unsigned &generation, const char *what, Where where) {
  Fiber &fiber = self();
  fiber.waits_for = &generation;
  fiber.seen = generation;
  fiber.what = what;
  fiber.where = where;
  switch_context(fiber.context, machine->scheduler);
}

// Lets the others run: for loops that wait for what another thread writes.
inline void spin(Where where) {
  Fiber &fiber = self();
  fiber.spinning = true;
  fiber.what = "spins";
  fiber.where = where;
  switch_context(fiber.context, machine->scheduler);
}

void arrive(Barrier &barrier, unsigned expected, const char *what, Where where);
Meeting &join(unsigned mask, unsigned lane, const char *what, Where where);

// Every lane of the mask brings a value. The last one to come runs finish(slots) once; then each
// reads what it wants by read(slots, lane).
template <class T, class Finish, class Read>
auto meet(unsigned mask, const T &value, const char *what, Where where, Finish finish, Read read) {
  static_assert(sizeof(T) <= Meeting::kSlot && std::is_trivially_copyable_v<T>, "value of a lane");
  unsigned lane = self().linear & 31;
  Meeting &meeting = join(mask, lane, what, where);
  auto &slots = meeting.slots[meeting.generation & 1];
  std::memcpy(slots[lane], &value, sizeof(T));
  if (meeting.arrived == mask) {
    finish(slots);
    meeting.arrived = 0;
    ++meeting.generation;
  } else {
    wait_until_changed(meeting.generation, what, where);
  }
  return read(slots, lane);
}

template <class T>
T load(const unsigned char *slot) {
  T value;
  std::memcpy(&value, slot, sizeof(T));
  return value;
}

// Kernels by the names that NVRTC is given, and how each takes its parameters.
struct Kernel {
  std::string signature;  // a letter for each parameter, as in layerskip/ops/launch.py
  std::function<std::function<void()>(void **)> bind;
};
void add_kernel(const char *name, Kernel kernel);

template <class T>
constexpr char parameter_code() {
  if (std::is_pointer_v<T>) return 'P';
  if (std::is_same_v<T, bool>) return '?';
  if (std::is_same_v<T, float>) return 'f';
  if (std::is_integral_v<T> && sizeof(T) == 4) return std::is_signed_v<T> ? 'i' : 'I';
  if (std::is_integral_v<T> && sizeof(T) == 8) return std::is_signed_v<T> ? 'q' : 'Q';
  return 's';
}

template <class... A, size_t... I>
std::function<void()> bind_kernel(void (*kernel)(A...), void **params, std::index_sequence<I...>) {
  std::tuple<std::decay_t<A>...> values{*static_cast<std::decay_t<A> *>(params[I])...};
  return [=] { std::apply(kernel, values); };
}

struct Registration {
  template <class... A>
  Registration(const char *name, void (*kernel)(A...)) {
    auto bind = [kernel](void **params) {
      return bind_kernel(kernel, params, std::index_sequence_for<A...>{});
    };
    add_kernel(name, Kernel{std::string{parameter_code<std::decay_t<A>>()...}, bind});
  }
};

}  // namespace emulator

#define EMULATOR_CAT(a, b) EMULATOR_CAT_(a, b)
#define EMULATOR_CAT_(a, b) a##b
// The name expression once as a string, once as the function.
#define EMULATOR_KERNEL(name, ...) \
  static emulator::Registration EMULATOR_CAT(registration_, __COUNTER__)(name, __VA_ARGS__);

#include "intrinsics.h"
#include "tensor_core.h"
