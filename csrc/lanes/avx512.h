// The sixteen virtual lanes as one AVX-512 register (F, BW, DQ, VL, VNNI). portable.h says what each name means.

struct Lanes {
  static constexpr int kRows = 8;
  static constexpr int kCodeRows = 16;
  static constexpr int kAttendRows = 7;
  static constexpr bool kSignedBytes = false;
  static constexpr bool kWords = false;
  static constexpr bool kTiles = false;
  using F = __m512;
  using I = __m512i;
  using B = __m512i;

  static inline __mmask16 first(int n) { return static_cast<__mmask16>((1u << n) - 1); }

  static inline F zero() { return _mm512_setzero_ps(); }
  static inline F set(float x) { return _mm512_set1_ps(x); }
  static inline F load(const float* p) { return _mm512_loadu_ps(p); }
  static inline void store(float* p, F x) { _mm512_storeu_ps(p, x); }
  static inline F load_first(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
  static inline void store_first(float* p, F x, int n) { _mm512_mask_storeu_ps(p, first(n), x); }
  static inline F add(F a, F b) { return _mm512_add_ps(a, b); }
  static inline F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static inline F div(F a, F b) { return _mm512_div_ps(a, b); }
  static inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static inline F max(F a, F b) { return _mm512_max_ps(a, b); }
  static inline F min(F a, F b) { return _mm512_min_ps(a, b); }

  static inline I zero_i() { return _mm512_setzero_si512(); }
  static inline I set_i(int32_t x) { return _mm512_set1_epi32(x); }
  static inline I load_i(const int32_t* p) { return _mm512_loadu_si512(p); }
  static inline I load_int8(const int8_t* p) {
    return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static inline I add_i(I a, I b) { return _mm512_add_epi32(a, b); }
  static inline I sub_i(I a, I b) { return _mm512_sub_epi32(a, b); }
  static inline I mul_i(I a, I b) { return _mm512_mullo_epi32(a, b); }
  static inline I max_i(I a, I b) { return _mm512_max_epi32(a, b); }
  static inline I and_i(I a, I b) { return _mm512_and_si512(a, b); }
  static inline I or_i(I a, I b) { return _mm512_or_si512(a, b); }
  template <int n>
  static inline I shl(I a) { return _mm512_slli_epi32(a, n); }
  template <int n>
  static inline I shr(I a) { return _mm512_srli_epi32(a, n); }
  template <int n>
  static inline I sra(I a) { return _mm512_srai_epi32(a, n); }

  static inline F to_float(I a) { return _mm512_cvtepi32_ps(a); }
  static inline I to_int(F a) { return _mm512_cvtps_epi32(a); }
  static inline I bits(F a) { return _mm512_castps_si512(a); }
  static inline F floats(I a) { return _mm512_castsi512_ps(a); }
  static inline F load_half(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static inline F load_bfloat(const uint16_t* p) {
    return floats(shl<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))));
  }
  static inline void store_int8(int8_t* p, I x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x));
  }

  static inline I load_pairs_signed(const uint8_t* p) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static inline I load_pairs_unsigned(const uint8_t* p) {
    return _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static inline I dot2(I acc, I a, I b) { return _mm512_dpwssd_epi32(acc, a, b); }

  static inline B load_b(const uint8_t* p) { return _mm512_loadu_si512(p); }
  static inline B set_b(uint8_t x) { return _mm512_set1_epi8(static_cast<char>(x)); }
  static inline B and_b(B a, B b) { return _mm512_and_si512(a, b); }
  static inline B or_b(B a, B b) { return _mm512_or_si512(a, b); }
  template <int n>
  static inline B shr_b(B a) { return n ? _mm512_srli_epi16(a, n) : a; }
  template <int n>
  static inline B shl_b(B a) { return n ? _mm512_slli_epi16(a, n) : a; }
  static inline B lookup(const uint8_t* table, B code) {
    const __m128i t = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(t), code);
  }
  static inline I set_quad(const int8_t* p) {
    int32_t x;
    std::memcpy(&x, p, 4);
    return _mm512_set1_epi32(x);
  }
  static inline I dot4(I acc, B code, I a) { return _mm512_dpbusd_epi32(acc, code, a); }
  static inline I dot4_wide(I acc, B code, I a) { return _mm512_dpbusd_epi32(acc, code, a); }

  static inline float lane0(F x) { return _mm512_cvtss_f32(x); }
  static inline float sum(F x) {
    const __m256 a = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    const __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_shuffle_ps(c, c, 1)));
  }
  static inline float largest(F x) { return _mm512_reduce_max_ps(x); }
  static inline int32_t total(I x) { return _mm512_reduce_add_epi32(x); }
  static inline int32_t largest_i(I x) { return _mm512_reduce_max_epi32(x); }
};
