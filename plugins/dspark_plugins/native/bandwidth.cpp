// How fast this machine reads memory: the bound of every pass.
#include <ctime>
#include <cstring>
#include <vector>

#include "dspark_native.h"
#include "isa.hpp"
#include "memory.hpp"
#include "pool.hpp"

namespace {

constexpr int64_t kItem = 1 << 18;  // bytes that a thread takes at a time

struct Job {
  const dspark::Kernels* kernels;
  const float* data;
  std::vector<float> sums;  // one a thread, a cache line apart
};

void read_items(void* context, int, int begin, int end, int thread) {
  auto* job = static_cast<Job*>(context);
  job->sums[static_cast<size_t>(thread) * 16] += job->kernels->read(job->data + begin * (kItem / 4), (end - begin) * (kItem / 4));
}

double now() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

}  // namespace

extern "C" double dspark_read_seconds(void* pool, const char* isa, int64_t bytes) {
  auto* p = static_cast<dspark::Pool*>(pool);
  const auto items = static_cast<int32_t>(bytes / kItem);
  void* data = dspark::map_pages(items * kItem);
  if (!data) return 0.0;
  std::memset(data, 0, static_cast<size_t>(items * kItem));
  Job job{&dspark::kernels_for(isa), static_cast<const float*>(data), {}};
  job.sums.assign(static_cast<size_t>(p->num_threads()) * 16, 0.0f);
  double best = 1e30;
  for (int i = 0; i < 3; ++i) {
    const double started = now();
    p->run(&items, 1, read_items, &job);
    const double took = now() - started;
    best = took < best ? took : best;
  }
  dspark::unmap_pages(data, items * kItem);
  return best;
}
