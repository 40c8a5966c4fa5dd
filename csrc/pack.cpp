#include "pack.h"

#include <cstring>

namespace headrace {
namespace {

struct Stored {
  int block;  // numbers
  int bytes;
};
constexpr Stored kStored[kKinds] = {{32, 18},   {32, 20},   {32, 22},   {32, 24},   {32, 34}, {32, 18}, {256, 84}, {256, 110},
                                    {256, 144}, {256, 176}, {256, 210}, {256, 136}, {1, 2},   {1, 2},   {1, 4}};

uint16_t read16(const uint8_t* p) {
  uint16_t x;
  std::memcpy(&x, p, 2);
  return x;
}

uint32_t read32(const uint8_t* p) {
  uint32_t x;
  std::memcpy(&x, p, 4);
  return x;
}

uint64_t read64(const uint8_t* p) {
  uint64_t x;
  std::memcpy(&x, p, 8);
  return x;
}

// Eight bytes at once.
constexpr uint64_t each(uint8_t byte) { return 0x0101010101010101u * byte; }

// The codes of a group of 32 numbers, one byte each, in words of two quads: the even quad in the lower half.
struct Codes {
  uint64_t x[4];
};

// Numbers 0-15 in the lower nibbles of 16 bytes, 16-31 in the upper ones.
Codes nibbles(const uint8_t* p) {
  const uint64_t a = read64(p), b = read64(p + 8);
  return {{a & each(15), b & each(15), a >> 4 & each(15), b >> 4 & each(15)}};
}

// Bit i of eight becomes bit 4 of byte i.
uint64_t spread(uint8_t bits) {
  const uint64_t one_each = each(bits) & 0x8040201008040201u;
  return (one_each + each(0x7f)) >> 3 & each(0x10);
}

void fifth_bits(const uint8_t* p, Codes& codes) {
  for (int i = 0; i < 4; ++i) codes.x[i] |= spread(p[i]);
}

// The codes of group g of a stored block; formats/*.py describe the blocks.
template <WeightKind kind>
Codes read_codes(const uint8_t* block, int g) {
  // `mask` of each of 32 bytes from p, after a shift to the right.
  const auto bits = [](const uint8_t* p, int shift, uint8_t mask) {
    Codes c;
    for (int i = 0; i < 4; ++i) c.x[i] = read64(p + 8 * i) >> shift & each(mask);
    return c;
  };
  const auto above = [](Codes low, const Codes& high, int shift) {
    for (int i = 0; i < 4; ++i) low.x[i] |= high.x[i] << shift;
    return low;
  };
  if constexpr (kind == WeightKind::q4_0 || kind == WeightKind::iq4_nl) return nibbles(block + 2);
  if constexpr (kind == WeightKind::q4_1) return nibbles(block + 4);
  if constexpr (kind == WeightKind::q5_0 || kind == WeightKind::q5_1) {
    constexpr int at = kind == WeightKind::q5_0 ? 2 : 4;
    Codes c = nibbles(block + at + 4);
    fifth_bits(block + at, c);
    return c;
  }
  if constexpr (kind == WeightKind::q8_0) {
    Codes c = bits(block + 2, 0, 255);
    for (uint64_t& x : c.x) x ^= each(0x80);
    return c;
  }
  if constexpr (kind == WeightKind::q2_k) return bits(block + 16 + 32 * (g / 4), 2 * (g % 4), 3);
  if constexpr (kind == WeightKind::q3_k) {
    return above(bits(block + 32 + 32 * (g / 4), 2 * (g % 4), 3), bits(block, g, 1), 2);
  }
  if constexpr (kind == WeightKind::q4_k) return bits(block + 16 + 32 * (g / 2), 4 * (g % 2), 15);
  if constexpr (kind == WeightKind::q5_k) {
    return above(bits(block + 48 + 32 * (g / 2), 4 * (g % 2), 15), bits(block + 16, g, 1), 4);
  }
  if constexpr (kind == WeightKind::q6_k) {
    const Codes low = bits(block + 64 * (g / 4) + 32 * (g % 2), g % 4 / 2 * 4, 15);
    return above(low, bits(block + 128 + 32 * (g / 4), 2 * (g % 4), 3), 4);
  }
  if constexpr (kind == WeightKind::iq4_xs) return nibbles(block + 8 + 16 * g);
}

// Sub-scales (and minima) of a stored block of 256 numbers, a byte each; int8 where they have a sign.
struct SubScales {
  uint64_t scale[2];
  uint64_t minimum;
};

// Eight bytes below 64, less 32 each.
uint64_t less_32(uint64_t x) {
  x ^= each(0x20);
  const uint64_t negative = x & each(0x20);
  return x | negative << 1 | negative << 2;
}

template <WeightKind kind>
SubScales read_sub_scales(const uint8_t* block) {
  if constexpr (kind == WeightKind::q4_k || kind == WeightKind::q5_k) {
    const uint64_t first = read64(block + 4), rest = read32(block + 12);  // of groups 0-3: scales, then minima
    const uint64_t low = first & each(63);
    const uint64_t high = ((rest | (rest >> 4 & each(15)) << 32) & each(15)) | (first >> 6 & each(3)) << 4;
    return {{(low & 0xffffffffu) | high << 32, 0}, low >> 32 | (high >> 32) << 32};
  }
  if constexpr (kind == WeightKind::q2_k) return {{read64(block), read64(block + 8)}, 0};
  if constexpr (kind == WeightKind::q6_k) return {{read64(block + 192), read64(block + 200)}, 0};
  if constexpr (kind == WeightKind::q3_k) {
    const uint64_t low = read64(block + 96), high = read32(block + 104);
    const auto pair = [&](int shift) { return (high >> shift & each(3)) | (high >> (shift + 2) & each(3)) << 32; };
    return {{less_32((low & each(15)) | pair(0) << 4), less_32((low >> 4 & each(15)) | pair(4) << 4)}, 0};
  }
  if constexpr (kind == WeightKind::iq4_xs) {
    const uint64_t low = read32(block + 4), high = read16(block + 2);
    uint64_t x = 0;
    for (int g = 0; g < 8; ++g) x |= ((low >> (4 * g) & 15) | (high >> (2 * g) & 3) << 4) << (8 * g);
    return {{less_32(x), 0}, 0};
  }
}

constexpr int d_at(WeightKind kind) {
  return kind == WeightKind::q2_k ? 80 : kind == WeightKind::q3_k ? 108 : kind == WeightKind::q6_k ? 208 : 0;
}
constexpr int m_at(WeightKind kind) { return kind == WeightKind::q2_k ? 82 : 2; }

// One output's codes of a group to their places among those of the 16 outputs.
template <int bits>
void pack_codes(const Codes& codes, int lane, uint8_t* group) {
  const auto put = [&](int line, uint64_t x) {
    const uint32_t word = static_cast<uint32_t>(x);
    std::memcpy(group + 64 * line + 4 * lane, &word, 4);
  };
  const uint64_t* x = codes.x;
  if constexpr (bits == 8) {
    for (int i = 0; i < 4; ++i) {
      put(2 * i, x[i]);
      put(2 * i + 1, x[i] >> 32);
    }
    return;
  }
  if constexpr (bits >= 4) {
    for (int i = 0; i < 4; ++i) {
      const uint64_t low = x[i] & each(15);
      put(i, low | low >> 28);
    }
  }
  if constexpr (bits == 2 || bits == 3 || bits == 6) {
    constexpr int from = bits == 6 ? 4 : 0;
    for (int j = 0; j < 2; ++j) {
      const uint64_t pair = (x[2 * j] >> from & each(3)) | (x[2 * j + 1] >> from & each(3)) << 4;
      put((bits == 6 ? 4 : 0) + j, pair | pair >> 30);
    }
  }
  if constexpr (bits == 3 || bits == 5) {
    uint64_t plane = 0;
    for (int i = 0; i < 4; ++i) plane |= (x[i] >> (bits - 1) & each(1)) << (2 * i);
    put(bits - 1, plane | plane >> 31);
  }
}

// One code out of a group; the inverse of pack_codes.
int code_of(int bits, const uint8_t* group, int lane, int input) {
  const int j = input / 4, byte = 4 * lane + input % 4;
  int code = 0;
  if (bits == 8) return group[64 * j + byte];
  if (bits >= 4) code = group[64 * (j / 2) + byte] >> (j % 2 * 4) & 15;
  if (bits == 2 || bits == 3) code = group[64 * (j / 4) + byte] >> (j % 4 * 2) & 3;
  if (bits == 6) code |= (group[256 + 64 * (j / 4) + byte] >> (j % 4 * 2) & 3) << 4;
  if (bits == 3 || bits == 5) code |= (group[64 * (bits - 1) + byte] >> j & 1) << (bits - 1);
  return code;
}

// Where sub-scale `number` of an output is among the pairs.
int pair_at(int number, int lane) { return 32 * (number / 2) + 2 * lane + number % 2; }

// The scales and codes of one output in a chunk whose first number is in `block`; `groups` of them are there.
template <WeightKind kind>
void pack_lane(const uint8_t* block, int groups, int lane, uint8_t* out) {
  constexpr WeightShape s = kShapes[static_cast<int>(kind)];
  constexpr Stored stored = kStored[static_cast<int>(kind)];
  if constexpr (s.sub == 0) {
    for (int g = 0; g < groups; ++g, block += stored.bytes) {
      std::memcpy(out + 32 * g + 2 * lane, block, 2);
      if (s.minima) std::memcpy(out + 64 + 32 * g + 2 * lane, block + 2, 2);
      pack_codes<s.bits>(read_codes<kind>(block, 0), lane, out + s.codes_at() + g * s.code_bytes());
    }
  } else {
    std::memcpy(out + 2 * lane, block + d_at(kind), 2);
    if (s.minima) std::memcpy(out + 32 + 2 * lane, block + m_at(kind), 2);
    const SubScales sub = read_sub_scales<kind>(block);
    const auto put = [&](int at, uint64_t x) {
      const uint16_t pair = static_cast<uint16_t>(x);
      std::memcpy(out + at, &pair, 2);
    };
    for (int i = 0; i < s.inputs() / s.sub; i += 2) {
      put(s.sub_scales_at() + pair_at(i, lane), sub.scale[i / 8] >> (8 * (i % 8)));
      if (s.minima && s.sub == 32) put(s.sub_minima_at() + pair_at(i, lane), sub.minimum >> (8 * (i % 8)));
    }
    for (int g = 0; g < s.groups(); ++g) {
      pack_codes<s.bits>(read_codes<kind>(block, g), lane, out + s.codes_at() + g * s.code_bytes());
    }
  }
}

template <int kind>
void pack_quantized(const Weight& w, const uint8_t* lines, int panel, uint8_t* out) {
  constexpr WeightShape s = kShapes[kind];
  constexpr Stored stored = kStored[kind];
  const int64_t line_bytes = stored_line_bytes(w.kind, w.inputs);
  const int lanes = w.outputs_of(panel);
  const uint8_t* first = lines + int64_t{panel} * kLanes * line_bytes;
  constexpr int end = s.codes_at() + s.groups() * s.code_bytes();
  for (int input = 0; input < w.inputs; input += s.inputs(), out += s.chunk_bytes()) {
    const int left = (w.inputs - input) / kGroup;
    const int groups = left < s.groups() ? left : s.groups();
    if (lanes < kLanes || groups < s.groups()) {
      std::memset(out, 0, static_cast<size_t>(s.chunk_bytes()));
    } else {  // what is not written below
      std::memset(out, 0, static_cast<size_t>(s.codes_at()));
      if (end < s.chunk_bytes()) std::memset(out + end, 0, static_cast<size_t>(s.chunk_bytes() - end));
    }
    const uint8_t* block = first + input / stored.block * stored.bytes;
    for (int lane = 0; lane < lanes; ++lane) {
      pack_lane<static_cast<WeightKind>(kind)>(block + lane * line_bytes, groups, lane, out);
    }
  }
}

using Pack = void (*)(const Weight&, const uint8_t*, int, uint8_t*);
constexpr Pack kPack[kQuantized] = {
    pack_quantized<0>, pack_quantized<1>, pack_quantized<2>, pack_quantized<3>,
    pack_quantized<4>, pack_quantized<5>, pack_quantized<6>, pack_quantized<7>,
    pack_quantized<8>, pack_quantized<9>, pack_quantized<10>, pack_quantized<11>,
};

void pack_bf16(const Weight& w, const uint8_t* lines, int panel, uint8_t* out) {
  constexpr int kAtOnce = 16;  // pairs, 1 KiB of the panel
  const int lanes = w.outputs_of(panel);
  const uint8_t* first = lines + int64_t{2} * panel * kLanes * w.inputs;
  const int pairs = w.inputs / 2;
  if (lanes < kLanes) std::memset(out, 0, static_cast<size_t>(w.panel_bytes()));
  std::memset(out + 64 * int64_t{pairs}, 0, static_cast<size_t>(w.panel_bytes() - 64 * int64_t{pairs}));
  for (int from = 0; from < pairs; from += kAtOnce) {
    const int to = from + kAtOnce < pairs ? from + kAtOnce : pairs;
    for (int lane = 0; lane < lanes; ++lane) {
      const uint8_t* line = first + int64_t{2} * lane * w.inputs;
      for (int i = from; i < to; ++i) std::memcpy(out + 64 * i + 4 * lane, line + 4 * i, 4);
    }
  }
  if (w.inputs % 2 == 0) return;
  for (int lane = 0; lane < lanes; ++lane) {
    std::memcpy(out + 64 * pairs + 4 * lane, first + int64_t{2} * (lane * int64_t{w.inputs} + w.inputs - 1), 2);
  }
}

void pack_plain(const Weight& w, const uint8_t* lines, int panel, int size, uint8_t* out) {
  std::memset(out, 0, static_cast<size_t>(w.panel_bytes()));
  const int64_t line = up(w.inputs, 16) * size, stored = int64_t{size} * w.inputs;
  for (int lane = 0; lane < w.outputs_of(panel); ++lane) {
    std::memcpy(out + lane * line, lines + (panel * kLanes + lane) * stored, static_cast<size_t>(stored));
  }
}

template <int kind>
float number_of(const uint8_t* chunk, int lane, int input) {
  constexpr WeightShape s = kShapes[kind];
  const int g = input / kGroup;
  const int code = code_of(s.bits, chunk + s.codes_at() + g * s.code_bytes(), lane, input % kGroup);
  const float value = static_cast<float>(s.table ? kTable[code & 15] - 128 : s.minima ? code : code - (1 << s.zero_log2));
  const auto half = [&](int at) { return half_to_float(read16(chunk + at + 2 * lane)); };
  if constexpr (s.sub == 0) {
    const float product = value * half(32 * g);
    return s.minima ? product + half(64 + 32 * g) : product;
  } else {
    const int at = pair_at(input / s.sub, lane);
    uint8_t scale = chunk[s.sub_scales_at() + at];
    uint8_t minimum = 0;
    if (s.shared_byte()) {
      minimum = scale >> 4;
      scale &= 15;
    } else if (s.minima) {
      minimum = chunk[s.sub_minima_at() + at];
    }
    const float sub = s.minima ? static_cast<float>(scale) : static_cast<float>(static_cast<int8_t>(scale));
    const float product = value * (half(0) * sub);
    return s.minima ? product - half(32) * static_cast<float>(minimum) : product;
  }
}

template <int kind>
void unpack_quantized(const uint8_t* panel, int lane, int inputs, float* out) {
  constexpr WeightShape s = kShapes[kind];
  for (int i = 0; i < inputs; ++i) out[i] = number_of<kind>(panel + i / s.inputs() * s.chunk_bytes(), lane, i % s.inputs());
}

using Unpack = void (*)(const uint8_t*, int, int, float*);
constexpr Unpack kUnpack[kQuantized] = {
    unpack_quantized<0>, unpack_quantized<1>, unpack_quantized<2>, unpack_quantized<3>,
    unpack_quantized<4>, unpack_quantized<5>, unpack_quantized<6>, unpack_quantized<7>,
    unpack_quantized<8>, unpack_quantized<9>, unpack_quantized<10>, unpack_quantized<11>,
};

}  // namespace

int64_t stored_line_bytes(WeightKind kind, int inputs) {
  const Stored stored = kStored[static_cast<int>(kind)];
  return int64_t{inputs} / stored.block * stored.bytes;
}

void pack(const Weight& w, const uint8_t* lines, int begin, int end, uint8_t* out) {
  for (int panel = begin; panel < end; ++panel) {
    uint8_t* at = out + panel * w.panel_bytes();
    if (w.kind == WeightKind::bf16) {
      pack_bf16(w, lines, panel, at);
    } else if (!w.quantized()) {
      pack_plain(w, lines, panel, w.kind == WeightKind::f16 ? 2 : 4, at);
    } else {
      kPack[static_cast<int>(w.kind)](w, lines, panel, at);
    }
  }
}

void unpack_line(const Weight& w, int output, float* out) {
  const uint8_t* panel = w.data + output / kLanes * w.panel_bytes();
  const int lane = output % kLanes;
  if (w.kind == WeightKind::bf16) {
    for (int i = 0; i < w.inputs; ++i) {
      const uint32_t bits = static_cast<uint32_t>(read16(panel + 64 * (i / 2) + 4 * lane + 2 * (i % 2))) << 16;
      std::memcpy(out + i, &bits, 4);
    }
  } else if (w.kind == WeightKind::f16) {
    const uint8_t* line = panel + lane * up(w.inputs, 16) * 2;
    for (int i = 0; i < w.inputs; ++i) out[i] = half_to_float(read16(line + 2 * i));
  } else if (w.kind == WeightKind::f32) {
    std::memcpy(out, panel + lane * up(w.inputs, 16) * 4, sizeof(float) * static_cast<size_t>(w.inputs));
  } else {
    kUnpack[static_cast<int>(w.kind)](panel, lane, w.inputs, out);
  }
}

float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  const uint32_t rest = half & 0x7fff;
  uint32_t bits;
  if (rest >= 0x7c00) {
    bits = 0x7f800000 | (rest & 0x3ff) << 13;
  } else if (rest >= 0x400) {
    bits = (rest << 13) + 0x38000000;
  } else {  // fraction x 2^-24, exact
    const float small = static_cast<float>(rest) * 5.9604644775390625e-8f;
    std::memcpy(&bits, &small, 4);
  }
  bits |= sign;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

}  // namespace headrace
