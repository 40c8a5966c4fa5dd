// What this machine reaches in the plainest loops, as one JSON object: reading memory, and multiplying and adding.
//
//     c++ -O3 -std=c++17 -march=native -pthread machine.cpp -o machine && ./machine THREADS
//
// The ceilings that the comparison divides by. Memory is read in order from huge pages with prefetch, the best of a few
// prefetch distances; arithmetic works on registers (or tiles) alone. Each figure is the best of several timings.

#include <immintrin.h>
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kLarge = size_t{1} << 30;
constexpr size_t kSmall = size_t{90} << 20;
constexpr int kTimings = 5;

volatile uint64_t sink;  // where results go, so that no loop is left out

template <typename Register>
void keep(const Register& value) {
    alignas(64) uint64_t lanes[sizeof value / 8];
    memcpy(lanes, &value, sizeof value);
    for (uint64_t lane : lanes) sink = lane;
}

double seconds_of(int threads, const std::function<void(int)>& work) {
    cpu_set_t granted;
    CPU_ZERO(&granted);
    sched_getaffinity(0, sizeof granted, &granted);
    std::vector<int> cores;
    for (int core = 0; core < CPU_SETSIZE; core++)
        if (CPU_ISSET(core, &granted)) cores.push_back(core);
    const auto begin = std::chrono::steady_clock::now();
    std::vector<std::thread> team;
    for (int i = 0; i < threads; i++)
        team.emplace_back([&, i] {
            cpu_set_t one;
            CPU_ZERO(&one);
            CPU_SET(cores[i % cores.size()], &one);
            pthread_setaffinity_np(pthread_self(), sizeof one, &one);
            work(i);
        });
    for (auto& member : team) member.join();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

double best_seconds(int threads, const std::function<void(int)>& work) {
    double best = seconds_of(threads, work);
    for (int i = 1; i < kTimings; i++) best = std::min(best, seconds_of(threads, work));
    return best;
}

// Equal sums from equal operands would be computed once: the compiler must not know that they are equal.
template <typename Register, size_t count>
void conceal(Register (&sum)[count]) {
    for (auto& part : sum) __asm__ volatile("" : "+v"(part));
}

// Reading.

void read_slice(const char* at, size_t bytes, size_t ahead) {
#ifdef __AVX512F__
    __m512i sum[8] = {};
    for (size_t i = 0; i < bytes; i += 512) {
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) {
            if (ahead) _mm_prefetch(at + i + 64 * j + ahead, _MM_HINT_T0);
            sum[j] = _mm512_add_epi64(sum[j], _mm512_load_si512(at + i + 64 * j));
        }
    }
    for (const auto& part : sum) keep(part);
#else
    __m256i sum[8] = {};
    for (size_t i = 0; i < bytes; i += 256) {
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) {
            if (ahead && j % 2 == 0) _mm_prefetch(at + i + 32 * j + ahead, _MM_HINT_T0);
            sum[j] = _mm256_add_epi64(sum[j], _mm256_load_si256(reinterpret_cast<const __m256i*>(at + i + 32 * j)));
        }
    }
    for (const auto& part : sum) keep(part);
#endif
}

double read_speed(int threads, size_t bytes) {
    const size_t mapped = bytes + 2 * kHugePage;  // aligned by hand, and room to prefetch past the end
    void* memory = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return 0;
    char* data = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory) + kHugePage - 1) & ~(kHugePage - 1));
    madvise(data, bytes, MADV_HUGEPAGE);
    const size_t slice = bytes / threads & ~size_t{511};
    seconds_of(threads, [&](int i) { memset(data + i * slice, i + 1, slice); });
    const int passes = static_cast<int>(std::max<size_t>(1, (size_t{2} << 30) / bytes));
    double best = 0;
    for (size_t ahead : {size_t{0}, size_t{1024}, size_t{4096}, size_t{16384}}) {
        const double took = best_seconds(threads, [&](int i) {
            for (int pass = 0; pass < passes; pass++) read_slice(data + i * slice, slice, ahead);
        });
        best = std::max(best, static_cast<double>(slice) * threads * passes / took);
    }
    munmap(memory, mapped);
    return best;
}

// Arithmetic. Each `..._loop` runs `rounds` times over its accumulators and says how much one round does.

