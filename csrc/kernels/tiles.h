// Linear maps of many rows and attention of many lines by tiles: the recipes of linear.h and attention.h, bit for bit.
//
// A tile has 16 lines of 64 bytes, in memory a line for each row (or query line) with 64 int8 or 32 bfloat16 of it; or a quad
// (or pair) of inputs for each of 16 outputs, which is how packed weights, keys and values lie in memory anyway; or a
// row's 16 sums. All eight tiles have that one shape, so a thread configures them once.
//
//   bfloat16: an instruction is one step of 32 inputs of the recipe. Sums stay in tiles, 2 x 2 of them.
//   int8: each group's exact sum goes to memory and from there through the float operations of with_group. A tile line holds two
//   groups of activations; weights are unpacked so that a tile has only one group's (or half's) quads, the rest being zeros.

constexpr TileShapes whole_tiles() {
  TileShapes shapes;
  for (int t = 0; t < 8; ++t) shapes.bytes[t] = 64, shapes.lines[t] = 16;
  return shapes;
}
constexpr TileShapes kWholeTiles = whole_tiles();

// Tiles belong to a thread, and take part in what the system saves when it switches threads. Workers keep them while
// they live; a thread that comes from outside gives them back, see rest_tiles.
thread_local bool configured = false;

void need_tiles() {
  if (configured) return;
  Tiles::configure(kWholeTiles);
  configured = true;
}

void rest_tiles() {
  if (configured) Tiles::release();
  configured = false;
}

constexpr int kTileRows = kTile;
constexpr int kFewRows = 4;             // beyond whole tiles: fewer are not worth another one
constexpr int kMostRows = 128;          // whose sums are kept at once
constexpr int kMostTiles = kMostRows / kTileRows;
constexpr int kBlockGroups = 8;         // of int8 inputs for which weights are unpacked before all rows meet them
constexpr int kBlockSteps = 16;         // of 32 bfloat16 inputs, likewise: two panels of them stay in the first cache

// Rows in tiles of 16. The last tile begins early enough to end with the rows, so some may be computed twice.
struct TiledRows {
  int from, count;

  ALWAYS int tiles() const { return (count + kTileRows - 1) / kTileRows; }
  ALWAYS int row(int tile) const { return from + (kTileRows * tile + kTileRows <= count ? kTileRows * tile : count - kTileRows); }
};

// ---- int8

// Some groups of a panel as tiles take them, with their scales.
template <int kind>
struct Unpacked {
  static constexpr WeightShape kShape = kShapes[kind];
  static_assert(kBlockGroups % kShape.groups() == 0, "blocks are whole chunks");
  static constexpr int kQuads = kShape.sub == 16 ? 4 : 8;  // that are summed as integers: a group, or half of one
  static constexpr int kUnits = 16 / kQuads;               // of so many quads, in the 64 inputs of a tile
  // Unit by unit, its quads and then zeros up to 16; so there are zeros enough before and behind each. They stay for all panels.
  alignas(64) int8_t codes[kBlockGroups * 8 / kQuads][16][64] = {};
  Scales<kind> scales[kBlockGroups];
  Lanes::F halves[kBlockGroups][2];  // sub-scales, where halves have their own

