// The arithmetic, compiled once per instruction set (DSPARK_ISA names it). Nothing here allocates or locks, and no
// inline function of the standard library is used: the linker could pick this unit's copy for the baseline code.
#include "kernels.hpp"

#if defined(DSPARK_ISA_AVX512)
#include "simd_avx512.hpp"
#define DSPARK_KERNELS kernels_avx512
#define DSPARK_NAME "avx512"
#elif defined(DSPARK_ISA_AVXVNNI)
#if __has_include(<avxvnniintrin.h>) && !defined(__clang__)  // where the compiler has no name for it this is plain AVX2
#define DSPARK_VNNI
#pragma GCC target("avxvnni")
#endif
#include "simd_avx2.hpp"
#define DSPARK_KERNELS kernels_avxvnni
#define DSPARK_NAME "avxvnni"
#elif defined(DSPARK_ISA_AVX2)
#include "simd_avx2.hpp"
#define DSPARK_KERNELS kernels_avx2
#define DSPARK_NAME "avx2"
#else
#include "simd_portable.hpp"
#define DSPARK_KERNELS kernels_portable
#define DSPARK_NAME "portable"
#endif

namespace {

using namespace dspark;

constexpr int kPrefetchBytes = 8192;       // ahead of the weights: covers the latency of memory at full speed
constexpr int kPrefetchBytesInt8 = 4096;
constexpr int kChunkSteps = 16;  // steps of a panel between two looks at what to fetch; for int8 one group
static_assert(kChunkSteps * 4 == kGroup, "one chunk of int8 steps is one group of activations");
constexpr float kInfinity = __builtin_inff();

// e^x with about 1 ulp, clamped to the range of normal floats; NaN stays NaN. N at once, step by step: the processor looks
// ahead over fewer instructions than one of them takes.
template <int N>
inline void exp_of(vf (&x)[N]) {
  const auto each = [](auto f) {
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) f(i);
  };
  vf n[N], y[N];
  each([&](int i) { x[i] = vmin(vset(88.0f), vmax(vset(-87.0f), x[i])); });
  each([&](int i) { n[i] = vround(vmul(x[i], vset(1.44269504088896341f))); });
  each([&](int i) { x[i] = vfma(n[i], vset(-0.693359375f), x[i]); });
  each([&](int i) { x[i] = vfma(n[i], vset(2.12194440e-4f), x[i]); });
  each([&](int i) { y[i] = vfma(vset(1.9875691500e-4f), x[i], vset(1.3981999507e-3f)); });
  each([&](int i) { y[i] = vfma(y[i], x[i], vset(8.3334519073e-3f)); });
  each([&](int i) { y[i] = vfma(y[i], x[i], vset(4.1665795894e-2f)); });
  each([&](int i) { y[i] = vfma(y[i], x[i], vset(1.6666665459e-1f)); });
  each([&](int i) { y[i] = vfma(y[i], x[i], vset(5.0000001201e-1f)); });
  each([&](int i) { y[i] = vadd(vfma(y[i], vmul(x[i], x[i]), x[i]), vset(1.0f)); });
  each([&](int i) { x[i] = vmul(y[i], vpow2(n[i])); });
}

inline vf vexp(vf x) {
  vf one[1] = {x};
  exp_of(one);
  return one[0];
}

inline vf vsilu(vf x) { return vdiv(x, vadd(vset(1.0f), vexp(vsub(vzero(), x)))); }

inline vf load_partial(const float* p, int count) {
  if (count >= 16) return vload(p);
  float buffer[16] = {};
  for (int i = 0; i < count; ++i) buffer[i] = p[i];
  return vload(buffer);
}

inline void store_partial(float* p, vf x, int count) {
  if (count >= 16) {
    vstore(p, x);
    return;
  }
  float buffer[16];
  vstore(buffer, x);
  for (int i = 0; i < count; ++i) p[i] = buffer[i];
}

// ---------------------------------------------------------------- matrices

// R rows of one panel, `sums` [R][32], through the epilogue.
template <int R>
inline void finish(const Gemm& g, int panel, int row, const float* sums) {
  const int column = panel * kPanel;
  vf scale[2] = {vzero(), vzero()};
  if (g.w->scales) {
    scale[0] = vload(g.w->scales + column);
    scale[1] = vload(g.w->scales + column + 16);
  }
  for (int r = 0; r < R; ++r) {
    vf a = vload(sums + r * kPanel), b = vload(sums + r * kPanel + 16);
    if (g.w->scales) {
      a = vmul(a, scale[0]);
      b = vmul(b, scale[1]);
    }
    if (g.epilogue == kSilu) {
      const vf y = vmul(vsilu(a), b);
      uint8_t* line = g.activation + (row + r) * g.activation_stride;
      if (g.activation_dtype == kFloat32) {
        vstore(reinterpret_cast<float*>(line) + panel * 16, y);
      } else {
        store_bfloat16_input(line, panel * 16, y);
      }
      continue;
    }
    float* out = g.out + (row + r) * g.out_stride + column;
    const int left = g.w->n - column;
    if (left >= kPanel) {
      if (g.epilogue == kAdd) {
        a = vadd(vload(out), a);
        b = vadd(vload(out + 16), b);
      }
      vstore(out, a);
      vstore(out + 16, b);
      continue;
    }
    const int first = left < 16 ? left : 16;
    if (g.epilogue == kAdd) a = vadd(load_partial(out, first), a);
    store_partial(out, a, first);
    if (left > 16) {
      if (g.epilogue == kAdd) b = vadd(load_partial(out + 16, left - 16), b);
      store_partial(out + 16, b, left - 16);
    }
  }
}

