// The Python module headrace.native._core. Shapes and types are checked here and nowhere below.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>

#include "isa.h"
#include "mode.h"
#include "pack.h"
#include "replay.h"
#include "sampling/bind.h"

namespace nb = nanobind;

namespace headrace {
namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using OwnBytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Table = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Lines = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

[[noreturn]] void refuse(const std::string& what) { throw nb::value_error(what.c_str()); }

void require(bool holds, const char* what) {
  if (!holds) refuse(what);
}

WeightKind kind_of(const std::string& name) {
  for (int k = 0; k < kKinds; ++k) {
    if (name == kWeightNames[k]) return static_cast<WeightKind>(k);
  }
  refuse("no native kernels for the format " + name);
}

KV kv_of(const std::string& name) {
  for (int k = 0; k < kKVFormats; ++k) {
    if (name == kKVNames[k]) return static_cast<KV>(k);
  }
  refuse("no native kernels for keys and values as " + name);
}

// A packed weight and the memory it lies in: its own, or somebody's that Python keeps alive.
class Packed {
 public:
  Packed(const std::string& kind, int outputs, int inputs) : weight_{kind_of(kind), outputs, inputs, nullptr} {
    require(outputs > 0 && inputs > 0, "a weight has outputs and inputs");
    if (weight_.quantized()) require(inputs % kGroup == 0, "quantized weights have whole groups of 32 inputs");
  }
  ~Packed() { release(own_, weight_.bytes()); }
  Packed(const Packed&) = delete;
  Packed& operator=(const Packed&) = delete;

  void fill(Bytes lines, Threads& threads, std::optional<OwnBytes> into) {
    const int64_t line = stored_line_bytes(weight_.kind, weight_.inputs);
    require(static_cast<int64_t>(lines.size()) == line * weight_.outputs, "the bytes are not those of the shape");
    require(weight_.data == nullptr, "this weight is filled already");
    uint8_t* to;
    if (into) {
      judge(into->size(), into->data());
      to = into->data();
    } else {
      to = own_ = reserve(weight_.bytes());
    }
    const uint8_t* from = lines.data();
    by_panels(threads, [&](int begin, int end) { pack(weight_, from, begin, end, to); });
    weight_.data = to;
  }
  void copy(Bytes packed, Threads& threads, OwnBytes into) {
    require(weight_.data == nullptr, "this weight is filled already");
    judge(packed.size(), packed.data());
    judge(into.size(), into.data());
    const int64_t panel = weight_.panel_bytes();
    by_panels(threads, [&](int begin, int end) {
      std::memcpy(into.data() + begin * panel, packed.data() + begin * panel, static_cast<size_t>((end - begin) * panel));
    });
    weight_.data = into.data();
  }
  void view(Bytes packed) {
    require(weight_.data == nullptr, "this weight is filled already");
    judge(packed.size(), packed.data());
    weight_.data = packed.data();
  }
  const Weight& filled() const {
    require(weight_.data != nullptr, "this weight is not filled yet");
    return weight_;
  }
  int64_t bytes() const { return weight_.bytes(); }

 private:
  // Each thread touches the panels first that it will mostly read: Replayer::linears.
  template <class Function>
  void by_panels(Threads& threads, const Function& f) {
    const nb::gil_scoped_release free;
    const Kept kept = threads.keep_caller();
    threads.run((weight_.panels() + 3) / 4, [&](int piece) {
      f(4 * piece, 4 * piece + 4 < weight_.panels() ? 4 * piece + 4 : weight_.panels());
    });
  }
  void judge(size_t size, const uint8_t* data) const {
    require(static_cast<int64_t>(size) == weight_.bytes(), "the bytes are not those of the packed weight");
    require(reinterpret_cast<uintptr_t>(data) % 64 == 0, "a packed weight begins on a cache line");
  }

  Weight weight_;
  uint8_t* own_ = nullptr;
};

struct Reserved {
  uint8_t* data;
  int64_t bytes;
};

struct PoolView {
  std::vector<OwnBytes> slots;
  int blocks, kv_heads, dim;
  KV format;

