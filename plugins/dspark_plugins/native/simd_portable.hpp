// Sixteen float lanes in plain C++; the compiler vectorises what it can.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

struct vf {
  float v[16];
};
struct vi {
  int32_t v[16];
};
struct vw {
  uint8_t v[64];  // packed weights: one step of 16 outputs
};

constexpr int kRowBlock = 2, kRowBlockHalf = 2, kRowBlockInt8 = 2;
constexpr bool kWholeBlocks = false;
constexpr int kExpTogether = 1;
constexpr int kAttendTile = 3, kAttendRegisters = 3;  // as measured with SSE2, whose four registers are one vf
constexpr bool kWideBfloat16 = true;
constexpr bool kOffsetInt8 = true;
constexpr bool kPrefetchAlone = true;

template <class F>
inline vf lanes(F f) {
  vf r;
  for (int i = 0; i < 16; ++i) r.v[i] = f(i);
  return r;
}
inline vf vset(float x) {
  return lanes([&](int) { return x; });
}
inline vf vzero() { return vset(0.0f); }
inline vf vload(const float* p) {
  vf r;
  std::memcpy(r.v, p, sizeof r.v);
  return r;
}
inline void vstore(float* p, const vf& x) { std::memcpy(p, x.v, sizeof x.v); }
inline vf vadd(const vf& a, const vf& b) {
  return lanes([&](int i) { return a.v[i] + b.v[i]; });
}
inline vf vsub(const vf& a, const vf& b) {
  return lanes([&](int i) { return a.v[i] - b.v[i]; });
}
inline vf vmul(const vf& a, const vf& b) {
  return lanes([&](int i) { return a.v[i] * b.v[i]; });
}
inline vf vdiv(const vf& a, const vf& b) {
  return lanes([&](int i) { return a.v[i] / b.v[i]; });
}
inline vf vfma(const vf& a, const vf& b, const vf& c) {
  return lanes([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
}
// The second operand is returned where either is NaN.
inline vf vmax(const vf& a, const vf& b) {
  return lanes([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline vf vmin(const vf& a, const vf& b) {
  return lanes([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
inline vf vabs(const vf& a) {
  return lanes([&](int i) { return std::fabs(a.v[i]); });
}
// Nearest even for |a| < 2^22, which is all that callers pass.
inline vf vround(const vf& a) {
  return lanes([&](int i) {
    volatile float shifted = a.v[i] + 12582912.0f;
    return shifted - 12582912.0f;
  });
}
inline float pow2_lane(float n) {
  const int32_t whole = n >= -126.0f && n <= 127.0f ? static_cast<int32_t>(n) : 0;
  const uint32_t bits = static_cast<uint32_t>(whole + 127) << 23;
  float r;
  std::memcpy(&r, &bits, 4);
  return r;
}
// 2^n for whole n in [-126, 127].
inline vf vpow2(const vf& n) {
  return lanes([&](int i) { return pow2_lane(n.v[i]); });
}
// Lanes [low, high) of `a`, `other` elsewhere.
inline vf vselect_range(const vf& a, const vf& other, int low, int high) {
  return lanes([&](int i) { return i >= low && i < high ? a.v[i] : other.v[i]; });
}
inline float vlane_sum(const vf& a) {
  float h[8];
  for (int i = 0; i < 8; ++i) h[i] = a.v[i] + a.v[i + 8];
  for (int i = 0; i < 4; ++i) h[i] = h[i] + h[i + 4];
  return (h[0] + h[2]) + (h[1] + h[3]);
}
inline float vlane_max(const vf& a) {
  float r = a.v[0];
  for (int i = 1; i < 16; ++i) r = r > a.v[i] ? r : a.v[i];
  return r;
}

inline float widen(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float r;
  std::memcpy(&r, &bits, 4);
  return r;
}
inline vf vload_bf16(const uint16_t* p) {
  return lanes([&](int i) { return widen(p[i]); });
}
inline void vstore_bf16(uint16_t* p, const vf& x) {
  for (int i = 0; i < 16; ++i) {
    uint32_t bits;
    std::memcpy(&bits, &x.v[i], 4);
    const uint32_t rounded = (bits + ((bits >> 16) & 1u) + 0x7fffu) >> 16;
    p[i] = static_cast<uint16_t>(x.v[i] != x.v[i] ? 0x7fc0u : rounded);
  }
}
// Sixteen inputs of a bfloat16 matrix, rounded, kept as float.
inline void store_bfloat16_input(uint8_t* line, int index, const vf& x) {
  uint16_t bits[16];
  vstore_bf16(bits, x);
  vstore(reinterpret_cast<float*>(line) + index, vload_bf16(bits));
}
// Lanes must already be whole numbers in [-127, 127] or NaN.
inline void vstore_int8(int8_t* p, const vf& x) {
  for (int i = 0; i < 16; ++i) p[i] = static_cast<int8_t>(x.v[i] >= -127.0f && x.v[i] <= 127.0f ? x.v[i] : 0.0f);
}

inline vi iset(int32_t x) {
  vi r;
  for (int i = 0; i < 16; ++i) r.v[i] = x;
  return r;
}
inline vf vfrom_int(const vi& a) {
  return lanes([&](int i) { return static_cast<float>(a.v[i]); });
}

inline vw wload(const uint8_t* p) {
  vw r;
  std::memcpy(r.v, p, 64);
  return r;
}
inline vw wxor(const vw& a, const vw& b) {
  vw r;
  for (int i = 0; i < 64; ++i) r.v[i] = a.v[i] ^ b.v[i];
  return r;
}
inline uint32_t wfold(const vw& a) {
  uint32_t lane[16], all = 0;
  std::memcpy(lane, a.v, 64);
  for (int i = 0; i < 16; ++i) all ^= lane[i];
  return all;
}
inline vf step_fp32(const vf& acc, const vw& w, const uint8_t* x) {
  float s, lane[16];
  std::memcpy(&s, x, 4);
  std::memcpy(lane, w.v, 64);
  return lanes([&](int i) { return acc.v[i] + lane[i] * s; });
}
// Of 16 pairs of bfloat16 the first ones or the second ones.
inline void load_first_or_second(vf& out, const uint8_t* p, int second) {
  out = lanes([&](int i) {
    uint16_t bits;
    std::memcpy(&bits, p + 4 * i + 2 * second, 2);
    return widen(bits);
  });
}
template <bool Alone>
inline vi step_int8(const vi& acc, const vw& w, const uint8_t* x) {
  int8_t quad[4];
  std::memcpy(quad, x, 4);
  vi r;
  for (int i = 0; i < 16; ++i) {
    int32_t sum = acc.v[i];
    for (int j = 0; j < 4; ++j) sum += static_cast<int32_t>(w.v[4 * i + j]) * quad[j];
    r.v[i] = sum;
  }
  return r;
}
inline void prefetch(const void* p) { __builtin_prefetch(p); }

}  // namespace
