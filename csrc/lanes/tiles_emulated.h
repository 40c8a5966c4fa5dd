// The tile instructions of tiles.h in plain C++, for tests on processors without them (HEADRACE_EMULATE_TILES). What would
// be an invalid instruction ends the process.

struct Tiles {
  struct State {
    TileShapes shapes;
    bool configured;
    alignas(64) uint8_t tile[8][16][64];
  };
  static inline thread_local State state{};

  static void configure(const TileShapes& shapes) {
    state = State{};
    must(shapes.palette == 1 && shapes.start == 0);
    for (int t = 0; t < 16; ++t) must(shapes.bytes[t] <= (t < 8 ? 64 : 0) && shapes.lines[t] <= (t < 8 ? 16 : 0));
    state.shapes = shapes;
    state.configured = true;
  }
  static void release() { state = State{}; }

  template <int t>
  static void zero() {
    (void)lines(t);
    std::memset(state.tile[t], 0, sizeof state.tile[t]);
  }
  template <int t>
  static void load(const void* p, int64_t stride) {
    zero<t>();
    for (int i = 0; i < lines(t); ++i) std::memcpy(state.tile[t][i], static_cast<const uint8_t*>(p) + i * stride, bytes(t));
  }
  template <int t>
  static void store(void* p, int64_t stride) {
    for (int i = 0; i < lines(t); ++i) std::memcpy(static_cast<uint8_t*>(p) + i * stride, state.tile[t][i], bytes(t));
  }

  template <int c, int a, int b>
  static void dot_int8() {
    each_line<int32_t, c, a, b>([](int32_t* sums, const uint8_t* line, int outputs) {
      for (int q = 0; q < lines(b); ++q) {
        for (int n = 0; n < outputs; ++n) {
          for (int i = 0; i < 4; ++i) {
            sums[n] += static_cast<int8_t>(line[4 * q + i]) * static_cast<int8_t>(state.tile[b][q][4 * n + i]);
          }
        }
      }
    });
  }
  // Even and odd products apart, fused, from zero; denormals are zeros by the thread's mode.
  template <int c, int a, int b>
  static void dot_bf16() {
    each_line<float, c, a, b>([](float* sums, const uint8_t* line, int outputs) {
      float even[16] = {}, odd[16] = {};
      for (int q = 0; q < lines(b); ++q) {
        for (int n = 0; n < outputs; ++n) {
          even[n] = __builtin_fmaf(widened(line + 4 * q), widened(state.tile[b][q] + 4 * n), even[n]);
          odd[n] = __builtin_fmaf(widened(line + 4 * q + 2), widened(state.tile[b][q] + 4 * n + 2), odd[n]);
        }
      }
      for (int n = 0; n < outputs; ++n) sums[n] += even[n] + odd[n];
    });
  }

 private:
  static void must(bool holds) {
    if (!holds) __builtin_trap();
  }
  static int lines(int t) {
    must(state.configured && state.shapes.lines[t] > 0);
    return state.shapes.lines[t];
  }
  static int bytes(int t) { return state.shapes.bytes[t]; }
  static float widened(const uint8_t* p) {
    uint16_t half;
    std::memcpy(&half, p, 2);
    const uint32_t whole = static_cast<uint32_t>(half) << 16;
    float x;
    std::memcpy(&x, &whole, 4);
    return x;
  }
  // f(line of c, line of a, numbers in a line of c) for every line.
  template <class Number, int c, int a, int b, class Function>
  static void each_line(Function&& f) {
    must(c != a && a != b && b != c);
    must(lines(c) == lines(a) && bytes(c) == bytes(b) && bytes(a) == 4 * lines(b));
    for (int i = 0; i < lines(c); ++i) {
      Number sums[16];
      std::memcpy(sums, state.tile[c][i], 64);
      f(sums, state.tile[a][i], bytes(c) / 4);
      std::memcpy(state.tile[c][i], sums, 64);
    }
  }
};
