// Attention over the pool: blocks of 32 absolute positions in order, segments of 512 merged in order, for every line.
//
// The recipe, for each query line: q is rounded to bfloat16 unless the pool is float32. For each block
//     s = scale x (q . k), capped; masked positions do not count; a block without any other is left out
//     m' = max(m, s); p = e^(s - m'), rounded where the pool is bfloat16, exactly 0 where masked; c = e^(m - m')
//     l = l c + sum of p (lanes i and 16 + i first, then the tree); acc = acc c + p . v
// Both products are sums over pairs as TDPBF16PS forms them (kernels/linear.h), 32 inputs a step, also for float32.
// A segment starts anew; the segments' (m, l, acc) merge by the same rule; the result is acc / l.
//
// int8, int4: the products are of codes, which bfloat16 holds exactly, so nothing is widened in memory. A step's 32 channels
// are a group with one scale a token: q . k is the sum of (0 + step) x scale, each one fma; and values' scales are
// multiplied into p, rounded to bfloat16 for each group anew, before p . v. q, k, v and the result are spread, see below.

template <KV format>
struct Head {
  static constexpr bool kScaled = has_scales(format);  // numbers are codes
  const uint8_t* keys;
  const uint8_t* values;
  int dim;
  int groups;
  // From here to the block that is next, 0 for none. Each cache line that is read asks for its like there: only the table
  // knows where that lies. Asking for all of them at once brought nothing.
  int64_t keys_ahead = 0, values_ahead = 0;

  Head(const Pool& pool, int block, int kv_head)
      : keys(pool.keys(block, kv_head)), values(pool.values(block, kv_head)), dim(pool.dim), groups(pool.groups()) {}

  void followed_by(const Head& next) {
    keys_ahead = next.keys - keys;
    values_ahead = next.values - values;
  }
  // Channels 2p and 2p + 1 of the keys of tokens 16 h .. 16 h + 15.
  ALWAYS void key_pair(int p, int h, Lanes::F& even, Lanes::F& odd) const {
    const int at = 2 * p * kBlock + 16 * h;
    if constexpr (format == KV::f32) {
      const auto* k = reinterpret_cast<const float*>(keys) + at;
      ask(k, keys_ahead), ask(k + kBlock, keys_ahead);
      even = Lanes::load(k);
      odd = Lanes::load(k + kBlock);
    } else if constexpr (format == KV::bf16) {
      const uint8_t* k = keys + (p * kBlock + 16 * h) * 4;
      ask(k, keys_ahead);
      split(k, even, odd);
    } else {
      if (h == 0) ask(keys + at, keys_ahead);
      even = Lanes::to_float(load_codes(keys + at));
      odd = Lanes::to_float(load_codes(keys + at + kBlock));
    }
  }
  // Channels d .. d + 15 of the values of tokens 2p and 2p + 1.
  ALWAYS void value_pair(int p, int d, Lanes::F& even, Lanes::F& odd) const {
    if constexpr (format == KV::f32) {
      const auto* v = reinterpret_cast<const float*>(values) + 2 * p * dim + d;
      ask(v, values_ahead), ask(v + dim, values_ahead);
      even = Lanes::load(v);
      odd = Lanes::load(v + dim);
    } else if constexpr (format == KV::bf16) {
      const uint8_t* v = values + (p * dim + d) * 4;
      ask(v, values_ahead);
      split(v, even, odd);
    } else if constexpr (format == KV::int8) {
      const uint8_t* v = values + 2 * p * groups * kKVGroup + d;
      if (d % 64 == 0) ask(v, values_ahead), ask(v + groups * kKVGroup, values_ahead);
      even = Lanes::to_float(load_codes(v));
      odd = Lanes::to_float(load_codes(v + groups * kKVGroup));
    } else {
      const uint8_t* v = values + (2 * p * groups + d / kKVGroup) * kLanes;
      const bool upper = d % kKVGroup != 0;
      if (!upper) ask(v, values_ahead);
      const Lanes::I first = load_codes(v), second = load_codes(v + groups * kLanes);
      even = Lanes::to_float(upper ? Lanes::template sra<4>(first) : lower(first));
      odd = Lanes::to_float(upper ? Lanes::template sra<4>(second) : lower(second));
    }
  }
  // Of a group of channels: of tokens 16 h .. 16 h + 15.
  ALWAYS Lanes::F key_scales(int group, int h) const { return scales<8>(keys, group, h); }
  ALWAYS Lanes::F value_scales(int group, int h) const { return scales<format == KV::int4 ? 4 : 8>(values, group, h); }

