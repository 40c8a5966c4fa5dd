// Kernels without any instruction set: what runs where nothing else does.
#include "pack.h"
#define LANES "lanes/portable.h"
#define MEMBER portable_kernels
#define MEMBER_NAME "portable"
#include "member.h"
