// Kernels for AMX: those of AVX-512, but linear maps of many rows and attention by tiles.
#include <immintrin.h>

#include <cstring>
#include <utility>

#include "kernels.h"

namespace headrace {
namespace {

#include "lanes/amx.h"
#include "kernels/math.h"
#include "kernels/weights.h"
#include "kernels/linear.h"
#include "kernels/attention.h"
#include "kernels/tiles.h"

template <int... kind>
void by_tiles(Kernels& k, std::integer_sequence<int, kind...>) {
  ((k.linear[kind] = tiled_linear<kind>), ...);
}

Kernels with_tiles() {
  Kernels k = avx512_kernels();
  k.name = "amx";
  k.panels = 2;
  by_tiles(k, std::make_integer_sequence<int, kQuantized + 1>());  // and bfloat16
  k.to_bf16 = to_bf16_twice;
  k.store = store;
  k.attend = tiled_attend;
  k.attend_segment = tiled_attend_segment;
  k.attend_merged = attend_merged;
  k.rest = rest_tiles;
  return k;
}

}  // namespace

const Kernels& amx_kernels() {
  static const Kernels kernels = with_tiles();
  return kernels;
}

}  // namespace headrace
