// The sixteen virtual lanes as two AVX2 registers (with FMA and F16C). portable.h says what each name means.

struct Lanes {
  static constexpr int kRows = 4;
  static constexpr int kCodeRows = 4;
  static constexpr int kAttendRows = 2;
  static constexpr bool kSignedBytes = true;
  static constexpr bool kWords = true;
  static constexpr bool kTiles = false;

  struct F {
    __m256 low, high;
  };
  struct I {
    __m256i low, high;
  };
  using B = I;

#define BOTH(type, name, instruction)                 \
  static inline type name(const type& a, const type& b) { \
    return {instruction(a.low, b.low), instruction(a.high, b.high)}; \
  }
#define SHIFT(type, name, instruction) \
  template <int n>                     \
  static inline type name(const type& a) { return {instruction(a.low, n), instruction(a.high, n)}; }

  static inline __m256i first(int n) {  // lanes below n, of 8
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }

  static inline F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static inline F set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  static inline F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static inline void store(float* p, const F& x) {
    _mm256_storeu_ps(p, x.low);
    _mm256_storeu_ps(p + 8, x.high);
  }
  static inline F load_first(const float* p, int n) {
    return {_mm256_maskload_ps(p, first(n)), n > 8 ? _mm256_maskload_ps(p + 8, first(n - 8)) : _mm256_setzero_ps()};
  }
  static inline void store_first(float* p, const F& x, int n) {
    _mm256_maskstore_ps(p, first(n), x.low);
    if (n > 8) _mm256_maskstore_ps(p + 8, first(n - 8), x.high);
  }
  BOTH(F, add, _mm256_add_ps)
  BOTH(F, sub, _mm256_sub_ps)
  BOTH(F, mul, _mm256_mul_ps)
  BOTH(F, div, _mm256_div_ps)
  BOTH(F, max, _mm256_max_ps)
  BOTH(F, min, _mm256_min_ps)
  static inline F fma(const F& a, const F& b, const F& c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
  }

  static inline I zero_i() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  static inline I set_i(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
  static inline I load_i(const int32_t* p) { return load_b(reinterpret_cast<const uint8_t*>(p)); }
  static inline I load_int8(const int8_t* p) {
    const __m128i all = load_16(p);
    return {_mm256_cvtepi8_epi32(all), _mm256_cvtepi8_epi32(_mm_srli_si128(all, 8))};
  }
  BOTH(I, add_i, _mm256_add_epi32)
  BOTH(I, sub_i, _mm256_sub_epi32)
  BOTH(I, mul_i, _mm256_mullo_epi32)
  BOTH(I, max_i, _mm256_max_epi32)
  BOTH(I, and_i, _mm256_and_si256)
  BOTH(I, or_i, _mm256_or_si256)
  SHIFT(I, shl, _mm256_slli_epi32)
  SHIFT(I, shr, _mm256_srli_epi32)
  SHIFT(I, sra, _mm256_srai_epi32)

  static inline F to_float(const I& a) { return {_mm256_cvtepi32_ps(a.low), _mm256_cvtepi32_ps(a.high)}; }
  static inline I to_int(const F& a) { return {_mm256_cvtps_epi32(a.low), _mm256_cvtps_epi32(a.high)}; }
  static inline I bits(const F& a) { return {_mm256_castps_si256(a.low), _mm256_castps_si256(a.high)}; }
  static inline F floats(const I& a) { return {_mm256_castsi256_ps(a.low), _mm256_castsi256_ps(a.high)}; }
  static inline __m128i load_16(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
  static inline F load_half(const uint16_t* p) { return {_mm256_cvtph_ps(load_16(p)), _mm256_cvtph_ps(load_16(p + 8))}; }
  static inline F load_bfloat(const uint16_t* p) {
    return floats(shl<16>({_mm256_cvtepu16_epi32(load_16(p)), _mm256_cvtepu16_epi32(load_16(p + 8))}));
  }
  static inline void store_int8(int8_t* p, const I& x) {
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.low, x.high), 0xd8);
    const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
  }

