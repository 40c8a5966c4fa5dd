// The kernels of one instruction set, as a translation unit's own, which defines LANES (the header of its lanes), MEMBER (the
// function that gives its table) and MEMBER_NAME first.
// All of it lies in an anonymous namespace, so the linker can never take one instruction set's code for another's.

#include <cstring>

#include "kernels.h"

namespace headrace {
namespace {

#include LANES
#include "kernels/math.h"
#include "kernels/weights.h"
#include "kernels/linear.h"
#include "kernels/rowwise.h"
#include "kernels/attention.h"

constexpr Kernels kMember = {
    MEMBER_NAME,
    1,
    {linear<0>, linear<1>, linear<2>, linear<3>, linear<4>, linear<5>, linear<6>, linear<7>, linear<8>, linear<9>,
     linear<10>, linear<11>, linear<12>, linear<13>, linear<14>},
    to_int8,
    to_bf16,
    rms_norm,
    add,
    scale,
    gated,
    softcap,
    rotate,
    store,
    attend,
    attend_segment,
    attend_merged,
    nullptr,
};

}  // namespace

const Kernels& MEMBER() { return kMember; }

}  // namespace headrace
