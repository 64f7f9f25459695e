// Drawing one draft from a row of logits: temperature, top-k, top-p, min-p, then the race or the inverse of the running
// total. The rules and the random numbers are those of dspark/sampling; sums are taken in an order of their own, so
// probabilities may differ from numpy's in their last bits.
#pragma once
#include <cstdint>
#include <utility>
#include <vector>

#include "dspark_native.h"
#include "kernels.hpp"

namespace dspark {

// Memory of one row, kept between calls.
struct DrawScratch {
  std::vector<float> scaled, values;                // [n] log weights, largest 0; those that top-k orders
  std::vector<int32_t> kept;
  std::vector<std::pair<double, int32_t>> ordered;  // candidates of top-p
};

struct DrawRow {
  const float* logits;        // [n], all finite
  int n;
  int best;                   // its arg-max
  const int32_t* token_ids;   // [n] ascending, or null: entry i is token i
  const uint8_t* bytes;       // leading noise bytes of all tokens, or null: made one by one
  int step;                   // drafts before this one
  double* probs;              // [n] out: q of what was kept
  int32_t* entries;           // [n] out: what was kept, ascending; left alone where that is everything
  int32_t* count;             // out: entries kept
};

// Return the entry that is drawn.
int draw_row(const Kernels& kernels, const DSparkSampling& s, const DrawRow& row, DrawScratch& scratch);

// Whether the race of such a request wants the noise of the whole vocabulary at once.
inline bool wants_noise(const DSparkSampling& s) { return s.scale > 0.0f && s.coupled && (!s.top_k || s.top_k > 256); }

constexpr uint32_t kTokenCoarse = 4;  // dspark/sampling/philox.py: Purpose

}  // namespace dspark
