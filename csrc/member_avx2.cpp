// Kernels for AVX2 with FMA and F16C.
#include <immintrin.h>
#define LANES "lanes/avx2.h"
#define MEMBER avx2_kernels
#define MEMBER_NAME "avx2"
#include "member.h"
