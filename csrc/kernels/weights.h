// A packed weight seen by one instruction set: codes into bytes, scales into lanes. Templates over the shape.

template <int n>
struct Constant {
  static constexpr int value = n;
};

// f(Constant<0>), f(Constant<1>), ...: a loop whose index is a constant.
template <int count, int at = 0, class Function>
ALWAYS void unroll(Function&& f) {
  if constexpr (at < count) {
    f(Constant<at>{});
    unroll<count, at + 1>(f);
  }
}

template <int kind>
struct Codes {
  static constexpr WeightShape kShape = kShapes[kind];
  static constexpr bool kWide = kShape.bits == 8 || kShape.table;
  // What a code means less its zero is known to the kernel by how its sums start.
  static constexpr bool kStartsAtZero = kShape.minima || (kWide && Lanes::kSignedBytes);

  // So many sums of two products fit into 16 bits: codes below 64 times activations of 127 at most.
  static constexpr int kRun = kShape.bits <= 4 ? 8 : kShape.bits == 5 ? 4 : 2;

  // Quad j of a group, one byte a code.
  template <int j>
  static ALWAYS Lanes::B quad(const uint8_t* group) {
    if constexpr (kShape.bits == 8) {
      return Lanes::load_b(group + 64 * j);
    } else if constexpr (kShape.bits == 2) {
      return two<j>(group);
    } else if constexpr (kShape.bits == 3) {
      return Lanes::or_b(two<j>(group), plane<j, 2>(group + 128));
    } else if constexpr (kShape.bits == 4) {
      return kShape.table ? Lanes::lookup(kTable, four<j>(group)) : four<j>(group);
    } else if constexpr (kShape.bits == 5) {
      return Lanes::or_b(four<j>(group), plane<j, 4>(group + 256));
    } else {
      const Lanes::B high = Lanes::load_b(group + 256 + 64 * (j / 4));
      constexpr int at = 2 * (j % 4);
      const Lanes::B moved = at <= 4 ? Lanes::template shl_b<at <= 4 ? 4 - at : 0>(high)
                                     : Lanes::template shr_b<at <= 4 ? 0 : at - 4>(high);
      return Lanes::or_b(four<j>(group), Lanes::and_b(moved, Lanes::set_b(0x30)));
    }
  }

  static ALWAYS Lanes::I dot(const Lanes::I& acc, const Lanes::B& code, const Lanes::I& a) {
    return kWide ? Lanes::dot4_wide(acc, code, a) : Lanes::dot4(acc, code, a);
  }

 private:
  template <int j>
  static ALWAYS Lanes::B four(const uint8_t* group) {
    const Lanes::B x = Lanes::load_b(group + 64 * (j / 2));
    return Lanes::and_b(Lanes::template shr_b<j % 2 * 4>(x), Lanes::set_b(0x0f));
  }
  template <int j>
  static ALWAYS Lanes::B two(const uint8_t* group) {
    const Lanes::B x = Lanes::load_b(group + 64 * (j / 4));
    return Lanes::and_b(Lanes::template shr_b<j % 4 * 2>(x), Lanes::set_b(0x03));
  }
  // Bit j of every byte, moved to bit `to`.
  template <int j, int to>
  static ALWAYS Lanes::B plane(const uint8_t* p) {
    const Lanes::B x = Lanes::load_b(p);
    const Lanes::B moved = j <= to ? Lanes::template shl_b<j <= to ? to - j : 0>(x)
                                   : Lanes::template shr_b<j <= to ? 0 : j - to>(x);
    return Lanes::and_b(moved, Lanes::set_b(1 << to));
  }
};

// The scales of one group in lanes; made once per group, used for every row.
template <int kind>
struct Scales {
  static constexpr WeightShape kShape = kShapes[kind];
  Lanes::F d;       // sub = 32: d x sub-scale, which float32 holds exactly
  Lanes::F m;       // -m of x = d q + m; so where sub = 32 dmin x sub-minimum, exactly; sub = 16: dmin
  Lanes::I pair;    // sub = 16: the sub-scales of both halves as int16
  Lanes::I minima;  // sub = 16: likewise

  static ALWAYS Scales of(const uint8_t* chunk, int g) {
    Scales s;
    const auto* halves = reinterpret_cast<const uint16_t*>(chunk);
    if constexpr (kShape.sub == 0) {
      s.d = Lanes::load_half(halves + 16 * g);
      if constexpr (kShape.minima) s.m = negative(Lanes::load_half(halves + 32 + 16 * g));
    } else {
      s.d = Lanes::load_half(halves);
      if constexpr (kShape.minima) s.m = Lanes::load_half(halves + 16);
    }
    if constexpr (kShape.sub == 32) {
      s.d = Lanes::mul(s.d, Lanes::to_float(of_pair(chunk + kShape.sub_scales_at(), g, !kShape.minima)));
      if constexpr (kShape.minima) {
        s.m = Lanes::mul(s.m, Lanes::to_float(of_pair(chunk + kShape.sub_minima_at(), g, false)));
      }
    } else if constexpr (kShape.sub == 16) {
      const uint8_t* at = chunk + kShape.sub_scales_at() + 32 * g;
      if constexpr (kShape.shared_byte()) {
        const Lanes::I both = Lanes::load_pairs_unsigned(at);
        const Lanes::I mask = Lanes::set_i(0x000f000f);
        s.pair = Lanes::and_i(both, mask);
        s.minima = Lanes::and_i(Lanes::template shr<4>(both), mask);
      } else {
        s.pair = Lanes::load_pairs_signed(at);
      }
    }
    return s;
  }

 private:
  static ALWAYS Lanes::I of_pair(const uint8_t* bytes, int g, bool is_signed) {
    const uint8_t* at = bytes + 32 * (g / 2);
    const Lanes::I pair = is_signed ? Lanes::load_pairs_signed(at) : Lanes::load_pairs_unsigned(at);
    return g % 2 ? Lanes::template sra<16>(pair) : Lanes::template sra<16>(Lanes::template shl<16>(pair));
  }
};