 private:
  template <int bits>
  ALWAYS Lanes::F scales(const uint8_t* head, int group, int h) const {
    const uint8_t* behind = head + groups * kKVGroup * kBlock * bits / 8;
    return Lanes::load_bfloat(reinterpret_cast<const uint16_t*>(behind) + group * kBlock + 16 * h);
  }
  static ALWAYS void ask(const void* line, int64_t ahead) {
    __builtin_prefetch(static_cast<const uint8_t*>(line) + ahead);
  }
  static ALWAYS void split(const uint8_t* p, Lanes::F& even, Lanes::F& odd) {
    const Lanes::I both = Lanes::load_i(reinterpret_cast<const int32_t*>(p));
    even = Lanes::floats(Lanes::template shl<16>(both));
    odd = Lanes::floats(Lanes::and_i(both, Lanes::set_i(static_cast<int32_t>(0xffff0000))));
  }
  static ALWAYS Lanes::I load_codes(const uint8_t* p) { return Lanes::load_int8(reinterpret_cast<const int8_t*>(p)); }
  // The lower four bits with their sign.
  static ALWAYS Lanes::I lower(const Lanes::I& byte) {
    return Lanes::template sra<28>(Lanes::template shl<28>(byte));
  }
};

// What is known of the lines of a tile while they walk the blocks.
struct Tile {
  alignas(64) float q[kTile][kMaxDim];
  alignas(64) float acc[kTile][kMaxDim];      // of this segment
  alignas(64) float merged[kTile][kMaxDim];   // of the segments before
  alignas(64) float p[kTile][kBlock];
  alignas(64) uint16_t short_q[kTile][kMaxDim], short_p[kTile][kBlock];  // the same as bfloat16, where tiles read them
  float m[kTile], l[kTile], merged_m[kTile], merged_l[kTile];
  int position[kTile];
  bool live[kTile];  // sees something of the block at hand
};

constexpr float kNothing = -__builtin_inff();

ALWAYS Lanes::F scaled(const Lanes::F& product, float scale, float cap) {
  const Lanes::F s = Lanes::mul(product, Lanes::set(scale));
  return cap > 0.0f ? cap_of(s, Lanes::set(cap)) : s;
}

// Scores of R lines against 16 keys, the half `half` of a block.
template <KV format, int R>
ALWAYS void score(const Head<format>& head, int half, Tile& t, int line, float scale, float cap) {
  Lanes::F sum[R], even[R], odd[R];
  for (int r = 0; r < R; ++r) sum[r] = Lanes::zero();
  for (int step = 0; step < head.dim; step += 32) {
    const int end = (step + 32 < head.dim ? step + 32 : head.dim) / 2;
    for (int r = 0; r < R; ++r) even[r] = odd[r] = Lanes::zero();
    for (int p = step / 2; p < end; ++p) {
      Lanes::F k0, k1;
      head.key_pair(p, half, k0, k1);
      for (int r = 0; r < R; ++r) {
        even[r] = Lanes::fma(k0, Lanes::set(t.q[line + r][2 * p]), even[r]);
        odd[r] = Lanes::fma(k1, Lanes::set(t.q[line + r][2 * p + 1]), odd[r]);
      }
    }
    if constexpr (Head<format>::kScaled) {
      const Lanes::F factor = head.key_scales(step / kKVGroup, half);
      for (int r = 0; r < R; ++r) {
        sum[r] = Lanes::fma(Lanes::add(Lanes::zero(), Lanes::add(even[r], odd[r])), factor, sum[r]);
      }
    } else {
      for (int r = 0; r < R; ++r) sum[r] = Lanes::add(sum[r], Lanes::add(even[r], odd[r]));
    }
  }
  for (int r = 0; r < R; ++r) Lanes::store(t.p[line + r] + 16 * half, scaled(sum[r], scale, cap));
}

