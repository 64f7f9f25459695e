// Weight matrices: packing into panels, reading rows back, one product.
#include <cmath>
#include <cstring>

#include "dspark_native.h"
#include "isa.hpp"
#include "kernels.hpp"
#include "memory.hpp"
#include "pool.hpp"

namespace dspark {

uint16_t to_bfloat16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) return 0x7fc0;
  return static_cast<uint16_t>((bits + ((bits >> 16) & 1u) + 0x7fffu) >> 16);
}

float from_bfloat16(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float r;
  std::memcpy(&r, &bits, 4);
  return r;
}

namespace {

// Where output `row` of one kind lies among the panels.
int64_t place(int kind, int row) {
  if (kind == DSPARK_ROWS_PLAIN) return row;
  return static_cast<int64_t>(row / 16) * kPanel + (kind == DSPARK_ROWS_UP ? 16 : 0) + row % 16;
}

void pack_row(Matrix& m, const float* from, int64_t at) {
  uint8_t* lane = m.data + at / kPanel * m.panel_bytes + at % kPanel * 4;
  if (m.dtype == kFloat32) {
    for (int k = 0; k < m.k; ++k) std::memcpy(lane + static_cast<int64_t>(k) * kStepBytes, from + k, 4);
  } else if (m.dtype == kBfloat16) {
    for (int k = 0; k < m.k; ++k) {
      const uint16_t v = to_bfloat16(from[k]);
      std::memcpy(lane + static_cast<int64_t>(k / 2) * kStepBytes + k % 2 * 2, &v, 2);
    }
  } else {
    float top = 0.0f;
    bool finite = true;
    for (int k = 0; k < m.k; ++k) {
      top = std::fmax(top, std::fabs(from[k]));
      finite = finite && std::isfinite(from[k]);
    }
    // A row that holds NaN or infinity is NaN as a whole.
    m.scales[at] = finite ? top / 127.0f : NAN;
    const float inverse = finite && top > 0.0f ? 127.0f / top : 0.0f;
    for (int k = 0; k < m.k_pad; ++k) {
      const int q = finite && k < m.k ? static_cast<int>(std::nearbyintf(from[k] * inverse)) : 0;
      lane[static_cast<int64_t>(k / 4) * kStepBytes + k % 4] = static_cast<uint8_t>(q + 128);
    }
  }
}

struct PackJob {
  Matrix* matrix;
  const float* rows;
  int first_row, kind;
};

void pack_items(void* context, int, int begin, int end, int) {
  auto* job = static_cast<PackJob*>(context);
  for (int i = begin; i < end; ++i) {
    const float* from = job->rows + static_cast<int64_t>(i) * job->matrix->k;
    pack_row(*job->matrix, from, place(job->kind, job->first_row + i));
  }
}

struct RowsJob {
  const Matrix* matrix;
  const int32_t* rows;
  float* out;
};

void rows_items(void* context, int, int begin, int end, int) {
  auto* job = static_cast<RowsJob*>(context);
  for (int i = begin; i < end; ++i) matrix_row(*job->matrix, job->rows[i], job->out + int64_t{i} * job->matrix->k);
}

struct ApplyJob {
  const Kernels* kernels;
  const Matrix* matrix;
  const float* x;
  int rows;
  float* out;
  uint8_t* prepared;
  int64_t stride;
};

void apply_items(void* context, int phase, int begin, int end, int) {
  auto* job = static_cast<ApplyJob*>(context);
  const Matrix& m = *job->matrix;
  if (phase == 0) {
    for (int t = begin; t < end; ++t) {
      job->kernels->prepare_row(job->x + int64_t{t} * m.k, nullptr, 0.0f, m.k, m.k_pad, m.dtype,
                                job->prepared + t * job->stride);
    }
    return;
  }
  Gemm g{};
  g.w = &m;
  g.x = job->prepared;
  g.x_stride = job->stride;
  g.rows = job->rows;
  g.epilogue = kStore;
  g.out = job->out;
  g.out_stride = m.n;
  job->kernels->gemm(g, begin, end);
}

}  // namespace

