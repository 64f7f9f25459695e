// Arenas for weights, growing buffers for scratch.
#pragma once
#include <cstdint>
#include <utility>
#include <vector>

#include "kernels.hpp"

namespace dspark {

// Anonymous pages, huge ones where allowed; zeroed. Null when the system has none.
void* map_pages(int64_t bytes);
void unmap_pages(void* address, int64_t bytes);

class Arena {
 public:
  Arena() = default;
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  void* allocate(int64_t bytes);  // 64-byte aligned and zeroed, or null
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

  void reserve(int64_t bytes);
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace dspark