// Memory to fetch while a tile computes: `lines` cache lines for every chunk of 16 steps.
struct Ahead {
  const uint8_t* at;
  const uint8_t* end;
  int lines;
};

inline void fetch(Ahead& ahead) {
  for (int i = 0; i < ahead.lines && ahead.at < ahead.end; ++i, ahead.at += 64) prefetch(ahead.at);
}

// One step of 16 H outputs for R rows.
template <Dtype D, int H, int R>
inline void step_rows(vf (&acc)[R][H], const uint8_t* w, const uint8_t* x, int64_t stride) {
  if constexpr (D == kBfloat16 && kWideBfloat16) {
#pragma GCC unroll 2
    for (int part = 0; part < 2; ++part) {  // all first inputs of the pairs, then all second ones
      vf line[H];
#pragma GCC unroll 2
      for (int h = 0; h < H; ++h) load_first_or_second(line[h], w + 64 * h, part);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        float value;
        __builtin_memcpy(&value, x + r * stride + 4 * part, 4);
        const vf all = vset(value);
#pragma GCC unroll 2
        for (int h = 0; h < H; ++h) acc[r][h] = vfma(line[h], all, acc[r][h]);
      }
    }
  } else {
    vw line[H];
#pragma GCC unroll 2
    for (int h = 0; h < H; ++h) line[h] = wload(w + 64 * h);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
      for (int h = 0; h < H; ++h) {
        if constexpr (D == kFloat32) {
          acc[r][h] = step_fp32(acc[r][h], line[h], x + r * stride);
        } else {
          acc[r][h] = step_bf16(acc[r][h], line[h], x + r * stride);
        }
      }
    }
  }
}