  static inline I load_pairs_signed(const uint8_t* p) {
    return {_mm256_cvtepi8_epi16(load_16(p)), _mm256_cvtepi8_epi16(load_16(p + 16))};
  }
  static inline I load_pairs_unsigned(const uint8_t* p) {
    return {_mm256_cvtepu8_epi16(load_16(p)), _mm256_cvtepu8_epi16(load_16(p + 16))};
  }
  static inline I dot2(const I& acc, const I& a, const I& b) {
    return {_mm256_add_epi32(acc.low, _mm256_madd_epi16(a.low, b.low)),
            _mm256_add_epi32(acc.high, _mm256_madd_epi16(a.high, b.high))};
  }

  static inline B load_b(const uint8_t* p) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32))};
  }
  static inline B set_b(uint8_t x) {
    const __m256i all = _mm256_set1_epi8(static_cast<char>(x));
    return {all, all};
  }
  BOTH(B, and_b, _mm256_and_si256)
  BOTH(B, or_b, _mm256_or_si256)
  SHIFT(B, shr_b, _mm256_srli_epi16)
  SHIFT(B, shl_b, _mm256_slli_epi16)
  static inline B lookup(const uint8_t* table, const B& code) {
    const __m256i t = _mm256_broadcastsi128_si256(load_16(table));
    return {_mm256_shuffle_epi8(t, code.low), _mm256_shuffle_epi8(t, code.high)};
  }
  static inline I set_quad(const int8_t* p) {
    int32_t x;
    std::memcpy(&x, p, 4);
    return set_i(x);
  }
  // vpmaddubsw adds two products in 16 bits: 2 * 63 * 127 fits.
  static inline I dot4(const I& acc, const B& code, const I& a) {
    return add_i(acc, quads(_mm256_maddubs_epi16(code.low, a.low), _mm256_maddubs_epi16(code.high, a.high)));
  }
  // |code - 128| <= 128 as unsigned, its sign moved onto a: 2 * 128 * 127 fits too.
  static inline I dot4_wide(const I& acc, const B& code, const I& a) {
    const __m256i flip = _mm256_set1_epi8(static_cast<char>(0x80));
    const __m256i low = _mm256_xor_si256(code.low, flip), high = _mm256_xor_si256(code.high, flip);
    return add_i(acc, quads(_mm256_maddubs_epi16(_mm256_abs_epi8(low), _mm256_sign_epi8(a.low, low)),
                            _mm256_maddubs_epi16(_mm256_abs_epi8(high), _mm256_sign_epi8(a.high, high))));
  }
  // Products in 16 bits, two added; sums of a few of them still fit, see Codes::kRun.
  static inline I words(const B& code, const I& a) {
    return {_mm256_maddubs_epi16(code.low, a.low), _mm256_maddubs_epi16(code.high, a.high)};
  }
  static inline I add_words(const I& a, const I& b) {
    return {_mm256_add_epi16(a.low, b.low), _mm256_add_epi16(a.high, b.high)};
  }
  static inline I widen(const I& acc, const I& words) { return add_i(acc, quads(words.low, words.high)); }
  static inline I quads(__m256i low, __m256i high) {
    const __m256i one = _mm256_set1_epi16(1);
    return {_mm256_madd_epi16(low, one), _mm256_madd_epi16(high, one)};
  }
#undef BOTH
#undef SHIFT

  static inline float lane0(const F& x) { return _mm256_cvtss_f32(x.low); }
  static inline float sum(const F& x) {
    const __m256 a = _mm256_add_ps(x.low, x.high);
    const __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_shuffle_ps(c, c, 1)));
  }
  static inline float largest(const F& x) {
    const __m256 a = _mm256_max_ps(x.low, x.high);
    const __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 c = _mm_max_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_max_ss(c, _mm_shuffle_ps(c, c, 1)));
  }
  static inline int32_t total(const I& x) {
    const __m256i a = _mm256_add_epi32(x.low, x.high);
    const __m128i b = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    const __m128i c = _mm_add_epi32(b, _mm_shuffle_epi32(b, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(c, _mm_shuffle_epi32(c, 0xb1)));
  }
  static inline int32_t largest_i(const I& x) {
    const __m256i a = _mm256_max_epi32(x.low, x.high);
    const __m128i b = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    const __m128i c = _mm_max_epi32(b, _mm_shuffle_epi32(b, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(c, _mm_shuffle_epi32(c, 0xb1)));
  }
};