  // The groups of a chunk, from group `at` on.
  ALWAYS void take(const uint8_t* chunk, int at) {
    const Lanes::B zero = Lanes::set_b(kShape.minima ? 0 : 1 << kShape.zero_log2);
    for (int g = 0; g < kShape.groups(); ++g) {
      const uint8_t* group = chunk + kShape.codes_at() + g * kShape.code_bytes();
      for (int b = 0; b < kShape.code_bytes(); b += 64) __builtin_prefetch(group + kAhead + b);
      unroll<8>([&](auto quad) {
        constexpr int j = decltype(quad)::value;
        int8_t* to = codes[(8 * (at + g) + j) / kQuads][j % kQuads];
        Lanes::store_b(to, Lanes::sub_b(Codes<kind>::template quad<j>(group), zero));
      });
      scales[at + g] = Scales<kind>::of(chunk, g);
      if constexpr (kShape.sub == 16) {
        const Lanes::I pair = scales[at + g].pair;
        halves[at + g][0] = Lanes::to_float(Lanes::template sra<16>(Lanes::template shl<16>(pair)));
        halves[at + g][1] = Lanes::to_float(Lanes::template sra<16>(pair));
      }
    }
  }
  // Unit `unit` at its place among the 64 inputs, zeros at the others'.
  template <int unit>
  ALWAYS const int8_t* tile(int inputs64) const {
    return codes[kUnits * inputs64 + unit][0] - 64 * kQuads * unit;
  }
};

// Exact sums of the units of 64 inputs: [unit][row][output].
template <int kind>
using Products = int32_t[Unpacked<kind>::kUnits][kTileRows][kLanes];

template <int kind>
ALWAYS void multiply(const Unpacked<kind>& w, int inputs64, const int8_t* x, int64_t stride, Products<kind>& out) {
  Tiles::load<4>(x, stride);
  unroll<Unpacked<kind>::kUnits>([&](auto u) {
    constexpr int unit = decltype(u)::value, weights = 6 + unit % 2;
    Tiles::zero<unit>();
    Tiles::load<weights>(w.template tile<unit>(inputs64), 64);
    Tiles::dot_int8<unit, 4, weights>();
    Tiles::store<unit>(out[unit], 64);
  });
}

// sums [16 rows] and what `groups` of a block add to them, rows x from input group `first` on.
template <int kind>
NEVER void int8_tile(const Unpacked<kind>& w, int groups, const Int8Rows& x, int first, float (*sums)[kLanes]) {
  constexpr int per_group = Unpacked<kind>::kUnits / 2;
  alignas(64) Products<kind> products[2];  // one is being multiplied while the other is added
  Lanes::F acc[kTileRows];
  unroll<kTileRows>([&](auto r) { acc[r.value] = Lanes::load(sums[r.value]); });
  const int8_t* codes = x.codes(0) + first * kGroup;
  multiply(w, 0, codes, x.stride, products[0]);
  for (int g = 0; g < groups; g += 2) {
    if (g + 2 < groups) multiply(w, g / 2 + 1, codes + (g + 2) * kGroup, x.stride, products[g / 2 % 2 ^ 1]);
    for (int h = 0; h < 2; ++h) {
      const auto* sum = products[g / 2 % 2] + h * per_group;
      unroll<kTileRows>([&](auto row) {
        constexpr int r = decltype(row)::value;
        Lanes::F s = Lanes::to_float(Lanes::load_i(sum[0][r]));
        if constexpr (per_group == 2) {  // below 2^24, so as exact as integers
          s = Lanes::fma(s, w.halves[g + h][0], Lanes::zero());
          s = Lanes::fma(Lanes::to_float(Lanes::load_i(sum[1][r])), w.halves[g + h][1], s);
        }
        acc[r] = with_group(acc[r], s, w.scales[g + h], x.groups(r)[first + g + h]);
      });
    }
  }
  unroll<kTileRows>([&](auto r) { Lanes::store(sums[r.value], acc[r.value]); });
}

