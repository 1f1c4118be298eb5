// The emulator's scheduler, and the C interface that tests/kernels/emulator.py loads.
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>

#include "emulator.h"

namespace emulator {

thread_local Machine *machine = nullptr;

#if defined(LAYERSKIP_EMULATOR_ASAN)
constexpr size_t kStack = 256 << 10;
constexpr size_t kCanary = 0;  // the sanitizer guards the end of shared memory
#else
constexpr size_t kStack = 64 << 10;
constexpr size_t kCanary = 256;
#endif
constexpr size_t kGuard = 4096;
constexpr unsigned char kPoison = 0xff;  // NaN as fp32, fp16 and bf16; -1 as an integer
constexpr int kPatience = 100000;        // rounds in which threads do nothing but spin
constexpr unsigned kWarp = 32;
constexpr size_t kReported = 8;          // threads named in a report

std::string describe(const Where &where) {
  return std::string(where.file) + ":" + std::to_string(where.line);
}

static std::string describe(const dim3 &index) {
  return "(" + std::to_string(index.x) + "," + std::to_string(index.y) + "," +
         std::to_string(index.z) + ")";
}

std::string describe(const Fiber &fiber) {
  return "thread " + std::to_string(fiber.linear) + " of block " + describe(fiber.block->index);
}

void fail(const std::string &message) {
  machine->error = message;
  switch_context(self().context, machine->scheduler);
  std::abort();  // the scheduler never comes back to a fiber that failed
}

void fail_to_read(unsigned lane, const char *what, Where where) {
  fail(std::string(what) + " reads lane " + std::to_string(lane) + ", which is not in its mask, at " +
       describe(where));
}

static void open(Barrier &barrier) {
  barrier.arrived = 0;
  ++barrier.generation;
}

void arrive(Barrier &barrier, unsigned expected, const char *what, Where where) {
  if (barrier.arrived == 0) barrier.where = where;
  if (!(barrier.where == where)) {
    fail(describe(self()) + " meets the others at a different " + what + ": " + describe(where) +
         ", they at " + describe(barrier.where));
  }
  if (++barrier.arrived == expected) {
    open(barrier);
  } else {
    wait_until_changed(barrier.generation, what, where);
  }
}

// The meeting that a lane comes to: that of its mask, unless one with some of the same lanes is on.
Meeting &join(unsigned mask, unsigned lane, const char *what, Where where) {
  auto complain = [&](const std::string &rest) {
    char call[32];
    std::snprintf(call, sizeof call, " with mask %08x ", mask);
    fail(describe(self()) + " calls " + what + call + rest + ", at " + describe(where));
  };
  if (!(mask >> lane & 1)) complain("that lacks its lane");
  std::deque<Meeting> &meetings = block().warps[self().linear >> 5];
  Meeting *found = nullptr;
  for (Meeting &meeting : meetings) {
    if (meeting.mask == mask) {
      found = &meeting;
    } else if (meeting.arrived & mask) {
      complain("while lanes of it wait with another mask at " + describe(meeting.where));
    }
  }
  if (found == nullptr) found = &meetings.emplace_back(mask);
  if (found->arrived == 0) found->where = where;
  if (!(found->where == where)) complain("while others of it wait at " + describe(found->where));
  found->arrived |= 1u << lane;
  return *found;
}

// Stacks with a guard page below each, kept for the next launch.
class Stacks {
 public:
  ~Stacks() {
    for (unsigned char *stack : stacks_) munmap(stack, kGuard + kStack);
  }
  unsigned char *at(size_t i) {
    while (stacks_.size() <= i) {
      void *memory = mmap(nullptr, kGuard + kStack, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (memory == MAP_FAILED) std::abort();
      mprotect(memory, kGuard, PROT_NONE);
      stacks_.push_back(static_cast<unsigned char *>(memory));
    }
    return stacks_[i] + kGuard;
  }

 private:
  std::vector<unsigned char *> stacks_;
};

struct Launch {
  dim3 grid, block;
  size_t shared;
  unsigned seed;
  std::function<void()> body;
};

// Dynamic shared memory of one block: poisoned, and with bytes behind it that must stay so.
class SharedMemory {
 public:
  explicit SharedMemory(size_t bytes) : bytes_(bytes) {
    void *memory = nullptr;
    if (posix_memalign(&memory, 128, std::max<size_t>(bytes + kCanary, 1))) std::abort();
    memory_.reset(static_cast<unsigned char *>(memory));
    std::memset(memory, kPoison, bytes + kCanary);
  }
  unsigned char *data() { return memory_.get(); }
  bool overrun() const {
    auto *end = memory_.get() + bytes_;
    return std::any_of(end, end + kCanary, [](unsigned char byte) { return byte != kPoison; });
  }

