// Attention over the pool: blocks of 32 absolute positions in order, segments of 512 merged in order, for every line.
//
// The recipe, for each query line: q is rounded to bfloat16 where the pool is bfloat16. For each block
//     s = scale x (q . k), capped; masked positions do not count; a block without any other is left out
//     m' = max(m, s); p = e^(s - m'), rounded likewise, exactly 0 where masked; c = e^(m - m')
//     l = l c + sum of p (lanes i and 16 + i first, then the tree); acc = acc c + p . v
// Both products are sums over pairs as TDPBF16PS forms them (kernels/linear.h), 32 inputs a step, also for float32.
// A segment starts anew; the segments' (m, l, acc) merge by the same rule; the result is acc / l.

template <bool bf16>
struct Head {
  static constexpr int kSize = bf16 ? 2 : 4;
  const uint8_t* keys;
  const uint8_t* values;
  int dim;

  // Channels 2p and 2p + 1 of the keys of tokens 16 h .. 16 h + 15.
  ALWAYS void key_pair(int p, int h, Lanes::F& even, Lanes::F& odd) const {
    if constexpr (bf16) {
      split(keys + (p * kBlock + 16 * h) * 4, even, odd);
    } else {
      const auto* k = reinterpret_cast<const float*>(keys) + 2 * p * kBlock + 16 * h;
      even = Lanes::load(k);
      odd = Lanes::load(k + kBlock);
    }
  }
  // Channels d .. d + 15 of the values of tokens 2p and 2p + 1.
  ALWAYS void value_pair(int p, int d, Lanes::F& even, Lanes::F& odd) const {
    if constexpr (bf16) {
      split(values + (p * dim + d) * 4, even, odd);
    } else {
      const auto* v = reinterpret_cast<const float*>(values) + 2 * p * dim + d;
      even = Lanes::load(v);
      odd = Lanes::load(v + dim);
    }
  }

