#include "sampling.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>

namespace headrace::sampling {
namespace {

using Wide = unsigned __int128;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kSlack = 16;   // room behind an array that `gather` writes
constexpr int64_t kFew = 128;    // tokens that are sorted rather than searched
constexpr int64_t kSteps[] = {64, 1024};  // how many tokens a nucleus is first thought to have
constexpr double kZero = -31;    // (x - peak) / temperature from which down the weight is surely 0
constexpr double kMargin = 0.01; // far above the error of a weight's logarithm

// Values and what is known of them: a whole row with its survey, or tokens picked out of one, in the order of ids.
struct Line {
  const float* x;
  int64_t n;
  const int32_t* ids;  // null: i
  const float* tops;   // null: not surveyed
  const float* columns;

  int64_t columns_count() const { return (n + kGroup - 1) / kGroup * kColumns; }
  bool is_below(int64_t group, float bound) const { return tops && tops[group] < bound; }
  int64_t id(int64_t i) const { return ids ? ids[i] : i; }
};

// A kept set: tokens of at least `value`, of those equal to it the ones up to index `last` of the line.
struct Edge {
  float value;
  int64_t last;
};

float next_up(float x) { return std::nextafterf(x, kInfinity); }

// An integer that orders as the value does; both zeros are one.
uint32_t order_of(float x) {
  x += 0.0f;
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

float value_of(uint32_t order) {
  const uint32_t bits = order & 0x80000000u ? order & 0x7fffffffu : ~order;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// Ascending keys are likelier first.
uint64_t key(float x, int64_t at) { return static_cast<uint64_t>(~order_of(x)) << 32 | static_cast<uint32_t>(at); }

Scale scale_of(float peak, double temperature, int64_t least) {
  const float t = static_cast<float>(std::min(temperature, static_cast<double>(FLT_MAX)));
  double z = kZero;
  float bound = 0;
  if (least > 0) {
    z = std::max(z, log(least) - kMargin);
    bound = static_cast<float>(least);  // then the least float that is at least `least`: the same for whole parts
    if (static_cast<int64_t>(bound) < least) bound = next_up(bound);
  }
  return {peak, t, static_cast<float>(peak + z * t), bound};
}

Line surveyed(const Passes& passes, const float* x, int64_t n, Scratch& scratch, bool* nan) {
  const int64_t groups = (n + kGroup - 1) / kGroup;
  scratch.columns.resize(groups * kColumns);
  scratch.tops.resize(groups);
  *nan = passes.survey(x, n, scratch.columns.data(), scratch.tops.data());
  return {x, n, nullptr, scratch.tops.data(), scratch.columns.data()};
}

Line surveyed(const Passes& passes, const float* x, int64_t n, Scratch& scratch) {
  bool nan;
  return surveyed(passes, x, n, scratch, &nan);
}

// The likeliest token, or the first NaN.
Choice peak_of(const Line& line, bool nan) {
  if (nan) {
    const int64_t at = std::find_if(line.x, line.x + line.n, [](float x) { return x != x; }) - line.x;
    return {at, line.x[at]};
  }
  const int64_t groups = (line.n + kGroup - 1) / kGroup;
  const int64_t group = std::max_element(line.tops, line.tops + groups) - line.tops;
  const float* first = line.x + group * kGroup;
  const int64_t at = std::find(first, line.x + line.n, line.tops[group]) - line.x;
  return {at, line.x[at]};
}

// A value that at least k of the values reach, and few more unless many are equal: 0 < k <= n.
float lower_bound(const Passes& passes, const float* x, int64_t n, int64_t k) {
  uint32_t low = order_of(-kInfinity), high = order_of(kInfinity);  // low is reached by k or more, high by fewer
  int64_t reached = n;
  while (high - low > 1 && reached > k + k / 4) {
    const uint32_t middle = low + (high - low) / 2;
    const int64_t found = passes.count(x, n, value_of(middle));
    if (found >= k) {
      low = middle;
      reached = found;
    } else {
      high = middle;
    }
  }
  return value_of(low);
}

// The same for a line, from its columns where they will do: where k columns reach a value, k tokens do.
float lower_bound(const Passes& passes, const Line& line, int64_t k) {
  if (line.columns && 4 * k <= line.columns_count()) return lower_bound(passes, line.columns, line.columns_count(), k);
  return lower_bound(passes, line.x, line.n, k);
}

// Moves the line's tokens with low <= x < high to scratch.values and .ids. Returns how many.
int64_t gather(const Passes& passes, const Line& line, float low, float high, Scratch& scratch) {
  if (scratch.values.size() < static_cast<size_t>(line.n + kSlack)) {
    scratch.values.resize(line.n + kSlack);
    scratch.ids.resize(line.n + kSlack);
  }
  float* values = scratch.values.data();
  int32_t* ids = scratch.ids.data();
  if (!line.tops) return passes.gather(line.x, line.ids, 0, line.n, low, high, values, ids);
  int64_t found = 0;
  for (int64_t first = 0, group = 0; first < line.n; first += kGroup, ++group) {
    if (line.is_below(group, low)) continue;
    found += passes.gather(line.x + first, nullptr, static_cast<int32_t>(first),
                           std::min<int64_t>(kGroup, line.n - first), low, high, values + found, ids + found);
  }
  return found;
}

// scratch.keys: the k likeliest of the line (k < n; fewer where there is NaN), in no order; `at` counts in
// scratch.values and .ids, where the candidates stay. Returns how many candidates there are.
int64_t select(const Passes& passes, const Line& line, int64_t k, Scratch& scratch) {
  const int64_t found = gather(passes, line, lower_bound(passes, line, k), kInfinity, scratch);
  scratch.keys.resize(found);
  for (int64_t i = 0; i < found; ++i) scratch.keys[i] = key(scratch.values[i], i);
  if (k < found) std::nth_element(scratch.keys.begin(), scratch.keys.begin() + (k - 1), scratch.keys.end());
  scratch.keys.resize(std::min(k, found));
  return found;
}

// The k likeliest tokens of a row (0 < k < n) as a line of their own, in scratch.values and .ids.
Line likeliest(const Passes& passes, const Line& row, int64_t k, Scratch& scratch) {
  const int64_t found = select(passes, row, k, scratch);
  const uint64_t last = *std::max_element(scratch.keys.begin(), scratch.keys.end());
  int64_t kept = 0;
  for (int64_t i = 0; i < found; ++i) {
    if (key(scratch.values[i], i) > last) continue;
    scratch.values[kept] = scratch.values[i];
    scratch.ids[kept++] = scratch.ids[i];
  }
  return {scratch.values.data(), k, scratch.ids.data(), nullptr, nullptr};
}

void top_of(const Passes& passes, const Line& row, int64_t k, Scratch& scratch) {
  scratch.order.clear();
  if (k <= 0) return;
  if (k < row.n) {
    select(passes, row, k, scratch);
  } else {
    scratch.keys.resize(row.n);
    for (int64_t i = 0; i < row.n; ++i) scratch.keys[i] = key(row.x[i], i);
  }
  std::sort(scratch.keys.begin(), scratch.keys.end());
  for (const uint64_t each : scratch.keys) {
    const auto at = static_cast<uint32_t>(each);
    scratch.order.push_back(k < row.n ? scratch.ids[at] : static_cast<int32_t>(at));
  }
}

int64_t sum_of(const Passes& passes, const Line& line, const Scale& scale) {
  if (!line.tops) return passes.sum(line.x, line.n, scale, scale.low);
  int64_t total = 0;
  for (int64_t first = 0, group = 0; first < line.n; first += kGroup, ++group) {
    if (line.is_below(group, scale.low)) continue;
    total += passes.sum(line.x + first, std::min<int64_t>(kGroup, line.n - first), scale, scale.low);
  }
  return total;
}

// The same as `nucleus`, among the first n of scratch.values and .ids (which change), all within low <= x < high: the
// last one's value and id.
Edge narrowed(const Passes& passes, int64_t n, float low, float high, const Scale& scale, int64_t target,
              Scratch& scratch) {
  float* values = scratch.values.data();
  int32_t* ids = scratch.ids.data();
  int64_t weight[kFew];
  while (n > kFew) {
    float pivot = static_cast<float>((low + std::min<double>(high, 0x1p128)) / 2);  // halfway; high may be infinity
    if (!(low < pivot && pivot < high)) pivot = next_up(low);
    if (pivot >= high) {  // all are equal to low
      passes.weigh(values, 1, scale, weight);
      return {low, ids[(target - 1) / weight[0]]};
    }
    const int64_t reached = passes.sum(values, n, scale, pivot);
    if (reached < target) {
      target -= reached;
      high = pivot;
    } else {
      low = pivot;
    }
    n = passes.gather(values, ids, 0, n, low, high, values, ids);
  }
  uint64_t keys[kFew];
  for (int64_t i = 0; i < n; ++i) keys[i] = key(values[i], i);
  std::sort(keys, keys + n);
  passes.weigh(values, n, scale, weight);
  for (int64_t i = 0;; ++i) {
    const auto at = static_cast<uint32_t>(keys[i]);
    if (target <= weight[at] || i + 1 == n) return {values[at], ids[at]};
    target -= weight[at];
  }
}

// As `nucleus`; `last` is an id. Where a nucleus mostly ends, among the likeliest, is tried first.
Edge nucleus_of(const Passes& passes, const Line& line, const Scale& scale, int64_t target, Scratch& scratch) {
  const float lowest = std::max(scale.low, -FLT_MAX);  // -inf weighs 0
  float high = next_up(scale.peak);
  if (line.columns) {
    for (const int64_t likely : kSteps) {
      if (4 * likely > line.columns_count()) break;
      const float low = std::max(lowest, lower_bound(passes, line, likely));
      if (low >= high) continue;
      const int64_t found = gather(passes, line, low, high, scratch);
      const int64_t reached = passes.sum(scratch.values.data(), found, scale, low);
      if (reached >= target) return narrowed(passes, found, low, high, scale, target, scratch);
      target -= reached;
      high = low;
    }
  }
  return narrowed(passes, gather(passes, line, lowest, high, scratch), lowest, high, scale, target, scratch);
}

// `draw` over the kept set of a line: the token's index.
int64_t draw(const Passes& passes, const Line& line, const Scale& scale, const Edge& edge, uint64_t number,
             Scratch& scratch) {
  const float until = std::max(edge.value, scale.low), after = std::max(next_up(edge.value), scale.low);
  const int64_t groups = (line.n + kGroup - 1) / kGroup;
  scratch.sums.resize(groups);
  int64_t total = 0;
  for (int64_t group = 0, first = 0; group < groups; ++group, first += kGroup) {
    int64_t found = 0;
    if (!line.is_below(group, until)) {
      const int64_t end = std::min(first + kGroup, line.n), middle = std::clamp(edge.last + 1, first, end);
      if (middle > first) found += passes.sum(line.x + first, middle - first, scale, until);
      if (middle < end) found += passes.sum(line.x + middle, end - middle, scale, after);
    }
    scratch.sums[group] = found;
    total += found;
  }
  auto left = static_cast<int64_t>(static_cast<Wide>(number) * static_cast<Wide>(total) >> 64);
  int64_t group = 0;
  for (; left >= scratch.sums[group]; ++group) left -= scratch.sums[group];
  int64_t weight[kGroup];
  const int64_t first = group * kGroup;
  passes.weigh(line.x + first, std::min<int64_t>(kGroup, line.n - first), scale, weight);
  for (int64_t i = first;; ++i) {
    if (line.x[i] < (i <= edge.last ? until : after)) continue;
    if (left < weight[i - first]) return i;
    left -= weight[i - first];
  }
}

int64_t choose(const Passes& passes, const Line& row, float peak, const Knobs& knobs, Scratch& scratch) {
  Line line = row;
  if (knobs.top_k > 0 && knobs.top_k < row.n) line = likeliest(passes, row, knobs.top_k, scratch);
  const int64_t least = knobs.min_p > 0 ? share(kUnit, knobs.min_p) : 0;
  const Scale scale = scale_of(peak, knobs.temperature, least);
  Edge edge{scale.low, line.n - 1};
  if (knobs.top_p < 1) {
    if (line.ids) {  // the search needs the place where they stand
      scratch.kept.assign(line.x, line.x + line.n);
      scratch.kept_ids.assign(line.ids, line.ids + line.n + kSlack);
      line.x = scratch.kept.data();
      line.ids = scratch.kept_ids.data();
    }
    const Scale whole = scale_of(peak, knobs.temperature, 0);
    const int64_t target = std::max<int64_t>(1, share(sum_of(passes, line, whole), knobs.top_p));
    edge = nucleus_of(passes, line, whole, target, scratch);
    if (line.ids) edge.last = std::lower_bound(line.ids, line.ids + line.n, edge.last) - line.ids;
  }
  return line.id(draw(passes, line, scale, edge, knobs.number, scratch));
}

}  // namespace

// ---- weights

void weights(const Passes& passes, const float* x, int64_t n, float peak, double temperature, int64_t* out) {
  passes.weigh(x, n, scale_of(peak, temperature, 0), out);
}

double log(int64_t total) {
  int k;
  double m = std::frexp(static_cast<double>(total), &k);
  if (m < 0.7071067811865476) {
    m *= 2;
    k -= 1;
  }
  const double s = (m - 1) / (m + 1), square = s * s;
  double series = 0;
  for (int j = 10; j >= 0; --j) series = series * square + 1.0 / (2 * j + 1);
  return (k - kWeightBits) * 0.6931471805599453 + 2 * s * series;
}

double log_total(const Passes& passes, const float* x, int64_t n, float peak, double temperature) {
  const Scale scale = scale_of(peak, temperature, 0);
  return log(passes.sum(x, n, scale, scale.low));
}

double logprob(float x, float peak, double temperature, double total) {
  const double t = std::min(temperature, static_cast<double>(FLT_MAX));
  return (static_cast<double>(x) - static_cast<double>(peak)) / t - total;
}

// ---- order

int64_t rank(const Passes& passes, const float* x, int64_t n, int64_t token) {
  return 1 + passes.count(x, token, x[token]) + passes.count(x + token, n - token, next_up(x[token]));
}

void top(const Passes& passes, const float* x, int64_t n, int64_t k, Scratch& scratch) {
  top_of(passes, surveyed(passes, x, n, scratch), k, scratch);
}

// ---- kept sets

// part = m / 2^s with whole m < 2^53; m * total < 2^116.
int64_t share(int64_t total, double part) {
  if (total <= 0 || part <= 0) return 0;
  int e;
  const auto m = static_cast<uint64_t>(std::ldexp(std::frexp(part, &e), 53));
  const int s = 53 - e;
  const Wide product = static_cast<Wide>(m) * static_cast<Wide>(total);
  if (s >= 117) return 1;
  return static_cast<int64_t>((product + ((Wide{1} << s) - 1)) >> s);
}

int64_t nucleus(const Passes& passes, const float* x, int64_t n, float peak, double temperature, int64_t target,
                Scratch& scratch) {
  return nucleus_of(passes, surveyed(passes, x, n, scratch), scale_of(peak, temperature, 0), target, scratch).last;
}

Choice pick(const Passes& passes, const float* x, int64_t n, const Knobs& knobs, Scratch& scratch) {
  bool nan;
  const Line row = surveyed(passes, x, n, scratch, &nan);
  const Choice best = peak_of(row, nan);
  if (knobs.temperature == 0 || !std::isfinite(best.peak)) return best;
  return {choose(passes, row, best.peak, knobs, scratch), best.peak};
}

// ---- log-probabilities

Score score(const Passes& passes, const float* x, int64_t n, float peak, double temperature, int64_t token, int64_t k,
            Scratch& scratch, std::vector<double>& logprobs) {
  const Line row = surveyed(passes, x, n, scratch);
  top_of(passes, row, k, scratch);
  const double total = log(sum_of(passes, row, scale_of(peak, temperature, 0)));
  logprobs.clear();
  for (const int32_t id : scratch.order) logprobs.push_back(logprob(x[id], peak, temperature, total));
  const auto found = std::find(scratch.order.begin(), scratch.order.end(), token);
  const bool among = found != scratch.order.end();
  return {logprob(x[token], peak, temperature, total),
          among ? found - scratch.order.begin() + 1 : rank(passes, x, n, token)};
}

}  // namespace headrace::sampling