  Pool slot(int number) const {
    require(number >= 0 && number < static_cast<int>(slots.size()), "no such slot in the pool");
    return {slots[static_cast<size_t>(number)].data(), kv_heads, dim, format};
  }
};

constexpr const char* kKindNames[] = {"embed", "select", "to_int8", "to_bf16", "rms_norm", "angles", "rotate",
                                      "store", "gated",  "add",     "softcap", "linear",   "attend"};

// Bytes of a row that an instruction reads of x and of y, and writes.
std::array<int64_t, 3> needs(const Instruction& i) {
  const int64_t line = int64_t{4} * i.width, turns = int64_t{8} * i.m;
  switch (i.kind) {
    case Kind::embed: return {0, 0, line};
    case Kind::to_int8: return {line, 0, int8_row_bytes(i.width)};
    case Kind::to_bf16: return {line, 0, bf16_row_bytes(i.width)};
    case Kind::angles: return {0, 0, turns};
    case Kind::rotate: return {line, turns, line};
    case Kind::store: return {line, line, 0};
    case Kind::gated:
    case Kind::add: return {line, line, line};
    case Kind::linear: {
      const int64_t x = i.weight.quantized() ? int8_row_bytes(i.width)
                        : i.weight.kind == WeightKind::bf16 ? bf16_row_bytes(i.width) : line;
      return {x, 0, int64_t{4} * i.weight.outputs};
    }
    case Kind::select:
    case Kind::rms_norm:
    case Kind::softcap:
    case Kind::attend: break;
  }
  return {line, 0, line};
}

class Program {
 public:
  Program(const std::string& isa, std::shared_ptr<Threads> threads, const std::vector<std::tuple<bool, int64_t>>& slots,
          std::optional<PoolView> pool, std::vector<int> windows, int vocab)
      : kernels_(member(isa)), pool_(std::move(pool)), windows_(std::move(windows)), vocab_(vocab),
        replayer_(kernels_, std::move(threads), made(slots)), slots_(slots) {
    require(pool_ || windows_.empty(), "groups are of a pool");
  }

  void region(bool wanted) {
    finish();
    open_ = Region{wanted ? Extent::wanted : Extent::tokens, {}};
  }
  // The region at hand is complete.
  void finish() {
    if (open_ && !open_->instructions.empty()) replayer_.add(std::move(*open_));
    open_.reset();
  }
  void add(Instruction i) {
    require(open_.has_value(), "an instruction needs a region");
    const std::array<int64_t, 3> bytes = needs(i);
    const int slots[] = {i.x, i.y, i.out};
    for (int n = 0; n < 3; ++n) {
      if (bytes[n] > slot_bytes(slots[n], bytes[n])) {
        refuse(std::string(kKindNames[static_cast<int>(i.kind)]) + ": slot " + std::to_string(slots[n]) + " has fewer than " +
               std::to_string(bytes[n]) + " bytes");
      }
    }
    judge_extents(i, bytes);
    open_->instructions.push_back(i);
  }

  void run(Ints tokens, Ints positions, Ints offsets, const std::vector<Table>& tables, Ints wanted,
           const std::vector<std::tuple<int, Lines>>& externals) {
    Batch b{static_cast<int>(tokens.size()), static_cast<int>(offsets.size()) - 1, static_cast<int>(wanted.size()),
            tokens.data(), positions.data(), offsets.data(), {}, {}, wanted.data()};
    for (const Table& t : tables) {
      b.tables.push_back(t.data());
      b.entries.push_back(static_cast<int>(t.shape(1)));
    }
    judge(b, static_cast<int>(positions.size()), tables);
    run(b, externals);
  }
  void run_head(int lines, const std::vector<std::tuple<int, Lines>>& externals) {
    run(Batch{0, 0, lines, nullptr, nullptr, nullptr, {}, {}, nullptr}, externals);
  }

