// A few threads that work through small pieces together. The caller is one of them.
//
// Work is handed out from one counter, so a thread that loses its core to a neighbour keeps only the piece it holds.
// Threads spin briefly for the next region and then sleep. Which thread does which piece is nobody's business: pieces
// must not care.

#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
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
    if (pieces > kMostPieces) {
      for (int from = 0; from < pieces; from += kMostPieces) {
        const auto some = [&](int piece) { f(from + piece); };
        run(pieces - from < kMostPieces ? pieces - from : kMostPieces, call<decltype(some)>, &some);
      }
      return;
    }
    run(pieces, call<Function>, &f);
  }

 private:
  template <class Function>
  static void call(const void* context, int piece) {
    (*static_cast<const Function*>(context))(piece);
  }

  using Call = void (*)(const void*, int);
  static constexpr int kMostPieces = (1 << 20) - 4096;  // of one region: the ticket has 20 bits for them

  void run(int pieces, Call call, const void* context);
  uint64_t work();
  void worker();
  void wait_for(uint64_t seen);

  // One word says which region it is, how many pieces it has and which is next; so a ticket is never of two minds.
  // bits 40-63: number of the region; 20-39: pieces; 0-19: next piece.
  alignas(64) std::atomic<uint64_t> ticket_{0};
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
