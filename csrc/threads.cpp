#include "threads.h"

#include <pthread.h>
#include <sched.h>

#include <chrono>
#include <stdexcept>
#include <string>
#include <system_error>

#include "mode.h"

namespace headrace {
namespace {

constexpr uint64_t kField = (1 << 20) - 1;   // of a ticket: end, next piece
constexpr uint64_t kRegion = (1 << 24) - 1;  // of a ticket: number of the region
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

std::atomic<unsigned> forked{0};

// How often this process came out of a fork.
unsigned forks() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { forked.fetch_add(1); });
  (void)registered;
  return forked.load(std::memory_order_relaxed);
}

// The processors that the calling thread may use; none where the system cannot say.
std::vector<int> allowed() {
  std::vector<int> found;
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) != 0) return found;
  for (int i = 0; i < CPU_SETSIZE; ++i) {
    if (CPU_ISSET(i, &set)) found.push_back(i);
  }
#endif
  return found;
}

void keep_to(const std::vector<int>& processors) {
#if defined(__linux__)
  if (processors.empty()) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int i : processors) {
    if (i >= 0 && i < CPU_SETSIZE) CPU_SET(i, &set);
  }
  sched_setaffinity(0, sizeof set, &set);
#else
  (void)processors;
#endif
}

}  // namespace

Kept::Kept(const std::vector<int>& place) {
  if (place.empty()) return;
  before_ = allowed();
  keep_to(place);
}

Kept::~Kept() { keep_to(before_); }

Team::Team(int count, const Places& places) : count_(count), ranges_(new Range[static_cast<size_t>(count)]) {
  workers_.reserve(static_cast<size_t>(count - 1));
  try {
    for (int i = 1; i < count; ++i) {
      workers_.emplace_back([this, i, place = places.empty() ? std::vector<int>() : places[static_cast<size_t>(i)]] {
        worker(i, place);
      });
    }
  } catch (const std::system_error& error) {
    stop();
    throw std::runtime_error("the system has no " + std::to_string(count) + " threads to give: " + error.what());
  }
}

Team::~Team() { stop(); }

void Team::stop() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_.store(true);
  }
  wake_.notify_all();
  for (std::thread& thread : workers_) thread.join();
  workers_.clear();
}

void Team::run(int pieces, Call call, const void* context) noexcept {
  if (count_ == 1 || pieces <= 1) {
    for (int piece = 0; piece < pieces; ++piece) call(context, piece);
    return;
  }
  call_.store(call, std::memory_order_relaxed);
  context_.store(context, std::memory_order_relaxed);
  done_.store(0, std::memory_order_relaxed);
  region_ = (region_ + 1) & kRegion;
  for (int t = 0; t < count_; ++t) {
    const uint64_t begin = static_cast<uint64_t>(int64_t{pieces} * t / count_);
    const uint64_t end = static_cast<uint64_t>(int64_t{pieces} * (t + 1) / count_);
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
void Team::work(int own) {
  int did = 0;
  for (int t = 0; t < count_; ++t) {
    std::atomic<uint64_t>& range = ranges_[own + t < count_ ? own + t : own + t - count_].ticket;
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

void Team::worker(int own, const std::vector<int>& place) {
  keep_to(place);
  const Mode mode(Denormals::flushed);
  uint64_t seen = 0;
  while (!stop_.load(std::memory_order_relaxed)) {
    wait_for(own, seen);
    if (stop_.load(std::memory_order_relaxed)) return;
    seen = region_of(ranges_[own].ticket.load(std::memory_order_acquire));
    work(own);
  }
}

// Returns when this thread's range is of another region than `seen`, or at the end.
void Team::wait_for(int own, uint64_t seen) {
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

Threads::Threads(int count, Places places) : count_(count), places_(std::move(places)), forks_(forks()) {
  if (count < 1 || count > kMost) throw std::invalid_argument("threads must be 1 to " + std::to_string(kMost));
  if (!places_.empty() && places_.size() != static_cast<size_t>(count)) {
    throw std::invalid_argument("places must be one for each of the threads, or none");
  }
  team_ = std::make_unique<Team>(count, places_);
}

Threads::~Threads() {
  if (forks_ != forks()) (void)team_.release();  // its threads are not in this process: nobody could be waited for
}

Team& Threads::here() {
  if (forks_ != forks()) {
    (void)team_.release();
    team_ = std::make_unique<Team>(count_, places_);
    forks_ = forks();
  }
  return *team_;
}

}  // namespace headrace
