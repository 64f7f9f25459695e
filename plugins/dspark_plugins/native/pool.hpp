// Threads that walk one pass together: a list of phases, each a number of items that any thread may take.
//
// A phase is over when its items are done, not when every thread has arrived: a thread that the system has put aside, or
// that is only just waking up, holds nobody back unless it holds items. Waiting is a short spin, then sleep.
#pragma once
#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

namespace dspark {

class Pool {
 public:
  // Runs items [begin, end) of one phase.
  using Body = void (*)(void* context, int phase, int begin, int end, int thread);

  Pool(int num_threads, bool pin);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int num_threads() const { return num_threads_; }
  // Run phases 0..num_phases-1 in order; phase i has totals[i] items. Returns when all are done. Where an item throws on
  // any thread, later ones are passed over and OutOfMemory is thrown: items throw for want of memory alone.
  void run(const int32_t* totals, int num_phases, Body body, void* context);

 private:
  struct alignas(64) Phase {
    std::atomic<uint64_t> next{0};   // epoch << 32 | first item that nobody has taken
    std::atomic<uint32_t> total{0};
    std::atomic<uint32_t> done{0};
  };
  struct Worker {
    Pool* pool;
    int index;
    pthread_t thread;
  };
  static void* start(void* worker);
  void serve(int thread);
  void walk(uint32_t epoch, int thread);
  bool take(Phase& phase, uint32_t epoch, int* begin, int* end);
  bool wait_done(Phase& phase, uint32_t epoch);

  int num_threads_;
  int owner_;  // process that made the threads; a forked child runs alone
  std::unique_ptr<Phase[]> phases_;
  int capacity_ = 0;
  std::vector<Worker> workers_;
  std::atomic<int32_t> num_phases_{0};
  std::atomic<Body> body_{nullptr};
  std::atomic<void*> context_{nullptr};
  uint32_t epoch_ = 0;
  alignas(64) std::atomic<uint32_t> job_{0};       // epoch of the running pass, 0 between passes
  alignas(64) std::atomic<uint32_t> idle_{0};      // threads asleep between passes
  alignas(64) std::atomic<uint32_t> event_{0};     // moves when a phase ends
  alignas(64) std::atomic<uint32_t> sleepers_{0};  // threads asleep inside a pass
  std::atomic<uint32_t> walking_{0};               // threads that may look at phases_
  std::atomic<bool> failed_{false};                // an item of this pass threw
  std::atomic<bool> stop_{false};
};

}  // namespace dspark