// R rows against 16 H outputs of one panel; every accumulator walks the inputs in ascending order, whatever R and H are.
// `own` fetches the panel itself some way ahead, for panels that nobody fetched before.
template <Dtype D, int H, int R>
void tile(const Gemm& g, int panel, int half, int row, bool own, Ahead ahead, float* sums) {
  const uint8_t* w = g.w->data + panel * g.w->panel_bytes + 64 * half;
  const uint8_t* x = g.x + row * g.x_stride;
  const int64_t stride = g.x_stride;
  const int chunks = g.w->k_pad / inputs_per_step(D) / kChunkSteps;
  vf acc[R][H];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
    for (int h = 0; h < H; ++h) acc[r][h] = vzero();
  }
  if constexpr (D == kInt8) {
    const uint8_t* meta = x + g.w->k_pad;
    for (int chunk = 0; chunk < chunks; ++chunk) {  // one group of activations
      fetch(ahead);
      vi sum[R][H];
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        int32_t start = 0;
        if (kOffsetInt8) __builtin_memcpy(&start, meta + r * stride + chunk * 8 + 4, 4);
#pragma GCC unroll 2
        for (int h = 0; h < H; ++h) sum[r][h] = iset(start);
      }
      for (int s = 0; s < kChunkSteps; ++s) {
        vw line[H];
#pragma GCC unroll 2
        for (int h = 0; h < H; ++h) line[h] = wload(w + 64 * h);
        if (own && (R > 1 || kPrefetchAlone)) {
          prefetch(w + kPrefetchBytesInt8);
          prefetch(w + kPrefetchBytesInt8 + 64);
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
          for (int h = 0; h < H; ++h) sum[r][h] = step_int8<R == 1>(sum[r][h], line[h], x + r * stride);
        }
        w += kStepBytes;
        x += 4;
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        float scale;
        __builtin_memcpy(&scale, meta + r * stride + chunk * 8, 4);
#pragma GCC unroll 2
        for (int h = 0; h < H; ++h) acc[r][h] = vfma(vfrom_int(sum[r][h]), vset(scale), acc[r][h]);
      }
    }
  } else {
    constexpr int x_step = D == kBfloat16 && kWideBfloat16 ? 8 : 4;
    const auto step = [&] {
      if (own) {
        prefetch(w + kPrefetchBytes);
        prefetch(w + kPrefetchBytes + 64);
      }
      step_rows<D, H, R>(acc, w, x, stride);
      w += kStepBytes;
      x += x_step;
    };
    for (int chunk = 0; chunk < chunks; ++chunk) {
      fetch(ahead);
      if constexpr (D == kBfloat16 && kWideBfloat16) {  // two steps at once would not fit the registers
#pragma GCC unroll 1
        for (int s = 0; s < kChunkSteps; ++s) step();
      } else {
#pragma GCC unroll 2
        for (int s = 0; s < kChunkSteps; ++s) step();
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
    for (int h = 0; h < H; ++h) vstore(sums + r * kPanel + 16 * (half + h), acc[r][h]);
  }
}

// `rows` <= R rows of one panel: both halves at once, or one after the other where that leaves registers for more rows.
template <Dtype D, int R>
inline void tile_of(const Gemm& g, int panel, int row, int rows, bool own, Ahead ahead) {
  if constexpr (R > 1) {
    if (rows < R) return tile_of<D, R - 1>(g, panel, row, rows, own, ahead);
  }
  alignas(64) float sums[R * kPanel];
  if constexpr (R <= kRowBlock) {
    tile<D, 2, R>(g, panel, 0, row, own, ahead, sums);
  } else {
    Ahead second = ahead;
    ahead.lines = (ahead.lines + 1) / 2;
    second.lines = ahead.lines;
    second.at += int64_t{64} * ahead.lines * (g.w->k_pad / inputs_per_step(D) / kChunkSteps);
    tile<D, 1, R>(g, panel, 0, row, own, ahead, sums);
    tile<D, 1, R>(g, panel, 1, row, false, second, sums);
  }
  finish<R>(g, panel, row, sums);
}

// Where block b of `rows` rows starts: blocks of nearly equal height, or whole ones with two rows or more in the last.
inline int first_row(int rows, int b, int blocks, int most) {
  if (!kWholeBlocks || b == 0 || b == blocks) return static_cast<int>(static_cast<int64_t>(rows) * b / blocks);
  return b * most - (b == blocks - 1 && rows - b * most == 1);
}

// Few rows wait for memory, so each panel is fetched a little ahead of its own use. Many rows compute, so the next panel
// is fetched in even portions meanwhile.
template <Dtype D>
void gemm_of(const Gemm& g, int begin, int end) {
  constexpr int most = D == kInt8 ? kRowBlockInt8 : kRowBlockHalf;
  const int blocks = (g.rows + most - 1) / most;
  const bool few = g.rows <= kRowBlock;
  const int lines = (2 * kChunkSteps + blocks - 1) / blocks;
  const int64_t block_bytes = int64_t{64} * lines * (g.w->k_pad / inputs_per_step(D) / kChunkSteps);
  for (int panel = begin; panel < end; ++panel) {
    const uint8_t* next = g.w->data + (panel + 1) * g.w->panel_bytes;
    const bool ahead = !few && panel + 1 < end;
    for (int b = 0; b < blocks; ++b) {
      const int row = first_row(g.rows, b, blocks, most), last = first_row(g.rows, b + 1, blocks, most);
      const uint8_t* from = next + block_bytes * b;
      tile_of<D, most>(g, panel, row, last - row, few || (b == 0 && panel == begin),
                       {from, ahead ? next + g.w->panel_bytes : from, lines});
    }
  }
}

void gemm(const Gemm& g, int begin, int end) {
  switch (g.w->dtype) {
    case kFloat32: return gemm_of<kFloat32>(g, begin, end);
    case kBfloat16: return gemm_of<kBfloat16>(g, begin, end);
    case kInt8: return gemm_of<kInt8>(g, begin, end);
  }
}

// ---------------------------------------------------------------- rows

inline float inverse_rms(const float* x, float eps, int n) {
  vf sum = vzero();
  int i = 0;
  for (; i + 16 <= n; i += 16) {
    const vf v = vload(x + i);
    sum = vfma(v, v, sum);
  }
  if (i < n) {
    const vf v = load_partial(x + i, n - i);
    sum = vfma(v, v, sum);
  }
  return 1.0f / __builtin_sqrtf(vlane_sum(sum) / static_cast<float>(n) + eps);
}

inline vf scaled(const float* x, const float* norm, float scale, int left) {
  const vf v = load_partial(x, left);
  return norm ? vmul(vmul(v, vset(scale)), load_partial(norm, left)) : v;
}

void quantise_row(const float* x, const float* norm, float scale, int k, int k_pad, uint8_t* out) {
  uint8_t* meta = out + k_pad;
  for (int g = 0; g < k_pad; g += kGroup, meta += 8) {
    vf v[kGroup / 16];
    vf peak = vzero(), poison = vzero();
    for (int i = 0; i < kGroup / 16; ++i) {
      const int left = k - (g + i * 16);
      v[i] = left > 0 ? scaled(x + g + i * 16, norm ? norm + g + i * 16 : norm, scale, left) : vzero();
      peak = vmax(peak, vabs(v[i]));
      poison = vfma(v[i], vzero(), poison);  // NaN once a value is NaN or infinite
    }
    const float top = vlane_max(peak);
    const float bad = vlane_sum(poison);
    const float step_size = top / 127.0f;
    const float inverse = top > 0.0f && bad == 0.0f ? 127.0f / top : 0.0f;
    int8_t* q = reinterpret_cast<int8_t*>(out + g);
    for (int i = 0; i < kGroup / 16; ++i) vstore_int8(q + i * 16, vround(vmul(v[i], vset(inverse))));
    int32_t sum = 0;
    for (int i = 0; i < kGroup; ++i) sum += q[i];
    const float value = bad == 0.0f ? step_size : __builtin_nanf("");
    const int32_t correction = -128 * sum;
    __builtin_memcpy(meta, &value, 4);
    __builtin_memcpy(meta + 4, &correction, 4);
  }
}

void prepare_row(const float* x, const float* norm, float eps, int k, int k_pad, Dtype dtype, uint8_t* out) {
  const float scale = norm ? inverse_rms(x, eps, k) : 1.0f;
  if (dtype == kInt8) return quantise_row(x, norm, scale, k, k_pad, out);
  for (int i = 0; i < k_pad; i += 16) {
    const vf v = i < k ? scaled(x + i, norm ? norm + i : norm, scale, k - i) : vzero();
    if (dtype == kFloat32) {
      vstore(reinterpret_cast<float*>(out) + i, v);
    } else {
      store_bfloat16_input(out, i, v);
    }
  }
}

void norm_row(float* x, const float* norm, float eps, int n) {
  const float scale = inverse_rms(x, eps, n);
  for (int i = 0; i < n; i += 16) store_partial(x + i, scaled(x + i, norm + i, scale, n - i), n - i);
}

float dot(const float* x, const float* y, int n) {
  vf sum = vzero();
  for (int i = 0; i < n; i += 16) sum = vfma(load_partial(x + i, n - i), load_partial(y + i, n - i), sum);
  return vlane_sum(sum);
}

uint32_t read(const uint8_t* x, int64_t bytes) {
  vw all[4] = {wload(x), wload(x), wload(x), wload(x)};
  for (int64_t i = 0; i < bytes; i += 256) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      prefetch(x + i + 64 * j + kPrefetchBytes);
      all[j] = wxor(all[j], wload(x + i + 64 * j));
    }
  }
  return wfold(wxor(wxor(all[0], all[1]), wxor(all[2], all[3])));
}

