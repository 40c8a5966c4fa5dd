// What sampling needs of sixteen lanes beyond csrc/lanes/avx2.h; wide_portable.h says what each name means.

struct Wide : Lanes {
  struct Total {
    __m256i low = _mm256_setzero_si256(), high = _mm256_setzero_si256();
  };
  using Flag = __m256;

  static inline F load_or(const float* p, int n, float rest) {
    const F x = load_first(p, n), other = set(rest);
    return {_mm256_blendv_ps(other.low, x.low, _mm256_castsi256_ps(first(n))),
            _mm256_blendv_ps(other.high, x.high, _mm256_castsi256_ps(first(n - 8)))};
  }
  static inline uint32_t bits_of(__m256 low, __m256 high) {
    return static_cast<uint32_t>(_mm256_movemask_ps(low)) | static_cast<uint32_t>(_mm256_movemask_ps(high)) << 8;
  }
  static inline uint32_t at_least(const F& x, const F& bound) {
    return bits_of(_mm256_cmp_ps(x.low, bound.low, _CMP_GE_OQ), _mm256_cmp_ps(x.high, bound.high, _CMP_GE_OQ));
  }
  static inline uint32_t below(const F& x, const F& bound) {
    return bits_of(_mm256_cmp_ps(x.low, bound.low, _CMP_LT_OQ), _mm256_cmp_ps(x.high, bound.high, _CMP_LT_OQ));
  }
  static inline __m256 kept(__m256 w, __m256 x, __m256 bound, __m256 least) {
    return _mm256_and_ps(w, _mm256_and_ps(_mm256_cmp_ps(x, bound, _CMP_GE_OQ), _mm256_cmp_ps(w, least, _CMP_GE_OQ)));
  }
  static inline F kept(const F& w, const F& x, const F& bound, const F& least) {
    return {kept(w.low, x.low, bound.low, least.low), kept(w.high, x.high, bound.high, least.high)};
  }
  // As a float64, 2^52 + w has w in its low bits: sums of these bits, less as many times those of 2^52, are exact.
  static inline __m256i bits_with_2_52(__m128 whole) {
    return _mm256_castpd_si256(_mm256_add_pd(_mm256_cvtps_pd(whole), _mm256_set1_pd(4503599627370496.0)));
  }
  static inline __m256i both(__m256 w) {
    const __m256 whole = _mm256_round_ps(w, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
    return _mm256_add_epi64(bits_with_2_52(_mm256_castps256_ps128(whole)),
                            bits_with_2_52(_mm256_extractf128_ps(whole, 1)));
  }
  static inline void add_whole(Total& total, const F& w) {
    total.low = _mm256_add_epi64(total.low, both(w.low));
    total.high = _mm256_add_epi64(total.high, both(w.high));
  }
  // `added`: how many times add_whole was called.
  static inline int64_t value(const Total& total, int64_t added) {
    alignas(32) uint64_t t[4];
    _mm256_store_si256(reinterpret_cast<__m256i*>(t), _mm256_add_epi64(total.low, total.high));
    const uint64_t each = 0x4330000000000000u;
    return static_cast<int64_t>(t[0] + t[1] + t[2] + t[3] - 16 * static_cast<uint64_t>(added) * each);
  }
  static inline Flag nan(Flag flag, const F& a, const F& b) {
    return _mm256_or_ps(flag, _mm256_or_ps(_mm256_cmp_ps(a.low, b.low, _CMP_UNORD_Q),
                                           _mm256_cmp_ps(a.high, b.high, _CMP_UNORD_Q)));
  }
  static inline Flag lowered() { return _mm256_setzero_ps(); }
  static inline bool raised(Flag flag) { return _mm256_movemask_ps(flag) != 0; }
  static inline void pack(uint32_t mask, const F& x, const int32_t* ids, int32_t first, float* out, int32_t* out_ids) {
    alignas(32) float lanes[16];
    store(lanes, x);
    for (; mask; mask &= mask - 1) {
      const int lane = __builtin_ctz(mask);
      *out_ids++ = ids ? ids[lane] : first + lane;
      *out++ = lanes[lane];
    }
  }
};