  int slot(int number) const {
    require(number >= 0 && number < static_cast<int>(slots_.size()), "no such slot");
    return number;
  }
  Pool pool(int slot) const {
    require(pool_.has_value(), "this program has no pool");
    return pool_->slot(slot);
  }
  int window(int group) const {
    require(group >= 0 && group < static_cast<int>(windows_.size()), "no such group");
    return windows_[static_cast<size_t>(group)];
  }

 private:
  // Of a row; where nothing is needed of it, there need be no slot.
  int64_t slot_bytes(int slot, int64_t needed) const {
    if (needed == 0) return 0;
    return std::get<1>(slots_[static_cast<size_t>(this->slot(slot))]);
  }

  static std::vector<Slot> made(const std::vector<std::tuple<bool, int64_t>>& slots) {
    std::vector<Slot> out;
    for (const auto& [wanted, bytes] : slots) out.push_back({wanted ? Extent::wanted : Extent::tokens, up(bytes, 64)});
    return out;
  }

  void run(const Batch& b, const std::vector<std::tuple<int, Lines>>& externals) {
    finish();
    std::vector<External> outside;
    for (const auto& [slot, lines] : externals) {
      require(slot_bytes(slot, 1) <= static_cast<int64_t>(lines.shape(1)) * 4, "an array's lines are too short");
      require(static_cast<int>(lines.shape(0)) >= (std::get<0>(slots_[static_cast<size_t>(slot)]) ? b.wanted : b.tokens), "an array has too few lines");
      outside.push_back({slot, reinterpret_cast<uint8_t*>(lines.data()), static_cast<int64_t>(lines.shape(1)) * 4});
    }
    const nb::gil_scoped_release free;
    replayer_.run(b, outside);
  }

  // A region's instructions run over its rows: all that they touch must have as many.
  void judge_extents(const Instruction& i, const std::array<int64_t, 3>& bytes) const {
    const std::string name = kKindNames[static_cast<int>(i.kind)];
    const bool of_tokens = i.kind == Kind::embed || i.kind == Kind::angles || i.kind == Kind::store || i.kind == Kind::attend;
    const bool wanted = open_->extent == Extent::wanted;
    if (wanted ? of_tokens : i.kind == Kind::select) refuse(name + ": a region of other rows");
    const int slots[] = {i.x, i.y, i.out};
    for (int n = 0; n < 3; ++n) {
      if (bytes[n] == 0) continue;
      const bool selected = i.kind == Kind::select && n == 0;
      if (std::get<0>(slots_[static_cast<size_t>(slots[n])]) != (wanted && !selected)) {
        refuse(name + ": slot " + std::to_string(slots[n]) + " has other rows than the region");
      }
    }
  }

  // Everything that is used as an index, before it is.
  void judge(const Batch& b, int positions, const std::vector<Table>& tables) const {
    require(b.rows >= 0 && positions == b.tokens, "tokens, positions and offsets do not fit together");
    require(b.rows == 0 ? b.tokens == 0 : b.offsets[0] == 0 && b.offsets[b.rows] == b.tokens, "offsets do not end with the tokens");
    require(tables.size() == windows_.size(), "a batch has one table for each group");
    for (const Table& t : tables) require(static_cast<int>(t.shape(0)) == b.rows, "a table has one line for each row");
    for (int i = 0; i < b.tokens; ++i) {
      if (b.token_ids[i] < 0 || b.token_ids[i] >= vocab_) refuse("token " + std::to_string(b.token_ids[i]) + " is outside the vocabulary of " + std::to_string(vocab_));
    }
    for (int i = 0; i < b.wanted; ++i) require(b.wanted_tokens[i] >= 0 && b.wanted_tokens[i] < b.tokens, "a wanted token is not in the batch");
    for (int r = 0; r < b.rows; ++r) require(b.offsets[r] <= b.offsets[r + 1], "offsets must ascend");
    for (int r = 0; r < b.rows; ++r) {
      if (b.offsets[r] == b.offsets[r + 1]) continue;
      const int first = b.positions[b.offsets[r]], last = b.positions[b.offsets[r + 1] - 1];
      require(first >= 0 && last - first == b.offsets[r + 1] - b.offsets[r] - 1, "a row's positions are consecutive");
      for (int i = b.offsets[r]; i < b.offsets[r + 1]; ++i) require(b.positions[i] - first == i - b.offsets[r], "a row's positions are consecutive");
      for (size_t g = 0; g < tables.size(); ++g) {
        const int window = windows_[g];
        const int from = window > 0 && first - window + 1 > 0 ? (first - window + 1) / kBlock : 0;
        const int32_t* ids = b.tables[g] + int64_t{r} * b.entries[g];
        require(last / kBlock < b.entries[g], "a block table is too short for its row");
        for (int n = from; n <= last / kBlock; ++n) {
          if (ids[n] < 0 || ids[n] >= pool_->blocks) refuse("row " + std::to_string(r) + ": the block table has no block for a position that is read");
        }
      }
    }
  }

