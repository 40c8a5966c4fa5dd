// The tile instructions. In assembly, because intrinsics take no template parameter for a tile's number, and because those of
// GCC 12 tell the compiler neither that LDTILECFG reads 64 bytes nor that TILELOADD reads memory at all.

struct Tiles {
  static void configure(const TileShapes& shapes) { asm volatile("ldtilecfg %0" : : "m"(shapes)); }
  static void release() { asm volatile("tilerelease"); }

  template <int t>
  static void zero() { asm volatile("tilezero %%tmm%c0" : : "i"(t)); }
  template <int t>
  static void load(const void* p, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(stride), "i"(t) : "memory");
  }
  template <int t>
  static void store(void* p, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"(stride), "i"(t) : "memory");
  }

  // c += a . b: c[line][n] is the sum over k of a[line][k] b[k / g][g n + k % g], with 4 signed bytes or 2 bfloat16 a group g.
  template <int c, int a, int b>
  static void dot_int8() { asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b)); }
  template <int c, int a, int b>
  static void dot_bf16() { asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b)); }
};