 private:
  static ALWAYS void split(const uint8_t* p, Lanes::F& even, Lanes::F& odd) {
    const Lanes::I both = Lanes::load_i(reinterpret_cast<const int32_t*>(p));
    even = Lanes::floats(Lanes::template shl<16>(both));
    odd = Lanes::floats(Lanes::and_i(both, Lanes::set_i(static_cast<int32_t>(0xffff0000))));
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

// Scores of R lines against `wide` times 16 keys, from half `half` on.
template <bool bf16, int R, int wide>
ALWAYS void score(const Head<bf16>& head, int half, Tile& t, int line, float scale, float cap) {
  Lanes::F sum[wide][R], even[wide][R], odd[wide][R];
  for (int h = 0; h < wide; ++h) {
    for (int r = 0; r < R; ++r) sum[h][r] = Lanes::zero();
  }
  for (int step = 0; step < head.dim; step += 32) {
    const int end = (step + 32 < head.dim ? step + 32 : head.dim) / 2;
    for (int h = 0; h < wide; ++h) {
      for (int r = 0; r < R; ++r) even[h][r] = odd[h][r] = Lanes::zero();
    }
    for (int p = step / 2; p < end; ++p) {
      Lanes::F k0[wide], k1[wide];
      for (int h = 0; h < wide; ++h) head.key_pair(p, half + h, k0[h], k1[h]);
      for (int r = 0; r < R; ++r) {
        const Lanes::F q0 = Lanes::set(t.q[line + r][2 * p]), q1 = Lanes::set(t.q[line + r][2 * p + 1]);
        for (int h = 0; h < wide; ++h) {
          even[h][r] = Lanes::fma(k0[h], q0, even[h][r]);
          odd[h][r] = Lanes::fma(k1[h], q1, odd[h][r]);
        }
      }
    }
    for (int h = 0; h < wide; ++h) {
      for (int r = 0; r < R; ++r) sum[h][r] = Lanes::add(sum[h][r], Lanes::add(even[h][r], odd[h][r]));
    }
  }
  for (int h = 0; h < wide; ++h) {
    for (int r = 0; r < R; ++r) {
      Lanes::store(t.p[line + r] + 16 * (half + h), scaled(sum[h][r], scale, cap));
    }
  }
}

// Scores to probabilities, and the rescaling of what came before. `first` is the block's first position.
template <bool bf16>
ALWAYS void soften(Tile& t, int line, int first, int window, int dim) {
  float* p = t.p[line];
  const int at = t.position[line];
  const int from = window > 0 && at - window + 1 > first ? at - window + 1 - first : 0;
  const int to = at - first < kBlock - 1 ? at - first + 1 : kBlock;
  const bool whole = from == 0 && to == kBlock;
  t.live[line] = from < to;
  if (!t.live[line]) {
    for (int i = 0; i < kBlock; ++i) p[i] = 0.0f;
    return;
  }
  if (!whole) {
    for (int i = 0; i < from; ++i) p[i] = kNothing;
    for (int i = to; i < kBlock; ++i) p[i] = kNothing;
  }
  const Lanes::F low = Lanes::load(p), high = Lanes::load(p + 16);
  const float here = Lanes::largest(Lanes::max(low, high));
  const float m = here > t.m[line] ? here : t.m[line];
  const Lanes::F top = Lanes::set(m);
  Lanes::F a = exp_of(Lanes::sub(low, top)), b = exp_of(Lanes::sub(high, top));
  if constexpr (bf16) a = bf16_of(a), b = bf16_of(b);
  Lanes::store(p, a);
  Lanes::store(p + 16, b);
  if (!whole) {
    for (int i = 0; i < from; ++i) p[i] = 0.0f;
    for (int i = to; i < kBlock; ++i) p[i] = 0.0f;
    a = Lanes::load(p), b = Lanes::load(p + 16);
  }
  const float sum = Lanes::sum(Lanes::add(a, b));
  if (m == t.m[line]) {  // e^0 is 1: nothing to rescale
    t.l[line] = t.l[line] + sum;
    return;
  }
  const Lanes::F factor = exp_of(Lanes::set(t.m[line] - m));
  for (int d = 0; d < dim; d += kLanes) {
    Lanes::store(t.acc[line] + d, Lanes::mul(Lanes::load(t.acc[line] + d), factor));
  }
  t.l[line] = t.l[line] * Lanes::lane0(factor) + sum;
  t.m[line] = m;
}

// acc += p . v for R lines, `wide` times 16 channels from d on.
template <bool bf16, int R, int wide>
ALWAYS void mix(const Head<bf16>& head, Tile& t, int line, int d) {
  Lanes::F even[wide][R], odd[wide][R];
  for (int h = 0; h < wide; ++h) {
    for (int r = 0; r < R; ++r) even[h][r] = odd[h][r] = Lanes::zero();
  }
  for (int p = 0; p < kBlock / 2; ++p) {
    Lanes::F v0[wide], v1[wide];
    for (int h = 0; h < wide; ++h) head.value_pair(p, d + 16 * h, v0[h], v1[h]);
    for (int r = 0; r < R; ++r) {
      const Lanes::F p0 = Lanes::set(t.p[line + r][2 * p]), p1 = Lanes::set(t.p[line + r][2 * p + 1]);
      for (int h = 0; h < wide; ++h) {
        even[h][r] = Lanes::fma(v0[h], p0, even[h][r]);
        odd[h][r] = Lanes::fma(v1[h], p1, odd[h][r]);
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    if (!t.live[line + r]) continue;
    for (int h = 0; h < wide; ++h) {
      float* acc = t.acc[line + r] + d + 16 * h;
      Lanes::store(acc, Lanes::add(Lanes::load(acc), Lanes::add(even[h][r], odd[h][r])));
    }
  }
}

template <bool bf16, int R>
ALWAYS void block_of(const Head<bf16>& head, Tile& t, int line, int first, const AttendTask& task) {
  constexpr int wide = Lanes::kAttendWide;
  for (int half = 0; half < 2; half += wide) score<bf16, R, wide>(head, half, t, line, task.scale, task.softcap);
  bool any = false;
  for (int r = 0; r < R; ++r) {
    soften<bf16>(t, line + r, first, task.window, head.dim);
    any = any || t.live[line + r];
  }
  if (!any) return;
  int d = 0;
  for (; d + 16 * wide <= head.dim; d += 16 * wide) mix<bf16, R, wide>(head, t, line, d);
  if (d < head.dim) mix<bf16, R, 1>(head, t, line, d);
}

// The same by tile instructions, see kernels/tiles.h: for so many lines at least, and heads of a multiple of 32 channels.
constexpr int kTileLines = 4;
template <bool bf16>
void tile_block(const Head<bf16>& head, Tile& t, int lines, int first, const AttendTask& task);

template <bool bf16>
ALWAYS void walk(const Head<bf16>& head, Tile& t, int lines, int first, const AttendTask& task) {
  if constexpr (bf16 && Lanes::kTiles) {
    if (lines >= kTileLines && head.dim % 32 == 0) return tile_block(head, t, lines, first, task);
  }
  constexpr int most = Lanes::kAttendRows;
  int line = 0;
  for (; line + most <= lines; line += most) block_of<bf16, most>(head, t, line, first, task);
  if constexpr (most > 2) {  // heads of a group are often 3, 6 or 7
    if (line + 3 == lines) block_of<bf16, 3>(head, t, line, first, task), line += 3;
    if (line + 2 <= lines) block_of<bf16, 2>(head, t, line, first, task), line += 2;
  }
  for (; line < lines; ++line) block_of<bf16, 1>(head, t, line, first, task);
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

ALWAYS void clear(Tile& t, int line, int dim) {
  for (int d = 0; d < dim; d += kLanes) {
    Lanes::store(t.acc[line] + d, Lanes::zero());
    Lanes::store(t.merged[line] + d, Lanes::zero());
  }
  t.m[line] = t.merged_m[line] = kNothing;
  t.l[line] = t.merged_l[line] = 0.0f;
}

template <bool bf16, class L = Lanes>
ALWAYS void begin(const Lines& lines, Tile& t) {
  const AttendTask& task = lines.task;
  for (int i = 0; i < lines.count; ++i) {
    const float* q = task.q + lines.at(i, task.q_stride);
    for (int d = 0; d < task.pool.dim; d += kLanes) {
      const Lanes::F x = bf16 ? bf16_of(Lanes::load(q + d)) : Lanes::load(q + d);
      Lanes::store(t.q[i] + d, x);
      if constexpr (bf16 && L::kTiles) L::store_bfloat(t.short_q[i] + d, x);
    }
    t.position[i] = lines.span.position + (lines.from + i) / (task.heads / task.pool.kv_heads);
    clear(t, i, task.pool.dim);
  }
}

// What the lines see of one segment.
template <bool bf16>
ALWAYS void walk_segment(const Lines& lines, Tile& t, const Seen& seen, int segment) {
  const Pool& pool = lines.task.pool;
  const int64_t head_bytes = int64_t{kBlock} * pool.dim * Head<bf16>::kSize;
  for (int b = seen.begin(segment); b < seen.end(segment); ++b) {
    const uint8_t* block = pool.data + (int64_t{lines.span.table[b]} * 2 * pool.kv_heads + lines.kv_head) * head_bytes;
    const Head<bf16> head{block, block + pool.kv_heads * head_bytes, pool.dim};
    walk<bf16>(head, t, lines.count, b * kBlock, lines.task);
  }
}

ALWAYS void finish(const Lines& lines, const Tile& t) {
  for (int i = 0; i < lines.count; ++i) {
    float* out = lines.task.out + lines.at(i, lines.task.out_stride);
    const Lanes::F total = Lanes::set(t.merged_l[i]);
    for (int d = 0; d < lines.task.pool.dim; d += kLanes) {
      Lanes::store(out + d, Lanes::div(Lanes::load(t.merged[i] + d), total));
    }
  }
}

template <bool bf16>
NEVER void attend_lines(const Lines& lines) {
  Tile t;
  begin<bf16>(lines, t);
  const Seen seen(lines.task, lines.span, lines.from, lines.from + lines.count);
  for (int segment = seen.first_segment(); segment <= seen.last_segment(); ++segment) {
    walk_segment<bf16>(lines, t, seen, segment);
    for (int i = 0; i < lines.count; ++i) merge(t, i, lines.task.pool.dim);
  }
  finish(lines, t);
}

NEVER void attend(const AttendTask& task, const Span& span, int kv_head, int from, int to) {
  const Lines lines{task, span, kv_head, from, to - from};
  task.pool.bf16 ? attend_lines<true>(lines) : attend_lines<false>(lines);
}

template <bool bf16>
NEVER void segment_lines(const Lines& lines, int segment, float* sums) {
  Tile t;
  begin<bf16>(lines, t);
  walk_segment<bf16>(lines, t, Seen(lines.task, lines.span, lines.from, lines.from + lines.count), segment);
  const int dim = lines.task.pool.dim;
  for (int i = 0; i < lines.count; ++i, sums += sums_of_line(dim)) {
    std::memcpy(sums, t.acc[i], sizeof(float) * static_cast<size_t>(dim));
    sums[dim] = t.m[i];
    sums[dim + 1] = t.l[i];
  }
}

NEVER void attend_segment(const AttendTask& task, const Span& span, int kv_head, int from, int to, int segment, float* sums) {
  const Lines lines{task, span, kv_head, from, to - from};
  task.pool.bf16 ? segment_lines<true>(lines, segment, sums) : segment_lines<false>(lines, segment, sums);
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

// One token's keys and values, into place `place` of a block.
NEVER void store(const Pool& pool, const float* keys, const float* values, int block, int place) {
  const int dim = pool.dim;
  const int64_t head = int64_t{kBlock} * dim;
  alignas(64) float k[kMaxDim], v[kMaxDim];
  for (int h = 0; h < pool.kv_heads; ++h, keys += dim, values += dim) {
    const int64_t at = (int64_t{block} * 2 * pool.kv_heads + h) * head;
    const int64_t other = at + pool.kv_heads * head;
    if (!pool.bf16) {
      auto* data = reinterpret_cast<float*>(pool.data);
      for (int d = 0; d < dim; ++d) data[at + d * kBlock + place] = keys[d];
      for (int d = 0; d < dim; ++d) data[other + place * dim + d] = values[d];
      continue;
    }
    auto* key = reinterpret_cast<uint32_t*>(pool.data) + at / 2 + place;
    for (int d = 0; d < dim; d += 2) __builtin_prefetch(key + d / 2 * kBlock, 1);  // each on a line of its own
    auto* value = reinterpret_cast<uint16_t*>(pool.data) + other + place / 2 * dim * 2 + place % 2;
    for (int d = 0; d < dim; d += kLanes) {
      Lanes::store(k + d, bf16_of(Lanes::load(keys + d)));
      Lanes::store(v + d, bf16_of(Lanes::load(values + d)));
    }
    for (int d = 0; d < dim; d += 2) {
      uint32_t bits[2];
      std::memcpy(bits, k + d, 8);
      key[d / 2 * kBlock] = bits[0] >> 16 | (bits[1] & 0xffff0000);
      std::memcpy(bits, v + d, 8);
      value[2 * d] = static_cast<uint16_t>(bits[0] >> 16);
      value[2 * d + 2] = static_cast<uint16_t>(bits[1] >> 16);
    }
  }
}
