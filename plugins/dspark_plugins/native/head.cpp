// The sequential head: G dependent small steps over the draft vocabulary, as phases of one run.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "dspark_native.h"
#include "head.hpp"
#include "isa.hpp"
#include "kernels.hpp"
#include "memory.hpp"
#include "pool.hpp"
#include "sampling.hpp"

namespace dspark {
namespace {

enum Kind : int32_t {
  kEmbedRows,  // [rows] W1[x], confidence, input of the gate or of W2
  kMix,        // [panels] gate / recurrent projection
  kMixRows,    // [rows] its non-linear part, input of W2
  kBias,       // [panels] logits += z W2
  kPick,       // [rows] arg-max
  kNoise,      // [rows * steps] leading noise bytes of every token
  kDraw,       // [rows] arg-max or draw
};

struct PhaseInfo {
  Kind kind;
  int step;
};

inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

}  // namespace

void embed_token(const DSparkHeadConfig& c, int32_t token, float* out) {
  const int64_t row = c.previous_to_row ? c.previous_to_row[token] : token;
  if (c.w1_is_bfloat16) {
    const uint16_t* from = static_cast<const uint16_t*>(c.w1) + row * c.rank;
    for (int i = 0; i < c.rank; ++i) {
      const uint32_t bits = static_cast<uint32_t>(from[i]) << 16;
      std::memcpy(out + i, &bits, 4);
    }
  } else {
    std::memcpy(out, static_cast<const float*>(c.w1) + row * c.rank, static_cast<size_t>(c.rank) * 4);
  }
}

float rate_slot(const DSparkHeadConfig& c, const Kernels& kernels, const float* hidden, const float* embedded) {
  float sum = kernels.dot(hidden, c.confidence, c.hidden_size) + c.confidence_bias;
  if (c.confidence_sees_previous) sum += kernels.dot(embedded, c.confidence + c.hidden_size, c.rank);
  return sum;
}

class Head {
 public:
  Head(const DSparkHeadConfig& c, Pool& pool)
      : c_(c),
        kernels_(kernels_for(c.isa)),
        pool_(pool),
        w2_(static_cast<const Matrix*>(c.w2)),
        mix_(static_cast<const Matrix*>(c.mix)) {}

  void greedy(int num, int steps, const int32_t* anchors, const float* hidden, float* logits, int32_t* tokens,
              uint8_t* finite, float* confidence);
  void sample(int num, int steps, const int32_t* anchors, const float* hidden, float* logits, int32_t* tokens,
              uint8_t* finite, float* confidence, const DSparkSampling* samplings, double* probs, int32_t* entries,
              int32_t* count);
  void step(int num, const int32_t* previous, const float* hidden, float* state, float* bias);
  void confidence(int num, const int32_t* previous, const float* hidden, float* out);

 private:
  static void body(void* self, int phase, int begin, int end, int) {
    auto* h = static_cast<Head*>(self);
    h->run(h->plan_[static_cast<size_t>(phase)], begin, end);
  }
  void add(Kind kind, int step, int32_t total) {
    plan_.push_back({kind, step});
    totals_.push_back(total);
  }
  void reserve(int num);
  void begin_block(int num, int steps, const int32_t* anchors, const float* hidden, float* logits, int32_t* tokens,
                   uint8_t* finite, float* confidence);
  void plan_step(int step);
  void draw(int step, int i);
  void run(PhaseInfo phase, int begin, int end);
  int32_t pick(int step, int64_t at) const;
  void embed_row(int step, int i);
  void mix_row(int i);
  void bias_input(int i, const float* z) {
    kernels_.prepare_row(z, nullptr, 0.0f, c_.rank, w2_->k_pad, w2_->dtype, z_.as<uint8_t>() + i * z_stride_);
  }
  const float* hidden_of(int i, int step) const { return hidden_ + (int64_t{i} * steps_ + step) * c_.hidden_size; }

