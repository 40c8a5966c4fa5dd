// From a file's bytes to the packed layout and back. The same on every instruction set.

#pragma once
#include "layout.h"

namespace headrace {

// Bytes of one line of a tensor as files store it.
int64_t stored_line_bytes(WeightKind kind, int inputs);

// Packs the panels [begin, end) of a weight out of `lines`, the stored lines of the whole tensor one after the other,
// into `out`, where the whole packed weight begins. Every byte of those panels is written.
void pack(const Weight& shape, const uint8_t* lines, int begin, int end, uint8_t* out);

// The numbers of one output, float32 [inputs]: bit for bit what the format's definition gives.
void unpack_line(const Weight& weight, int output, float* out);

float half_to_float(uint16_t half);

}  // namespace headrace
