// Linear maps: one panel of 16 outputs against one row or several rows of activations.
//
// A row's result never depends on how many rows share a call: each row has its own accumulator and meets the groups in
// ascending order. The recipe of a quantized weight, for each group of 32 inputs:
//     t = float32(sum of code x activation, exact in int32) x d
//     acc = fma(t, activation scale, acc);  acc = fma(-(sum of activations) x activation scale, -m, acc) with minima
// and for halves with sub-scales of their own (sub = 16) the integers of both are added before the conversion, and
//     t = fma(float32(sum of -(activations) x sub-minima), dmin, t) with minima (one fma more, no second accumulation).

struct Int8Rows {
  const uint8_t* base;
  int64_t stride;
  int filled;  // codes in a row

  ALWAYS const int8_t* codes(int r) const { return reinterpret_cast<const int8_t*>(base + r * stride); }
  ALWAYS const ActivationGroup* groups(int r) const {
    return reinterpret_cast<const ActivationGroup*>(base + r * stride + filled);
  }
};

// Where R rows stand at one group of inputs.
template <int R>
struct Places {
  explicit Places(const Int8Rows& of) : rows(of) {}
  ALWAYS void next() { input += kGroup; }
  ALWAYS const int8_t* codes(int r) const { return rows.codes(r) + input; }
  ALWAYS const ActivationGroup& group(int r) const { return rows.groups(r)[input / kGroup]; }

  const Int8Rows rows;
  int input = 0;
};

// Of 16 rows the compiler would keep a pointer to each one's codes and scales, many more than it has registers. So every
// fourth row has one, the others are reached by the stride, and the compiler does not learn how they hang together.
template <>
struct Places<16> {
  explicit Places(const Int8Rows& rows) : behind(rows.filled), stride(rows.stride), three(3 * rows.stride) {
    for (int i = 0; i < 4; ++i) fourth[i] = rows.base + 4 * i * stride;
    hide();
  }
  ALWAYS void next() {
    for (const uint8_t*& row : fourth) row += kGroup;
    behind += static_cast<int64_t>(sizeof(ActivationGroup)) - kGroup;
    hide();
  }
  ALWAYS const int8_t* codes(int r) const { return reinterpret_cast<const int8_t*>(at(r)); }
  ALWAYS const ActivationGroup& group(int r) const { return *reinterpret_cast<const ActivationGroup*>(at(r) + behind); }
  ALWAYS const uint8_t* at(int r) const {
    const uint8_t* row = fourth[r / 4];
    return r % 4 == 0 ? row : r % 4 == 1 ? row + stride : r % 4 == 2 ? row + 2 * stride : row + three;
  }
  ALWAYS void hide() {
    for (const uint8_t*& row : fourth) asm("" : "+r"(row));
    asm("" : "+r"(stride), "+r"(three));
  }

  const uint8_t* fourth[4];
  int64_t behind;  // from codes to what belongs to the group
  int64_t stride, three;
};

// How many bytes before their turn weights are asked for, where several rows make the arithmetic slower than memory: the
// processor's own prefetching does not see so far. A single row is quicker without.
constexpr int kAhead = 4096;

// sum += quads [first, first + count) of a group x the activations from `input` of the group on. Exact in any order. L is Lanes, but
// looked into only where the template is used: not all lanes have words.
template <class C, int first, int count, int R, class L = Lanes>
ALWAYS void add_quads(const uint8_t* codes, const Places<R>& x, int input, Lanes::I (&sum)[R]) {
  if constexpr (L::kWords && !C::kWide) {
    Lanes::I words[R];
    unroll<count>([&](auto j) {
      constexpr int at = decltype(j)::value;
      const Lanes::B code = C::template quad<first + at>(codes);
      for (int r = 0; r < R; ++r) {
        const Lanes::I product = L::words(code, Lanes::set_quad(x.codes(r) + input + 4 * at));
        words[r] = at % C::kRun == 0 ? product : L::add_words(words[r], product);
        if constexpr ((at + 1) % C::kRun == 0 || at + 1 == count) sum[r] = L::widen(sum[r], words[r]);
      }
    });
  } else {
    unroll<count>([&](auto j) {
      const Lanes::B code = C::template quad<first + decltype(j)::value>(codes);
      for (int r = 0; r < R; ++r) {
        sum[r] = C::dot(sum[r], code, Lanes::set_quad(x.codes(r) + input + 4 * decltype(j)::value));
      }
    });
  }
}

ALWAYS Lanes::I halves_of(const ActivationGroup& a) {
  int32_t both;
  std::memcpy(&both, a.half, 4);
  return Lanes::set_i(both);
}

