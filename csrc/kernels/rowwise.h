// Operations on one row by itself.

// f(index, lanes of x) for stretches of 16, the last one filled up with zeros; f returns what is stored.
template <class Function>
ALWAYS void each(int n, float* out, Function&& f) {
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) Lanes::store(out + i, f([&](const float* p) { return Lanes::load(p + i); }));
  if (i < n) {
    Lanes::store_first(out + i, f([&](const float* p) { return Lanes::load_first(p + i, n - i); }), n - i);
  }
}

NEVER void add(const float* x, const float* y, int n, float* out) {
  each(n, out, [&](auto at) { return Lanes::add(at(x), at(y)); });
}

NEVER void scale(const float* x, float factor, int n, float* out) {
  each(n, out, [&](auto at) { return Lanes::mul(at(x), Lanes::set(factor)); });
}

NEVER void gated(const float* gate, const float* upper, int n, Activation activation, float* out) {
  if (activation == Activation::silu) {
    each(n, out, [&](auto at) { return Lanes::mul(silu_of(at(gate)), at(upper)); });
  } else {
    each(n, out, [&](auto at) { return Lanes::mul(gelu_tanh_of(at(gate)), at(upper)); });
  }
}

NEVER void softcap(const float* x, float cap, int n, float* out) {
  each(n, out, [&](auto at) { return cap_of(at(x), Lanes::set(cap)); });
}

// Mean of squares over 16 lanes and the tree; then x times 1 / sqrt(mean + eps), times (weight + offset).
NEVER void rms_norm(const float* x, int width, const float* weight, int n, float eps, float offset, float* out) {
  for (int at = 0; at < width; at += n, x += n, out += n) {
    Lanes::F squares = Lanes::zero();
    for (int i = 0; i < n; i += kLanes) {
      const Lanes::F v = n - i < kLanes ? Lanes::load_first(x + i, n - i) : Lanes::load(x + i);
      squares = Lanes::fma(v, v, squares);
    }
    const float rms = 1.0f / __builtin_sqrtf(Lanes::sum(squares) / static_cast<float>(n) + eps);
    const Lanes::F factor = Lanes::set(rms), more = Lanes::set(offset);
    each(n, out, [&](auto p) { return Lanes::mul(Lanes::mul(p(x), factor), Lanes::add(p(weight), more)); });
  }
}

// 16 channels (or the n left) and those they turn with.
ALWAYS void turn(const float* first, const float* second, const float* cosine, const float* sine, float* out, float* other,
                 int n) {
  const auto at = [n](const float* p) { return n == kLanes ? Lanes::load(p) : Lanes::load_first(p, n); };
  const auto put = [n](float* p, const Lanes::F& x) { n == kLanes ? Lanes::store(p, x) : Lanes::store_first(p, x, n); };
  const Lanes::F a = at(first), b = at(second), c = at(cosine), s = at(sine);
  put(out, Lanes::sub(Lanes::mul(a, c), Lanes::mul(b, s)));
  put(other, Lanes::add(Lanes::mul(b, c), Lanes::mul(a, s)));
}

NEVER void rotate(const float* x, int heads, int dim, const float* turns, int half, float* out) {
  const float* sines = turns + half;
  for (int h = 0; h < heads; ++h, x += dim, out += dim) {
    int i = 0;
    for (; i + kLanes <= half; i += kLanes) {
      turn(x + i, x + half + i, turns + i, sines + i, out + i, out + half + i, kLanes);
    }
    if (i < half) turn(x + i, x + half + i, turns + i, sines + i, out + i, out + half + i, half - i);
    for (i = 2 * half; i < dim; ++i) out[i] = x[i];
  }
}

// One scale for each 32 numbers: amax / 127, codes round(x (127 / amax)), half to even. A group whose numbers are all
// below 2^-100 is zeros; one with NaN or infinity has the scale NaN, so that all it touches becomes NaN.
NEVER void to_int8(const float* x, int n, uint8_t* out) {
  const int filled = static_cast<int>(up(n, 64));
  auto* groups = reinterpret_cast<ActivationGroup*>(out + filled);
  for (int at = 0; at < filled; at += kGroup, ++groups) {
    const int left = n - at;
    Lanes::F v[2] = {Lanes::zero(), Lanes::zero()};
    for (int h = 0; h < 2; ++h) {
      const int here = left - 16 * h;
      if (here >= kLanes) v[h] = Lanes::load(x + at + 16 * h);
      else if (here > 0) v[h] = Lanes::load_first(x + at + 16 * h, here);
    }
    const int32_t bits = largest_size(v[0], v[1]);
    float amax;
    std::memcpy(&amax, &bits, 4);
    const bool finite = bits < kNotFinite, zero = bits < kNegligible;
    const float factor = finite && !zero ? 127.0f / amax : 0.0f;
    int32_t sums[2];
    for (int h = 0; h < 2; ++h) {
      const Lanes::I code = finite ? Lanes::to_int(Lanes::mul(v[h], Lanes::set(factor))) : Lanes::zero_i();
      Lanes::store_int8(reinterpret_cast<int8_t*>(out) + at + 16 * h, code);
      sums[h] = -Lanes::total(code);
    }
    groups->scale = !finite ? __builtin_nanf("") : zero ? 0.0f : amax / 127.0f;
    groups->codes = sums[0] + sums[1];
    groups->sum = groups->scale * static_cast<float>(groups->codes);
    groups->half[0] = static_cast<int16_t>(sums[0]);
    groups->half[1] = static_cast<int16_t>(sums[1]);
  }
}

NEVER void to_bf16(const float* x, int n, uint8_t* out) {
  auto* y = reinterpret_cast<float*>(out);
  each(n, y, [&](auto at) { return bf16_of(at(x)); });
  for (int i = n; i < up(n, 32); ++i) y[i] = 0.0f;
}
