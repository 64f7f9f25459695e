#include "pool.hpp"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>

#include "memory.hpp"

namespace dspark {
namespace {

constexpr int kSpins = 600;  // about 10 to 30 microseconds of PAUSE

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

void futex_wait(std::atomic<uint32_t>& word, uint32_t seen) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}

void futex_wake(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace

Pool::Pool(int num_threads, bool pin) : num_threads_(num_threads), owner_(getpid()) {
  workers_.resize(static_cast<size_t>(num_threads - 1));
  cpu_set_t allowed;
  const bool known = pin && sched_getaffinity(0, sizeof allowed, &allowed) == 0;
  int cpu = 0;
  for (size_t i = 0; i < workers_.size(); ++i) {
    workers_[i] = {this, static_cast<int>(i) + 1, {}};
    if (pthread_create(&workers_[i].thread, nullptr, &Pool::start, &workers_[i]) != 0) {
      workers_.resize(i);
      num_threads_ = static_cast<int>(i) + 1;
      break;
    }
    if (known) {  // the caller's thread keeps the first processor, worker i the (i + 1)-th
      int seen = 0;
      for (cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
        if (CPU_ISSET(cpu, &allowed) && seen++ == static_cast<int>(i) + 1) break;
      }
      if (cpu < CPU_SETSIZE) {
        cpu_set_t one;
        CPU_ZERO(&one);
        CPU_SET(cpu, &one);
        pthread_setaffinity_np(workers_[i].thread, sizeof one, &one);
      }
    }
  }
}

Pool::~Pool() {
  if (owner_ != getpid()) return;
  stop_.store(true);
  job_.store(UINT32_MAX);
  futex_wake(job_);
  for (Worker& w : workers_) pthread_join(w.thread, nullptr);
}

void* Pool::start(void* worker) {
  auto* w = static_cast<Worker*>(worker);
  w->pool->serve(w->index);
  return nullptr;
}

void Pool::serve(int thread) {
  uint32_t last = 0;
  while (true) {
    uint32_t job = 0;
    for (int i = 0; i < kSpins; ++i) {
      job = job_.load(std::memory_order_acquire);
      if (job != 0 && job != last) break;
      relax();
    }
    if (job == 0 || job == last) {
      idle_.fetch_add(1);
      while ((job = job_.load()) == 0 || job == last) futex_wait(job_, job);
      idle_.fetch_sub(1);
    }
    if (stop_.load()) return;
    last = job;
    walking_.fetch_add(1);
    if (job_.load() == job) walk(job, thread);
    walking_.fetch_sub(1, std::memory_order_release);
  }
}

bool Pool::take(Phase& phase, uint32_t epoch, int* begin, int* end) {
  uint64_t seen = phase.next.load(std::memory_order_acquire);
  while (static_cast<uint32_t>(seen >> 32) == epoch) {
    const uint32_t first = static_cast<uint32_t>(seen);
    const uint32_t total = phase.total.load(std::memory_order_relaxed);
    if (first >= total) return false;
    const uint32_t share = static_cast<uint32_t>(num_threads_);
    const uint32_t count = (total - first + share - 1) / share;
    if (phase.next.compare_exchange_weak(seen, seen + count, std::memory_order_acq_rel)) {
      *begin = static_cast<int>(first);
      *end = static_cast<int>(first + count);
      return true;
    }
  }
  return false;
}

bool Pool::wait_done(Phase& phase, uint32_t epoch) {
  const uint32_t total = phase.total.load(std::memory_order_relaxed);
  for (int i = 0; i < kSpins; ++i) {
    if (phase.done.load(std::memory_order_acquire) >= total) return true;
    if (job_.load(std::memory_order_relaxed) != epoch) return false;
    relax();
  }
  sleepers_.fetch_add(1);
  bool alive = true;
  while (true) {
    const uint32_t seen = event_.load();
    if (phase.done.load() >= total) break;
    if (job_.load() != epoch) {
      alive = false;
      break;
    }
    futex_wait(event_, seen);
  }
  sleepers_.fetch_sub(1);
  return alive;
}

void Pool::walk(uint32_t epoch, int thread) {
  const int num_phases = num_phases_.load(std::memory_order_acquire);
  for (int i = 0; i < num_phases; ++i) {
    Phase& phase = phases_[static_cast<size_t>(i)];
    int begin = 0, end = 0;
    while (take(phase, epoch, &begin, &end)) {
      try {
        if (!failed_.load(std::memory_order_relaxed)) {
          body_.load(std::memory_order_relaxed)(context_.load(std::memory_order_relaxed), i, begin, end, thread);
        }
      } catch (const std::exception&) {
        failed_.store(true);
      }
      const uint32_t count = static_cast<uint32_t>(end - begin);
      const uint32_t total = phase.total.load(std::memory_order_relaxed);
      if (phase.done.fetch_add(count) + count == total && sleepers_.load() > 0) {
        event_.fetch_add(1);
        futex_wake(event_);
      }
    }
    if (!wait_done(phase, epoch)) return;
  }
}

void Pool::run(const int32_t* totals, int num_phases, Body body, void* context) {
  if (workers_.empty() || owner_ != getpid()) {
    for (int i = 0; i < num_phases; ++i) {
      if (totals[i] > 0) body(context, i, 0, totals[i], 0);
    }
    return;
  }
  if (num_phases > capacity_) {
    while (walking_.load() != 0) sched_yield();  // a late thread may still be looking at the old list
    phases_.reset(new Phase[static_cast<size_t>(num_phases + 64)]);
    capacity_ = num_phases + 64;
  }
  if (++epoch_ == UINT32_MAX) epoch_ = 1;
  for (int i = 0; i < num_phases; ++i) {
    Phase& phase = phases_[static_cast<size_t>(i)];
    phase.next.store(0, std::memory_order_relaxed);  // closed: no thread of an earlier pass can take from it
    phase.total.store(static_cast<uint32_t>(totals[i]), std::memory_order_relaxed);
    phase.done.store(0, std::memory_order_relaxed);
    phase.next.store(static_cast<uint64_t>(epoch_) << 32, std::memory_order_release);
  }
  num_phases_.store(num_phases, std::memory_order_relaxed);
  body_.store(body, std::memory_order_relaxed);
  context_.store(context, std::memory_order_relaxed);
  job_.store(epoch_);
  if (idle_.load() > 0) futex_wake(job_);
  walk(epoch_, 0);
  job_.store(0);
  if (sleepers_.load() > 0) {
    event_.fetch_add(1);
    futex_wake(event_);
  }
  if (failed_.exchange(false)) throw OutOfMemory("the lists of a pass", 0);
}

}  // namespace dspark
