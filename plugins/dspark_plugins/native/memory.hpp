// Arenas for weights, growing buffers for scratch.
#pragma once
#include <cstdint>
#include <exception>
#include <new>
#include <utility>
#include <vector>

#include "kernels.hpp"

namespace dspark {

// What could not be allocated, for the message.
struct OutOfMemory : std::bad_alloc {
  OutOfMemory(const char* what, int64_t bytes) : of(what), size(bytes) {}
  const char* of;
  int64_t size;  // bytes, 0 = not known
};

// Keep what dspark_last_error tells this thread.
void remember_failure(const char* what, int64_t bytes) noexcept;

// Run a call of the C interface; return 0, or -1 with the failure remembered. Exceptions end here.
template <class Call>
int32_t guarded(Call&& call) noexcept {
  try {
    call();
    return 0;
  } catch (const OutOfMemory& failure) {
    remember_failure(failure.of, failure.size);
  } catch (const std::exception&) {
    remember_failure("the lists of a call", 0);
  }
  return -1;
}

// The same for what makes a handle: null when it failed.
template <class Make>
void* made(Make&& make) noexcept {
  void* handle = nullptr;
  guarded([&] { handle = make(); });
  return handle;
}

// Anonymous pages, huge ones where allowed; zeroed. Null when the system has none.
void* map_pages(int64_t bytes);
void unmap_pages(void* address, int64_t bytes);

class Arena {
 public:
  Arena() = default;
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  void* allocate(int64_t bytes);  // 64-byte aligned and zeroed; throws OutOfMemory
  int64_t used() const { return used_; }
  std::vector<std::pair<const void*, int64_t>> filled() const;  // what was given out, block by block
  std::vector<Matrix*> matrices;

 private:
  struct Block {
    void* address;
    int64_t size, used;
  };
  std::vector<Block> blocks_;
  uint8_t* next_ = nullptr;
  int64_t left_ = 0;
  int64_t used_ = 0;
};

// Zeroed memory that grows and never shrinks; contents are lost when it grows.
class Buffer {
 public:
  Buffer() = default;
  ~Buffer();
  Buffer(Buffer&& other) noexcept : data_(other.data_), bytes_(other.bytes_) {
    other.data_ = nullptr;
    other.bytes_ = 0;
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  Buffer& operator=(Buffer&&) = delete;

  void reserve(int64_t bytes, const char* what = "the rows of a pass");  // throws OutOfMemory, and is empty then
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace dspark
