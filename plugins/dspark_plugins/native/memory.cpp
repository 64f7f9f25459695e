#include "memory.hpp"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "dspark_native.h"

namespace dspark {
namespace {
constexpr int64_t kHuge = int64_t{2} << 20;
constexpr int64_t kBlock = int64_t{64} << 20;  // reserved at a time; untouched pages cost nothing
thread_local char last_error[200] = "";
int64_t whole_pages(int64_t bytes) { return (bytes + kHuge - 1) / kHuge * kHuge; }
}  // namespace

void remember_failure(const char* what, int64_t bytes) noexcept {
  if (bytes > 0) {
    std::snprintf(last_error, sizeof last_error, "no memory for %s: %lld bytes", what, static_cast<long long>(bytes));
  } else {
    std::snprintf(last_error, sizeof last_error, "no memory for %s", what);
  }
}

void* map_pages(int64_t bytes) {
  // Over-reserve so that the part we keep starts on a huge page.
  const int64_t size = whole_pages(bytes);
  void* raw = mmap(nullptr, static_cast<size_t>(size + kHuge), PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) return nullptr;
  const auto start = reinterpret_cast<uintptr_t>(raw);
  const uintptr_t aligned = (start + kHuge - 1) / kHuge * kHuge;
  if (aligned > start) munmap(raw, aligned - start);
  const uintptr_t tail = start + static_cast<uintptr_t>(kHuge) - aligned;
  if (tail > 0) munmap(reinterpret_cast<void*>(aligned + static_cast<uintptr_t>(size)), tail);
  void* address = reinterpret_cast<void*>(aligned);
  madvise(address, static_cast<size_t>(size), MADV_HUGEPAGE);  // a wish: without it small pages serve
  return address;
}

void unmap_pages(void* address, int64_t bytes) {
  if (address) munmap(address, static_cast<size_t>(whole_pages(bytes)));
}

Arena::~Arena() {
  for (Matrix* m : matrices) delete m;
  for (const Block& b : blocks_) unmap_pages(b.address, b.size);
}

void* Arena::allocate(int64_t bytes) {
  bytes = (bytes + 63) / 64 * 64;
  if (bytes > left_) {
    const int64_t size = bytes > kBlock ? whole_pages(bytes) : kBlock;
    blocks_.reserve(blocks_.size() + 1);
    void* block = map_pages(size);
    if (!block) throw OutOfMemory("weights", size);
    blocks_.push_back({block, size, 0});
    next_ = static_cast<uint8_t*>(block);
    left_ = size;
  }
  void* result = next_;
  next_ += bytes;
  left_ -= bytes;
  used_ += bytes;
  blocks_.back().used += bytes;
  return result;
}

std::vector<std::pair<const void*, int64_t>> Arena::filled() const {
  std::vector<std::pair<const void*, int64_t>> found;
  for (const Block& b : blocks_) found.emplace_back(b.address, b.used);
  return found;
}

Buffer::~Buffer() { std::free(data_); }

void Buffer::reserve(int64_t bytes, const char* what) {
  if (bytes <= bytes_) return;
  bytes = (bytes + bytes / 4 + 63) / 64 * 64;
  std::free(data_);
  bytes_ = 0;
  data_ = std::aligned_alloc(64, static_cast<size_t>(bytes));
  if (!data_) throw OutOfMemory(what, bytes);
  std::memset(data_, 0, static_cast<size_t>(bytes));
  bytes_ = bytes;
}

}  // namespace dspark

extern "C" const char* dspark_last_error(void) { return dspark::last_error; }
