// Kernels for AVX-512 with VNNI.
#include <immintrin.h>
#define LANES "lanes/avx512.h"
#define MEMBER avx512_kernels
#define MEMBER_NAME "avx512"
#include "member.h"
