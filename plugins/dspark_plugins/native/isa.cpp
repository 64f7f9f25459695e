#include "isa.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <cstring>

#include "dspark_native.h"
#include "memory.hpp"
#include "pool.hpp"

namespace dspark {
namespace {

#if defined(__x86_64__)
bool has_avxvnni() {  // compilers learnt this name later than they learnt its instructions
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 4) != 0;
}
#endif

}  // namespace

const Kernels& kernels_for(const char* wanted) {
  int limit = 3;
  if (wanted && std::strcmp(wanted, "avxvnni") == 0) limit = 2;
  if (wanted && std::strcmp(wanted, "avx2") == 0) limit = 1;
  if (wanted && std::strcmp(wanted, "portable") == 0) limit = 0;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
  if (limit >= 3 && avx512) return kernels_avx512;
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (limit >= 2 && avx2 && has_avxvnni()) return kernels_avxvnni;
  if (limit >= 1 && avx2) return kernels_avx2;
#endif
  return kernels_portable;
}

}  // namespace dspark

extern "C" {

const char* dspark_isa(const char* wanted) { return dspark::kernels_for(wanted).name; }

void* dspark_pool_create(int32_t num_threads, int32_t pin) {
  return dspark::made([&] { return new dspark::Pool(num_threads, pin != 0); });
}
void dspark_pool_destroy(void* pool) { delete static_cast<dspark::Pool*>(pool); }
int32_t dspark_pool_threads(void* pool) { return static_cast<dspark::Pool*>(pool)->num_threads(); }

}  // extern "C"
