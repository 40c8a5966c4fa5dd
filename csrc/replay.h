// A program, flattened: regions of instructions on planned slots of memory, replayed for every plan.
//
// A region is what is done between two waits: one row after the other through a chain of instructions, several linear
// maps of the same rows, or attention. How instructions are grouped into regions changes no bit of any result.

#pragma once
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "kernels.h"
#include "threads.h"

namespace headrace {

enum class Extent : int { tokens, wanted };

struct Slot {
  Extent extent;
  int64_t stride;  // bytes of one row, a multiple of 64
};

enum class Kind : int { embed, select, to_int8, to_bf16, rms_norm, angles, rotate, store, gated, add, softcap, linear, attend };

struct Instruction {
  Kind kind;
  int x = -1, y = -1, out = -1;     // slots
  int width = 0;                    // numbers of x; embed, angles: of out
  Weight weight{};                  // embed, linear
  const float* vector = nullptr;    // bias, norm weight, frequencies
  float a = 0.0f, b = 0.0f;         // embed: factor; norm: eps, offset; angles: factor; softcap: cap; attend: scale, cap
  int n = 0;                        // norm: stretch; rotate: head size
  int m = 0;                        // angles, rotate: half of the channels that turn
  Activation activation = Activation::silu;
  Pool pool{};                      // store, attend
  int group = 0;                    // of the KV layout
  int window = 0, heads = 0;
};

struct Region {
  Extent extent;
  std::vector<Instruction> instructions;
};

// Panels of one of a region's linear maps.
struct Share {
  int map, begin, end;
};

struct Batch {
  int tokens, rows, wanted;
  const int32_t* token_ids;
  const int32_t* positions;
  const int32_t* offsets;
  std::vector<const int32_t*> tables;  // per group [rows][entries]
  std::vector<int> entries;            // per group: of one row
  const int32_t* wanted_tokens;
};

// Memory that is not the replayer's, standing in for a slot.
struct External {
  int slot;
  uint8_t* data;
  int64_t stride;
};

class Replayer {
 public:
  Replayer(const Kernels& kernels, std::shared_ptr<Threads> threads, std::vector<Slot> slots)
      : kernels_(kernels), threads_(std::move(threads)), slots_(std::move(slots)), at_(slots_.size()), stride_(slots_.size()) {}
  ~Replayer();
  Replayer(const Replayer&) = delete;
  Replayer& operator=(const Replayer&) = delete;

  void add(Region region);
  void run(const Batch& batch, const std::vector<External>& externals);

 private:
  struct Tile {  // lines of one span that are attended together
    int span, from, to;
    int first_segment;
    int segments;  // that are attended apart; 0: all in one go
    int64_t sums;  // where theirs begin, of one key head
  };
  // How the layers of a KV group are attended to in this run.
  struct Attended {
    std::vector<Span> spans;
    std::vector<Tile> tiles;
    std::vector<std::pair<int, int>> pieces;  // tile, segment
    int64_t sums = 0;                         // numbers of one key head
  };

  struct Prepared : Region {
    std::vector<Share> few, many;  // pieces of linear maps, for few rows and for many
  };

  std::vector<Share> shares(const Region& region, bool many) const;
  void place(const Batch& batch, const std::vector<External>& externals);
  int64_t place_bytes(size_t slot, const Batch& batch) const;
  void rows(const Region& region, const Batch& batch);
  void row(const Instruction& i, const Batch& batch, int row) const;
  void linears(const Prepared& region, const Batch& batch);
  void attend(const Instruction& i, const Batch& batch);
  Attended share_out(const AttendTask& task, int group, const Batch& batch) const;
  uint8_t* raw(int slot, int64_t row) const { return at_[slot] + row * stride_[slot]; }
  float* line(int slot, int64_t row) const { return reinterpret_cast<float*>(raw(slot, row)); }
  int count(Extent extent, const Batch& batch) const { return extent == Extent::tokens ? batch.tokens : batch.wanted; }

  const Kernels& kernels_;
  std::shared_ptr<Threads> threads_;
  std::vector<Slot> slots_;
  std::vector<Prepared> regions_;
  uint8_t* arena_ = nullptr;
  int64_t arena_bytes_ = 0;
  std::vector<uint8_t*> at_;
  std::vector<int64_t> stride_;
  std::vector<int> owner_;  // token -> row of the plan
  std::vector<std::optional<Attended>> attended_;  // by KV group
  std::vector<float> sums_;
};

// Memory for weights and buffers: on huge pages where the system grants them. Zeroed; release with `release`.
uint8_t* reserve(int64_t bytes);
void release(uint8_t* data, int64_t bytes);

}  // namespace headrace
