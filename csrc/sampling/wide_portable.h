// What sampling needs of sixteen lanes beyond csrc/lanes/portable.h: masks, and sums of weights as int64.

struct Wide : Lanes {
  using Total = int64_t;
  using Flag = bool;

  static inline F load_or(const float* p, int n, float rest) {
    F out;
    for (int i = 0; i < 16; ++i) out.v[i] = i < n ? p[i] : rest;
    return out;
  }
  // Bit i: is lane i of x at least bound, below bound?
  static inline uint32_t at_least(const F& x, const F& bound) {
    uint32_t mask = 0;
    for (int i = 0; i < 16; ++i) mask |= static_cast<uint32_t>(x.v[i] >= bound.v[i]) << i;
    return mask;
  }
  static inline uint32_t below(const F& x, const F& bound) {
    uint32_t mask = 0;
    for (int i = 0; i < 16; ++i) mask |= static_cast<uint32_t>(x.v[i] < bound.v[i]) << i;
    return mask;
  }
  // w where x is at least bound and w at least least, else 0.
  static inline F kept(const F& w, const F& x, const F& bound, const F& least) {
    F out;
    for (int i = 0; i < 16; ++i) out.v[i] = (x.v[i] >= bound.v[i]) & (w.v[i] >= least.v[i]) ? w.v[i] : 0.0f;
    return out;
  }
  // Adds each lane's whole part, 0 <= w < 2^52.
  static inline void add_whole(Total& total, const F& w) {
    for (int i = 0; i < 16; ++i) total += static_cast<int64_t>(w.v[i]);
  }
  static inline int64_t value(const Total& total, int64_t) { return total; }
  // Has flag been raised, or is there a NaN in a or b?
  static inline Flag nan(Flag flag, const F& a, const F& b) {
    int found = 0;
    for (int i = 0; i < 16; ++i) found |= (a.v[i] != a.v[i]) | (b.v[i] != b.v[i]);
    return flag | (found != 0);
  }
  static inline Flag lowered() { return false; }
  static inline bool raised(Flag flag) { return flag; }
  // Moves the lanes of mask to the front of out, their numbers (first + lane, or ids[lane]) likewise.
  static inline void pack(uint32_t mask, const F& x, const int32_t* ids, int32_t first, float* out, int32_t* out_ids) {
    for (; mask; mask &= mask - 1) {
      const int lane = __builtin_ctz(mask);
      *out_ids++ = ids ? ids[lane] : first + lane;
      *out++ = x.v[lane];
    }
  }
};
