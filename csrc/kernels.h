// What one instruction set offers: a table of kernels on plain memory. Everything above is free of instruction sets.
//
// "Row" is one token's line of numbers. Kernels are pure: they read what a task points to and write its outputs; none
// allocates, throws or keeps state. All must run in the mode of `mode.h`.

#pragma once
#include "layout.h"

namespace headrace {

struct LinearTask {
  Weight weight;
  const float* bias;  // [outputs], or null
  const uint8_t* x;   // rows as the weight takes them: int8_row_bytes, bf16_row_bytes or float32
  int64_t x_stride;   // bytes
  bool one_more;      // behind the last row of x another can be read, of anything
  float* y;
  int64_t y_stride;  // numbers
};

constexpr int kBlock = 32;      // tokens
constexpr int kSegmentBlocks = 16;  // of one segment of attention: 512 positions
constexpr int kMaxDim = 256;
constexpr int kTile = 16;       // rows of a tile of AMX; query lines computed together at most

// Number formats of keys and values. int4: keys of 8 bits, values of 4.
enum class KV : int { f32, bf16, int8, int4 };
constexpr int kKVFormats = 4;
constexpr const char* kKVNames[kKVFormats] = {"f32", "bf16", "int8", "int4"};
constexpr int kKVGroup = 32;  // channels that share a scale
constexpr bool has_scales(KV format) { return format == KV::int8 || format == KV::int4; }

// Keys and values of one layer: [blocks], and in each [kv_heads] heads of keys, then of values, of 32 tokens. A head is
//   f32:  keys [dim][32 tokens], values [32][dim]
//   bf16: keys [dim / 2][32 tokens][2], values [16 pairs of tokens][dim][2]: pairs that a product adds first, as tiles take them
//   8 bits: codes as f32, a byte each, then bfloat16 scales [groups][32 tokens]; `dim` is filled up to whole groups
//   4 bits: codes of values [32][groups][16], channels i and 16 + i of the group in the lower and the upper half of a byte, then
//           scales likewise. So no byte is of two tokens, which two threads may write at once.
// Zeroed memory is zeros in every format.
struct Pool {
  uint8_t* data;
  int kv_heads;
  int dim;  // a multiple of 16, at most kMaxDim
  KV format;

  constexpr int groups() const { return (dim + kKVGroup - 1) / kKVGroup; }
  constexpr int64_t code_bytes(int bits) const { return int64_t{kBlock} * kKVGroup * groups() * bits / 8; }
  constexpr int64_t key_bytes() const { return head_bytes(8); }
  constexpr int64_t value_bytes() const { return head_bytes(format == KV::int4 ? 4 : 8); }
  constexpr int64_t block_bytes() const { return kv_heads * (key_bytes() + value_bytes()); }
  uint8_t* keys(int block, int kv_head) const { return data + block * block_bytes() + kv_head * key_bytes(); }
  uint8_t* values(int block, int kv_head) const {
    return data + block * block_bytes() + kv_heads * key_bytes() + kv_head * value_bytes();
  }

 private:
  constexpr int64_t head_bytes(int bits) const {
    if (!has_scales(format)) return int64_t{kBlock} * dim * (format == KV::f32 ? 4 : 2);
    return code_bytes(bits) + int64_t{kBlock} * groups() * 2;
  }
};

struct AttendTask {
  Pool pool;
  const float* q;  // rows of heads x dim
  int64_t q_stride;
  float* out;
  int64_t out_stride;
  int heads;
  float scale;
  float softcap;  // 0: none
  int window;     // 0: none
};

// What a plan calls a row: tokens of one request, consecutive in the step and in position.
struct Span {
  int first;           // index of the first token in the step
  int position;        // of that token
  const int32_t* table;  // block ids by position / 32
};

// The blocks that query lines [from, to) of a span see, and the segments they lie in.
struct Seen {
  int first_block, last_block;

  Seen(const AttendTask& task, const Span& span, int from, int to) {
    const int group = task.heads / task.pool.kv_heads, position = span.position + from / group;
    first_block = task.window > 0 && position - task.window + 1 > 0 ? (position - task.window + 1) / kBlock : 0;
    last_block = (span.position + (to - 1) / group) / kBlock;
  }
  int first_segment() const { return first_block / kSegmentBlocks; }
  int last_segment() const { return last_block / kSegmentBlocks; }
  int segments() const { return last_segment() - first_segment() + 1; }
  int begin(int segment) const { return segment == first_segment() ? first_block : segment * kSegmentBlocks; }
  int end(int segment) const { return segment == last_segment() ? last_block + 1 : (segment + 1) * kSegmentBlocks; }
};

// Numbers of one line's sums over a segment: accumulated values [dim], the largest score, the sum of probabilities.
constexpr int sums_of_line(int dim) { return dim + kLanes; }

enum class Activation : int { silu, gelu_tanh };

struct Kernels {
  const char* name;
  int panels;  // that a linear map of at least kTile rows multiplies together

  // The outputs of panels [begin, end) for rows [from, to); by kind of weight.
  void (*linear[kKinds])(const LinearTask&, int begin, int end, int from, int to);
  // A row of n float32 as int8 with a scale per 32, or rounded to bfloat16.
  void (*to_int8)(const float* x, int n, uint8_t* out);
  void (*to_bf16)(const float* x, int n, uint8_t* out);
  // x / rms(x) x (weight + offset), stretch by stretch of n.
  void (*rms_norm)(const float* x, int width, const float* weight, int n, float eps, float offset, float* out);
  void (*add)(const float* x, const float* y, int n, float* out);
  void (*scale)(const float* x, float factor, int n, float* out);
  void (*gated)(const float* gate, const float* up, int n, Activation activation, float* out);
  void (*softcap)(const float* x, float cap, int n, float* out);
  // Turn `heads` heads of `dim`: turns is cosines [half], then sines [half].
  void (*rotate)(const float* x, int heads, int dim, const float* turns, int half, float* out);
  void (*store)(const Pool& pool, const float* keys, const float* values, int block, int place);
  // At most kTile query lines [from, to) of a span and one key head; line = token x (heads of the group) + head.
  void (*attend)(const AttendTask& task, const Span& span, int kv_head, int from, int to);
  // The same in two steps: one segment's sums, [lines][sums_of_line]; and all segments' put together, in order.
  void (*attend_segment)(const AttendTask& task, const Span& span, int kv_head, int from, int to, int segment, float* sums);
  void (*attend_merged)(const AttendTask& task, const Span& span, int kv_head, int from, int to, int segments,
                        const float* sums);
  // Leaves the calling thread's registers as another's code expects them, after any number of calls. Or null: always so.
  void (*rest)();
};

const Kernels& portable_kernels();
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();
const Kernels& amx_kernels();

}  // namespace headrace