inline void rotate(float* x, const float* cos, const float* sin, int half) {
  for (int i = 0; i < half; ++i) {
    const float a = x[i], b = x[i + half];
    x[i] = a * cos[i] - b * sin[i];
    x[i + half] = b * cos[i] + a * sin[i];
  }
}

inline uint16_t narrow(float x) {
  float lane[16] = {x};
  uint16_t out[16];
  vstore_bf16(out, vload(lane));
  return out[0];
}

void heads(const RowHeads& r) {
  const CacheLayer& c = r.cache;
  const int dim = c.head_dim, half = dim / 2;
  const int group = r.heads / c.kv_heads;
  if (r.with_queries) {
    for (int h = r.begin * group; h < r.end * group; ++h) {
      float* q = r.qkv + static_cast<int64_t>(h) * dim;
      if (r.q_norm) norm_row(q, r.q_norm, r.eps, dim);
      rotate(q, r.cos, r.sin, half);
      for (int i = 0; i < dim; ++i) q[i] *= r.q_scale;
    }
  }
  for (int h = r.begin; h < r.end; ++h) {
    float* k = r.qkv + static_cast<int64_t>(r.heads + h) * dim;
    const float* v = r.qkv + static_cast<int64_t>(r.heads + c.kv_heads + h) * dim;
    if (r.k_norm) norm_row(k, r.k_norm, r.eps, dim);
    rotate(k, r.cos, r.sin, half);
    const int64_t key = c.key_block(r.slot, h) + r.slot % 16, value = c.value_row(r.slot, h);
    if (c.dtype == kFloat32) {
      float* keys = reinterpret_cast<float*>(c.keys) + key;
      float* values = reinterpret_cast<float*>(c.values) + value;
      for (int i = 0; i < dim; ++i) keys[i * 16] = k[i];
      for (int i = 0; i < dim; ++i) values[i] = v[i];
    } else {
      uint16_t* keys = reinterpret_cast<uint16_t*>(c.keys) + key;
      uint16_t* values = reinterpret_cast<uint16_t*>(c.values) + value;
      uint16_t line[16];
      for (int i = 0; i < dim; i += 16) {
        vstore_bf16(line, load_partial(k + i, dim - i));
        for (int j = 0; j < 16 && i + j < dim; ++j) keys[(i + j) * 16] = line[j];
        vstore_bf16(line, load_partial(v + i, dim - i));
        for (int j = 0; j < 16 && i + j < dim; ++j) values[i + j] = line[j];
      }
    }
  }
}

void argmax(const float* x, int n, int32_t* index, uint8_t* finite) {
  vf best = vset(-kInfinity), poison = vzero();
  int i = 0;
  for (; i + 16 <= n; i += 16) {
    const vf v = vload(x + i);
    best = vmax(v, best);
    poison = vfma(v, vzero(), poison);
  }
  float top = vlane_max(best);
  float bad = vlane_sum(poison);
  for (; i < n; ++i) {
    top = x[i] > top ? x[i] : top;
    bad += x[i] * 0.0f;
  }
  int32_t at = 0;
  while (at < n && x[at] != top) ++at;
  *index = at < n ? at : 0;
  *finite = bad == 0.0f;
}

// ---------------------------------------------------------------- attention

