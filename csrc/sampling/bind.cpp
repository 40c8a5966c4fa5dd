// Python's way into sampling.h. Shapes and types are checked here and nowhere below; the interpreter is let go of while
// rows are read.

#include "bind.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <cstring>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "../isa.h"
#include "../mode.h"
#include "sampling.h"

namespace nb = nanobind;
using namespace headrace::sampling;
using headrace::Denormals;
using headrace::Mode;

namespace {

using Lines = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Line = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Array = nb::ndarray<nb::numpy, T, nb::ndim<1>>;

template <class T>
Array<T> array_of(const T* data, size_t n) {
  T* copy = new T[n ? n : 1];
  if (n) std::memcpy(copy, data, n * sizeof(T));
  nb::capsule owner(copy, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  return Array<T>(copy, {n}, owner);
}

template <class T>
Array<T> array_of(const std::vector<T>& data) {
  return array_of(data.data(), data.size());
}

Scratch& scratch() {
  thread_local Scratch mine;
  return mine;
}

// The passes of a member that can be used here; isa.h says which those are.
const Passes& passes_of(const std::string& isa) {
  for (const headrace::Kernels* usable : headrace::members()) {
    if (isa != usable->name) continue;
#if defined(__x86_64__)
    if (isa == "avx2") return avx2();
    if (isa == "avx512" || isa == "amx") return avx512();
#endif
    return portable();
  }
  throw nb::value_error(("sampling: this machine has no instruction set " + isa).c_str());
}

void check_width(int64_t n) {
  if (n < 1 || n > kMaxVocab) throw nb::value_error("sampling: a row has 1 to 524,287 logits");
}

void check_token(int64_t token, int64_t n) {
  if (token < 0 || token >= n) throw nb::index_error("sampling: no such token in the row");
}

Knobs knobs_of(nb::handle each) {
  if (each.is_none()) return {0, 0, 1, 0, 0};
  const auto knobs = nb::cast<nb::tuple>(each);
  if (nb::len(knobs) != 5) throw nb::value_error("sampling: knobs are five numbers");
  const Knobs out{nb::cast<double>(knobs[0]), nb::cast<int64_t>(knobs[1]), nb::cast<double>(knobs[2]),
                  nb::cast<double>(knobs[3]), nb::cast<uint64_t>(knobs[4])};
  const auto is_part = [](double x) { return x >= 0 && x <= 1; };
  if (!(static_cast<float>(out.temperature) > 0) || !is_part(out.top_p) || !is_part(out.min_p))
    throw nb::value_error("sampling: knobs out of range");
  return out;
}

// A peak comes as float64 and is made a float32 only where denormals are kept: it may be one.
class Sampling {
 public:
  explicit Sampling(const std::string& isa) : passes_(passes_of(isa)) {}

  nb::tuple peaks(const Lines& lines) const { return picked(lines, std::vector<Knobs>(lines.shape(0))); }

  nb::tuple pick(const Lines& lines, const nb::sequence& knobs) const {
    const Mode mode(Denormals::kept);  // for the checks too
    std::vector<Knobs> rows;
    for (nb::handle each : knobs) rows.push_back(knobs_of(each));
    if (rows.size() != lines.shape(0)) throw nb::value_error("sampling: one tuple of knobs for each line");
    return picked(lines, rows);
  }

  Array<int64_t> weights(const Line& line, double peak, double temperature) const {
    return array_of(weights_of(line, peak, temperature));
  }

  double log_total(const Line& line, double peak, double temperature) const {
    check_width(width(line));
    const nb::gil_scoped_release released;
    const Mode mode(Denormals::kept);
    return headrace::sampling::log_total(passes_, line.data(), width(line), static_cast<float>(peak), temperature);
  }

  int64_t rank(const Line& line, int64_t token) const {
    check_token(token, width(line));
    const nb::gil_scoped_release released;
    const Mode mode(Denormals::kept);
    return headrace::sampling::rank(passes_, line.data(), width(line), token);
  }

  Array<int64_t> top(const Line& line, int64_t k) const {
    Scratch& memory = scratch();
    {
      const nb::gil_scoped_release released;
      const Mode mode(Denormals::kept);
      headrace::sampling::top(passes_, line.data(), width(line), k, memory);
    }
    return array_of(std::vector<int64_t>(memory.order.begin(), memory.order.end()));
  }

  int64_t nucleus(const Line& line, double peak, double temperature, int64_t target) const {
    check_width(width(line));
    const std::vector<int64_t> all = weights_of(line, peak, temperature);
    if (target < 1 || target > std::accumulate(all.begin(), all.end(), int64_t{0}))
      throw nb::value_error("sampling: a nucleus needs a target from 1 to the sum of the weights");
    const Mode mode(Denormals::kept);
    return headrace::sampling::nucleus(passes_, line.data(), width(line), static_cast<float>(peak), temperature, target,
                                        scratch());
  }

  nb::tuple score(const Line& line, double peak, double temperature, int64_t token, int64_t k) const {
    check_width(width(line));
    check_token(token, width(line));
    Scratch& memory = scratch();
    std::vector<double> logprobs;
    Score found;
    {
      const nb::gil_scoped_release released;
      const Mode mode(Denormals::kept);
      found = headrace::sampling::score(passes_, line.data(), width(line), static_cast<float>(peak), temperature, token,
                                        k, memory, logprobs);
    }
    nb::list best;
    for (size_t i = 0; i < logprobs.size(); ++i) best.append(nb::make_tuple(memory.order[i], logprobs[i]));
    return nb::make_tuple(found.logprob, found.rank, nb::tuple(best));
  }

 private:
  static int64_t width(const Line& line) { return static_cast<int64_t>(line.shape(0)); }

  std::vector<int64_t> weights_of(const Line& line, double peak, double temperature) const {
    std::vector<int64_t> out(line.shape(0));
    const nb::gil_scoped_release released;
    const Mode mode(Denormals::kept);
    headrace::sampling::weights(passes_, line.data(), width(line), static_cast<float>(peak), temperature, out.data());
    return out;
  }

  nb::tuple picked(const Lines& lines, const std::vector<Knobs>& knobs) const {
    const auto n = static_cast<int64_t>(lines.shape(1));
    check_width(n);
    std::vector<int64_t> tokens(knobs.size());
    std::vector<float> logits(knobs.size());
    {
      const nb::gil_scoped_release released;
      const Mode mode(Denormals::kept);
      for (size_t i = 0; i < knobs.size(); ++i) {
        const Choice choice = headrace::sampling::pick(passes_, lines.data() + i * n, n, knobs[i], scratch());
        tokens[i] = choice.token;
        logits[i] = choice.peak;
      }
    }
    return nb::make_tuple(array_of(tokens), array_of(logits));
  }

  const Passes& passes_;
};

}  // namespace

void bind_sampling(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<Sampling>(m, "Sampling")
      .def(nb::init<const std::string&>(), "isa"_a)
      .def("peaks", &Sampling::peaks, "lines"_a.noconvert())
      .def("pick", &Sampling::pick, "lines"_a.noconvert(), "knobs"_a)
      .def("weights", &Sampling::weights, "values"_a.noconvert(), "peak"_a, "temperature"_a)
      .def("log_total", &Sampling::log_total, "values"_a.noconvert(), "peak"_a, "temperature"_a)
      .def("rank", &Sampling::rank, "values"_a.noconvert(), "token"_a)
      .def("top", &Sampling::top, "values"_a.noconvert(), "k"_a)
      .def("nucleus", &Sampling::nucleus, "values"_a.noconvert(), "peak"_a, "temperature"_a, "target"_a)
      .def("score", &Sampling::score, "values"_a.noconvert(), "peak"_a, "temperature"_a, "token"_a, "k"_a);
  m.def("share", &headrace::sampling::share, "total"_a, "part"_a);
  m.def("log_weight", &headrace::sampling::log, "total"_a);
}