template <int kind>
NEVER void int8_tiles(const LinearTask& t, int panel, const TiledRows& rows, Unpacked<kind>& w) {
  constexpr WeightShape shape = kShapes[kind];
  const int filled = static_cast<int>(up(t.weight.inputs, 64));
  const int groups = static_cast<int>(up(t.weight.inputs, shape.inputs())) / kGroup;
  const uint8_t* chunk = t.weight.data + panel * t.weight.panel_bytes();
  alignas(64) float sums[kMostTiles][kTileRows][kLanes];
  std::memset(sums, 0, rows.tiles() * sizeof sums[0]);
  for (int first = 0; first < groups; first += kBlockGroups) {
    const int here = groups - first < kBlockGroups ? groups - first : kBlockGroups;
    for (int g = 0; g < here; g += shape.groups(), chunk += shape.chunk_bytes()) w.take(chunk, g);
    for (int i = 0; i < rows.tiles(); ++i) {
      const Int8Rows x{t.x + rows.row(i) * t.x_stride, t.x_stride, filled};
      int8_tile(w, here, x, first, sums[i]);
    }
  }
  for (int i = 0; i < rows.tiles(); ++i) {
    for (int r = 0; r < kTileRows; ++r) put(t, panel, rows.row(i) + r, Lanes::load(sums[i][r]));
  }
}

// ---- bfloat16

// Sums of row tiles and panels: [tile][panel][row][output].
using Sums = float[kMostTiles][2][kTileRows][kLanes];

// Sums of A row tiles from `tile` on and B panels, and what `steps` of 32 inputs add to them.
template <int A, int B>
ALWAYS void bf16_tile(const uint8_t* const (&x)[A], int64_t stride, const uint8_t* panel, int64_t panel_bytes, int steps,
                      Sums& sums, int tile) {
  unroll<A * B>([&](auto c) { Tiles::load<decltype(c)::value>(sums[tile + decltype(c)::value / B][decltype(c)::value % B], 64); });
  for (int k = 0; k < steps; ++k) {
    unroll<B>([&](auto b) { Tiles::load<6 + decltype(b)::value>(panel + b.value * panel_bytes + k * 1024, 64); });
    unroll<A>([&](auto a) {
      Tiles::load<4 + decltype(a)::value>(x[a.value] + k * 64, stride);
      unroll<B>([&](auto b) {
        Tiles::dot_bf16<decltype(a)::value * B + decltype(b)::value, 4 + decltype(a)::value, 6 + decltype(b)::value>();
      });
    });
  }
  unroll<A * B>([&](auto c) { Tiles::store<decltype(c)::value>(sums[tile + decltype(c)::value / B][decltype(c)::value % B], 64); });
}

template <int B>
NEVER void bf16_tiles(const LinearTask& t, int panel, const TiledRows& rows) {
  const int steps = static_cast<int>(up(t.weight.inputs, 32)) / 32;
  const int64_t panel_bytes = t.weight.panel_bytes();
  const uint8_t* weights = t.weight.data + panel * panel_bytes;
  alignas(64) Sums sums;
  std::memset(sums, 0, rows.tiles() * sizeof sums[0]);
  for (int first = 0; first < steps; first += kBlockSteps) {
    const int here = steps - first < kBlockSteps ? steps - first : kBlockSteps;
    const auto x = [&](int tile) { return t.x + rows.row(tile) * t.x_stride + bf16_copy_at(t.weight.inputs) + first * 64; };
    int i = 0;
    for (; i + 2 <= rows.tiles(); i += 2) {
      bf16_tile<2, B>({x(i), x(i + 1)}, t.x_stride, weights + first * 1024, panel_bytes, here, sums, i);
    }
    if (i < rows.tiles()) bf16_tile<1, B>({x(i)}, t.x_stride, weights + first * 1024, panel_bytes, here, sums, i);
  }
  for (int i = 0; i < rows.tiles(); ++i) {
    for (int b = 0; b < B; ++b) {
      for (int r = 0; r < kTileRows; ++r) put(t, panel + b, rows.row(i) + r, Lanes::load(sums[i][b][r]));
    }
  }
}

// As to_bf16 of rowwise.h, and the copy as bfloat16 that tiles read.
NEVER void to_bf16_twice(const float* x, int n, uint8_t* out) {
  avx512_kernels().to_bf16(x, n, out);
  const auto* rounded = reinterpret_cast<const float*>(out);
  auto* copy = reinterpret_cast<uint16_t*>(out + bf16_copy_at(n));
  for (int i = 0; i < up(n, 32); i += kLanes) Lanes::store_bfloat(copy + i, Lanes::load(rounded + i));
}

