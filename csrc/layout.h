// How weights and activations lie in memory: facts that packing, kernels and bindings share. No instruction set here.
//
// A quantized weight [outputs, inputs] is cut into panels of 16 outputs, a panel into chunks of consecutive inputs, a
// chunk into groups of 32 inputs. A chunk holds its scales, then the codes of its groups; all of it for 16 outputs, one
// output per virtual lane, so that a row of activations meets one panel without any sum across lanes. Outputs beyond
// the last are zero, as are inputs beyond the last where the number of inputs does not fill the last chunk.
//
//   | part of a chunk | size in bytes | what |
//   |---|--:|---|
//   | scales | 64, or 32 where sub > 0 | binary16 [groups or 1][16]: d |
//   | minima | the same, where there are minima | binary16 [groups or 1][16]: m of x = d q + m, or dmin |
//   | fill | 0 or 32 | so that the codes begin on a cache line |
//   | sub-scales | groups x 16 or groups x 32 | bytes, in pairs: [pair][16][2], a pair being two groups or two halves |
//   | sub-minima | groups x 16, where sub = 32 and there are minima | likewise |
//   | codes | groups x code_bytes | see below |
//
// Codes of a group: 8 quads of 4 inputs each for 16 outputs, a quad being 64 bytes, byte 4 * lane + input.
//   8 bits: quad after quad.
//   4 bits: 64 bytes hold quad 2j in the lower and quad 2j + 1 in the upper nibbles, j = 0..3.
//   2 bits: 64 bytes hold quads 4j .. 4j + 3, lowest bits first, j = 0..1.
//   5 = 4 bits, then one plane of 64 bytes whose bit j is the fifth bit of quad j; 3 = 2 bits and such a plane;
//   6 = 4 bits, then the upper two as in "2 bits".
// All numbers of the file are kept bit for bit; 8-bit codes are stored plus 128.

#pragma once
#include <cstddef>
#include <cstdint>

namespace headrace {

// Of everything above, and of the tables below: packed weights are kept between runs, so whoever changes what a stored
// block is packed to counts one up.
constexpr int kLayoutVersion = 1;

constexpr int kLanes = 16;
constexpr int kGroup = 32;  // inputs that share one activation scale

struct WeightShape {
  int bits;       // of a code
  bool table;     // codes index a table of 16 values
  int sub;        // inputs that share a sub-scale (16 or 32) below a binary16 per 256; 0: a binary16 per group
  bool minima;    // x = d q + m rather than d (q - zero)
  int zero_log2;  // zero = 1 << zero_log2 where there are no minima

  constexpr int groups() const { return sub ? 8 : 2; }
  constexpr int inputs() const { return groups() * kGroup; }
  constexpr int code_bytes() const { return 64 * bits; }
  constexpr int scale_bytes() const { return sub ? 32 : 64; }
  constexpr int sub_scales_at() const { return sub ? 64 : (minima ? 128 : 64); }
  constexpr int sub_scale_bytes() const { return sub == 32 ? 16 * groups() : sub == 16 ? 32 * groups() : 0; }
  constexpr int sub_minima_at() const { return sub_scales_at() + sub_scale_bytes(); }
  constexpr int codes_at() const { return sub_minima_at() + (sub == 32 && minima ? 16 * groups() : 0); }
  constexpr int chunk_bytes() const { return (codes_at() + groups() * code_bytes() + 63) / 64 * 64; }
  // Where sub = 16 and there are minima (Q2_K) both are of 4 bits and share a byte, the scale in the lower nibble.
  constexpr bool shared_byte() const { return sub == 16 && minima; }
};

enum class WeightKind : int { q4_0, q4_1, q5_0, q5_1, q8_0, iq4_nl, q2_k, q3_k, q4_k, q5_k, q6_k, iq4_xs, bf16, f16, f32 };
constexpr int kKinds = 15;
constexpr int kQuantized = 12;  // the first kinds; the others are not in chunks

constexpr WeightShape kShapes[kKinds] = {
    {4, false, 0, false, 3},  {4, false, 0, true, 0},  {5, false, 0, false, 4},  {5, false, 0, true, 0},
    {8, false, 0, false, 7},  {4, true, 0, false, 7},  {2, false, 16, true, 0},  {3, false, 16, false, 2},
    {4, false, 32, true, 0},  {5, false, 32, true, 0}, {6, false, 16, false, 5}, {4, true, 32, false, 7},
    {16, false, 0, false, 0}, {16, false, 0, false, 0}, {32, false, 0, false, 0},
};
constexpr const char* kWeightNames[kKinds] = {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "Q2_K", "Q3_K",
                                              "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "BF16", "F16",   "F32"};

// The values of IQ4_NL and IQ4_XS plus 128 (ggml-common.h of GGML gives the table).
constexpr uint8_t kTable[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};

constexpr int ceil_div(int64_t n, int64_t by) { return static_cast<int>((n + by - 1) / by); }
constexpr int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// One weight, packed. bf16: panels of [inputs / 2][16][2], inputs filled up to 32. f16, f32: lines of `inputs` filled up
// to 16. All begin on a cache line.
struct Weight {
  WeightKind kind;
  int outputs;
  int inputs;
  const uint8_t* data;

  bool quantized() const { return static_cast<int>(kind) < kQuantized; }
  const WeightShape& shape() const { return kShapes[static_cast<int>(kind)]; }
  int panels() const { return ceil_div(outputs, kLanes); }
  int outputs_of(int panel) const { return outputs - panel * kLanes < kLanes ? outputs - panel * kLanes : kLanes; }
  int64_t panel_bytes() const {
    if (quantized()) return up(inputs, shape().inputs()) / shape().inputs() * shape().chunk_bytes();
    if (kind == WeightKind::bf16) return up(inputs, 32) * 2 * kLanes;
    return up(inputs, 16) * (kind == WeightKind::f32 ? 4 : 2) * kLanes;
  }
  int64_t bytes() const { return panels() * panel_bytes(); }
};

// A row of activations as int8: `inputs` filled up to 64 codes, then one of these per group.
struct ActivationGroup {
  float scale;      // amax / 127
  float sum;        // scale x -(sum of the codes)
  int32_t codes;    // -(sum of the codes)
  int16_t half[2];  // -(sum of the first 16 codes), -(sum of the last 16)
};

// A row of activations for bfloat16 weights: float32 numbers rounded to bfloat16, filled up to 32; then, where kernels have
// tiles, the same numbers as bfloat16.
constexpr int64_t bf16_copy_at(int inputs) { return up(inputs, 32) * 4; }

// Bytes of a row of activations as a weight of that kind takes them: an odd number of cache lines. So the same place of 16 rows,
// which one tile reads, lies in 16 sets of the first cache; a stride of 4 KiB would have them push each other out.
constexpr int64_t odd_lines(int64_t bytes) { return up(bytes, 64) | 64; }
constexpr int64_t int8_row_bytes(int inputs) { return odd_lines(up(inputs, 64) * 3 / 2); }
constexpr int64_t bf16_row_bytes(int inputs) { return odd_lines(bf16_copy_at(inputs) + up(inputs, 32) * 2); }

}  // namespace headrace