// acc and what one group adds: `sum` is of (code - zero) x activation, and of both halves' with their sub-scales.
template <int kind>
ALWAYS Lanes::F with_group(const Lanes::F& acc, const Lanes::F& sum, const Scales<kind>& scales, const ActivationGroup& a) {
  constexpr WeightShape shape = kShapes[kind];
  Lanes::F t = Lanes::mul(sum, scales.d);
  if constexpr (shape.sub == 16 && shape.minima) {
    const Lanes::I minima = Lanes::dot2(Lanes::zero_i(), scales.minima, halves_of(a));
    t = Lanes::fma(Lanes::to_float(minima), scales.m, t);
  }
  const Lanes::F more = Lanes::fma(t, Lanes::set(a.scale), acc);
  return shape.sub != 16 && shape.minima ? Lanes::fma(Lanes::set(a.sum), scales.m, more) : more;
}

template <int kind, int R>
ALWAYS void group_dot(const uint8_t* chunk, int g, const Places<R>& x, Lanes::F (&acc)[R]) {
  using C = Codes<kind>;
  constexpr WeightShape shape = C::kShape;
  const uint8_t* codes = chunk + shape.codes_at() + g * shape.code_bytes();
  if constexpr (R >= 4) {
    for (int b = 0; b < shape.code_bytes(); b += 64) __builtin_prefetch(codes + kAhead + b);
  }
  const Scales<kind> scales = Scales<kind>::of(chunk, g);
  Lanes::I sum[R];
  for (int r = 0; r < R; ++r) {
    if constexpr (shape.sub == 16) {
      sum[r] = Lanes::zero_i();
    } else {
      sum[r] = C::kStartsAtZero ? Lanes::zero_i()
                                : Lanes::template shl<shape.zero_log2>(Lanes::set_i(x.group(r).codes));
    }
  }
  add_quads<C, 0, shape.sub == 16 ? 4 : 8>(codes, x, 0, sum);
  if constexpr (shape.sub == 16) {
    const Lanes::I low = Lanes::template sra<16>(Lanes::template shl<16>(scales.pair));
    const Lanes::I high = Lanes::template sra<16>(scales.pair);
    Lanes::I second[R];
    for (int r = 0; r < R; ++r) {
      sum[r] = Lanes::mul_i(sum[r], low);
      second[r] = Lanes::zero_i();
    }
    add_quads<C, 4, 4>(codes, x, 16, second);
    for (int r = 0; r < R; ++r) sum[r] = Lanes::add_i(sum[r], Lanes::mul_i(second[r], high));
  }
  for (int r = 0; r < R; ++r) {
    const ActivationGroup& a = x.group(r);
    if constexpr (shape.sub == 16 && !shape.minima) {
      const Lanes::I zero = Lanes::dot2(Lanes::zero_i(), scales.pair, halves_of(a));
      sum[r] = Lanes::add_i(sum[r], Lanes::template shl<shape.zero_log2>(zero));
    }
    acc[r] = with_group(acc[r], Lanes::to_float(sum[r]), scales, a);
  }
}

// acc = row x panel for R rows from `row` on.
template <int kind, int R>
NEVER void int8_panel(const uint8_t* panel, int inputs, const Int8Rows& all, int row, Lanes::F (&acc)[R]) {
  constexpr WeightShape shape = kShapes[kind];
  Places<R> x(Int8Rows{all.base + row * all.stride, all.stride, all.filled});
  Lanes::F sums[R];
  for (int r = 0; r < R; ++r) sums[r] = Lanes::zero();
  for (int input = 0; input < inputs; input += shape.inputs(), panel += shape.chunk_bytes()) {
    const int groups = shape.groups();
    for (int g = 0; g < groups; ++g, x.next()) group_dot<kind, R>(panel, g, x, sums);
  }
  for (int r = 0; r < R; ++r) acc[r] = sums[r];
}

// As TDPBF16PS defines it: for each 32 inputs acc + (sum of even products + sum of odd products), the two sums fused
// multiply-adds from zero in ascending order.
template <int R>
NEVER void bf16_panel(const uint8_t* panel, int inputs, const float* rows, int64_t stride, Lanes::F (&acc)[R]) {
  Lanes::F sums[R];
  for (int r = 0; r < R; ++r) sums[r] = Lanes::zero();
  const Lanes::I upper = Lanes::set_i(static_cast<int32_t>(0xffff0000));
  for (int input = 0; input < inputs; input += 32) {
    Lanes::F even[R], odd[R];
    for (int r = 0; r < R; ++r) even[r] = odd[r] = Lanes::zero();
    for (int p = 0; p < 16; ++p, panel += 64) {
      const Lanes::I pair = Lanes::load_i(reinterpret_cast<const int32_t*>(panel));
      const Lanes::F first = Lanes::floats(Lanes::template shl<16>(pair));
      const Lanes::F second = Lanes::floats(Lanes::and_i(pair, upper));
      for (int r = 0; r < R; ++r) {
        const float* x = rows + r * stride + input + 2 * p;
        even[r] = Lanes::fma(first, Lanes::set(x[0]), even[r]);
        odd[r] = Lanes::fma(second, Lanes::set(x[1]), odd[r]);
      }
    }
    for (int r = 0; r < R; ++r) sums[r] = Lanes::add(sums[r], Lanes::add(even[r], odd[r]));
  }
  for (int r = 0; r < R; ++r) acc[r] = sums[r];
}