  const Kernels& kernels_;
  std::optional<PoolView> pool_;
  std::vector<int> windows_;  // per group; 0: none
  int vocab_;
  Replayer replayer_;
  std::vector<std::tuple<bool, int64_t>> slots_;  // counts wanted tokens?, bytes of a row
  std::optional<Region> open_;
};

// Instructions point into weights and arrays, so a program keeps those alive.
void add_rowwise(nb::class_<Program>& c) {
  c.def("embed", [](Program& p, const Packed& table, int out, float factor) {
    const Weight& w = table.filled();
    Instruction i{Kind::embed};
    i.weight = w, i.out = p.slot(out), i.width = w.inputs, i.a = factor;
    p.add(i);
  }, nb::keep_alive<1, 2>());
  c.def("select", [](Program& p, int x, int out, int width) {
    Instruction i{Kind::select};
    i.x = p.slot(x), i.out = p.slot(out), i.width = width;
    p.add(i);
  });
  c.def("to_int8", [](Program& p, int x, int out, int width) {
    Instruction i{Kind::to_int8};
    i.x = p.slot(x), i.out = p.slot(out), i.width = width;
    p.add(i);
  });
  c.def("to_bf16", [](Program& p, int x, int out, int width) {
    Instruction i{Kind::to_bf16};
    i.x = p.slot(x), i.out = p.slot(out), i.width = width;
    p.add(i);
  });
  c.def("rms_norm", [](Program& p, int x, int out, int width, Floats weight, float eps, float offset) {
    require(weight.size() > 0 && width % static_cast<int>(weight.size()) == 0, "rms_norm: the width is no multiple of the weight's length");
    Instruction i{Kind::rms_norm};
    i.x = p.slot(x), i.out = p.slot(out), i.width = width, i.vector = weight.data(), i.n = static_cast<int>(weight.size());
    i.a = eps, i.b = offset;
    p.add(i);
  }, nb::arg("x"), nb::arg("out"), nb::arg("width"), nb::arg("weight").noconvert(), nb::arg("eps"), nb::arg("offset"), nb::keep_alive<1, 5>());
  c.def("angles", [](Program& p, int out, Floats frequencies, float factor) {
    Instruction i{Kind::angles};
    i.out = p.slot(out), i.vector = frequencies.data(), i.m = static_cast<int>(frequencies.size()), i.width = 2 * i.m;
    i.a = factor;
    p.add(i);
  }, nb::arg("out"), nb::arg("frequencies").noconvert(), nb::arg("factor"), nb::keep_alive<1, 3>());
  c.def("rotate", [](Program& p, int x, int turns, int out, int width, int dim, int half) {
    require(dim > 0 && width % dim == 0 && 2 * half <= dim, "rotate: the sizes do not fit together");
    Instruction i{Kind::rotate};
    i.x = p.slot(x), i.y = p.slot(turns), i.out = p.slot(out), i.width = width, i.n = dim, i.m = half;
    p.add(i);
  });
  c.def("store", [](Program& p, int keys, int values, int slot, int group) {
    Instruction i{Kind::store};
    i.x = p.slot(keys), i.y = p.slot(values), i.pool = p.pool(slot), i.group = group, i.width = i.pool.kv_heads * i.pool.dim;
    p.window(group);
    p.add(i);
  });
  c.def("gated", [](Program& p, int gate, int up, int out, int width, const std::string& activation) {
    require(activation == "silu" || activation == "gelu_tanh", "gated: the activation is silu or gelu_tanh");
    Instruction i{Kind::gated};
    i.x = p.slot(gate), i.y = p.slot(up), i.out = p.slot(out), i.width = width;
    i.activation = activation == "silu" ? Activation::silu : Activation::gelu_tanh;
    p.add(i);
  });
  c.def("add", [](Program& p, int x, int y, int out, int width) {
    Instruction i{Kind::add};
    i.x = p.slot(x), i.y = p.slot(y), i.out = p.slot(out), i.width = width;
    p.add(i);
  });
  c.def("softcap", [](Program& p, int x, int out, int width, float cap) {
    Instruction i{Kind::softcap};
    i.x = p.slot(x), i.out = p.slot(out), i.width = width, i.a = cap;
    p.add(i);
  });
}

void add_others(nb::class_<Program>& c) {
  c.def("linear", [](Program& p, int x, int out, const Packed& weight, std::optional<Floats> bias) {
    Instruction i{Kind::linear};
    i.weight = weight.filled(), i.x = p.slot(x), i.out = p.slot(out), i.width = i.weight.inputs;
    if (bias) {
      require(static_cast<int>(bias->size()) == i.weight.outputs, "linear: the bias has another length than the outputs");
      i.vector = bias->data();
    }
    p.add(i);
  }, nb::arg("x"), nb::arg("out"), nb::arg("weight"), nb::arg("bias").noconvert().none(), nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>());
  c.def("attend", [](Program& p, int x, int out, int heads, float scale, float softcap, int slot, int group) {
    Instruction i{Kind::attend};
    i.pool = p.pool(slot), i.x = p.slot(x), i.out = p.slot(out), i.heads = heads, i.a = scale, i.b = softcap;
    i.group = group, i.window = p.window(group), i.width = heads * i.pool.dim;
    require(heads % i.pool.kv_heads == 0, "attend: the heads are no multiple of the key heads");
    p.add(i);
  });
}

}  // namespace
}  // namespace headrace

