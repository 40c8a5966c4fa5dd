// The sixteen virtual lanes in plain C++: the definition that the other instruction sets reproduce bit for bit.
//
// Every kernel is written once over a type `Lanes` with these names. F is 16 float32, I is 16 int32, B is 64 bytes seen
// as 16 lanes of 4. All float operations are single IEEE operations, rounded to nearest even; `fma` is fused, nothing
// else is. The same header shape is kept by avx2.h and avx512.h.
//
// Included inside an anonymous namespace by one translation unit per instruction set, so that no inline function of one
// instruction set can be linked into another.

struct Lanes {
  static constexpr int kRows = 4;             // most rows that a linear map of numbers keeps in registers, a power of 2
  static constexpr int kCodeRows = 4;         // the same of codes
  static constexpr int kAttendRows = 2;       // most query lines that attention keeps in registers
  static constexpr bool kWords = false;       // products of small codes are added in 16 bits first (words, add_words, widen)
  static constexpr bool kSignedBytes = true;  // 8-bit codes are multiplied as code - 128, see dot4_wide
  static constexpr bool kTiles = false;       // there are tiles, see amx.h and kernels/tiles.h

  struct F {
    float v[16];
  };
  struct I {
    int32_t v[16];
  };
  struct B {
    uint8_t v[64];
  };

#define EACH(expression)                   \
  for (int i = 0; i < 16; ++i) {           \
    out.v[i] = expression;                 \
  }                                        \
  return out

