// A few threads that work through small pieces together. The caller is one of them.
//
// Each thread has a range of the pieces and takes them one after the other; who has done its own helps the others. So
// from step to step a thread mostly meets the same weights, in order, and a thread that loses its core to a neighbour
// keeps only the piece it holds. Threads spin briefly for the next region and then sleep. Which thread does which
// piece is nobody's business: pieces must not care.

#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace headrace {

// For each thread the processors it may use; empty: the system's to choose.
using Places = std::vector<std::vector<int>>;

// Keeps the calling thread to some processors, and gives it back those it had when it ends.
class Kept {
 public:
  explicit Kept(const std::vector<int>& place);
  ~Kept();
  Kept(const Kept&) = delete;
  Kept& operator=(const Kept&) = delete;

 private:
  std::vector<int> before_;
};

// The threads of one process.
class Team {
 public:
  // std::runtime_error where the system refuses a thread.
  Team(int count, const Places& places);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  using Call = void (*)(const void*, int);
  // Of one region: a ticket has 20 bits for them, and each thread asks every range once more than it has.
  static constexpr int kMostPieces = (1 << 20) - 4096;

  void run(int pieces, Call call, const void* context) noexcept;

 private:
  // One word says of which region a range is, where it ends and which piece is next; so a ticket is never of two minds.
  // bits 40-63: number of the region; 20-39: end; 0-19: next piece.
  struct alignas(64) Range {
    std::atomic<uint64_t> ticket{0};
  };

  void stop();
  void work(int own);
  void worker(int own, const std::vector<int>& place);
  void wait_for(int own, uint64_t seen);

  const int count_;
  std::unique_ptr<Range[]> ranges_;
  uint64_t region_ = 0;
  alignas(64) std::atomic<int> done_{0};
  alignas(64) std::atomic<Call> call_{nullptr};
  std::atomic<const void*> context_{nullptr};
  alignas(64) std::atomic<int> sleeping_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> workers_;
};

// A team that outlives a fork: threads stay with the parent, so a child starts its own when it first needs them.
class Threads {
 public:
  static constexpr int kMost = 1024;

  // std::invalid_argument for a count outside 1 .. kMost or places of another number, std::runtime_error where the system
  // refuses a thread. A place that the system does not grant is a wish: the thread goes where it may.
  explicit Threads(int count, Places places = {});
  ~Threads();
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

  int count() const { return count_; }

  // Around whatever runs many regions: the caller is the first thread, and belongs where that does.
  Kept keep_caller() const { return Kept(places_.empty() ? std::vector<int>() : places_[0]); }

  // f(piece) for 0 .. pieces - 1, each once; returns when all are done. f must not throw. Not reentrant.
  template <class Function>
  void run(int pieces, const Function& f) {
    Team& team = here();
    for (int from = 0; from < pieces; from += Team::kMostPieces) {
      const auto some = [&](int piece) { f(from + piece); };
      team.run(pieces - from < Team::kMostPieces ? pieces - from : Team::kMostPieces, call<decltype(some)>, &some);
    }
  }

 private:
  template <class Function>
  static void call(const void* context, int piece) {
    (*static_cast<const Function*>(context))(piece);
  }

  Team& here();

  const int count_;
  const Places places_;
  unsigned forks_;  // of the process when the team was made
  std::unique_ptr<Team> team_;
};

}  // namespace headrace