void matrix_row(const Matrix& m, int row, float* out) {
  const uint8_t* lane = m.data + row / kPanel * m.panel_bytes + row % kPanel * 4;
  if (m.dtype == kFloat32) {
    for (int k = 0; k < m.k; ++k) std::memcpy(out + k, lane + int64_t{k} * kStepBytes, 4);
  } else if (m.dtype == kBfloat16) {
    for (int k = 0; k < m.k; ++k) {
      uint16_t v;
      std::memcpy(&v, lane + static_cast<int64_t>(k / 2) * kStepBytes + k % 2 * 2, 2);
      out[k] = from_bfloat16(v);
    }
  } else {
    for (int k = 0; k < m.k; ++k) {
      const int q = lane[static_cast<int64_t>(k / 4) * kStepBytes + k % 4];
      out[k] = static_cast<float>(q - 128) * m.scales[row];
    }
  }
}

}  // namespace dspark

using namespace dspark;

extern "C" {

void* dspark_arena_create(void) { return made([&] { return new Arena; }); }
void dspark_arena_destroy(void* arena) { delete static_cast<Arena*>(arena); }
int64_t dspark_arena_bytes(void* arena) { return static_cast<Arena*>(arena)->used(); }

void* dspark_matrix_create(void* arena, int32_t dtype, int32_t n, int32_t k) {
  return made([&] {
    auto* a = static_cast<Arena*>(arena);
    Matrix m{};
    m.dtype = static_cast<Dtype>(dtype);
    m.n = n;
    m.k = k;
    m.k_pad = round_up(k, kGroup);
    m.panels = round_up(n, kPanel) / kPanel;
    m.panel_bytes = static_cast<int64_t>(m.k_pad) / inputs_per_step(m.dtype) * kStepBytes;
    m.data = static_cast<uint8_t*>(a->allocate(m.panel_bytes * m.panels));
    if (m.dtype == kInt8) {
      m.scales = static_cast<float*>(a->allocate(int64_t{m.panels} * kPanel * 4));
      // Outputs that are never packed must read as zero: 128 stands for it.
      for (int64_t p = n / kPanel; p < m.panels; ++p) std::memset(m.data + p * m.panel_bytes, 128, m.panel_bytes);
    }
    a->matrices.reserve(a->matrices.size() + 1);
    a->matrices.push_back(new Matrix(m));
    return a->matrices.back();
  });
}

int32_t dspark_matrix_pack(void* matrix, void* pool, const float* rows, int32_t num_rows, int32_t first_row, int32_t kind) {
  return guarded([&] {
    PackJob job{static_cast<Matrix*>(matrix), rows, first_row, kind};
    static_cast<Pool*>(pool)->run(&num_rows, 1, pack_items, &job);
  });
}

int32_t dspark_matrix_rows(void* matrix, void* pool, const int32_t* rows, int32_t num_rows, float* out) {
  return guarded([&] {
    RowsJob job{static_cast<Matrix*>(matrix), rows, out};
    static_cast<Pool*>(pool)->run(&num_rows, 1, rows_items, &job);
  });
}

int64_t dspark_matrix_bytes(void* matrix) {
  auto* m = static_cast<Matrix*>(matrix);
  return m->panel_bytes * m->panels + (m->scales ? int64_t{m->panels} * kPanel * 4 : 0);
}

int32_t dspark_matrix_apply(void* matrix, void* pool, const char* isa, const float* x, int32_t rows, float* out) {
  return guarded([&] {
    auto* m = static_cast<Matrix*>(matrix);
    Buffer buffer;
    const Kernels& kernels = kernels_for(isa);
    const int64_t stride = kernels.row_bytes(m->dtype, m->k_pad);
    buffer.reserve(stride * rows, "the inputs of a product");
    ApplyJob job{&kernels, m, x, rows, out, buffer.as<uint8_t>(), stride};
    const int32_t totals[2] = {rows, m->panels};
    static_cast<Pool*>(pool)->run(totals, 2, apply_items, &job);
  });
}

}  // extern "C"
