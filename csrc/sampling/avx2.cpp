// The passes in AVX2.

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "sampling.h"

namespace headrace::sampling {
namespace {
#include "../lanes/avx2.h"
#include "wide_avx2.h"
#include "passes.h"
constexpr Passes kPasses = {survey, count, gather, sum, weigh};
}  // namespace

const Passes& avx2() { return kPasses; }

}  // namespace headrace::sampling