// One output after the other: lane i of the accumulator takes inputs i, 16 + i, ...; then the tree.
template <bool half, int R>
NEVER void wide_panel(const uint8_t* panel, int inputs, int outputs, const float* rows, int64_t stride,
                      Lanes::F (&acc)[R]) {
  const int64_t line = up(inputs, 16) * (half ? 2 : 4);
  float out[R][kLanes] = {};
  for (int o = 0; o < outputs; ++o, panel += line) {
    Lanes::F sums[R];
    for (int r = 0; r < R; ++r) sums[r] = Lanes::zero();
    for (int i = 0; i < inputs; i += 16) {
      const Lanes::F w = half ? Lanes::load_half(reinterpret_cast<const uint16_t*>(panel) + i)
                              : Lanes::load(reinterpret_cast<const float*>(panel) + i);
      const int left = inputs - i;
      for (int r = 0; r < R; ++r) {
        const float* x = rows + r * stride + i;
        sums[r] = Lanes::fma(w, left < 16 ? Lanes::load_first(x, left) : Lanes::load(x), sums[r]);
      }
    }
    for (int r = 0; r < R; ++r) out[r][o] = Lanes::sum(sums[r]);
  }
  for (int r = 0; r < R; ++r) acc[r] = Lanes::load(out[r]);
}

// A row's outputs of one panel, the bias added.
ALWAYS void put(const LinearTask& t, int panel, int row, Lanes::F acc) {
  const int first = panel * kLanes;
  const int outputs = t.weight.outputs_of(panel);
  if (t.bias != nullptr) acc = Lanes::add(acc, Lanes::load_first(t.bias + first, outputs));
  float* y = t.y + row * t.y_stride + first;
  if (outputs == kLanes) {
    Lanes::store(y, acc);
  } else {
    Lanes::store_first(y, acc, outputs);
  }
}

// R rows from `row` on are computed, `live` of them kept.
template <int kind, int R>
ALWAYS void linear_rows(const LinearTask& t, int panel, int row, int live) {
  const Weight& w = t.weight;
  const uint8_t* at = w.data + panel * w.panel_bytes();
  Lanes::F acc[R];
  if constexpr (kind < kQuantized) {
    int8_panel<kind, R>(at, w.inputs, Int8Rows{t.x, t.x_stride, static_cast<int>(up(w.inputs, 64))}, row, acc);
  } else {
    const auto* rows = reinterpret_cast<const float*>(t.x + row * t.x_stride);
    const int64_t stride = t.x_stride / 4;
    if constexpr (kind == static_cast<int>(WeightKind::bf16)) {
      bf16_panel<R>(at, w.inputs, rows, stride, acc);
    } else {
      wide_panel<kind == static_cast<int>(WeightKind::f16), R>(at, w.inputs, w.outputs_of(panel), rows, stride, acc);
    }
  }
  for (int r = 0; r < live; ++r) put(t, panel, row + r, acc[r]);
}

// Rows [row, to) of one panel: R at a time, then half as many, and so on. All but one of R codes' rows take longer in such
// parts than R, so one more is computed, and left.
template <int kind, int R>
ALWAYS void rows_by(const LinearTask& t, int panel, int row, int to) {
  for (; row + R <= to; row += R) linear_rows<kind, R>(t, panel, row, R);
  if (kind < kQuantized && R > 2 && t.one_more && row + R - 1 == to) return linear_rows<kind, R>(t, panel, row, R - 1);
  if constexpr (R > 1) rows_by<kind, R / 2>(t, panel, row, to);
}

// The outputs of panels [begin, end) for rows [from, to).
template <int kind>
void linear(const LinearTask& t, int begin, int end, int from, int to) {
  constexpr int most = kind < kQuantized ? Lanes::kCodeRows : Lanes::kRows;
  for (int panel = begin; panel < end; ++panel) rows_by<kind, most>(t, panel, from, to);
}