// ---- both

// The outputs of panels [begin, end) for rows [from, to): whole tiles of rows here, the few that are left by AVX-512.
template <int kind>
void tiled_linear(const LinearTask& t, int begin, int end, int from, int to) {
  while (to - from >= kTileRows) {
    need_tiles();
    TiledRows rows{from, to - from < kMostRows ? to - from : kMostRows};
    if (rows.count % kTileRows < kFewRows) rows.count -= rows.count % kTileRows;
    if constexpr (kind < kQuantized) {
      Unpacked<kind> w;
      for (int panel = begin; panel < end; ++panel) int8_tiles(t, panel, rows, w);
    } else {
      int panel = begin;
      for (; panel + 2 <= end; panel += 2) bf16_tiles<2>(t, panel, rows);
      if (panel < end) bf16_tiles<1>(t, panel, rows);
    }
    from += rows.count;
  }
  if (from < to) avx512_kernels().linear[kind](t, begin, end, from, to);
}

// ---- attention

// Codes as a tile takes them, exact in bfloat16: 16 pairs for each of 16 tokens or channels.
using CodeTile = uint8_t[16][64];

ALWAYS void put_pair(uint8_t* line, const Lanes::F& even, const Lanes::F& odd) {
  const Lanes::I both = Lanes::or_i(Lanes::template shr<16>(Lanes::bits(even)), Lanes::bits(odd));
  Lanes::store(reinterpret_cast<float*>(line), Lanes::floats(both));
}

// q . k of all lines and a block, to t.p.
template <KV format>
ALWAYS void tile_products(const Head<format>& head, Tile& t) {
  constexpr int64_t pair_bytes = kBlock * 4;  // of channels, in keys
  Tiles::zero<0>();
  Tiles::zero<1>();
  for (int d = 0; d < head.dim; d += 32) {
    Tiles::load<4>(t.short_q[0] + d, sizeof t.short_q[0]);
    Tiles::load<6>(head.keys + d / 2 * pair_bytes, pair_bytes);
    Tiles::dot_bf16<0, 4, 6>();
    Tiles::load<7>(head.keys + d / 2 * pair_bytes + 64, pair_bytes);
    Tiles::dot_bf16<1, 4, 7>();
  }
  Tiles::store<0>(t.p[0], sizeof t.p[0]);
  Tiles::store<1>(t.p[0] + 16, sizeof t.p[0]);
}

// The same of codes: each group's exact product goes to memory and from there through score's float operations.
template <KV format>
ALWAYS void tile_scaled_products(const Head<format>& head, Tile& t, int lines) {
  alignas(64) CodeTile codes[2];
  alignas(64) float product[2][kTile][kLanes];
  for (int group = 0; group < head.groups; ++group) {
    for (int p = 0; p < 16; ++p) {
      for (int h = 0; h < 2; ++h) {
        Lanes::F even, odd;
        head.key_pair(16 * group + p, h, even, odd);
        put_pair(codes[h][p], even, odd);
      }
    }
    Tiles::zero<0>();
    Tiles::zero<1>();
    Tiles::load<4>(t.short_q[0] + group * kKVGroup, sizeof t.short_q[0]);
    Tiles::load<6>(codes[0], 64);
    Tiles::dot_bf16<0, 4, 6>();
    Tiles::load<7>(codes[1], 64);
    Tiles::dot_bf16<1, 4, 7>();
    Tiles::store<0>(product[0], 64);
    Tiles::store<1>(product[1], 64);
    for (int h = 0; h < 2; ++h) {
      const Lanes::F factor = head.key_scales(group, h);
      for (int i = 0; i < lines; ++i) {
        float* sum = t.p[i] + 16 * h;
        const Lanes::F before = group == 0 ? Lanes::zero() : Lanes::load(sum);
        Lanes::store(sum, Lanes::fma(Lanes::load(product[h][i]), factor, before));
      }
    }
  }
}

