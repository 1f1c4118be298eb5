// Changing from one stack to another, on one OS thread.
//
// x86-64 has a switch of its own: the six registers that a called function must keep, and the stack
// pointer. Elsewhere, or with LAYERSKIP_EMULATOR_UCONTEXT, POSIX's ucontext does it, which is slower
// because it also keeps the signal mask.
#pragma once
#include <cstddef>

#if !defined(__x86_64__) && !defined(LAYERSKIP_EMULATOR_UCONTEXT)
#define LAYERSKIP_EMULATOR_UCONTEXT 1
#endif
#if defined(LAYERSKIP_EMULATOR_UCONTEXT)
#include <ucontext.h>
#endif

#if defined(__SANITIZE_ADDRESS__)
#define LAYERSKIP_EMULATOR_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define LAYERSKIP_EMULATOR_ASAN 1
#endif
#endif
#if defined(LAYERSKIP_EMULATOR_ASAN)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace emulator {

struct Context {
#if defined(LAYERSKIP_EMULATOR_UCONTEXT)
  ucontext_t registers;
#else
  void *stack_pointer = nullptr;
#endif
  // The sanitizer has to be told which stack is in use.
  void *fake_stack = nullptr;
  const void *bottom = nullptr;
  size_t size = 0;
};

// Goes on where `to` stopped; returns when something switches back to `from`.
void switch_context(Context &from, Context &to);

// Makes `context` begin with entry(), which must not return, on the stack [bottom, bottom + size).
void start_context(Context &context, void *bottom, size_t size, void (*entry)());

}  // namespace emulator
