#include "isa.h"

#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace headrace {
namespace {

#if defined(__x86_64__)
struct Feature {
  const char* name;
  unsigned leaf;
  int word;  // 1: ebx, 2: ecx, 3: edx
  int bit;
};
constexpr Feature kAvx2[] = {{"FMA", 1, 2, 12}, {"F16C", 1, 2, 29}, {"AVX2", 7, 1, 5}};
constexpr Feature kAvx512[] = {{"AVX512F", 7, 1, 16},  {"AVX512DQ", 7, 1, 17}, {"AVX512BW", 7, 1, 30},
                               {"AVX512VL", 7, 1, 31}, {"AVX512_VNNI", 7, 2, 11}};
[[maybe_unused]] constexpr Feature kAmx[] = {{"AMX_TILE", 7, 3, 24}, {"AMX_INT8", 7, 3, 25}, {"AMX_BF16", 7, 3, 22}};

bool has(const Feature& f) {
  unsigned word[4] = {};
  return __get_cpuid_count(f.leaf, 0, &word[0], &word[1], &word[2], &word[3]) && (word[f.word] >> f.bit & 1);
}

// The register states that the system saves and restores (XCR0): bits 1 and 2 for AVX2, 5 to 7 more for AVX-512, 17 and 18
// more for tiles.
constexpr uint64_t kAvx2State = 0x6, kAvx512State = 0xe6;
[[maybe_unused]] constexpr uint64_t kTileState = 0x600e6;

uint64_t granted() {
  if (!has({"OSXSAVE", 1, 2, 27})) return 0;
  unsigned low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return static_cast<uint64_t>(high) << 32 | low;
}

// Linux gives tiles to processes that ask for them, as one's registers become larger by 8 KiB. Asked once.
[[maybe_unused]] bool tiles_granted() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM; XFEATURE_XTILEDATA
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
#else
  return false;
#endif
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

std::string lacking_avx512() {
  const std::string less = lacking(kAvx2, kAvx2State);
  return less.empty() ? lacking(kAvx512, kAvx512State) : less;
}

std::string lacking_amx() {
  std::string less = lacking_avx512();
#ifndef HEADRACE_EMULATE_TILES
  if (less.empty()) less = lacking(kAmx, kTileState);
  if (less.empty() && !tiles_granted()) less = "the system does not grant its tiles to this process";
#endif
  return less;
}
#endif

struct Member {
  const Kernels& (*kernels)();
  std::string (*lacking)();  // why it cannot be used here; empty: it can
};

const Member kMembers[] = {
#if defined(__x86_64__)
    {avx512_kernels, lacking_avx512},
    {amx_kernels, lacking_amx},  // behind AVX-512 as long as no hardware has run it: docs/decisions/0008-amx.md
    {avx2_kernels, [] { return lacking(kAvx2, kAvx2State); }},
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