// Which positions of a block a line sees: [from, to), within the block.
struct Sight {
  int from, to;
  Sight(int position, int first, int window)
      : from(window > 0 ? within(position - window + 1 - first) : 0), to(within(position - first + 1)) {}
  bool any() const { return from < to; }
  bool whole() const { return from == 0 && to == kBlock; }

 private:
  static int within(int place) { return place < 0 ? 0 : place < kBlock ? place : kBlock; }
};

ALWAYS void hide(float* p, const Sight& sight, float with) {
  for (int i = 0; i < sight.from; ++i) p[i] = with;
  for (int i = sight.to; i < kBlock; ++i) p[i] = with;
}

// The rescaling of what a line has summed, where a block brings a larger score.
ALWAYS void rescale(Tile& t, int line, float m, int dim) {
  const Lanes::F factor = exp_of(Lanes::set(t.m[line] - m));
  for (int d = 0; d < dim; d += kLanes) {
    Lanes::store(t.acc[line] + d, Lanes::mul(Lanes::load(t.acc[line] + d), factor));
  }
  t.l[line] = t.l[line] * Lanes::lane0(factor);
  t.m[line] = m;
}

// Scores to probabilities for R lines, and the rescaling of what came before. `first` is the block's first position. Each
// step is taken for all lines, whose chains are long and independent. False where none of them sees any of the block.
template <KV format, int R>
ALWAYS bool soften(Tile& t, int line, int first, int window, int dim) {
  bool whole = true, any = false;
  for (int r = 0; r < R; ++r) {
    const Sight sight(t.position[line + r], first, window);
    t.live[line + r] = sight.any();
    any = any || sight.any();
    if (sight.whole()) continue;
    whole = false;
    hide(t.p[line + r], sight, kNothing);
  }
  if (!any) return false;
  Lanes::F low[R], high[R];
  float m[R];
  for (int r = 0; r < R; ++r) {
    low[r] = Lanes::load(t.p[line + r]), high[r] = Lanes::load(t.p[line + r] + 16);
    const float here = Lanes::largest(Lanes::max(low[r], high[r]));
    m[r] = here > t.m[line + r] ? here : t.m[line + r];
  }
  for (int r = 0; r < R; ++r) {
    const Lanes::F top = Lanes::set(m[r]);
    low[r] = exp_of(Lanes::sub(low[r], top)), high[r] = exp_of(Lanes::sub(high[r], top));
    if constexpr (format == KV::bf16) low[r] = bf16_of(low[r]), high[r] = bf16_of(high[r]);
    Lanes::store(t.p[line + r], low[r]);
    Lanes::store(t.p[line + r] + 16, high[r]);
  }
  if (!whole) {
    for (int r = 0; r < R; ++r) {
      hide(t.p[line + r], Sight(t.position[line + r], first, window), 0.0f);
      low[r] = Lanes::load(t.p[line + r]), high[r] = Lanes::load(t.p[line + r] + 16);
    }
  }
  float sum[R];
  for (int r = 0; r < R; ++r) sum[r] = Lanes::sum(Lanes::add(low[r], high[r]));
  for (int r = 0; r < R; ++r) {
    if (!t.live[line + r]) continue;
    if (m[r] != t.m[line + r]) rescale(t, line + r, m[r], dim);  // e^0 is 1
    t.l[line + r] = t.l[line + r] + sum[r];
  }
  return true;
}

// acc += p . v for R lines from `line` on, whose p is given: channels d .. d + 15.
template <KV format, int R>
ALWAYS void mix(const Head<format>& head, const float (*share)[kBlock], Tile& t, int line, int d) {
  Lanes::F even[R], odd[R];
  for (int r = 0; r < R; ++r) even[r] = odd[r] = Lanes::zero();
  for (int p = 0; p < kBlock / 2; ++p) {
    Lanes::F v0, v1;
    head.value_pair(p, d, v0, v1);
    for (int r = 0; r < R; ++r) {
      even[r] = Lanes::fma(v0, Lanes::set(share[r][2 * p]), even[r]);
      odd[r] = Lanes::fma(v1, Lanes::set(share[r][2 * p + 1]), odd[r]);
    }
  }
  for (int r = 0; r < R; ++r) {
    if (!t.live[line + r]) continue;
    float* acc = t.acc[line + r] + d;
    Lanes::store(acc, Lanes::add(Lanes::load(acc), Lanes::add(even[r], odd[r])));
  }
}