template <class E>
inline vf load_element(const E* p);
template <>
inline vf load_element<float>(const float* p) {
  return vload(p);
}
template <>
inline vf load_element<uint16_t>(const uint16_t* p) {
  return vload_bf16(p);
}

// One query head of one row.
struct Query {
  const float* q;  // [head_dim]
  int32_t end;
  float* scores;  // [kChunk], later its weights
  float* partial;
};

// Blocks of sixteen keys, or vectors of a value, that H queries meet at once: their sums and the fewer of both kinds, which
// wait for the others one by one, stay in registers. Smaller blocks of a chunk gained nothing, since one tile's keys come
// from the second cache while it computes.
constexpr bool fits(int H, int U) { return H * U + (H < U ? H : U) <= kAttendRegisters; }
constexpr int breadth(int H) { return fits(H, 4) ? 4 : fits(H, 2) ? 2 : 1; }

// What the tiles of a call fetch ahead they share, so that no one of them waits for memory: every `step`-th line from
// line `first` on, none where that is negative.
struct Share {
  int first, step;
};

// Call f(size, first, share) for tiles of 1 to kAttendTile queries whose sizes differ by at most 1; `size` is a constant.
template <int N>
struct Constant {
  static constexpr int value = N;
};
template <int H, class F>
inline void sized(int size, int first, Share share, const F& f) {
  if constexpr (H > 0) {
    if (size == H) return f(Constant<H>{}, first, share);
    sized<H - 1>(size, first, share, f);
  }
}
template <class F>
inline void tiles_of(int num_queries, const F& f) {
  const int tiles = (num_queries + kAttendTile - 1) / kAttendTile;
  for (int i = 0, first = 0, size; i < tiles; ++i, first += size) {
    size = (num_queries - first + tiles - i - 1) / (tiles - i);
    sized<kAttendTile>(size, first, Share{i, tiles}, f);
  }
}

// `count` keys as [dim][16]: in place when their slots are one aligned block, otherwise copied together.
template <class E>
inline const E* key_block(const Attention& a, const int32_t* slots, int count, E* staging) {
  const E* keys = reinterpret_cast<const E*>(a.cache.keys);
  bool together = slots[0] % 16 == 0;
  for (int j = 1; j < count; ++j) together &= slots[j] == slots[0] + j;
  if (together) return keys + a.cache.key_block(slots[0], a.kv_head);
  for (int j = 0; j < 16; ++j) {
    const int slot = slots[j < count ? j : 0];
    const E* from = keys + a.cache.key_block(slot, a.kv_head) + slot % 16;
    for (int d = 0; d < a.cache.head_dim; ++d) staging[d * 16 + j] = from[d * 16];
  }
  return staging;
}

// The part of the next keys that is as long as one of them: the j-th sixteenth of every block of sixteen.
template <class E>
inline void fetch_next_key(const Attention& a, int j) {
  const int dim = a.cache.head_dim;
  const E* keys = reinterpret_cast<const E*>(a.cache.keys) + a.cache.key_block(a.next[j / 16 * 16], a.next_head);
  for (int i = 0; i < dim; i += 64 / static_cast<int>(sizeof(E))) prefetch(keys + j % 16 * dim + i);
}

// Scores of U blocks of sixteen keys for H queries; a share of their values is fetched meanwhile.
template <class E, int H, int U>
inline void scores_of(int dim, const Query* queries, const E* const* blocks, const E* const* values, Share share,
                      int first) {
  constexpr int line = 4 / static_cast<int>(sizeof(E));  // steps that read a cache line of every block
  int due = share.first * line;
  const E* keys[U];
  for (int u = 0; u < U; ++u) keys[u] = blocks[u];
  const float* q[H];
  for (int h = 0; h < H; ++h) q[h] = queries[h].q;
  vf acc[U][H];
#pragma GCC unroll 16
  for (int u = 0; u < U; ++u) {
#pragma GCC unroll 16
    for (int h = 0; h < H; ++h) acc[u][h] = vzero();
  }
  for (int d = 0; d < dim; ++d) {
    if (d == due) {
      for (int u = 0; u < U; ++u) prefetch(values[u] + d * 16);
      due += share.step * line;
    }
    if constexpr (H < U) {  // what there are fewer of is kept for a step
      vf x[H];
#pragma GCC unroll 16
      for (int h = 0; h < H; ++h) x[h] = vset(q[h][d]);
#pragma GCC unroll 16
      for (int u = 0; u < U; ++u) {
        const vf k = load_element<E>(keys[u] + d * 16);
#pragma GCC unroll 16
        for (int h = 0; h < H; ++h) acc[u][h] = vfma(k, x[h], acc[u][h]);
      }
    } else {
      vf k[U];
#pragma GCC unroll 16
      for (int u = 0; u < U; ++u) k[u] = load_element<E>(keys[u] + d * 16);
#pragma GCC unroll 16
      for (int h = 0; h < H; ++h) {
        const vf x = vset(q[h][d]);
#pragma GCC unroll 16
        for (int u = 0; u < U; ++u) acc[u][h] = vfma(k[u], x, acc[u][h]);
      }
    }
  }
  for (int u = 0; u < U; ++u) {
    for (int h = 0; h < H; ++h) vstore(queries[h].scores + first + 16 * u, acc[u][h]);
  }
}