NB_MODULE(_core, m) {
  using namespace headrace;
  nb::set_leak_warnings(false);  // a forked child ends with what its parent's threads held
  m.doc() = "Headrace's kernels and the replayer of programs. headrace.native says what is for whom.";
  m.def("isas", [] {
    std::vector<std::string> names;
    for (const Kernels* k : members()) names.emplace_back(k->name);
    return names;
  }, "Instruction sets that can be used here, the default first.");
  m.def("survey", &survey, "(instruction set, why it cannot be used here or \"\"), the default first.");
  m.def("reserve", [](int64_t bytes) {
    require(bytes > 0, "memory of at least a byte");
    uint8_t* data = nullptr;
    try {
      data = reserve(bytes);
    } catch (const std::bad_alloc&) {
      PyErr_Format(PyExc_MemoryError, "the system has no %lld MB of memory to give", static_cast<long long>(bytes / 1000000));
      throw nb::python_error();
    }
    const nb::capsule owner(new Reserved{data, bytes}, [](void* p) noexcept {
      const auto* r = static_cast<Reserved*>(p);
      release(r->data, r->bytes);
      delete r;
    });
    return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(data, {static_cast<size_t>(bytes)}, owner);
  }, "uint8 [bytes], zeroed, on huge pages where the system grants them; resident only where it was touched.");
  m.def("packed_bytes", [](const std::string& kind, int outputs, int inputs) { return Packed(kind, outputs, inputs).bytes(); },
        "Bytes of a weight [outputs, inputs] of that format once packed.");
  m.def("int8_row_bytes", &int8_row_bytes, "Bytes of a row of activations as int8.");
  m.def("bf16_row_bytes", &bf16_row_bytes, "Bytes of a row of activations rounded to bfloat16.");
  m.attr("MOST_DIM") = kMaxDim;
  m.attr("LAYOUT_VERSION") = kLayoutVersion;
  nb::class_<Threads>(m, "Threads", "Compute threads, the caller among them.")
      .def(nb::init<int, Places>(), nb::arg("count"), nb::arg("places") = Places(),
           "`places`: for each thread the processors it is kept to; none: the system's to choose.")
      .def_prop_ro("count", &Threads::count);
  nb::class_<Packed>(m, "Packed", "A weight as the kernels read it.")
      .def(nb::init<const std::string&, int, int>())
      .def("fill", &Packed::fill, nb::arg("lines"), nb::arg("threads"), nb::arg("into").none() = nb::none(),
           nb::keep_alive<1, 4>(), "Pack the stored lines, uint8, into memory of its own or of the caller's.")
      .def("view", &Packed::view, nb::keep_alive<1, 2>(), "Use bytes that are packed already.")
      .def("copy", &Packed::copy, nb::arg("packed"), nb::arg("threads"), nb::arg("into"), nb::keep_alive<1, 4>(),
           "Copy bytes that are packed already into memory that the threads touch as they will read it.")
      .def("line", [](const Packed& p, int output) {
        const Weight& w = p.filled();
        require(output >= 0 && output < w.outputs, "no such output");
        auto* out = new float[static_cast<size_t>(w.inputs)];
        unpack_line(w, output, out);
        const nb::capsule owner(out, [](void* q) noexcept { delete[] static_cast<float*>(q); });
        return nb::ndarray<nb::numpy, float, nb::ndim<1>>(out, {static_cast<size_t>(w.inputs)}, owner);
      }, "One output's numbers, float32 [inputs].")
      .def("data", [](nb::handle_t<Packed> self) {
        const Weight& w = nb::cast<const Packed&>(self).filled();
        return nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>>(w.data, {static_cast<size_t>(w.bytes())}, self);
      }, "uint8 [nbytes], a view.")
      .def_prop_ro("nbytes", &Packed::bytes);
  nb::class_<PoolView>(m, "Pool", "The KV pool's memory.")
      .def("__init__", [](PoolView* self, std::vector<OwnBytes> slots, int blocks, int kv_heads, int dim, const std::string& name) {
        require(dim % kLanes == 0 && dim <= kMaxDim, "heads have a multiple of 16 channels, at most 256");
        require(blocks > 0 && kv_heads > 0 && dim > 0, "a pool has blocks, heads and channels");
        const KV format = kv_of(name);
        const Pool one{nullptr, kv_heads, dim, format};
        const size_t bytes = static_cast<size_t>(blocks) * static_cast<size_t>(one.block_bytes());
        for (const OwnBytes& s : slots) require(s.size() == bytes, "the pool's memory is not of that shape");
        new (self) PoolView{std::move(slots), blocks, kv_heads, dim, format};
      });
  nb::class_<Program> program(m, "Program", "Regions of instructions on slots, replayed for each batch.");
  program
      .def(nb::init<const std::string&, std::shared_ptr<Threads>, const std::vector<std::tuple<bool, int64_t>>&,
                    std::optional<PoolView>, std::vector<int>, int>(),
           nb::arg("isa"), nb::arg("threads"), nb::arg("slots"), nb::arg("pool").none(), nb::arg("windows"), nb::arg("vocab"))
      .def("region", &Program::region, "Begin a region; what it counts: wanted tokens, or all.")
      .def("run", nb::overload_cast<Ints, Ints, Ints, const std::vector<Table>&, Ints, const std::vector<std::tuple<int, Lines>>&>(&Program::run))
      .def("run_head", &Program::run_head);
  add_rowwise(program);
  add_others(program);
  bind_sampling(m);
}