 private:
  struct Free {
    void operator()(unsigned char *memory) const { std::free(memory); }
  };
  size_t bytes_;
  std::unique_ptr<unsigned char, Free> memory_;
};

// Runs some blocks of a launch to their end, as the fibers of one OS thread.
class Worker {
 public:
  // The first error, or nothing.
  std::string run(const Launch &launch, const std::vector<dim3> &indices) {
    prepare(launch, indices);
    std::mt19937 random(launch.seed);
    bool alone = warps_run_alone(launch.seed);
    size_t together = alone ? kWarp : fibers_.size();
    int idle = 0;
    while (state_.live > 0 && state_.error.empty()) {
      reorder(launch.seed, random);
      Round whole;
      for (size_t first = 0; first < order_.size(); first += together) {
        Round round;
        do {
          round = run_once(first, std::min(first + together, order_.size()));
          whole.ran = whole.ran || round.ran;
          whole.progress = whole.progress || round.progress;
        } while (alone && round.progress);
      }
      idle = whole.progress ? 0 : idle + 1;
      if (state_.live == 0 || !state_.error.empty()) break;
      if (!whole.ran || idle > kPatience) report_deadlock();
    }
    for (size_t j = 0; j < blocks_.size() && state_.error.empty(); j++) {
      if (shared_[j]->overrun()) {
        state_.error = "block " + describe(blocks_[j].index) + " wrote past its " +
                       std::to_string(launch.shared) + " bytes of shared memory";
      }
    }
    return state_.error;
  }

 private:
  static void entry() {
    start_first();
    (*machine->body)();
    self().done = true;
    switch_context(self().context, machine->scheduler);
    std::abort();
  }

  struct Round {
    bool ran = false, progress = false;  // some thread; and it did more than spin
  };

  // Lets each thread run that does not wait, of a part of the order.
  Round run_once(size_t first, size_t end) {
    Round round;
    for (size_t i = first; i < end && state_.error.empty(); i++) {
      Fiber &fiber = fibers_[order_[i]];
      if (fiber.done || (fiber.waits_for != nullptr && *fiber.waits_for == fiber.seen)) continue;
      resume(fiber);
      round.ran = true;
      round.progress = round.progress || !fiber.spinning;
      if (fiber.done) leave(fiber);
    }
    round.progress = round.progress && state_.error.empty();
    return round;
  }

  // The sanitizer tells a fiber that starts where the scheduler's stack is.
  static void start_first() {
#if defined(LAYERSKIP_EMULATOR_ASAN)
    __sanitizer_finish_switch_fiber(nullptr, &machine->scheduler.bottom, &machine->scheduler.size);
#endif
  }

  void prepare(const Launch &launch, const std::vector<dim3> &indices) {
    machine = &state_;
    unsigned threads = launch.block.x * launch.block.y * launch.block.z;
    state_.grid = launch.grid;
    state_.block = launch.block;
    state_.body = &launch.body;
    state_.error.clear();
    state_.grid_barrier = {};
    state_.live = threads * unsigned(indices.size());
    fibers_.assign(state_.live, Fiber{});
    blocks_.assign(indices.size(), Block{});
    shared_.clear();
    for (size_t j = 0; j < indices.size(); j++) {
      shared_.push_back(std::make_unique<SharedMemory>(launch.shared));
      blocks_[j].index = indices[j];
      blocks_[j].live = threads;
      blocks_[j].warps.resize((threads + 31) / 32);
      blocks_[j].shared = shared_[j]->data();
      for (unsigned i = 0; i < threads; i++) start(fibers_[j * threads + i], blocks_[j], i);
    }
    order_.resize(fibers_.size());
    std::iota(order_.begin(), order_.end(), 0u);
    if (launch.seed == 1) std::reverse(order_.begin(), order_.end());
  }

  void start(Fiber &fiber, Block &block, unsigned linear) {
    dim3 size = state_.block;
    fiber.linear = linear;
    fiber.thread = {linear % size.x, linear / size.x % size.y, linear / (size.x * size.y)};
    fiber.block = &block;
    // Stacks begin at different offsets into a page: else all would share a few cache lines.
    size_t place = size_t(&fiber - fibers_.data());
    start_context(fiber.context, stacks_.at(place), kStack - place % 32 * 128, entry);
  }

  // Seed 0 takes threads in order, 1 backwards, any other in a new order each round. An odd one
  // above 1 lets a warp run until all of it waits: so a warp comes as far ahead of the others as
  // barriers allow.
  static bool warps_run_alone(unsigned seed) { return seed > 1 && seed % 2 == 1; }

  void reorder(unsigned seed, std::mt19937 &random) {
    if (seed <= 1) return;
    std::shuffle(order_.begin(), order_.end(), random);
    if (!warps_run_alone(seed)) return;
    std::vector<unsigned> ranks(order_.size() / kWarp + 1);
    std::iota(ranks.begin(), ranks.end(), 0u);
    std::shuffle(ranks.begin(), ranks.end() - 1, random);
    std::stable_sort(order_.begin(), order_.end(), [&](unsigned a, unsigned b) {
      return ranks[a / kWarp] < ranks[b / kWarp];
    });
  }

