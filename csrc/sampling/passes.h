// The passes of sampling.h, written once over `Wide`. Included inside an anonymous namespace by one translation unit
// per instruction set; nothing here calls a function that another one could share.

using F = Wide::F;

// The weight as a float32, before it is cut to a whole number: the recipe of `weights`. Adding (n + 44) * 2^23 to the
// bits of e multiplies it by 2^(n + 44) exactly. Means nothing for x below scale.low; above it z is at least
// -63, so the recipe's bound at -40 (where all weights are 0 already) is not needed.
template <bool divide>
inline __attribute__((always_inline)) F heavy(const F& x, const F& peak, const F& temperature) {
  // Adding this leaves n + 44, rounded half to even, in the low bits.
  const F magic = Wide::set(12582912.0f + kWeightBits);
  F z = Wide::sub(x, peak);
  if (divide) z = Wide::div(z, temperature);
  const F shifted = Wide::add(Wide::mul(z, Wide::set(1.4426950408889634f)), magic);
  const F n = Wide::sub(shifted, magic);
  F r = Wide::sub(z, Wide::mul(n, Wide::set(0.693359375f)));
  r = Wide::sub(r, Wide::mul(n, Wide::set(-2.12194440e-4f)));
  F q = Wide::add(Wide::mul(r, Wide::set(0.0013926184f)), Wide::set(0.008363179f));
  q = Wide::add(Wide::mul(q, r), Wide::set(0.041666556f));
  q = Wide::add(Wide::mul(q, r), Wide::set(0.16666576f));
  q = Wide::add(Wide::mul(q, r), Wide::set(0.5f));
  const F e = Wide::add(Wide::add(Wide::mul(q, Wide::mul(r, r)), r), Wide::set(1.0f));
  return Wide::floats(Wide::add_i(Wide::bits(e), Wide::template shl<23>(Wide::bits(shifted))));
}

bool survey(const float* x, int64_t n, float* columns, float* tops) {
  const float infinity = __builtin_inff();
  Wide::Flag flag = Wide::lowered();
  for (int64_t begin = 0; begin < n; begin += kGroup, columns += kColumns) {
    const int64_t end = begin + kGroup < n ? begin + kGroup : n;
    F most = Wide::set(-infinity);
    F other = most;
    int64_t i = begin;
    for (; i + 32 <= end; i += 32) {
      const F a = Wide::load(x + i), b = Wide::load(x + i + 16);
      flag = Wide::nan(flag, a, b);
      most = Wide::max(a, most);
      other = Wide::max(b, other);
    }
    for (; i < end; i += 16) {
      const F a = Wide::load_or(x + i, end - i < 16 ? static_cast<int>(end - i) : 16, -infinity);
      flag = Wide::nan(flag, a, a);
      most = Wide::max(a, most);
    }
    most = Wide::max(most, other);
    Wide::store(columns, most);
    *tops++ = Wide::largest(most);
  }
  return Wide::raised(flag);
}

int64_t count(const float* x, int64_t n, float bound) {
  const F least = Wide::set(bound);
  int64_t found = 0, i = 0;
  for (; i + 16 <= n; i += 16) found += __builtin_popcount(Wide::at_least(Wide::load(x + i), least));
  if (i < n) {
    const int rest = static_cast<int>(n - i);
    found += __builtin_popcount(Wide::at_least(Wide::load_or(x + i, rest, 0), least) & ((1u << rest) - 1));
  }
  return found;
}

int64_t gather(const float* x, const int32_t* ids, int32_t first, int64_t n, float low, float high, float* values,
               int32_t* value_ids) {
  const F from = Wide::set(low), to = Wide::set(high);
  int64_t found = 0;
  for (int64_t i = 0; i < n; i += 16) {
    const int rest = n - i < 16 ? static_cast<int>(n - i) : 16;
    const F a = rest < 16 ? Wide::load_or(x + i, rest, 0) : Wide::load(x + i);
    const uint32_t mask = Wide::at_least(a, from) & Wide::below(a, to) & ((1u << rest) - 1);
    if (!mask) continue;
    Wide::pack(mask, a, ids ? ids + i : ids, first + static_cast<int32_t>(i), values + found, value_ids + found);
    found += __builtin_popcount(mask);
  }
  return found;
}

template <bool divide>
inline __attribute__((always_inline)) int64_t sum_of(const float* x, int64_t n, const Scale& scale, float bound) {
  const F peak = Wide::set(scale.peak), temperature = Wide::set(scale.temperature);
  const F low = Wide::set(bound), least = Wide::set(scale.least);
  Wide::Total total{};
  int64_t added = 0, i = 0;
  for (; i + 32 <= n; i += 32) {
    const F a = Wide::load(x + i), b = Wide::load(x + i + 16);
    if (!(Wide::at_least(a, low) | Wide::at_least(b, low))) continue;
    const F v = heavy<divide>(a, peak, temperature), w = heavy<divide>(b, peak, temperature);
    Wide::add_whole(total, Wide::kept(v, a, low, least));
    Wide::add_whole(total, Wide::kept(w, b, low, least));
    added += 2;
  }
  for (; i + 16 <= n; i += 16, ++added) {
    const F a = Wide::load(x + i);
    Wide::add_whole(total, Wide::kept(heavy<divide>(a, peak, temperature), a, low, least));
  }
  if (i < n) {
    // -inf weighs 0 even where low is -inf: NaN is not at least `least`.
    const F a = Wide::load_or(x + i, static_cast<int>(n - i), -__builtin_inff());
    Wide::add_whole(total, Wide::kept(heavy<divide>(a, peak, temperature), a, low, least));
    ++added;
  }
  return Wide::value(total, added);
}

int64_t sum(const float* x, int64_t n, const Scale& scale, float bound) {
  return scale.temperature == 1.0f ? sum_of<false>(x, n, scale, bound) : sum_of<true>(x, n, scale, bound);
}

void weigh(const float* x, int64_t n, const Scale& scale, int64_t* out) {
  const F peak = Wide::set(scale.peak), temperature = Wide::set(scale.temperature);
  const F low = Wide::set(scale.low), least = Wide::set(scale.least);
  for (int64_t i = 0; i < n; i += 16) {
    const int rest = n - i < 16 ? static_cast<int>(n - i) : 16;
    const F a = Wide::load_or(x + i, rest, 0);
    alignas(64) float lanes[16];
    Wide::store(lanes, Wide::kept(heavy<true>(a, peak, temperature), a, low, least));
    for (int lane = 0; lane < rest; ++lane) out[i + lane] = static_cast<int64_t>(lanes[lane]);
  }
}
