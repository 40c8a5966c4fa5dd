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

class Threads {
 public:
  explicit Threads(int count);
  ~Threads();
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

  int count() const { return static_cast<int>(workers_.size()) + 1; }

  // f(piece) for 0 .. pieces - 1, each once; returns when all are done. Not reentrant.
  template <class Function>
  void run(int pieces, const Function& f) {
    for (int from = 0; from < pieces; from += kMostPieces) {
      const auto some = [&](int piece) { f(from + piece); };
      run(pieces - from < kMostPieces ? pieces - from : kMostPieces, call<decltype(some)>, &some);
    }
  }

 private:
  template <class Function>
  static void call(const void* context, int piece) {
    (*static_cast<const Function*>(context))(piece);
  }

  using Call = void (*)(const void*, int);
  static constexpr int kMostPieces = (1 << 20) - 4096;  // of one region: a ticket has 20 bits for them

  // One word says of which region a range is, where it ends and which piece is next; so a ticket is never of two minds.
  // bits 40-63: number of the region; 20-39: end; 0-19: next piece.
  struct alignas(64) Range {
    std::atomic<uint64_t> ticket{0};
  };

  void run(int pieces, Call call, const void* context);
  void work(int own);
  void worker(int own);
  void wait_for(int own, uint64_t seen);

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

}  // namespace headrace
