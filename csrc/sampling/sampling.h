// Choosing tokens from float32 logits, bit for bit as `headrace/ops/sampling.py` defines it; the words are used as
// there: weight, peak, likelier, nucleus, share. Whole rows are read by the passes of one instruction set; what they
// leave over is handled by plain code that all instruction sets share.
//
// Rows obey that module's contract (finite peak, no NaN, no +inf) except where a function says that it looks.
// Everything is a pure function of its arguments. `Scratch` is only memory: one per thread, kept between calls.

#pragma once
#include <cstdint>
#include <vector>

namespace headrace::sampling {

constexpr int kWeightBits = 44;
constexpr int64_t kUnit = int64_t{1} << kWeightBits;       // weight of the likeliest token
constexpr int64_t kMaxVocab = (int64_t{1} << (63 - kWeightBits)) - 1;
constexpr int kGroup = 512;   // logits that are surveyed, skipped and added up together
constexpr int kColumns = 16;  // column maxima that a survey keeps of each group

// How logits of one row become weights.
struct Scale {
  float peak;
  float temperature;
  float low;    // logits below are known to weigh 0 (or less than `least`)
  float least;  // weights below count as 0
};

// What one instruction set offers: passes over n float32 values, n >= 0.
struct Passes {
  // Largest value of each column of each group, and of each group; the last group may be short: -inf fills it up.
  // True where there is a NaN; then the maxima mean nothing.
  bool (*survey)(const float* x, int64_t n, float* columns, float* tops);
  // How many are at least `bound`.
  int64_t (*count)(const float* x, int64_t n, float bound);
  // Moves those with low <= x < high, in order; their ids are ids[i], or first + i where ids is null. Returns how many.
  // The outputs may be x and ids themselves; outputs and ids have room for 16 more.
  int64_t (*gather)(const float* x, const int32_t* ids, int32_t first, int64_t n, float low, float high, float* values,
                    int32_t* value_ids);
  // Sum of the weights of those that are at least `bound`, which is at least scale.low.
  int64_t (*sum)(const float* x, int64_t n, const Scale& scale, float bound);
  // Each one's weight.
  void (*weigh)(const float* x, int64_t n, const Scale& scale, int64_t* out);
};

const Passes& portable();
const Passes& avx2();    // needs AVX2, FMA, F16C
const Passes& avx512();  // needs AVX-512 F, BW, DQ, VL, VNNI as well

struct Scratch {
  std::vector<float> columns, tops, values, kept;
  std::vector<int32_t> ids, kept_ids, order;
  std::vector<int64_t> sums;
  std::vector<uint64_t> keys;
};

// How a row's token is chosen: the arguments of `choose`.
struct Knobs {
  double temperature;  // > 0; 0: greedy, nothing else is read
  int64_t top_k;
  double top_p, min_p;
  uint64_t number;
};

struct Choice {
  int64_t token;
  float peak;  // the row's; finite if and only if the row obeys the contract
};

struct Score {
  double logprob;
  int64_t rank;
};

void weights(const Passes& passes, const float* x, int64_t n, float peak, double temperature, int64_t* out);
double log(int64_t total);
double log_total(const Passes& passes, const float* x, int64_t n, float peak, double temperature);
int64_t rank(const Passes& passes, const float* x, int64_t n, int64_t token);
// scratch.order: the min(k, n) likeliest ids, likeliest first.
void top(const Passes& passes, const float* x, int64_t n, int64_t k, Scratch& scratch);
int64_t share(int64_t total, double part);
int64_t nucleus(const Passes& passes, const float* x, int64_t n, float peak, double temperature, int64_t target,
                Scratch& scratch);
// The row's peak and, where that is finite, the token that is drawn; where it is not, or the choice greedy, the peak's.
Choice pick(const Passes& passes, const float* x, int64_t n, const Knobs& knobs, Scratch& scratch);
double logprob(float x, float peak, double temperature, double total);
// Log-probability and rank of `token`; scratch.order and logprobs: the k likeliest and theirs.
Score score(const Passes& passes, const float* x, int64_t n, float peak, double temperature, int64_t token, int64_t k,
            Scratch& scratch, std::vector<double>& logprobs);

}  // namespace headrace::sampling