  DSparkHeadConfig c_;
  const Kernels& kernels_;
  Pool& pool_;
  const Matrix* w2_;
  const Matrix* mix_;
  Buffer embedded_, mix_in_raw_, mix_in_, mix_out_, z_, state_;
  int64_t z_stride_ = 0, mix_stride_ = 0;
  std::vector<PhaseInfo> plan_;
  std::vector<int32_t> totals_, previous_;
  // Of the current call.
  int num_ = 0, steps_ = 0;
  const float* hidden_ = nullptr;
  float *state_now_ = nullptr, *logits_ = nullptr, *confidence_ = nullptr;
  Epilogue epilogue_ = kAdd;
  int32_t* tokens_ = nullptr;
  uint8_t* finite_ = nullptr;
  // Of `sample` alone.
  const DSparkSampling* samplings_ = nullptr;
  double* probs_ = nullptr;
  int32_t *entries_ = nullptr, *count_ = nullptr;
  Buffer noise_;
  int noise_counters_ = 0;
  std::vector<DrawScratch> scratch_;
};

void Head::reserve(int num) {
  num_ = num;
  embedded_.reserve(int64_t{num} * (c_.rank + 16) * 4);
  if (w2_) {
    z_stride_ = kernels_.row_bytes(w2_->dtype, w2_->k_pad);
    z_.reserve(num * z_stride_);
  }
  if (mix_) {
    mix_stride_ = kernels_.row_bytes(mix_->dtype, mix_->k_pad);
    mix_in_.reserve(num * mix_stride_);
    mix_in_raw_.reserve(int64_t{num} * mix_->k * 4);
    mix_out_.reserve(int64_t{num} * mix_->n * 4);
  }
}

void Head::plan_step(int step) {
  add(kEmbedRows, step, num_);
  if (mix_) {
    add(kMix, step, mix_->panels);
    add(kMixRows, step, num_);
  }
  if (w2_) add(kBias, step, w2_->panels);
}

void Head::begin_block(int num, int steps, const int32_t* anchors, const float* hidden, float* logits, int32_t* tokens,
                       uint8_t* finite, float* confidence) {
  reserve(num);
  steps_ = steps;
  hidden_ = hidden;
  logits_ = logits;
  tokens_ = tokens;
  finite_ = finite;
  confidence_ = confidence;
  epilogue_ = kAdd;
  previous_.assign(anchors, anchors + num);
  state_.reserve(int64_t{num} * c_.rank * 4 + 64);
  state_now_ = state_.as<float>();
  std::memset(state_now_, 0, static_cast<size_t>(num) * static_cast<size_t>(c_.rank) * 4);
  plan_.clear();
  totals_.clear();
}

void Head::greedy(int num, int steps, const int32_t* anchors, const float* hidden, float* logits, int32_t* tokens,
                  uint8_t* finite, float* confidence) {
  begin_block(num, steps, anchors, hidden, logits, tokens, finite, confidence);
  for (int k = 0; k < steps; ++k) {
    plan_step(k);
    add(kPick, k, num);
  }
  pool_.run(totals_.data(), static_cast<int>(plan_.size()), body, this);
}

void Head::sample(int num, int steps, const int32_t* anchors, const float* hidden, float* logits, int32_t* tokens,
                  uint8_t* finite, float* confidence, const DSparkSampling* samplings, double* probs,
                  int32_t* entries, int32_t* count) {
  begin_block(num, steps, anchors, hidden, logits, tokens, finite, confidence);
  samplings_ = samplings;
  probs_ = probs;
  entries_ = entries;
  count_ = count;
  bool noise = false;
  for (int i = 0; i < num; ++i) noise = noise || wants_noise(samplings[i]);
  if (noise) {
    const int32_t last = c_.draft_to_target ? c_.draft_to_target[c_.draft_vocab_size - 1] : c_.draft_vocab_size - 1;
    noise_counters_ = last / 16 + 1;
    noise_.reserve(int64_t{num} * steps * noise_counters_ * 16, "the noise of drawn drafts");
    add(kNoise, 0, num * steps);
  }
  if (scratch_.size() < static_cast<size_t>(num)) scratch_.resize(static_cast<size_t>(num));
  for (int k = 0; k < steps; ++k) {
    plan_step(k);
    add(kDraw, k, num);
  }
  pool_.run(totals_.data(), static_cast<int>(plan_.size()), body, this);
}

void Head::step(int num, const int32_t* previous, const float* hidden, float* state, float* bias) {
  reserve(num);
  steps_ = 1;
  hidden_ = hidden;
  logits_ = bias;
  confidence_ = nullptr;
  epilogue_ = kStore;
  previous_.assign(previous, previous + num);
  state_now_ = state;
  plan_.clear();
  totals_.clear();
  plan_step(0);
  pool_.run(totals_.data(), static_cast<int>(plan_.size()), body, this);
}

void Head::confidence(int num, const int32_t* previous, const float* hidden, float* out) {
  reserve(num);
  for (int i = 0; i < num; ++i) {
    float* embedded = embedded_.as<float>();
    if (c_.kind != DSPARK_HEAD_NONE) embed_token(c_, previous[i], embedded);
    out[i] = rate_slot(c_, kernels_, hidden + int64_t{i} * c_.hidden_size, embedded);
  }
}

// The arg-max entry of one row of logits. With `greedy_confidence` its own probability is rated too: at temperature 0 the
// token itself may be looked at, since what is accepted does not depend on how it is judged.
int32_t Head::pick(int step, int64_t at) const {
  const float* logits = logits_ + at * c_.draft_vocab_size;
  int32_t entry = 0;
  if (!c_.greedy_confidence || !confidence_) {
    kernels_.argmax(logits, c_.draft_vocab_size, &entry, finite_ + at);
    return entry;
  }
  float value = 0.0f, log_sum = 0.0f;
  finite_[at] = kernels_.top(const_cast<float*>(logits), nullptr, c_.draft_vocab_size, 1, &value, &entry, &log_sum) > 0;
  if (!finite_[at]) return 0;
  const float* w = c_.greedy_confidence + step * 3;
  const float log_q = std::min(value - log_sum, 0.0f);
  const float logit_q = log_q - std::log(std::max(-std::expm1(log_q), 1e-4f));
  confidence_[at] = w[0] * confidence_[at] + w[1] * logit_q + w[2];
  return entry;
}

void Head::embed_row(int step, int i) {
  float* embedded = embedded_.as<float>() + int64_t{i} * (c_.rank + 16);
  const float* hidden = hidden_of(i, step);
  if (c_.kind != DSPARK_HEAD_NONE) embed_token(c_, previous_[static_cast<size_t>(i)], embedded);
  if (confidence_) confidence_[int64_t{i} * steps_ + step] = rate_slot(c_, kernels_, hidden, embedded);
  if (c_.kind == DSPARK_HEAD_VANILLA) bias_input(i, embedded);
  if (!mix_) return;
  const size_t rank_bytes = static_cast<size_t>(c_.rank) * 4, hidden_bytes = static_cast<size_t>(c_.hidden_size) * 4;
  float* raw = mix_in_raw_.as<float>() + int64_t{i} * mix_->k;
  if (c_.kind == DSPARK_HEAD_GATED) {  // [h ; W1[x]]
    std::memcpy(raw, hidden, hidden_bytes);
    std::memcpy(raw + c_.hidden_size, embedded, rank_bytes);
  } else {  // [s ; W1[x] ; h]
    std::memcpy(raw, state_now_ + int64_t{i} * c_.rank, rank_bytes);
    std::memcpy(raw + c_.rank, embedded, rank_bytes);
    std::memcpy(raw + 2 * c_.rank, hidden, hidden_bytes);
  }
  kernels_.prepare_row(raw, nullptr, 0.0f, mix_->k, mix_->k_pad, mix_->dtype, mix_in_.as<uint8_t>() + i * mix_stride_);
}

void Head::mix_row(int i) {
  const int r = c_.rank;
  float* out = mix_out_.as<float>() + int64_t{i} * mix_->n;
  float* embedded = embedded_.as<float>() + int64_t{i} * (r + 16);
  for (int j = 0; j < mix_->n; ++j) out[j] += c_.mix_bias[j];
  if (c_.kind == DSPARK_HEAD_GATED) {
    for (int j = 0; j < r; ++j) embedded[j] *= sigmoid(out[j]);
  } else {
    float* state = state_now_ + int64_t{i} * r;
    for (int j = 0; j < r; ++j) {
      const float gate = sigmoid(out[j]);
      state[j] = gate * state[j] + (1.0f - gate) * std::tanh(out[r + j]);
      embedded[j] = std::tanh(out[2 * r + j]);
    }
  }
  bias_input(i, embedded);
}

void Head::draw(int step, int i) {
  const int vocab = c_.draft_vocab_size;
  const int64_t at = int64_t{i} * steps_ + step;
  const float* logits = logits_ + at * vocab;
  const DSparkSampling& s = samplings_[i];
  int32_t entry = 0;
  if (s.scale > 0.0f) {
    kernels_.argmax(logits, vocab, &entry, finite_ + at);
  } else {
    entry = pick(step, at);
  }
  count_[at] = 0;
  if (s.scale > 0.0f && finite_[at]) {
    DrawRow row{};
    row.logits = logits;
    row.n = vocab;
    row.best = entry;
    row.token_ids = c_.draft_to_target;
    row.bytes = wants_noise(s) ? noise_.as<uint8_t>() + at * noise_counters_ * 16 : nullptr;
    row.step = step;
    row.probs = probs_ + at * vocab;
    row.entries = entries_ + at * vocab;
    row.count = count_ + at;
    entry = draw_row(kernels_, s, row, scratch_[static_cast<size_t>(i)]);
  }
  tokens_[at] = previous_[static_cast<size_t>(i)] = c_.draft_to_target ? c_.draft_to_target[entry] : entry;
}

void Head::run(PhaseInfo phase, int begin, int end) {
  const int64_t vocab = c_.draft_vocab_size;
  Gemm g{};
  g.rows = num_;
  switch (phase.kind) {
    case kEmbedRows:
      for (int i = begin; i < end; ++i) embed_row(phase.step, i);
      return;
    case kMix:
      g.w = mix_;
      g.x = mix_in_.as<uint8_t>();
      g.x_stride = mix_stride_;
      g.epilogue = kStore;
      g.out = mix_out_.as<float>();
      g.out_stride = mix_->n;
      return kernels_.gemm(g, begin, end);
    case kMixRows:
      for (int i = begin; i < end; ++i) mix_row(i);
      return;
    case kBias:
      g.w = w2_;
      g.x = z_.as<uint8_t>();
      g.x_stride = z_stride_;
      g.epilogue = epilogue_;
      g.out = logits_ + phase.step * vocab;
      g.out_stride = steps_ * vocab;
      return kernels_.gemm(g, begin, end);
    case kNoise:
      for (int j = begin; j < end; ++j) {
        const DSparkSampling& s = samplings_[j / steps_];
        if (!wants_noise(s)) continue;
        kernels_.philox_bytes(s.seed, static_cast<uint32_t>(s.position + j % steps_), kTokenCoarse, noise_counters_,
                              noise_.as<uint8_t>() + int64_t{j} * noise_counters_ * 16);
      }
      return;
    case kDraw:
      for (int i = begin; i < end; ++i) draw(phase.step, i);
      return;
    case kPick:
      for (int i = begin; i < end; ++i) {
        const int64_t at = int64_t{i} * steps_ + phase.step;
        int32_t token = pick(phase.step, at);
        if (c_.draft_to_target) token = c_.draft_to_target[token];
        tokens_[at] = previous_[static_cast<size_t>(i)] = token;
      }
      return;
  }
}

}  // namespace dspark

