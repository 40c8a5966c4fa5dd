#include "threads.h"

#include <sched.h>

#include <chrono>

#include "mode.h"

namespace headrace {
namespace {

constexpr uint64_t kField = (1 << 20) - 1;
constexpr auto kSpin = std::chrono::microseconds(100);  // for the next region, before sleeping
constexpr int kPausesPerLook = 32;

uint64_t region_of(uint64_t ticket) { return ticket >> 40; }
int pieces_of(uint64_t ticket) { return static_cast<int>(ticket >> 20 & kField); }
int next_of(uint64_t ticket) { return static_cast<int>(ticket & kField); }

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

Threads::Threads(int count) {
  for (int i = 1; i < count; ++i) workers_.emplace_back([this] { worker(); });
}

Threads::~Threads() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_.store(true);
  }
  wake_.notify_all();
  for (std::thread& thread : workers_) thread.join();
}

void Threads::run(int pieces, Call call, const void* context) {
  if (workers_.empty() || pieces <= 1) {
    for (int piece = 0; piece < pieces; ++piece) call(context, piece);
    return;
  }
  call_.store(call, std::memory_order_relaxed);
  context_.store(context, std::memory_order_relaxed);
  done_.store(0, std::memory_order_relaxed);
  const uint64_t region = (region_of(ticket_.load(std::memory_order_relaxed)) + 1) << 40;
  ticket_.store(region | static_cast<uint64_t>(pieces) << 20);
  if (sleeping_.load() > 0) {
    { const std::lock_guard<std::mutex> lock(mutex_); }
    wake_.notify_all();
  }
  work();
  for (int looks = 0; done_.load(std::memory_order_acquire) < pieces; ++looks) {
    if (looks < 2048) pause();
    else sched_yield();  // whoever holds the last piece may want this core
  }
}

// Takes pieces until there are none; the ticket that said so.
uint64_t Threads::work() {
  for (;;) {
    const uint64_t ticket = ticket_.fetch_add(1, std::memory_order_acquire);
    if (next_of(ticket) >= pieces_of(ticket)) return ticket;
    const Call call = call_.load(std::memory_order_relaxed);
    call(context_.load(std::memory_order_relaxed), next_of(ticket));
    done_.fetch_add(1, std::memory_order_release);
  }
}

void Threads::worker() {
  const Mode mode;
  uint64_t seen = region_of(ticket_.load());
  while (!stop_.load(std::memory_order_relaxed)) {
    wait_for(seen);
    if (stop_.load(std::memory_order_relaxed)) return;
    seen = region_of(work());
  }
}

// Returns when there is a region other than `seen`, or at the end.
void Threads::wait_for(uint64_t seen) {
  const auto until = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < kPausesPerLook; ++i) {
      if (region_of(ticket_.load(std::memory_order_relaxed)) != seen) return;
      pause();
    }
  } while (std::chrono::steady_clock::now() < until);
  std::unique_lock<std::mutex> lock(mutex_);
  sleeping_.fetch_add(1);
  wake_.wait(lock, [&] { return stop_.load() || region_of(ticket_.load()) != seen; });
  sleeping_.fetch_sub(1);
}

}  // namespace headrace
