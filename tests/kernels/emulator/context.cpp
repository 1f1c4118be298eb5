#include "context.h"

#include <cstdint>

namespace emulator {

#if defined(LAYERSKIP_EMULATOR_UCONTEXT)

static void switch_registers(Context &from, Context &to) {
  swapcontext(&from.registers, &to.registers);
}

static void prepare_registers(Context &context, void *bottom, size_t size, void (*entry)()) {
  getcontext(&context.registers);
  context.registers.uc_stack.ss_sp = bottom;
  context.registers.uc_stack.ss_size = size;
  context.registers.uc_link = nullptr;
  makecontext(&context.registers, entry, 0);
}

#else

extern "C" void layerskip_emulator_switch(void **save, void *load);
asm(R"(
.text
.hidden layerskip_emulator_switch
.globl layerskip_emulator_switch
.type layerskip_emulator_switch, @function
layerskip_emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size layerskip_emulator_switch, .-layerskip_emulator_switch
)");

static void switch_registers(Context &from, Context &to) {
  layerskip_emulator_switch(&from.stack_pointer, to.stack_pointer);
}

static void prepare_registers(Context &context, void *bottom, size_t size, void (*entry)()) {
  // What the switch pops: six registers, then the address that it returns to. The word above takes
  // the place of entry's own return address, which keeps the stack aligned as after a call.
  auto **top = reinterpret_cast<void **>(reinterpret_cast<uintptr_t>(bottom) + size);
  *--top = nullptr;
  *--top = reinterpret_cast<void *>(entry);
  for (int i = 0; i < 6; i++) *--top = nullptr;
  context.stack_pointer = top;
}

#endif

void switch_context(Context &from, Context &to) {
#if defined(LAYERSKIP_EMULATOR_ASAN)
  __sanitizer_start_switch_fiber(&from.fake_stack, to.bottom, to.size);
#endif
  switch_registers(from, to);
#if defined(LAYERSKIP_EMULATOR_ASAN)
  __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
}

void start_context(Context &context, void *bottom, size_t size, void (*entry)()) {
  context.fake_stack = nullptr;
  context.bottom = bottom;
  context.size = size;
#if defined(LAYERSKIP_EMULATOR_ASAN)
  __asan_unpoison_memory_region(bottom, size);
#endif
  prepare_registers(context, bottom, size, entry);
}

}  // namespace emulator
