// The seam between the pass (baseline instructions) and its kernels (compiled once per instruction set).
//
// The law that every kernel keeps: the value of an output row is a fixed sequence of operations on that row's inputs. It
// depends neither on the other rows of the call nor on how rows, panels, pages or threads are cut.
#pragma once
#include <cstdint>

namespace dspark {

enum Dtype : int32_t { kFloat32 = 0, kBfloat16 = 1, kInt8 = 2 };
enum Epilogue : int32_t { kStore = 0, kAdd = 1, kSilu = 2 };

constexpr int kPanel = 32;        // outputs of one weight panel
constexpr int kStepBytes = 128;   // bytes of one panel step: 32 outputs x 4 bytes (1 float, 2 bf16 or 4 int8 inputs)
constexpr int kGroup = 64;        // int8: inputs that share one activation scale
constexpr int kChunk = 256;       // attention: keys of one softmax chunk, counted from position 0
constexpr int kAttendQueries = 24;  // query heads of all rows that attend together: 24 kB of scores, half a cache

constexpr int round_up(int x, int to) { return (x + to - 1) / to * to; }
constexpr int inputs_per_step(Dtype dtype) { return dtype == kFloat32 ? 1 : dtype == kBfloat16 ? 2 : 4; }

// A weight matrix [n, k] in panels: panel p holds outputs 32p..32p+31 as k_pad / inputs_per_step steps of 128 bytes.
struct Matrix {
  Dtype dtype;
  int32_t n;        // outputs
  int32_t k;        // inputs
  int32_t k_pad;    // inputs, padded with zeros
  int32_t panels;   // panels of 32 outputs
  int64_t panel_bytes;
  uint8_t* data;
  float* scales;    // int8: [panels * 32] scale of each output, otherwise null; bytes hold w / scale + 128
};

// out[t, :] = x[t, :] W^T for panels [begin, end), then the epilogue.
struct Gemm {
  const Matrix* w;
  const uint8_t* x;        // prepared rows
  int64_t x_stride;        // bytes
  int32_t rows;
  Epilogue epilogue;
  float* out;              // kStore, kAdd: [rows, n]
  int64_t out_stride;      // floats
  uint8_t* activation;     // kSilu: panels interleave 16 gate and 16 up outputs; 16 values of silu(gate) * up per panel
  int64_t activation_stride;  // bytes
  Dtype activation_dtype;  // kFloat32 or kBfloat16
};

// Keys are stored [slot / 16][kv_head][dim][16], values [slot / 16][kv_head][16][dim_pad]: what one head reads of sixteen
// slots lies together, and memory is read in long runs.
struct CacheLayer {
  uint8_t* keys;
  uint8_t* values;
  Dtype dtype;  // kFloat32 or kBfloat16
  int32_t kv_heads;
  int32_t head_dim;
  int32_t head_dim_pad;  // multiple of 16

  // Elements before the keys of a slot's block of sixteen, and before the slot's own values.
  int64_t key_block(int32_t slot, int32_t head) const {
    return (static_cast<int64_t>(slot / 16) * kv_heads + head) * head_dim * 16;
  }
  int64_t value_row(int32_t slot, int32_t head) const {
    return ((static_cast<int64_t>(slot / 16) * kv_heads + head) * 16 + slot % 16) * head_dim_pad;
  }
};

struct AttentionRow {
  const float* q;        // [group, head_dim], scaled
  const int32_t* slots;  // [end] slots of the chunk's keys
  int32_t end;           // begin + 1..kChunk
  float* partial;        // [group, 2 + head_dim_pad]: maximum, sum, weighted values
};

// Rows of one sequence, one key head, one chunk of keys.
struct Attention {
  CacheLayer cache;
  int32_t kv_head;
  int32_t group;  // query heads of this key head
  const AttentionRow* rows;
  int32_t num_rows;      // num_rows * group is at most kAttendQueries
  int32_t alike;         // the first keys, whose slots are those of every row that has so many
  int32_t begin;         // keys before it are outside the window of every row
  const int32_t* next;   // [num_next] slots whose keys of head next_head are wanted next, and are fetched ahead
  int32_t num_next;
  int32_t next_head;
  uint8_t* staging;      // kChunk * head_dim_pad floats
};

// Normalise, rotate and cache key heads [begin, end) of one row of the fused projection [heads + 2 * kv_heads,
// head_dim], and the query heads that belong to them.
struct RowHeads {
  float* qkv;
  int32_t heads;
  const float* q_norm;  // [head_dim] or null
  const float* k_norm;
  float eps;
  float q_scale;
  const float* cos;  // [head_dim / 2]
  const float* sin;
  CacheLayer cache;
  int32_t slot;
  bool with_queries;
  int32_t begin, end;
};

struct Kernels {
  const char* name;
  bool wide_bfloat16;  // inputs of bfloat16 matrices are kept as (rounded) floats
  // Bytes of one prepared input row: values, then for int8 one {float scale, int32 -128 * sum} per group.
  int64_t row_bytes(Dtype dtype, int k_pad) const {
    const int64_t value = dtype == kInt8 ? 1 : dtype == kBfloat16 && !wide_bfloat16 ? 2 : 4;
    const int64_t groups = dtype == kInt8 ? static_cast<int64_t>(k_pad / kGroup) * 8 : 0;
    return (k_pad * value + groups + 63) / 64 * 64;
  }
  void (*gemm)(const Gemm& g, int begin, int end);
  // Normalise (unless norm is null) and convert one row to the input form of a matrix.
  void (*prepare_row)(const float* x, const float* norm, float eps, int k, int k_pad, Dtype dtype, uint8_t* out);
  void (*heads)(const RowHeads& r);
  void (*attend)(const Attention& a);
  // Merge the partials of `chunks` chunks, `stride` floats apart, into out [group, head_dim]; chunks' weights replace
  // their maxima.
  void (*combine)(float* partial, int chunks, int64_t stride, int group, int head_dim, int head_dim_pad,
                  float* out);
  void (*argmax)(const float* x, int n, int32_t* index, uint8_t* finite);
  // Of x + base (x alone where base is null), which is left in x: the `most` largest values in falling order, the lowest
  // index first among equals, and the logarithm of the sum of all exponentials. Returns how many; 0 when one is not finite.
  int (*top)(float* x, const float* base, int n, int most, float* values, int32_t* indices, float* log_sum);
  // Normalise one row in place.
  void (*norm_row)(float* x, const float* norm, float eps, int n);
  float (*dot)(const float* x, const float* y, int n);
  // scaled = (x - top) * scale and weights = e^scaled of n entries (top is the largest x); returns their sum.
  double (*soft)(const float* x, int n, float top, float scale, float* scaled, double* weights);
  // Philox4x32-10 of counters (0..num_counters - 1, position, purpose, 0): 16 bytes each.
  void (*philox_bytes)(uint64_t seed, uint32_t position, uint32_t purpose, int num_counters, uint8_t* out);
  // Read bytes (a multiple of 256) at full speed; what is returned keeps the reads alive.
  uint32_t (*read)(const uint8_t* x, int64_t bytes);
};

extern const Kernels kernels_portable;
extern const Kernels kernels_avx2;
extern const Kernels kernels_avxvnni;
extern const Kernels kernels_avx512;

}  // namespace dspark