// p times the scales of a group of values, rounded to bfloat16: tokens 16 h .. 16 h + 15 of a line.
template <KV format>
ALWAYS Lanes::F weighed(const Head<format>& head, const Tile& t, int line, int group, int h) {
  return bf16_of(Lanes::mul(Lanes::load(t.p[line] + 16 * h), head.value_scales(group, h)));
}

template <KV format, int R>
NEVER void block_of(const Head<format>& head, Tile& t, int line, int first, const AttendTask& task) {
  for (int half = 0; half < 2; ++half) score<format, R>(head, half, t, line, task.scale, task.softcap);
  if (!soften<format, R>(t, line, first, task.window, head.dim)) return;
  if constexpr (Head<format>::kScaled) {
    alignas(64) float share[R][kBlock];
    for (int group = 0, from = 0; group < head.groups; ++group, from += kKVGroup) {
      for (int r = 0; r < R; ++r) {
        for (int h = 0; h < 2; ++h) Lanes::store(share[r] + 16 * h, weighed(head, t, line + r, group, h));
      }
      const int to = from + kKVGroup < head.dim ? from + kKVGroup : head.dim;
      for (int d = from; d < to; d += kLanes) mix<format, R>(head, share, t, line, d);
    }
  } else {
    for (int d = 0; d < head.dim; d += kLanes) mix<format, R>(head, t.p + line, t, line, d);
  }
}

// The same by tile instructions, see kernels/tiles.h: for so many lines at least, and heads of a multiple of 32 channels.
constexpr int kTileLines = 4;
template <KV format>
void tile_block(const Head<format>& head, Tile& t, int lines, int first, const AttendTask& task);

template <KV format>
ALWAYS void walk(const Head<format>& head, Tile& t, int lines, int first, const AttendTask& task) {
  if constexpr (format != KV::f32 && Lanes::kTiles) {
    if (lines >= kTileLines && head.dim % 32 == 0) return tile_block(head, t, lines, first, task);
  }
  constexpr int most = Lanes::kAttendRows;
  for (int line = 0, left = ceil_div(lines, most); left > 0; --left) {  // as equal as can be
    const int count = ceil_div(lines - line, left);
    unroll<most>([&](auto n) {
      constexpr int R = decltype(n)::value + 1;
      if (count == R) block_of<format, R>(head, t, line, first, task);
    });
    line += count;
  }
}

// The segment's sums join those before: merged = merged e^(M - m') + acc e^(m - m').
ALWAYS void merge(Tile& t, int line, int dim) {
  if (t.m[line] == kNothing && t.l[line] == 0.0f) return;
  const float m = t.m[line] > t.merged_m[line] ? t.m[line] : t.merged_m[line];
  const Lanes::F before = exp_of(Lanes::set(t.merged_m[line] - m)), now = exp_of(Lanes::set(t.m[line] - m));
  for (int d = 0; d < dim; d += kLanes) {
    const Lanes::F add = Lanes::mul(Lanes::load(t.acc[line] + d), now);
    Lanes::store(t.merged[line] + d, Lanes::fma(Lanes::load(t.merged[line] + d), before, add));
    Lanes::store(t.acc[line] + d, Lanes::zero());
  }
  t.merged_l[line] = t.merged_l[line] * Lanes::lane0(before) + t.l[line] * Lanes::lane0(now);
  t.merged_m[line] = m;
  t.m[line] = kNothing;
  t.l[line] = 0.0f;
}

// Query lines [from, to) of a span and one key head, as they stand in memory.
struct Lines {
  const AttendTask& task;
  const Span& span;
  int kv_head, from, count;

  int64_t at(int i, int64_t stride) const {
    const int group = task.heads / task.pool.kv_heads, token = (from + i) / group;
    return (span.first + token) * stride + (kv_head * group + (from + i) % group) * task.pool.dim;
  }
};

