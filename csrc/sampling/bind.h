#pragma once
#include <nanobind/nanobind.h>

// The class `Sampling` of headrace.native._core: `headrace/native/sampling.py` says what its methods mean.
void bind_sampling(nanobind::module_& m);
