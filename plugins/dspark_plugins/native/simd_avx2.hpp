// Sixteen float lanes on AVX2 and FMA: two registers are one `vf`. With DSPARK_VNNI int8 takes AVX-VNNI, to the same bits.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace {

struct vf {
  __m256 a, b;
};
struct vi {
  __m256i a, b;
};
using vw = vi;  // 64 bytes of packed weights: one step of 16 outputs

constexpr int kRowBlock = 2;      // rows whose accumulators of a whole panel live in registers
constexpr int kRowBlockHalf = 6;  // of half a panel
constexpr int kRowBlockInt8 = 4;  // the same, int8
constexpr bool kWholeBlocks = true;  // six rows and two beat four and four: eight accumulators wait for each other
constexpr int kExpTogether = 2;
// Six queries share a loaded key or value: pairs of registers for six sums and what they share, one pair is left. Fewer
// sums would wait for each other.
constexpr int kAttendTile = 6, kAttendRegisters = 7;
constexpr bool kPrefetchAlone = true;
constexpr bool kWideBfloat16 = true;  // bfloat16 is multiplied as float
#if defined(DSPARK_VNNI)
constexpr bool kOffsetInt8 = true;  // VPDPBUSD takes weight bytes with their offset of 128
#else
constexpr bool kOffsetInt8 = false;  // weight bytes are made signed again
#endif

inline vf vzero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline vf vset(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline vf vload(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void vstore(float* p, vf x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
inline vf vadd(vf x, vf y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline vf vsub(vf x, vf y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline vf vmul(vf x, vf y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline vf vdiv(vf x, vf y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline vf vfma(vf x, vf y, vf z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
// The second operand is returned where either is NaN.
inline vf vmax(vf x, vf y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline vf vmin(vf x, vf y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline vf vabs(vf x) {
  const __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  return {_mm256_and_ps(x.a, mask), _mm256_and_ps(x.b, mask)};
}
inline vf vround(vf x) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
}
inline __m256 pow2_half(__m256 n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
// 2^n for whole n in [-126, 127].
inline vf vpow2(vf n) { return {pow2_half(n.a), pow2_half(n.b)}; }
inline __m256 range_mask(int first, int low, int high) {
  const __m256i lane = _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(first));
  const __m256i from = _mm256_cmpgt_epi32(lane, _mm256_set1_epi32(low - 1));
  return _mm256_castsi256_ps(_mm256_and_si256(from, _mm256_cmpgt_epi32(_mm256_set1_epi32(high), lane)));
}
// Lanes [low, high) of `x`, `other` elsewhere.
inline vf vselect_range(vf x, vf other, int low, int high) {
  return {_mm256_blendv_ps(other.a, x.a, range_mask(0, low, high)),
          _mm256_blendv_ps(other.b, x.b, range_mask(8, low, high))};
}
inline float vlane_sum(vf x) {
  const __m256 h = _mm256_add_ps(x.a, x.b);
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  q = _mm_add_ss(q, _mm_movehdup_ps(q));
  return _mm_cvtss_f32(q);
}
inline float vlane_max(vf x) {
  const __m256 h = _mm256_max_ps(x.a, x.b);
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  q = _mm_max_ss(q, _mm_movehdup_ps(q));
  return _mm_cvtss_f32(q);
}

inline __m256 widen_half(const uint16_t* p) {
  return _mm256_castsi256_ps(
      _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16));
}
inline vf vload_bf16(const uint16_t* p) { return {widen_half(p), widen_half(p + 8)}; }
inline __m256i round_half(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i lsb = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded =
      _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(lsb, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
}
inline void vstore_bf16(uint16_t* p, vf x) {
  const __m256i packed = _mm256_packus_epi32(round_half(x.a), round_half(x.b));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}
// Sixteen inputs of a bfloat16 matrix, rounded: kept as float, so that nothing is widened in the product.
inline void store_bfloat16_input(uint8_t* line, int index, vf x) {
  float* out = reinterpret_cast<float*>(line) + index;
  _mm256_storeu_ps(out, _mm256_castsi256_ps(_mm256_slli_epi32(round_half(x.a), 16)));
  _mm256_storeu_ps(out + 8, _mm256_castsi256_ps(_mm256_slli_epi32(round_half(x.b), 16)));
}
inline void vstore_int8(int8_t* p, vf x) {
  const __m256i words = _mm256_permute4x64_epi64(
      _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)), 0xd8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}

inline vi iset(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline vf vfrom_int(vi x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }

inline vw wload(const uint8_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32))};
}
inline vw wxor(vw x, vw y) { return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)}; }
inline uint32_t wfold(vw x) {
  const __m256i one = _mm256_xor_si256(x.a, x.b);
  const __m128i half = _mm_xor_si128(_mm256_castsi256_si128(one), _mm256_extracti128_si256(one, 1));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(half) ^ _mm_extract_epi32(half, 1) ^ _mm_extract_epi32(half, 2) ^
                               _mm_extract_epi32(half, 3));
}
inline vf step_fp32(vf acc, vw w, const uint8_t* x) {
  const __m256 s = _mm256_set1_ps(*reinterpret_cast<const float*>(x));
  return {_mm256_fmadd_ps(_mm256_castsi256_ps(w.a), s, acc.a), _mm256_fmadd_ps(_mm256_castsi256_ps(w.b), s, acc.b)};
}
// Of 16 pairs of bfloat16 the first ones or the second ones.
inline void load_first_or_second(vf& out, const uint8_t* p, int second) {
  const vw w = wload(p);
  const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  out.a = _mm256_castsi256_ps(second ? _mm256_and_si256(w.a, upper) : _mm256_slli_epi32(w.a, 16));
  out.b = _mm256_castsi256_ps(second ? _mm256_and_si256(w.b, upper) : _mm256_slli_epi32(w.b, 16));
}
#if defined(DSPARK_VNNI)
inline __m256i dot4_half(__m256i acc, __m256i bytes, __m256i x) {
  __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc) : "x"(bytes), "x"(x));  // the intrinsic's sum would be copied twice a step
  return acc;
}
#else
// Exact: |w| <= 127 and |x| <= 127, so a sum of two products fits 16 bits and VPMADDUBSW never saturates.
inline __m256i dot4_half(__m256i acc, __m256i bytes, __m256i x) {
  const __m256i w = _mm256_xor_si256(bytes, _mm256_set1_epi8(static_cast<char>(0x80)));
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
  return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
#endif
template <bool Alone>
inline vi step_int8(vi acc, vw w, const uint8_t* x) {
  const __m256i quad = _mm256_set1_epi32(*reinterpret_cast<const int32_t*>(x));
  return {dot4_half(acc.a, w.a, quad), dot4_half(acc.b, w.b, quad)};
}
inline void prefetch(const void* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0); }

}  // namespace