// Queries, keys and values of formats with scales are multiplied by the Hadamard matrix of their size (Sylvester's) over its
// root, where there is one, and so is what comes out: the matrix is its own inverse, so nothing changes, but a channel that
// stands out is spread over all (QuaRot, Ashkboos et al. 2024).
struct Signs {
  alignas(64) float line[kLanes][kLanes];
  constexpr Signs() : line() {
    for (int i = 0; i < kLanes; ++i) {
      for (int j = 0; j < kLanes; ++j) line[i][j] = __builtin_parity(static_cast<unsigned>(i & j)) ? -1.0f : 1.0f;
    }
  }
};
constexpr Signs kSigns;

// x and out may be the same.
ALWAYS void spread(const float* x, int dim, float* out) {
  if ((dim & (dim - 1)) != 0) {
    std::memmove(out, x, sizeof(float) * static_cast<size_t>(dim));
    return;
  }
  for (int d = 0; d < dim; d += kLanes) {  // within 16
    Lanes::F sum = Lanes::zero();
    for (int i = 0; i < kLanes; ++i) sum = Lanes::fma(Lanes::set(x[d + i]), Lanes::load(kSigns.line[i]), sum);
    Lanes::store(out + d, sum);
  }
  for (int step = kLanes; step < dim; step *= 2) {  // between them
    for (int d = 0; d < dim; d += kLanes) {
      if (d & step) continue;
      const Lanes::F a = Lanes::load(out + d), b = Lanes::load(out + d + step);
      Lanes::store(out + d, Lanes::add(a, b));
      Lanes::store(out + d + step, Lanes::sub(a, b));
    }
  }
  const Lanes::F factor = Lanes::set(1.0f / __builtin_sqrtf(static_cast<float>(dim)));
  for (int d = 0; d < dim; d += kLanes) Lanes::store(out + d, Lanes::mul(Lanes::load(out + d), factor));
}

ALWAYS void clear(Tile& t, int line, int dim) {
  for (int d = 0; d < dim; d += kLanes) {
    Lanes::store(t.acc[line] + d, Lanes::zero());
    Lanes::store(t.merged[line] + d, Lanes::zero());
  }
  t.m[line] = t.merged_m[line] = kNothing;
  t.l[line] = t.merged_l[line] = 0.0f;
}

template <KV format, class L = Lanes>
ALWAYS void begin(const Lines& lines, Tile& t) {
  const AttendTask& task = lines.task;
  for (int i = 0; i < lines.count; ++i) {
    const float* q = task.q + lines.at(i, task.q_stride);
    if constexpr (has_scales(format)) {
      spread(q, task.pool.dim, t.q[i]);
      q = t.q[i];
    }
    for (int d = 0; d < task.pool.dim; d += kLanes) {
      const Lanes::F x = format == KV::f32 ? Lanes::load(q + d) : bf16_of(Lanes::load(q + d));
      Lanes::store(t.q[i] + d, x);
      if constexpr (format != KV::f32 && L::kTiles) L::store_bfloat(t.short_q[i] + d, x);
    }
    t.position[i] = lines.span.position + (lines.from + i) / (task.heads / task.pool.kv_heads);
    clear(t, i, task.pool.dim);
  }
}

// What the lines see of one segment.
template <KV format>
ALWAYS void walk_segment(const Lines& lines, Tile& t, const Seen& seen, int segment) {
  for (int b = seen.begin(segment); b < seen.end(segment); ++b) {
    Head<format> head(lines.task.pool, lines.span.table[b], lines.kv_head);
    if (b < seen.last_block) head.followed_by(Head<format>(lines.task.pool, lines.span.table[b + 1], lines.kv_head));
    walk<format>(head, t, lines.count, b * kBlock, lines.task);
  }
}

ALWAYS void finish(const Lines& lines, const Tile& t) {
  for (int i = 0; i < lines.count; ++i) {
    float* out = lines.task.out + lines.at(i, lines.task.out_stride);
    const Lanes::F total = Lanes::set(t.merged_l[i]);
    for (int d = 0; d < lines.task.pool.dim; d += kLanes) {
      Lanes::store(out + d, Lanes::div(Lanes::load(t.merged[i] + d), total));
    }
    if (has_scales(lines.task.pool.format)) spread(out, lines.task.pool.dim, out);
  }
}

template <KV format>
NEVER void attend_lines(const Lines& lines) {
  Tile t;
  begin<format>(lines, t);
  const Seen seen(lines.task, lines.span, lines.from, lines.from + lines.count);
  for (int segment = seen.first_segment(); segment <= seen.last_segment(); ++segment) {
    walk_segment<format>(lines, t, seen, segment);
    for (int i = 0; i < lines.count; ++i) merge(t, i, lines.task.pool.dim);
  }
  finish(lines, t);
}