  void resume(Fiber &fiber) {
    fiber.waits_for = nullptr;
    fiber.spinning = false;
    state_.current = &fiber;
    switch_context(state_.scheduler, fiber.context);
  }

  // A thread that returns no longer counts: others may have been waiting for it alone.
  void leave(Fiber &fiber) {
    Block &block = *fiber.block;
    --block.live;
    --state_.live;
    if (block.live > 0 && block.barrier.arrived == block.live) open(block.barrier);
    if (state_.live > 0 && state_.grid_barrier.arrived == state_.live) open(state_.grid_barrier);
  }

  void report_deadlock() {
    std::string message = "deadlock:";
    size_t stuck = 0;
    for (const Fiber &fiber : fibers_) {
      if (fiber.done) continue;
      if (++stuck > kReported) continue;
      message += "\n  " + describe(fiber) + (fiber.spinning ? " " : " waits for ") + fiber.what +
                 " at " + describe(fiber.where);
    }
    if (stuck > kReported) message += "\n  and " + std::to_string(stuck - kReported) + " more";
    state_.error = message;
  }

  Machine state_;
  std::vector<Fiber> fibers_;
  std::vector<Block> blocks_;
  std::vector<std::unique_ptr<SharedMemory>> shared_;
  std::vector<unsigned> order_;
  Stacks stacks_;
};

// Workers are kept with their stacks: one for each OS thread that runs blocks at the same time.
class Pool {
 public:
  std::unique_ptr<Worker> take() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (idle_.empty()) return std::make_unique<Worker>();
    auto worker = std::move(idle_.back());
    idle_.pop_back();
    return worker;
  }
  void give_back(std::unique_ptr<Worker> worker) {
    std::lock_guard<std::mutex> lock(mutex_);
    idle_.push_back(std::move(worker));
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Worker>> idle_;
};

static std::map<std::string, Kernel> &kernels() {
  static std::map<std::string, Kernel> all;
  return all;
}

void add_kernel(const char *name, Kernel kernel) { kernels()[name] = std::move(kernel); }

// Blocks in the order in which they start: as threads, by seed.
static std::vector<dim3> block_indices(dim3 grid, unsigned seed) {
  std::vector<dim3> indices;
  for (unsigned z = 0; z < grid.z; z++) {
    for (unsigned y = 0; y < grid.y; y++) {
      for (unsigned x = 0; x < grid.x; x++) indices.push_back({x, y, z});
    }
  }
  if (seed == 1) std::reverse(indices.begin(), indices.end());
  if (seed > 1) std::shuffle(indices.begin(), indices.end(), std::mt19937(seed));
  return indices;
}

static std::string run(const Launch &launch, bool cooperative, unsigned threads) {
  static Pool pool;
  std::vector<dim3> indices = block_indices(launch.grid, launch.seed);
  std::atomic<size_t> next{0};
  std::mutex mutex;
  std::string error;
  auto work = [&] {
    auto worker = pool.take();
    for (size_t i; (i = next++) < indices.size();) {
      std::string found = worker->run(launch, cooperative ? indices : std::vector<dim3>{indices[i]});
      if (cooperative || !found.empty()) next = indices.size();
      std::lock_guard<std::mutex> lock(mutex);
      if (error.empty()) error = found;
    }
    pool.give_back(std::move(worker));
  };
  std::vector<std::thread> others;
  unsigned useful = cooperative ? 1 : unsigned(std::min<size_t>(threads, indices.size()));
  for (unsigned t = 1; t < useful; t++) others.emplace_back(work);
  work();
  for (std::thread &thread : others) thread.join();
  return error;
}

}  // namespace emulator

// The letters of a kernel's parameters, or null for a name that no source here has.
extern "C" const char *emulator_signature(const char *kernel) {
  auto found = emulator::kernels().find(kernel);
  return found == emulator::kernels().end() ? nullptr : found->second.signature.c_str();
}

// The arguments of cuLaunchKernel; the thread order; OS threads; where a report goes. 0 if all ran.
extern "C" int emulator_launch(const char *kernel, const unsigned *grid, const unsigned *block,
                               size_t shared, void **params, int cooperative, unsigned seed,
                               unsigned threads, char *report, size_t report_size) {
  emulator::Launch launch{{grid[0], grid[1], grid[2]},
                          {block[0], block[1], block[2]},
                          shared,
                          seed,
                          emulator::kernels().at(kernel).bind(params)};
  std::string error = emulator::run(launch, cooperative != 0, threads);
  std::snprintf(report, report_size, "%s", error.c_str());
  return error.empty() ? 0 : 1;
}
