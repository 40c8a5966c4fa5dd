// AVX-512's lanes, and the tiles of AMX (TILE, INT8, BF16). portable.h says what the lanes' names mean.

#define Lanes Avx512
#include "avx512.h"
#undef Lanes

struct Lanes : Avx512 {
  static constexpr bool kTiles = true;

  static inline void store_b(int8_t* p, B x) { _mm512_storeu_si512(p, x); }
  static inline B sub_b(B a, B b) { return _mm512_sub_epi8(a, b); }
  // Numbers that are bfloat16 already, as such.
  static inline void store_bfloat(uint16_t* p, F x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(shr<16>(bits(x))));
  }
};

// Shapes of the eight tiles, as LDTILECFG reads them.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};  // of a line
  uint8_t lines[16] = {};
};

#ifdef HEADRACE_EMULATE_TILES
#include "tiles_emulated.h"
#else
#include "tiles.h"
#endif