// acc += p . v for 32 channels from d on, p being in tile 4 and these channels' values at two addresses.
ALWAYS void tile_mix(Tile& t, int lines, bool all, int d, const uint8_t* low, const uint8_t* high, int64_t stride) {
  alignas(64) float spare[kTile][32];
  // A line that sees nothing keeps its sums: 0 x NaN, or -0 + 0, would change them.
  float* to = all ? t.acc[0] + d : spare[0];
  const int64_t to_stride = all ? sizeof t.acc[0] : sizeof spare[0];
  Tiles::load<0>(t.acc[0] + d, sizeof t.acc[0]);
  Tiles::load<6>(low, stride);
  Tiles::dot_bf16<0, 4, 6>();
  Tiles::store<0>(to, to_stride);
  Tiles::load<1>(t.acc[0] + d + 16, sizeof t.acc[0]);
  Tiles::load<7>(high, stride);
  Tiles::dot_bf16<1, 4, 7>();
  Tiles::store<1>(to + 16, to_stride);
  for (int i = 0; i < lines && !all; ++i) {
    if (t.live[i]) std::memcpy(t.acc[i] + d, spare[i], sizeof spare[i]);
  }
}

template <KV format>
ALWAYS void tile_scaled_mix(const Head<format>& head, Tile& t, int lines, bool all) {
  alignas(64) CodeTile codes[2];
  for (int group = 0, d = 0; group < head.groups; ++group, d += kKVGroup) {
    for (int h = 0; h < 2; ++h) {
      for (int i = 0; i < lines; ++i) Lanes::store_bfloat(t.short_p[i] + 16 * h, weighed(head, t, i, group, h));
      for (int p = 0; p < 16; ++p) {
        Lanes::F even, odd;
        head.value_pair(p, d + 16 * h, even, odd);
        put_pair(codes[h][p], even, odd);
      }
    }
    Tiles::load<4>(t.short_p, sizeof t.short_p[0]);
    tile_mix(t, lines, all, d, codes[0][0], codes[1][0], 64);
  }
}

// All lines against a block. Lines of the tile beyond `lines` hold anything, and stay their own.
template <KV format>
NEVER void tile_block(const Head<format>& head, Tile& t, int lines, int first, const AttendTask& task) {
  if constexpr (Head<format>::kScaled) tile_scaled_products(head, t, lines);
  else tile_products(head, t);
  int live = 0;
  for (int i = 0; i < lines; ++i) {
    for (int h = 0; h < kBlock; h += kLanes) {
      Lanes::store(t.p[i] + h, scaled(Lanes::load(t.p[i] + h), task.scale, task.softcap));
    }
    live += soften<format, 1>(t, i, first, task.window, head.dim);
  }
  if (live == 0) return;
  if constexpr (Head<format>::kScaled) return tile_scaled_mix(head, t, lines, live == lines);
  for (int i = 0; i < lines; ++i) {
    for (int h = 0; h < kBlock; h += kLanes) Lanes::store_bfloat(t.short_p[i] + h, Lanes::load(t.p[i] + h));
  }
  Tiles::load<4>(t.short_p, sizeof t.short_p[0]);
  for (int d = 0; d < head.dim; d += 32) {
    tile_mix(t, lines, live == lines, d, head.values + d * 4, head.values + d * 4 + 64, head.dim * 4);
  }
}

void tiled_attend(const AttendTask& task, const Span& span, int kv_head, int from, int to) {
  need_tiles();
  attend(task, span, kv_head, from, to);
}

void tiled_attend_segment(const AttendTask& task, const Span& span, int kv_head, int from, int to, int segment, float* sums) {
  need_tiles();
  attend_segment(task, span, kv_head, from, to, segment, sums);
}