// Scores of keys [begin, end) for all queries; begin is a multiple of 16.
template <class E>
void all_scores(const Attention& a, const Query* queries, int num_queries, const int32_t* slots, int begin, int end) {
  const int dim = a.cache.head_dim;
  const E *keys[kChunk / 16], *values[kChunk / 16];
  int blocks = 0;
  for (int first = begin; first < end; first += 16, ++blocks) {
    values[blocks] = reinterpret_cast<const E*>(a.cache.values) + a.cache.value_row(slots[first], a.kv_head);
    keys[blocks] = key_block<E>(a, slots + first, end - first < 16 ? end - first : 16,
                                reinterpret_cast<E*>(a.staging) + blocks * a.cache.head_dim_pad * 16);
  }
  tiles_of(num_queries, [&](auto size, int tile, Share share) {
    constexpr int H = decltype(size)::value, U = breadth(H);
    int u = 0;
    for (; u + U <= blocks; u += U) {
      scores_of<E, H, U>(dim, queries + tile, keys + u, values + u, share, begin + 16 * u);
    }
    for (; u < blocks; ++u) scores_of<E, H, 1>(dim, queries + tile, keys + u, values + u, share, begin + 16 * u);
  });
}

// The scores of one query become weights: e^(score - maximum).
inline void weigh(const Query& query, int begin) {
  float* line = query.scores;
  const int first = begin / 16 * 16, end = query.end;
  const auto seen = [&](vf x, float other, int j) {
    return vselect_range(x, vset(other), begin > j ? begin - j : 0, end - j < 16 ? end - j : 16);
  };
  vf top = vset(-kInfinity);
  for (int j = first; j < end; j += 16) top = vmax(seen(vload(line + j), -kInfinity, j), top);
  const float maximum = vlane_max(top);
  vf sum = vzero();
  for (int j = first; j < end;) {
    if (begin <= j && j + 16 * kExpTogether <= end) {
      vf p[kExpTogether];
      for (vf& x : p) {
        x = vsub(vload(line + j), vset(maximum));
        j += 16;
      }
      exp_of(p);
      j -= 16 * kExpTogether;
      for (const vf& x : p) {
        vstore(line + j, x);
        sum = vadd(sum, x);
        j += 16;
      }
    } else {
      const vf p = seen(vexp(vsub(vload(line + j), vset(maximum))), 0.0f, j);
      vstore(line + j, p);
      sum = vadd(sum, p);
      j += 16;
    }
  }
  query.partial[0] = maximum;
  query.partial[1] = vlane_sum(sum);
}

// Weighted sum of columns [column, column + 16 C) of the values of keys [begin, end), on top of what is there unless
// these are the first.
template <class E, int H, int C>
inline void values_of(const Attention& a, const Query* queries, const int32_t* slots, int column, int begin, int end,
                      Share share) {
  int due = share.first < 0 ? -1 : begin + share.first;
  const E* values = reinterpret_cast<const E*>(a.cache.values);
  const float* weights[H];
  for (int h = 0; h < H; ++h) weights[h] = queries[h].scores;
  vf acc[H][C];
#pragma GCC unroll 16
  for (int h = 0; h < H; ++h) {
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) {
      acc[h][c] = begin == a.begin ? vzero() : vload(queries[h].partial + 2 + column + 16 * c);
    }
  }
  for (int j = begin; j < end; ++j) {
    const E* v = values + a.cache.value_row(slots[j], a.kv_head) + column;
    if (j == due) {
      if (j - begin < a.num_next) fetch_next_key<E>(a, j - begin);
      due += share.step;
    }
    vf line[C];
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) line[c] = load_element<E>(v + 16 * c);
#pragma GCC unroll 16
    for (int h = 0; h < H; ++h) {
      const vf p = vset(weights[h][j]);
#pragma GCC unroll 16
      for (int c = 0; c < C; ++c) acc[h][c] = vfma(p, line[c], acc[h][c]);
    }
  }
  for (int h = 0; h < H; ++h) {
    for (int c = 0; c < C; ++c) vstore(queries[h].partial + 2 + column + 16 * c, acc[h][c]);
  }
}

// The values of keys [begin, end) for all queries.
template <class E>
void all_values(const Attention& a, const Query* queries, int num_queries, const int32_t* slots, int begin, int end) {
  const int pad = a.cache.head_dim_pad;
  if (begin >= end) return;
  tiles_of(num_queries, [&](auto size, int tile, Share share) {
    constexpr int H = decltype(size)::value, C = breadth(H);
    if (begin > a.begin) share.first = -1;  // done with the first keys
    int column = 0;
    for (; column + 16 * C <= pad; column += 16 * C, share.first = -1) {
      values_of<E, H, C>(a, queries + tile, slots, column, begin, end, share);
    }
    for (; column < pad; column += 16, share.first = -1) {
      values_of<E, H, 1>(a, queries + tile, slots, column, begin, end, share);
    }
  });
}