#if defined(__AVX512VNNI__)
constexpr const char* kInt8 = "AVX-512 VNNI";
constexpr double kInt8Round = 16 * 64;
void int8_loop(long rounds) {
    __m512i sum[16] = {};
    conceal(sum);
    __m512i left = _mm512_set1_epi8(3), right = _mm512_set1_epi8(2);
    for (long n = 0; n < rounds; n++) {
        __asm__ volatile("" : "+v"(left), "+v"(right));
#pragma GCC unroll 16
        for (int j = 0; j < 16; j++) sum[j] = _mm512_dpbusd_epi32(sum[j], left, right);
    }
    for (const auto& part : sum) keep(part);
}
#elif defined(__AVXVNNI__)
constexpr const char* kInt8 = "AVX-VNNI";
constexpr double kInt8Round = 12 * 32;
void int8_loop(long rounds) {
    __m256i sum[12] = {};
    conceal(sum);
    __m256i left = _mm256_set1_epi8(3), right = _mm256_set1_epi8(2);
    for (long n = 0; n < rounds; n++) {
        __asm__ volatile("" : "+v"(left), "+v"(right));
#pragma GCC unroll 12
        for (int j = 0; j < 12; j++) sum[j] = _mm256_dpbusd_avx_epi32(sum[j], left, right);
    }
    for (const auto& part : sum) keep(part);
}
#else
constexpr const char* kInt8 = "AVX2 maddubs";
constexpr double kInt8Round = 8 * 32;
void int8_loop(long rounds) {
    __m256i sum[8] = {};
    conceal(sum);
    __m256i left = _mm256_set1_epi8(3), right = _mm256_set1_epi8(2);
    const __m256i ones = _mm256_set1_epi16(1);
    for (long n = 0; n < rounds; n++) {
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) {
            __asm__ volatile("" : "+v"(left), "+v"(right));  // else one product would serve all sums
            sum[j] = _mm256_add_epi32(sum[j], _mm256_madd_epi16(_mm256_maddubs_epi16(left, right), ones));
        }
    }
    for (const auto& part : sum) keep(part);
}
#endif

#ifdef __AVX512F__
constexpr double kFmaRound = 16 * 16;
void fma_loop(long rounds) {
    __m512 sum[16] = {};
    conceal(sum);
    __m512 left = _mm512_set1_ps(0.5F), right = _mm512_set1_ps(1.5F);
    for (long n = 0; n < rounds; n++) {
        __asm__ volatile("" : "+v"(left), "+v"(right));
#pragma GCC unroll 16
        for (int j = 0; j < 16; j++) sum[j] = _mm512_fmadd_ps(left, right, sum[j]);
    }
    for (const auto& part : sum) keep(part);
}
#else
constexpr double kFmaRound = 12 * 8;
void fma_loop(long rounds) {
    __m256 sum[12] = {};
    conceal(sum);
    __m256 left = _mm256_set1_ps(0.5F), right = _mm256_set1_ps(1.5F);
    for (long n = 0; n < rounds; n++) {
        __asm__ volatile("" : "+v"(left), "+v"(right));
#pragma GCC unroll 12
        for (int j = 0; j < 12; j++) sum[j] = _mm256_fmadd_ps(left, right, sum[j]);
    }
    for (const auto& part : sum) keep(part);
}
#endif

#ifdef __AMX_INT8__
constexpr double kAmxRound = 4 * 16 * 16 * 64;

bool amx_granted() {
    constexpr long kAsk = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
    return syscall(SYS_arch_prctl, kAsk, kTileData) == 0;
}

void amx_loop(long rounds) {
    alignas(64) struct {
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t columns[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } shape;
    __asm__ volatile("" : : "r"(&shape) : "memory");  // GCC 12 takes _tile_loadconfig to read 8 bytes
    _tile_loadconfig(&shape);
    alignas(64) int8_t ones[1024];
    memset(ones, 1, sizeof ones);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_loadd(4, ones, 64);
    _tile_loadd(5, ones, 64);
    _tile_loadd(6, ones, 64);
    _tile_loadd(7, ones, 64);
    for (long n = 0; n < rounds; n++) {
        _tile_dpbusd(0, 4, 6);
        _tile_dpbusd(1, 4, 7);
        _tile_dpbusd(2, 5, 6);
        _tile_dpbusd(3, 5, 7);
    }
    alignas(64) int32_t out[256];
    _tile_stored(0, out, 64);
    sink = static_cast<uint64_t>(out[0]);
    _tile_release();
}
#endif

double rate(int threads, double round, void (*loop)(long)) {
    long rounds = 1 << 16;
    while (seconds_of(1, [&](int) { loop(rounds); }) < 0.05) rounds *= 2;
    return round * static_cast<double>(rounds) * threads / best_seconds(threads, [&](int) { loop(rounds); });
}

}  // namespace

int main(int count, char** arguments) {
    const int threads = count > 1 ? std::max(1, atoi(arguments[1])) : 1;
    const double large = read_speed(threads, kLarge), small = read_speed(threads, kSmall);
    double int8 = rate(threads, kInt8Round, int8_loop);
    std::string loop = kInt8;
#ifdef __AMX_INT8__
    if (amx_granted()) {
        int8 = rate(threads, kAmxRound, amx_loop);
        loop = "AMX";
    }
#endif
    const double fma = rate(threads, kFmaRound, fma_loop);
    printf("{\"threads\": %d, \"read_1gb\": %.4g, \"read_90mb\": %.4g, \"int8\": %.4g, \"int8_loop\": \"%s\", ", threads,
           large, small, int8, loop.c_str());
    printf("\"float32\": %.4g}\n", fma);
}