NEVER void attend(const AttendTask& task, const Span& span, int kv_head, int from, int to) {
  const Lines lines{task, span, kv_head, from, to - from};
  switch (task.pool.format) {
    case KV::f32: return attend_lines<KV::f32>(lines);
    case KV::bf16: return attend_lines<KV::bf16>(lines);
    case KV::int8: return attend_lines<KV::int8>(lines);
    case KV::int4: return attend_lines<KV::int4>(lines);
  }
}

template <KV format>
NEVER void segment_lines(const Lines& lines, int segment, float* sums) {
  Tile t;
  begin<format>(lines, t);
  walk_segment<format>(lines, t, Seen(lines.task, lines.span, lines.from, lines.from + lines.count), segment);
  const int dim = lines.task.pool.dim;
  for (int i = 0; i < lines.count; ++i, sums += sums_of_line(dim)) {
    std::memcpy(sums, t.acc[i], sizeof(float) * static_cast<size_t>(dim));
    sums[dim] = t.m[i];
    sums[dim + 1] = t.l[i];
  }
}

NEVER void attend_segment(const AttendTask& task, const Span& span, int kv_head, int from, int to, int segment, float* sums) {
  const Lines lines{task, span, kv_head, from, to - from};
  switch (task.pool.format) {
    case KV::f32: return segment_lines<KV::f32>(lines, segment, sums);
    case KV::bf16: return segment_lines<KV::bf16>(lines, segment, sums);
    case KV::int8: return segment_lines<KV::int8>(lines, segment, sums);
    case KV::int4: return segment_lines<KV::int4>(lines, segment, sums);
  }
}

NEVER void attend_merged(const AttendTask& task, const Span& span, int kv_head, int from, int to, int segments, const float* sums) {
  const Lines lines{task, span, kv_head, from, to - from};
  const int dim = task.pool.dim;
  Tile t;
  for (int i = 0; i < lines.count; ++i) clear(t, i, dim);
  for (int segment = 0; segment < segments; ++segment) {
    for (int i = 0; i < lines.count; ++i, sums += sums_of_line(dim)) {
      std::memcpy(t.acc[i], sums, sizeof(float) * static_cast<size_t>(dim));
      t.m[i] = sums[dim];
      t.l[i] = sums[dim + 1];
      merge(t, i, dim);
    }
  }
  finish(lines, t);
}

// One token's keys and values as numbers, into place `place` of a block's head.
template <KV format>
ALWAYS void store_numbers(uint8_t* keys, uint8_t* values, const float* key, const float* value, int dim, int place) {
  if constexpr (format == KV::f32) {
    auto* k = reinterpret_cast<float*>(keys);
    auto* v = reinterpret_cast<float*>(values);
    for (int d = 0; d < dim; ++d) k[d * kBlock + place] = key[d];
    for (int d = 0; d < dim; ++d) v[place * dim + d] = value[d];
  } else {
    auto* k = reinterpret_cast<uint32_t*>(keys) + place;
    for (int d = 0; d < dim; d += 2) __builtin_prefetch(k + d / 2 * kBlock, 1);  // each on a line of its own
    auto* v = reinterpret_cast<uint16_t*>(values) + place / 2 * dim * 2 + place % 2;
    alignas(64) float x[kMaxDim], y[kMaxDim];
    for (int d = 0; d < dim; d += kLanes) {
      Lanes::store(x + d, bf16_of(Lanes::load(key + d)));
      Lanes::store(y + d, bf16_of(Lanes::load(value + d)));
    }
    for (int d = 0; d < dim; d += 2) {
      uint32_t bits[2];
      std::memcpy(bits, x + d, 8);
      k[d / 2 * kBlock] = bits[0] >> 16 | (bits[1] & 0xffff0000);
      std::memcpy(bits, y + d, 8);
      v[2 * d] = static_cast<uint16_t>(bits[0] >> 16);
      v[2 * d + 2] = static_cast<uint16_t>(bits[1] >> 16);
    }
  }
}

