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
int end_of(uint64_t ticket) { return static_cast<int>(ticket >> 20 & kField); }
int next_of(uint64_t ticket) { return static_cast<int>(ticket & kField); }

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

Threads::Threads(int count) : ranges_(new Range[static_cast<size_t>(count < 1 ? 1 : count)]) {
  for (int i = 1; i < count; ++i) workers_.emplace_back([this, i] { worker(i); });
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
  region_ = (region_ + 1) & (kField << 4 | 15);
  const int threads = count();
  for (int t = 0; t < threads; ++t) {
    const uint64_t begin = static_cast<uint64_t>(int64_t{pieces} * t / threads);
    const uint64_t end = static_cast<uint64_t>(int64_t{pieces} * (t + 1) / threads);
    ranges_[t].ticket.store(region_ << 40 | end << 20 | begin);
  }
  if (sleeping_.load() > 0) {
    { const std::lock_guard<std::mutex> lock(mutex_); }
    wake_.notify_all();
  }
  work(0);
  for (int looks = 0; done_.load(std::memory_order_acquire) < pieces; ++looks) {
    if (looks < 2048) pause();
    else sched_yield();  // whoever holds the last piece may want this core
  }
}

// Takes pieces, its own first, until there are none.
void Threads::work(int own) {
  const int threads = count();
  int did = 0;
  for (int t = 0; t < threads; ++t) {
    std::atomic<uint64_t>& range = ranges_[own + t < threads ? own + t : own + t - threads].ticket;
    for (;;) {
      const uint64_t ticket = range.fetch_add(1, std::memory_order_acquire);
      if (next_of(ticket) >= end_of(ticket)) break;
      const Call call = call_.load(std::memory_order_relaxed);
      call(context_.load(std::memory_order_relaxed), next_of(ticket));
      ++did;
    }
  }
  if (did > 0) done_.fetch_add(did, std::memory_order_release);
}

void Threads::worker(int own) {
  const Mode mode;
  uint64_t seen = 0;
  while (!stop_.load(std::memory_order_relaxed)) {
    wait_for(own, seen);
    if (stop_.load(std::memory_order_relaxed)) return;
    seen = region_of(ranges_[own].ticket.load(std::memory_order_acquire));
    work(own);
  }
}

// Returns when this thread's range is of another region than `seen`, or at the end.
void Threads::wait_for(int own, uint64_t seen) {
  const std::atomic<uint64_t>& range = ranges_[own].ticket;
  const auto until = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < kPausesPerLook; ++i) {
      if (region_of(range.load(std::memory_order_relaxed)) != seen) return;
      pause();
    }
  } while (std::chrono::steady_clock::now() < until);
  std::unique_lock<std::mutex> lock(mutex_);
  sleeping_.fetch_add(1);
  wake_.wait(lock, [&] { return stop_.load() || region_of(range.load()) != seen; });
  sleeping_.fetch_sub(1);
}

}  // namespace headrace
