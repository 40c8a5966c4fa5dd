// Elementary functions on lanes: polynomials of our own, the same operations in the same order on every instruction set.

#define ALWAYS inline __attribute__((always_inline))
#define NEVER __attribute__((noinline))

// e^x, relative error below 1e-7; below -87.3 and above 88.3 as at those. NaN stays NaN. exp(0) is exactly 1.
ALWAYS Lanes::F exp_of(Lanes::F x) {
  x = Lanes::max(Lanes::set(-87.3f), x);
  x = Lanes::min(Lanes::set(88.3f), x);
  // t = 1.5 x 2^23 + n, n the nearest whole number of x / ln 2, which then stands in the lowest bits of t.
  const Lanes::F magic = Lanes::set(12582912.0f);
  const Lanes::F t = Lanes::fma(x, Lanes::set(1.44269504f), magic);
  const Lanes::F n = Lanes::sub(t, magic);
  Lanes::F r = Lanes::fma(n, Lanes::set(-0.693359375f), x);
  r = Lanes::fma(n, Lanes::set(2.12194440e-4f), r);
  // (e^r - 1 - r) / r^2 on |r| <= ln(2) / 2: degree 4, fitted at Chebyshev nodes.
  Lanes::F q = Lanes::fma(Lanes::set(0.0013926184f), r, Lanes::set(0.008363179f));
  q = Lanes::fma(q, r, Lanes::set(0.041666556f));
  q = Lanes::fma(q, r, Lanes::set(0.16666576f));
  q = Lanes::fma(q, r, Lanes::set(0.5f));
  const Lanes::F e = Lanes::add(Lanes::fma(q, Lanes::mul(r, r), r), Lanes::set(1.0f));
  const Lanes::I power = Lanes::add_i(Lanes::template shl<23>(Lanes::bits(t)), Lanes::set_i(0x3f800000));
  return Lanes::mul(e, Lanes::floats(power));
}

ALWAYS Lanes::F negative(const Lanes::F& x) { return Lanes::sub(Lanes::zero(), x); }

// x / (1 + e^-y)
ALWAYS Lanes::F gate_of(const Lanes::F& x, const Lanes::F& y) {
  return Lanes::div(x, Lanes::add(Lanes::set(1.0f), exp_of(negative(y))));
}

ALWAYS Lanes::F silu_of(const Lanes::F& x) { return gate_of(x, x); }

// x / 2 (1 + tanh u) = x / (1 + e^-2u), u = sqrt(2 / pi) (x + 0.044715 x^3)
ALWAYS Lanes::F gelu_tanh_of(const Lanes::F& x) {
  const Lanes::F cubic = Lanes::fma(Lanes::mul(Lanes::mul(x, x), Lanes::set(0.044715f)), x, x);
  return gate_of(x, Lanes::mul(cubic, Lanes::set(1.5957691216f)));
}

// tanh |x| = 1 - 2 / (e^2|x| + 1), then the sign of x
ALWAYS Lanes::F tanh_of(const Lanes::F& x) {
  const Lanes::I sign = Lanes::and_i(Lanes::bits(x), Lanes::set_i(static_cast<int32_t>(0x80000000)));
  const Lanes::F size = Lanes::floats(Lanes::and_i(Lanes::bits(x), Lanes::set_i(0x7fffffff)));
  const Lanes::F e = exp_of(Lanes::add(size, size));
  const Lanes::F t = Lanes::sub(Lanes::set(1.0f), Lanes::div(Lanes::set(2.0f), Lanes::add(e, Lanes::set(1.0f))));
  return Lanes::floats(Lanes::or_i(Lanes::bits(t), sign));
}

ALWAYS Lanes::F cap_of(const Lanes::F& x, const Lanes::F& cap) {
  return Lanes::mul(tanh_of(Lanes::div(x, cap)), cap);
}

// Rounded to bfloat16, half to even; still float32. A quiet NaN stays one: sizes above 0x7fff0000 would carry into the
// sign, so they are taken for that.
ALWAYS Lanes::F bf16_of(const Lanes::F& x) {
  const Lanes::I bits = Lanes::bits(x);
  const Lanes::I sign = Lanes::and_i(bits, Lanes::set_i(static_cast<int32_t>(0x80000000)));
  const Lanes::I minus = Lanes::sub_i(Lanes::zero_i(), Lanes::and_i(bits, Lanes::set_i(0x7fffffff)));
  const Lanes::I size = Lanes::sub_i(Lanes::zero_i(), Lanes::max_i(minus, Lanes::set_i(-0x7fff0000)));
  const Lanes::I odd = Lanes::and_i(Lanes::template shr<16>(size), Lanes::set_i(1));
  const Lanes::I rounded = Lanes::add_i(size, Lanes::add_i(odd, Lanes::set_i(0x7fff)));
  return Lanes::floats(Lanes::or_i(sign, Lanes::and_i(rounded, Lanes::set_i(static_cast<int32_t>(0xffff0000)))));
}

// The bits of the largest |x| of 32 numbers: as a whole number they order like the sizes, and infinity and NaN come last.
ALWAYS int32_t largest_size(const Lanes::F& low, const Lanes::F& high) {
  const Lanes::I size = Lanes::set_i(0x7fffffff);
  return Lanes::largest_i(Lanes::max_i(Lanes::and_i(Lanes::bits(low), size), Lanes::and_i(Lanes::bits(high), size)));
}
constexpr int32_t kNotFinite = 0x7f800000;  // sizes from here on
constexpr int32_t kNegligible = 0x0d800000;  // 2^-100: groups of smaller numbers are stored as zeros