// The codes of 32 numbers; their scale, a bfloat16 number, is returned.
//
// scale = amax / top by division, rounded; code = round(x (1 / scale)), half to even, which is never beyond `top`: the
// scale's rounding moves amax / scale by half a percent at most. Numbers all below 2^-100 are zeros; among NaN or infinity
// the scale is NaN, so that all it touches becomes NaN.
template <int top>
ALWAYS float to_codes(const float* x, int8_t* codes) {
  const Lanes::F low = Lanes::load(x), high = Lanes::load(x + kLanes);
  const int32_t bits = largest_size(low, high);
  float scale = 0.0f;
  if (bits >= kNegligible) {
    float amax;
    std::memcpy(&amax, &bits, 4);
    scale = Lanes::lane0(bf16_of(Lanes::set(amax / static_cast<float>(top))));
    if (bits >= kNotFinite) scale = __builtin_nanf("");
  }
  const bool coded = bits >= kNegligible && bits < kNotFinite;
  const Lanes::F factor = Lanes::set(coded ? 1.0f / scale : 0.0f);
  Lanes::store_int8(codes, coded ? Lanes::to_int(Lanes::mul(low, factor)) : Lanes::zero_i());
  Lanes::store_int8(codes + kLanes, coded ? Lanes::to_int(Lanes::mul(high, factor)) : Lanes::zero_i());
  return scale;
}

// Codes of a token's channels at its place among a group's keys or values.
ALWAYS void put_keys(uint8_t* head, int group, int place, const int8_t* codes) {
  uint8_t* to = head + group * kKVGroup * kBlock + place;
  for (int i = 0; i < kKVGroup; ++i) to[i * kBlock] = static_cast<uint8_t>(codes[i]);
}

template <KV format>
ALWAYS void put_values(uint8_t* head, int groups, int group, int place, const int8_t* codes) {
  if constexpr (format == KV::int8) {
    std::memcpy(head + (place * groups + group) * kKVGroup, codes, kKVGroup);
  } else {
    uint8_t* to = head + (place * groups + group) * kLanes;
    for (int i = 0; i < kLanes; ++i) to[i] = static_cast<uint8_t>((codes[i] & 15) | (codes[kLanes + i] & 15) << 4);
  }
}

ALWAYS void put_scale(uint8_t* scales, int group, int place, float scale) {
  uint32_t bits;
  std::memcpy(&bits, &scale, 4);
  const auto half = static_cast<uint16_t>(bits >> 16);
  std::memcpy(scales + (group * kBlock + place) * 2, &half, 2);
}

// The same as codes and scales.
template <KV format>
ALWAYS void store_codes(const Pool& pool, uint8_t* keys, uint8_t* values, const float* key, const float* value, int place) {
  constexpr int bits = format == KV::int8 ? 8 : 4, top = format == KV::int8 ? 127 : 7;  // of values
  alignas(64) float x[kMaxDim] = {}, y[kMaxDim] = {};  // filled up with zeros
  spread(key, pool.dim, x);
  spread(value, pool.dim, y);
  alignas(64) int8_t codes[kKVGroup];
  for (int g = 0; g < pool.groups(); ++g) {
    put_scale(keys + pool.code_bytes(8), g, place, to_codes<127>(x + g * kKVGroup, codes));
    put_keys(keys, g, place, codes);
    put_scale(values + pool.code_bytes(bits), g, place, to_codes<top>(y + g * kKVGroup, codes));
    put_values<format>(values, pool.groups(), g, place, codes);
  }
}

// One token's keys and values, into place `place` of a block.
NEVER void store(const Pool& pool, const float* keys, const float* values, int block, int place) {
  for (int h = 0; h < pool.kv_heads; ++h, keys += pool.dim, values += pool.dim) {
    uint8_t* k = pool.keys(block, h);
    uint8_t* v = pool.values(block, h);
    switch (pool.format) {
      case KV::f32: store_numbers<KV::f32>(k, v, keys, values, pool.dim, place); break;
      case KV::bf16: store_numbers<KV::bf16>(k, v, keys, values, pool.dim, place); break;
      case KV::int8: store_codes<KV::int8>(pool, k, v, keys, values, place); break;
      case KV::int4: store_codes<KV::int4>(pool, k, v, keys, values, place); break;
    }
  }
}
