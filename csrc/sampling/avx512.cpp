// The passes in AVX-512.

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "sampling.h"

namespace headrace::sampling {
namespace {
#include "../lanes/avx512.h"
#include "wide_avx512.h"
#include "passes.h"
constexpr Passes kPasses = {survey, count, gather, sum, weigh};
}  // namespace

const Passes& avx512() { return kPasses; }

}  // namespace headrace::sampling