  // ---- float32
  static inline F zero() { return F{}; }
  static inline F set(float x) { F out; EACH(x); }
  static inline F load(const float* p) { F out; std::memcpy(&out, p, 64); return out; }
  static inline void store(float* p, const F& x) { std::memcpy(p, &x, 64); }
  static inline F load_first(const float* p, int n) { F out; EACH(i < n ? p[i] : 0.0f); }
  static inline void store_first(float* p, const F& x, int n) { std::memcpy(p, &x, sizeof(float) * n); }
  static inline F add(const F& a, const F& b) { F out; EACH(a.v[i] + b.v[i]); }
  static inline F sub(const F& a, const F& b) { F out; EACH(a.v[i] - b.v[i]); }
  static inline F mul(const F& a, const F& b) { F out; EACH(a.v[i] * b.v[i]); }
  static inline F div(const F& a, const F& b) { F out; EACH(a.v[i] / b.v[i]); }
  static inline F fma(const F& a, const F& b, const F& c) { F out; EACH(fused(a.v[i], b.v[i], c.v[i])); }
  // As the x86 instructions: the second operand where they are equal or one is NaN.
  static inline F max(const F& a, const F& b) { F out; EACH(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
  static inline F min(const F& a, const F& b) { F out; EACH(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }

  // ---- int32
  static inline I zero_i() { return I{}; }
  static inline I set_i(int32_t x) { I out; EACH(x); }
  static inline I load_i(const int32_t* p) { I out; std::memcpy(&out, p, 64); return out; }
  static inline I load_int8(const int8_t* p) { I out; EACH(p[i]); }
  static inline I add_i(const I& a, const I& b) { I out; EACH(static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) + static_cast<uint32_t>(b.v[i]))); }
  static inline I sub_i(const I& a, const I& b) { I out; EACH(static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) - static_cast<uint32_t>(b.v[i]))); }
  static inline I mul_i(const I& a, const I& b) { I out; EACH(static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) * static_cast<uint32_t>(b.v[i]))); }
  static inline I max_i(const I& a, const I& b) { I out; EACH(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
  static inline I and_i(const I& a, const I& b) { I out; EACH(a.v[i] & b.v[i]); }
  static inline I or_i(const I& a, const I& b) { I out; EACH(a.v[i] | b.v[i]); }
  template <int n>
  static inline I shl(const I& a) { I out; EACH(static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) << n)); }
  template <int n>
  static inline I shr(const I& a) { I out; EACH(static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) >> n)); }
  template <int n>
  static inline I sra(const I& a) { I out; EACH(a.v[i] >> n); }

  // ---- between the two
  static inline F to_float(const I& a) { F out; EACH(static_cast<float>(a.v[i])); }
  // Round half to even, |a| < 2^22: adding 1.5 * 2^23 leaves no bits for a fraction.
  static inline I to_int(const F& a) {
    return sub_i(bits(add(a, set(12582912.0f))), bits(set(12582912.0f)));
  }
  static inline I bits(const F& a) { I out; std::memcpy(&out, &a, 64); return out; }
  static inline F floats(const I& a) { F out; std::memcpy(&out, &a, 64); return out; }
  static inline F load_half(const uint16_t* p) { F out; EACH(half_to_float(p[i])); }
  static inline F load_bfloat(const uint16_t* p) { I out; for (int i = 0; i < 16; ++i) out.v[i] = static_cast<int32_t>(static_cast<uint32_t>(p[i]) << 16); return floats(out); }
  static inline void store_int8(int8_t* p, const I& x) { for (int i = 0; i < 16; ++i) p[i] = static_cast<int8_t>(x.v[i]); }

  // 32 bytes as 16 lanes of two int16, the first in the lower half; sign- or zero-extended.
  static inline I load_pairs_signed(const uint8_t* p) {
    I out;
    EACH(static_cast<int32_t>(static_cast<uint16_t>(static_cast<int8_t>(p[2 * i])) |
                              static_cast<uint32_t>(static_cast<uint16_t>(static_cast<int8_t>(p[2 * i + 1]))) << 16));
  }
  static inline I load_pairs_unsigned(const uint8_t* p) {
    I out;
    EACH(static_cast<int32_t>(p[2 * i] | static_cast<uint32_t>(p[2 * i + 1]) << 16));
  }
  // acc + first(a) * first(b) + second(a) * second(b), int16 products.
  static inline I dot2(const I& acc, const I& a, const I& b) {
    I out;
    EACH(acc.v[i] + int32_t(int16_t(a.v[i])) * int16_t(b.v[i]) + (a.v[i] >> 16) * (b.v[i] >> 16));
  }

  // ---- bytes
  static inline B load_b(const uint8_t* p) { B out; std::memcpy(&out, p, 64); return out; }
  static inline B set_b(uint8_t x) { B out; std::memset(&out, x, 64); return out; }
  static inline B and_b(const B& a, const B& b) { B out; for (int i = 0; i < 64; ++i) out.v[i] = a.v[i] & b.v[i]; return out; }
  static inline B or_b(const B& a, const B& b) { B out; for (int i = 0; i < 64; ++i) out.v[i] = a.v[i] | b.v[i]; return out; }
  // Shifts of whole 16-bit words: the caller masks off what crosses a byte.
  template <int n>
  static inline B shr_b(const B& a) { B out; for (int i = 0; i < 64; ++i) out.v[i] = static_cast<uint8_t>(a.v[i] >> n); return out; }
  template <int n>
  static inline B shl_b(const B& a) { B out; for (int i = 0; i < 64; ++i) out.v[i] = static_cast<uint8_t>(a.v[i] << n); return out; }
  // table[code], table of 16 bytes, codes below 16.
  static inline B lookup(const uint8_t* table, const B& code) { B out; for (int i = 0; i < 64; ++i) out.v[i] = table[code.v[i]]; return out; }
  static inline I set_quad(const int8_t* p) { int32_t x; std::memcpy(&x, p, 4); return set_i(x); }
  // acc + sum over a lane's 4 bytes of code * a; codes below 64.
  static inline I dot4(const I& acc, const B& code, const I& a) {
    I out;
    EACH(acc.v[i] + code.v[4 * i] * int8_t(a.v[i]) + code.v[4 * i + 1] * int8_t(a.v[i] >> 8) +
         code.v[4 * i + 2] * int8_t(a.v[i] >> 16) + code.v[4 * i + 3] * int8_t(a.v[i] >> 24));
  }
  // The same for codes up to 255, of code - 128 where kSignedBytes, else of code. `a` never holds -128.
  static inline I dot4_wide(const I& acc, const B& code, const I& a) {
    I out;
    EACH(acc.v[i] + (code.v[4 * i] - 128) * int8_t(a.v[i]) + (code.v[4 * i + 1] - 128) * int8_t(a.v[i] >> 8) +
         (code.v[4 * i + 2] - 128) * int8_t(a.v[i] >> 16) + (code.v[4 * i + 3] - 128) * int8_t(a.v[i] >> 24));
  }
#undef EACH

  // ---- reductions: one fixed tree, halves onto halves
  static inline float lane0(const F& x) { return x.v[0]; }
  static inline float sum(const F& x) {
    float t[8];
    for (int i = 0; i < 8; ++i) t[i] = x.v[i] + x.v[i + 8];
    for (int i = 0; i < 4; ++i) t[i] = t[i] + t[i + 4];
    return (t[0] + t[2]) + (t[1] + t[3]);
  }
  static inline float largest(const F& x) {  // no NaN in x
    float t = x.v[0];
    for (int i = 1; i < 16; ++i) t = x.v[i] > t ? x.v[i] : t;
    return t;
  }
  static inline int32_t largest_i(const I& x) {
    int32_t t = x.v[0];
    for (int i = 1; i < 16; ++i) t = x.v[i] > t ? x.v[i] : t;
    return t;
  }

  static inline int32_t total(const I& x) {  // of small numbers
    int32_t t = 0;
    for (int i = 0; i < 16; ++i) t += x.v[i];
    return t;
  }

 private:
  static inline float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
};