// Keys that all rows list alike are read for all of them; behind these every row goes on by itself. No row's weights,
// not even those of 0, ever meet a value that the row does not see: it may be no number.
template <class E>
void attend_of(const Attention& a) {
  alignas(64) float scores[kAttendQueries][kChunk];
  Query queries[kAttendQueries];
  const int group = a.group, num_queries = a.num_rows * group;
  int least = kChunk, most = 0;
  for (int i = 0; i < num_queries; ++i) {
    const AttentionRow& row = a.rows[i / group];
    const int h = i % group;
    queries[i] = {row.q + static_cast<int64_t>(h) * a.cache.head_dim, row.end, scores[i],
                  row.partial + static_cast<int64_t>(h) * (2 + a.cache.head_dim_pad)};
    least = row.end < least ? row.end : least;
    most = row.end > most ? row.end : most;
  }
  const int first = a.begin / 16 * 16;
  int scored = a.alike < most ? a.alike / 16 * 16 : most;  // a block is one list of slots
  scored = scored > first ? scored : first;
  int summed = a.alike < least ? a.alike : least;
  summed = summed > a.begin ? summed : a.begin;
  const int32_t* longest = a.rows[0].slots;
  for (int r = 1; r < a.num_rows; ++r) longest = a.rows[r].end == most ? a.rows[r].slots : longest;
  all_scores<E>(a, queries, num_queries, longest, first, scored);
  for (int r = 0; r < a.num_rows; ++r) {
    all_scores<E>(a, queries + r * group, group, a.rows[r].slots, scored, a.rows[r].end);
  }
  for (int i = 0; i < num_queries; ++i) weigh(queries[i], a.begin);
  all_values<E>(a, queries, num_queries, longest, a.begin, summed);
  for (int r = 0; r < a.num_rows; ++r) {
    all_values<E>(a, queries + r * group, group, a.rows[r].slots, summed, a.rows[r].end);
  }
}

int top(float* x, const float* base, int n, int most, float* values, int32_t* indices, float* log_sum) {
  constexpr int kBlock = 64;
  vf poison = vzero();
  int found = 0;
  for (int start = 0; start < n; start += kBlock) {
    const int count = n - start < kBlock ? n - start : kBlock;
    float* line = x + start;
    float high = -kInfinity;
    if (count == kBlock) {
      vf best = vset(-kInfinity);
      for (int j = 0; j < kBlock; j += 16) {
        const vf v = base ? vadd(vload(line + j), vload(base + start + j)) : vload(line + j);
        vstore(line + j, v);
        best = vmax(v, best);
        poison = vfma(v, vzero(), poison);
      }
      high = vlane_max(best);
    } else {
      float bad = 0.0f;
      for (int j = 0; j < count; ++j) {
        if (base) line[j] += base[start + j];
        high = line[j] > high ? line[j] : high;
        bad += line[j] * 0.0f;
      }
      poison = vadd(poison, vset(bad));
    }
    if (found == most && !(high > values[most - 1])) continue;
    for (int j = 0; j < count; ++j) {
      if (found == most && !(line[j] > values[most - 1])) continue;
      int place = found < most ? found++ : most - 1;
      for (; place > 0 && line[j] > values[place - 1]; --place) {
        values[place] = values[place - 1];
        indices[place] = indices[place - 1];
      }
      values[place] = line[j];
      indices[place] = start + j;
    }
  }
  if (!(vlane_sum(poison) == 0.0f)) return 0;
  const vf largest = vset(values[0]);
  vf sum = vzero();
  int i = 0;
  for (; i + 16 <= n; i += 16) sum = vadd(sum, vexp(vsub(vload(x + i), largest)));
  if (i < n) sum = vadd(sum, vselect_range(vexp(vsub(load_partial(x + i, n - i), largest)), vzero(), 0, n - i));
  *log_sum = values[0] + __builtin_logf(vlane_sum(sum));
  return found;
}

void attend(const Attention& a) {
  if (a.group > kAttendQueries) {  // of one row
    const int size = 2 + a.cache.head_dim_pad;
    for (int h = 0; h < a.group; h += kAttendQueries) {
      const int left = a.group - h;
      AttentionRow row = a.rows[0];
      row.q += static_cast<int64_t>(h) * a.cache.head_dim;
      row.partial += static_cast<int64_t>(h) * size;
      Attention some = a;
      some.rows = &row;
      some.group = left < kAttendQueries ? left : kAttendQueries;
      attend(some);
    }
  } else if (a.cache.dtype == kFloat32) {
    attend_of<float>(a);
  } else {
    attend_of<uint16_t>(a);
  }
}

// ---------------------------------------------------------------- drawing

// Loops below are long enough that compilers turn them into vector code rather than unroll them.
constexpr int kWideBlock = 128;

