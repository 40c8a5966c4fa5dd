// What sampling needs of sixteen lanes beyond csrc/lanes/avx512.h; wide_portable.h says what each name means.

struct Wide : Lanes {
  struct Total {
    __m512i low = _mm512_setzero_si512(), high = _mm512_setzero_si512();
  };
  using Flag = __mmask16;

  static inline F load_or(const float* p, int n, float rest) {
    return _mm512_mask_loadu_ps(set(rest), Lanes::first(n), p);
  }
  static inline uint32_t at_least(F x, F bound) { return _mm512_cmp_ps_mask(x, bound, _CMP_GE_OQ); }
  static inline uint32_t below(F x, F bound) { return _mm512_cmp_ps_mask(x, bound, _CMP_LT_OQ); }
  static inline F kept(F w, F x, F bound, F least) {
    return _mm512_maskz_mov_ps(
        _mm512_mask_cmp_ps_mask(_mm512_cmp_ps_mask(x, bound, _CMP_GE_OQ), w, least, _CMP_GE_OQ), w);
  }
  static inline void add_whole(Total& total, F w) {
    total.low = _mm512_add_epi64(total.low, _mm512_cvttps_epi64(_mm512_castps512_ps256(w)));
    total.high = _mm512_add_epi64(total.high, _mm512_cvttps_epi64(_mm512_extractf32x8_ps(w, 1)));
  }
  static inline int64_t value(const Total& total, int64_t) {
    return _mm512_reduce_add_epi64(_mm512_add_epi64(total.low, total.high));
  }
  static inline Flag nan(Flag flag, F a, F b) { return flag | _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q); }
  static inline Flag lowered() { return 0; }
  static inline bool raised(Flag flag) { return flag != 0; }
  static inline void pack(uint32_t mask, F x, const int32_t* ids, int32_t first, float* out, int32_t* out_ids) {
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const I numbers = ids ? _mm512_loadu_si512(ids) : add_i(lanes, set_i(first));
    const __mmask16 chosen = static_cast<__mmask16>(mask);
    _mm512_storeu_ps(out, _mm512_maskz_compress_ps(chosen, x));
    _mm512_storeu_si512(out_ids, _mm512_maskz_compress_epi32(chosen, numbers));
  }
};
