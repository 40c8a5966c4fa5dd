#include "isa.h"

#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace headrace {
namespace {

#if defined(__x86_64__)
struct Feature {
  const char* name;
  unsigned leaf;
  int word;  // 1: ebx, 2: ecx
  int bit;
};
constexpr Feature kAvx2[] = {{"FMA", 1, 2, 12}, {"F16C", 1, 2, 29}, {"AVX2", 7, 1, 5}};
constexpr Feature kAvx512[] = {{"AVX512F", 7, 1, 16},  {"AVX512DQ", 7, 1, 17}, {"AVX512BW", 7, 1, 30},
                               {"AVX512VL", 7, 1, 31}, {"AVX512_VNNI", 7, 2, 11}};

bool has(const Feature& f) {
  unsigned word[4] = {};
  return __get_cpuid_count(f.leaf, 0, &word[0], &word[1], &word[2], &word[3]) && (word[f.word] >> f.bit & 1);
}

// The register states that the system saves and restores (XCR0).
uint64_t granted() {
  if (!has({"OSXSAVE", 1, 2, 27})) return 0;
  unsigned low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return static_cast<uint64_t>(high) << 32 | low;
}

template <size_t n>
std::string lacking(const Feature (&features)[n], uint64_t state) {
  std::string out;
  for (const Feature& f : features) {
    if (!has(f)) out += (out.empty() ? "the processor lacks " : ", ") + std::string(f.name);
  }
  if (out.empty() && (granted() & state) != state) out = "the system does not keep its registers";
  return out;
}
#endif

struct Member {
  const Kernels& (*kernels)();
  std::string (*lacking)();  // why it cannot be used here; empty: it can
};

const Member kMembers[] = {
#if defined(__x86_64__)
    {avx512_kernels, [] {
       const std::string less = lacking(kAvx2, 6);
       return less.empty() ? lacking(kAvx512, 0xe6) : less;
     }},
    {avx2_kernels, [] { return lacking(kAvx2, 6); }},
#endif
    {portable_kernels, [] { return std::string(); }},
};

}  // namespace

std::vector<const Kernels*> members() {
  std::vector<const Kernels*> found;
  for (const Member& m : kMembers) {
    if (m.lacking().empty()) found.push_back(&m.kernels());
  }
  return found;
}

std::vector<std::pair<std::string, std::string>> survey() {
  std::vector<std::pair<std::string, std::string>> found;
  for (const Member& m : kMembers) found.emplace_back(m.kernels().name, m.lacking());
  return found;
}

const Kernels& member(const std::string& name) {
  std::string known;
  for (const Kernels* k : members()) {
    if (name == k->name) return *k;
    known += known.empty() ? k->name : std::string(", ") + k->name;
  }
  throw std::invalid_argument("isa must be one of " + known + " on this machine, not '" + name + "'");
}

}  // namespace headrace
