// The passes in plain C++.

#include <cstdint>
#include <cstring>

#include "sampling.h"

namespace headrace::sampling {
namespace {
// lanes/portable.h names it; sampling has no half floats.
[[maybe_unused]] inline float half_to_float(uint16_t) { return 0; }
#include "../lanes/portable.h"
#include "wide_portable.h"
#include "passes.h"
constexpr Passes kPasses = {"portable", survey, count, gather, sum, weigh};
}  // namespace

const Passes& portable() { return kPasses; }

}  // namespace headrace::sampling
