// The rounding and denormal mode of arithmetic: to nearest even everywhere. Kernels flush denormals, as the tile
// instructions do; sampling keeps them, as its definition does.

#pragma once
#include <cstdint>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace headrace {

enum class Denormals { flushed, kept };

// Sets the mode for this thread, and what was there back when it ends.
class Mode {
 public:
#if defined(__x86_64__)
  // All exceptions masked; flush to zero, and denormals are zeros, or neither.
  explicit Mode(Denormals denormals) : before_(_mm_getcsr()) { _mm_setcsr(denormals == Denormals::flushed ? 0x9fc0 : 0x1f80); }
  ~Mode() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#elif defined(__aarch64__)
  explicit Mode(Denormals denormals) {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    const uint64_t flush = denormals == Denormals::flushed ? 1u << 24 : 0;
    asm volatile("msr fpcr, %0" : : "r"(flush));
  }
  ~Mode() { asm volatile("msr fpcr, %0" : : "r"(before_)); }

 private:
  uint64_t before_;
#else
  explicit Mode(Denormals) {}
#endif

 public:
  Mode(const Mode&) = delete;
  Mode& operator=(const Mode&) = delete;
};

}  // namespace headrace