using namespace dspark;

extern "C" {

void* dspark_head_create(const DSparkHeadConfig* config, void* pool) {
  return made([&] { return new Head(*config, *static_cast<Pool*>(pool)); });
}

void dspark_head_destroy(void* head) { delete static_cast<Head*>(head); }

int32_t dspark_head_greedy(void* head, int32_t num_sequences, int32_t steps, const int32_t* anchors, const float* hidden,
                        float* logits, int32_t* tokens, uint8_t* finite, float* confidence) {
  return guarded([&] {
    static_cast<Head*>(head)->greedy(num_sequences, steps, anchors, hidden, logits, tokens, finite, confidence);
  });
}

int32_t dspark_head_sample(void* head, int32_t num_sequences, int32_t steps, const int32_t* anchors, const float* hidden,
                        float* logits, const DSparkSampling* samplings, int32_t* tokens, uint8_t* finite,
                        float* confidence, double* probs, int32_t* entries, int32_t* count) {
  return guarded([&] {
    static_cast<Head*>(head)->sample(num_sequences, steps, anchors, hidden, logits, tokens, finite, confidence,
                                     samplings, probs, entries, count);
  });
}

int32_t dspark_head_step(void* head, int32_t num_sequences, const int32_t* previous, const float* hidden, float* state,
                      float* bias) {
  return guarded([&] {
    static_cast<Head*>(head)->step(num_sequences, previous, hidden, state, bias);
  });
}

int32_t dspark_head_confidence(void* head, int32_t num_sequences, const int32_t* previous, const float* hidden,
                            float* confidence) {
  return guarded([&] {
    static_cast<Head*>(head)->confidence(num_sequences, previous, hidden, confidence);
  });
}

}  // extern "C"
