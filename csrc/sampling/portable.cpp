// The passes in plain C++.

#include <cstdint>
#include <cstring>

#include "../pack.h"
#include "sampling.h"

namespace headrace::sampling {
namespace {
#include "../lanes/portable.h"
#include "wide_portable.h"
#include "passes.h"
constexpr Passes kPasses = {survey, count, gather, sum, weigh};
}  // namespace

const Passes& portable() { return kPasses; }

}  // namespace headrace::sampling