// e^x of x <= 0 in double precision, within 2 ulp; that of -708 below it, which no draw can meet.
inline void exp_wide(const float* x, double* out) {
  float low[kWideBlock];
  for (int i = 0; i < kWideBlock; i += 16) vstore(low + i, vmax(vload(x + i), vset(-708.0f)));
  double shifted[kWideBlock];
  uint64_t bits[kWideBlock];
  for (int i = 0; i < kWideBlock; ++i) {
    const double v = low[i];
    shifted[i] = v * 1.4426950408889634 + 6755399441055744.0;  // rounds to a whole number in the low bits
    const double whole = shifted[i] - 6755399441055744.0;
    const double r = (v - whole * 0.693147180369123816490) - whole * 1.90821492927058770002e-10;
    double p = 1.0 / 6227020800.0;
    p = p * r + 1.0 / 479001600.0;
    p = p * r + 1.0 / 39916800.0;
    p = p * r + 1.0 / 3628800.0;
    p = p * r + 1.0 / 362880.0;
    p = p * r + 1.0 / 40320.0;
    p = p * r + 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    p = p * r + 1.0;
    out[i] = p * r + 1.0;
  }
  __builtin_memcpy(bits, shifted, sizeof bits);
  for (int i = 0; i < kWideBlock; ++i) bits[i] = (bits[i] + 1023) << 52;
  __builtin_memcpy(shifted, bits, sizeof bits);
  for (int i = 0; i < kWideBlock; ++i) out[i] *= shifted[i];
}

double soft(const float* x, int n, float top, float scale, float* scaled, double* weights) {
  double lanes[kWideBlock] = {};
  int i = 0;
  for (; i + kWideBlock <= n; i += kWideBlock) {
    for (int l = 0; l < kWideBlock; ++l) scaled[i + l] = (x[i + l] - top) * scale;
    exp_wide(scaled + i, weights + i);
    for (int l = 0; l < kWideBlock; ++l) lanes[l] += weights[i + l];
  }
  if (i < n) {
    float rest[kWideBlock] = {};
    double out[kWideBlock];
    for (int l = 0; i + l < n; ++l) rest[l] = scaled[i + l] = (x[i + l] - top) * scale;
    exp_wide(rest, out);
    for (int l = 0; i + l < n; ++l) lanes[l] += weights[i + l] = out[l];
  }
  double sum = 0.0;
  for (int l = 0; l < kWideBlock; ++l) sum += lanes[l];
  return sum;
}

void philox_bytes(uint64_t seed, uint32_t position, uint32_t purpose, int num_counters, uint8_t* out) {
  for (int first = 0; first < num_counters; first += kWideBlock) {
    uint32_t c0[kWideBlock], c1[kWideBlock], c2[kWideBlock], c3[kWideBlock];
    for (int l = 0; l < kWideBlock; ++l) {
      c0[l] = static_cast<uint32_t>(first + l);
      c1[l] = position;
      c2[l] = purpose;
      c3[l] = 0;
    }
    uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
      for (int l = 0; l < kWideBlock; ++l) {
        const uint64_t a = uint64_t{0xD2511F53u} * c0[l], b = uint64_t{0xCD9E8D57u} * c2[l];
        c0[l] = static_cast<uint32_t>(b >> 32) ^ c1[l] ^ k0;
        c1[l] = static_cast<uint32_t>(b);
        c2[l] = static_cast<uint32_t>(a >> 32) ^ c3[l] ^ k1;
        c3[l] = static_cast<uint32_t>(a);
      }
    }
    const int count = num_counters - first < kWideBlock ? num_counters - first : kWideBlock;
    for (int l = 0; l < count; ++l) {
      const uint32_t words[4] = {c0[l], c1[l], c2[l], c3[l]};
      __builtin_memcpy(out + int64_t{first + l} * 16, words, 16);
    }
  }
}

void combine(float* partial, int chunks, int64_t stride, int group, int head_dim, int head_dim_pad, float* out) {
  for (int h = 0; h < group; ++h) {
    float* first = partial + static_cast<int64_t>(h) * (2 + head_dim_pad);
    float maximum = -kInfinity;
    for (int c = 0; c < chunks; ++c) {
      const float m = first[c * stride];
      maximum = m > maximum || m != m ? m : maximum;
    }
    float total = 0.0f;
    for (int from = 0; from < chunks; from += 16) {
      const int count = chunks - from < 16 ? chunks - from : 16;
      float weight[16] = {};
      for (int i = 0; i < count; ++i) weight[i] = first[(from + i) * stride] - maximum;
      vstore(weight, vexp(vload(weight)));
      for (int i = 0; i < count; ++i) {
        float* chunk = first + (from + i) * stride;
        chunk[0] = weight[i];
        total += weight[i] * chunk[1];
      }
    }
    for (int column = 0; column < head_dim; column += 16) {
      vf sum = vzero();
      for (int c = 0; c < chunks; ++c) {
        sum = vfma(vset(first[c * stride]), vload(first + c * stride + 2 + column), sum);
      }
      store_partial(out + static_cast<int64_t>(h) * head_dim + column, vdiv(sum, vset(total)), head_dim - column);
    }
  }
}

}  // namespace

namespace dspark {
const Kernels DSPARK_KERNELS = {DSPARK_NAME, kWideBfloat16, gemm, prepare_row, heads, attend, combine, argmax, top, norm_row, dot, soft, philox_bytes, read};
}  // namespace dspark
