// Which instruction sets this processor and its system offer.

#pragma once
#include <string>
#include <utility>
#include <vector>

#include "kernels.h"

namespace headrace {

// The usable members, the default first; "portable" is always the last.
std::vector<const Kernels*> members();

// Every member there is, in that order, with the reason why it cannot be used here; empty: it can.
std::vector<std::pair<std::string, std::string>> survey();

// The member of that name. std::invalid_argument, naming the usable ones, where it is none of them.
const Kernels& member(const std::string& name);

}  // namespace headrace
