// The rounding and denormal mode of kernels: to nearest even, denormals as zeros, as the tile instructions have it.

#pragma once
#include <cstdint>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace headrace {

// Sets the mode for this thread, and what was there back when it ends.
class Mode {
 public:
#if defined(__x86_64__)
  Mode() : before_(_mm_getcsr()) { _mm_setcsr(0x9fc0); }  // all exceptions masked, flush to zero, denormals are zeros
  ~Mode() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#elif defined(__aarch64__)
  Mode() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    const uint64_t flush = 1u << 24;
    asm volatile("msr fpcr, %0" : : "r"(flush));
  }
  ~Mode() { asm volatile("msr fpcr, %0" : : "r"(before_)); }

 private:
  uint64_t before_;
#endif

 public:
  Mode(const Mode&) = delete;
  Mode& operator=(const Mode&) = delete;
};

}  // namespace headrace
