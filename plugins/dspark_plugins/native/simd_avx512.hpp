// Sixteen float lanes on AVX-512 (with VNNI and BF16). One vector register is one `vf`.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace {

using vf = __m512;   // 16 float
using vi = __m512i;  // 16 int32
using vw = __m512i;  // 64 bytes of packed weights: one step of 16 outputs

constexpr int kRowBlock = 8;  // rows whose accumulators of a whole panel live in registers
constexpr int kRowBlockHalf = 8, kRowBlockInt8 = 8;  // nothing to gain from half panels
constexpr bool kWholeBlocks = false;
constexpr int kExpTogether = 4;
// Six queries share a loaded key or value, four vectors of these share a query: 24 sums and the four, one of 32 is left.
constexpr int kAttendTile = 6, kAttendRegisters = 31;
constexpr bool kWideBfloat16 = false;
constexpr bool kOffsetInt8 = true;  // VPDPBUSD takes weight bytes with their offset of 128
constexpr bool kPrefetchAlone = false;  // one row of int8 is read faster by loads alone

inline vf vzero() { return _mm512_setzero_ps(); }
inline vf vset(float x) { return _mm512_set1_ps(x); }
inline vf vload(const float* p) { return _mm512_loadu_ps(p); }
inline void vstore(float* p, vf x) { _mm512_storeu_ps(p, x); }
inline vf vadd(vf a, vf b) { return _mm512_add_ps(a, b); }
inline vf vsub(vf a, vf b) { return _mm512_sub_ps(a, b); }
inline vf vmul(vf a, vf b) { return _mm512_mul_ps(a, b); }
inline vf vdiv(vf a, vf b) { return _mm512_div_ps(a, b); }
inline vf vfma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
// The second operand is returned where either is NaN.
inline vf vmax(vf a, vf b) { return _mm512_max_ps(a, b); }
inline vf vmin(vf a, vf b) { return _mm512_min_ps(a, b); }
inline vf vabs(vf a) { return _mm512_abs_ps(a); }
inline vf vround(vf a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// 2^n for whole n in [-126, 127].
inline vf vpow2(vf n) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
// Lanes [low, high) of `a`, `other` elsewhere.
inline vf vselect_range(vf a, vf other, int low, int high) {
  const __mmask16 mask = static_cast<__mmask16>(((1u << high) - 1u) & ~((1u << low) - 1u));
  return _mm512_mask_blend_ps(mask, other, a);
}
inline float vlane_sum(vf a) {
  __m256 h = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  q = _mm_add_ss(q, _mm_movehdup_ps(q));
  return _mm_cvtss_f32(q);
}
inline float vlane_max(vf a) { return _mm512_reduce_max_ps(a); }

inline vf vload_bf16(const uint16_t* p) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
}
// Round to nearest even; the integer way keeps denormals, which VCVTNEPS2BF16 would flush.
inline void vstore_bf16(uint16_t* p, vf x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i lsb = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(lsb, _mm512_set1_epi32(0x7fff))), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  rounded = _mm512_mask_set1_epi32(rounded, nan, 0x7fc0);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(rounded));
}
// Sixteen inputs of a bfloat16 matrix.
inline void store_bfloat16_input(uint8_t* line, int index, vf x) {
  vstore_bf16(reinterpret_cast<uint16_t*>(line) + index, x);
}
inline void vstore_int8(int8_t* p, vf x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x)));
}

inline vi iset(int32_t x) { return _mm512_set1_epi32(x); }
inline vf vfrom_int(vi a) { return _mm512_cvtepi32_ps(a); }

inline vw wload(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline vw wxor(vw a, vw b) { return _mm512_xor_si512(a, b); }
inline uint32_t wfold(vw a) {
  uint32_t lane[16], all = 0;
  _mm512_storeu_si512(lane, a);
  for (int i = 0; i < 16; ++i) all ^= lane[i];
  return all;
}
inline vf step_fp32(vf acc, vw w, const uint8_t* x) {
  return _mm512_fmadd_ps(_mm512_castsi512_ps(w), _mm512_set1_ps(*reinterpret_cast<const float*>(x)), acc);
}
inline vf step_bf16(vf acc, vw w, const uint8_t* x) {
  const __m512i pair = _mm512_set1_epi32(*reinterpret_cast<const int32_t*>(x));
  return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(w), reinterpret_cast<__m512bh>(pair));
}
// Written out: compilers copy the intrinsic's sum twice a step, which halved the speed of many rows. `Alone`, the only row
// of its tile, spares the register and the instruction of the broadcast.
template <bool Alone>
inline vi step_int8(vi acc, vw w, const uint8_t* x) {
  const int32_t& quad = *reinterpret_cast<const int32_t*>(x);
  if constexpr (Alone) {
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(w), "m"(quad));
  } else {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(w), "v"(_mm512_set1_epi32(quad)));
  }
  return acc;
}
inline void prefetch(const void* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0); }

}  // namespace
