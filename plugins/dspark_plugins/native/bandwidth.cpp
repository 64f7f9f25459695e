// How fast this machine reads memory: the bound of every pass.
#include <cstring>
#include <ctime>
#include <utility>
#include <vector>

#include "dspark_native.h"
#include "isa.hpp"
#include "memory.hpp"
#include "pool.hpp"

namespace dspark {
namespace {

constexpr int64_t kItem = 1 << 18;  // bytes that a thread takes at a time

struct Job {
  const Kernels* kernels;
  std::vector<std::pair<const uint8_t*, int64_t>> items;
  std::vector<uint32_t> sums;  // one a thread, a cache line apart
};

void read_items(void* context, int, int begin, int end, int thread) {
  auto* job = static_cast<Job*>(context);
  for (int i = begin; i < end; ++i) {
    const auto& item = job->items[static_cast<size_t>(i)];
    job->sums[static_cast<size_t>(thread) * 16] ^= job->kernels->read(item.first, item.second);
  }
}

double now() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

void add_items(Job& job, const void* data, int64_t bytes) {
  const auto* at = static_cast<const uint8_t*>(data);
  for (; bytes >= 256; at += kItem, bytes -= kItem) job.items.emplace_back(at, bytes < kItem ? bytes / 256 * 256 : kItem);
}

void read_times(Pool& pool, Job& job, int times, double* seconds) {
  job.sums.assign(static_cast<size_t>(pool.num_threads()) * 16, 0);
  const auto items = static_cast<int32_t>(job.items.size());
  for (int i = 0; i < times; ++i) {
    const double started = now();
    pool.run(&items, 1, read_items, &job);
    seconds[i] = now() - started;
  }
}

}  // namespace
}  // namespace dspark

using namespace dspark;

extern "C" {

double dspark_read_seconds(void* pool, const char* isa, int64_t bytes) {
  double best = 1e30;
  const int32_t failed = guarded([&] {
    Arena arena;
    void* data = arena.allocate(bytes = bytes / kItem * kItem);
    std::memset(data, 0, static_cast<size_t>(bytes));
    Job job{&kernels_for(isa), {}, {}};
    add_items(job, data, bytes);
    double took[3];
    read_times(*static_cast<Pool*>(pool), job, 3, took);
    for (const double t : took) best = t < best ? t : best;
  });
  return failed ? 0.0 : best;
}

int32_t dspark_arena_read_seconds(void* arena, void* pool, const char* isa, int32_t times, double* seconds) {
  return guarded([&] {
    Job job{&kernels_for(isa), {}, {}};
    for (const auto& [data, bytes] : static_cast<Arena*>(arena)->filled()) add_items(job, data, bytes);
    read_times(*static_cast<Pool*>(pool), job, times, seconds);
  });
}

}  // extern "C"
