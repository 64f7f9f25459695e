// A tree of drafts out of one block: level after level the likeliest paths are continued by their likeliest tokens.
//
// Slot k of a block gives base logits that do not depend on the drafts before it; the sequential head makes them
// depend on the last one. So every path costs one row of the head's product, not a pass of the drafter.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "dspark_tree.h"
#include "head.hpp"
#include "isa.hpp"
#include "kernels.hpp"
#include "memory.hpp"
#include "pool.hpp"

namespace dspark {
namespace {

enum Kind : int32_t {
  kEmbedRows,  // [rows] W1[x] and the rating of each path's end
  kBias,       // [panels] bias = W1[x] W2
  kTopRows,    // [rows] likeliest tokens and log-sum-exp of U + bias
  kGrow,       // [sequences] new nodes, and which of them go on
};

struct PhaseInfo {
  Kind kind;
  int level;
};

struct Node {
  int32_t token, parent, depth, rank;
  float log_q, path, rating;  // path: sum of log_q from the anchor
};

}  // namespace

class Tree {
 public:
  Tree(const DSparkHeadConfig& c, Pool& pool)
      : c_(c), kernels_(kernels_for(c.isa)), pool_(pool), w2_(static_cast<const Matrix*>(c.w2)) {}

  void build(const DSparkTreeCall& call);

 private:
  static void body(void* self, int phase, int begin, int end, int) {
    auto* t = static_cast<Tree*>(self);
    t->run(t->plan_[static_cast<size_t>(phase)], begin, end);
  }
  void add(Kind kind, int level, int32_t total) {
    plan_.push_back({kind, level});
    totals_.push_back(total);
  }
  int rows_of(int level) const { return call_.num_sequences * widths_[static_cast<size_t>(level)]; }
  void run(PhaseInfo phase, int begin, int end);
  void embed_row(int level, int row);
  void top_row(int level, int row);
  void grow(int level, int sequence);
  void collect(int sequence);
  int32_t end_token(int level, int row) const;
  int32_t& end_of(int sequence, int j) { return ends_[static_cast<size_t>(sequence * call_.width + j)]; }
  int32_t end_of(int sequence, int j) const { return ends_[static_cast<size_t>(sequence * call_.width + j)]; }

  DSparkHeadConfig c_;
  const Kernels& kernels_;
  Pool& pool_;
  const Matrix* w2_;
  Buffer embedded_, z_, bias_;
  int64_t z_stride_ = 0;
  std::vector<PhaseInfo> plan_;
  std::vector<int32_t> totals_, widths_;
  std::vector<std::vector<Node>> nodes_;         // [sequence]
  std::vector<std::vector<int32_t>> order_;      // [sequence] scratch
  std::vector<int32_t> ends_;                    // [sequence, width] node that a row continues, -1 = the anchor, -2 = none
  std::vector<float> rating_, lse_, top_value_;  // [rows], [rows], [rows, branch]
  std::vector<int32_t> top_index_, top_count_;   // [rows, branch], [rows]
  DSparkTreeCall call_{};
};

void Tree::build(const DSparkTreeCall& call) {
  call_ = call;
  const int n = call.num_sequences;
  widths_.assign(1, 1);
  for (int k = 1; k < call.steps; ++k) widths_.push_back(std::min(call.width, widths_.back() * call.branch));
  const size_t most = static_cast<size_t>(n) * static_cast<size_t>(call.width);
  embedded_.reserve(static_cast<int64_t>(most) * (c_.rank + 16) * 4);
  bias_.reserve(static_cast<int64_t>(most) * c_.draft_vocab_size * 4, "the logits of a tree");
  if (w2_) {
    z_stride_ = kernels_.row_bytes(w2_->dtype, w2_->k_pad);
    z_.reserve(static_cast<int64_t>(most) * z_stride_);
  }
  rating_.assign(most, 0.0f);
  lse_.resize(most);
  top_value_.resize(most * static_cast<size_t>(call.branch));
  top_index_.resize(most * static_cast<size_t>(call.branch));
  top_count_.resize(most);
  ends_.assign(most, -2);
  nodes_.resize(static_cast<size_t>(n));
  order_.resize(static_cast<size_t>(n));
  for (int i = 0; i < n; ++i) {
    nodes_[static_cast<size_t>(i)].clear();
    end_of(i, 0) = -1;
  }
  plan_.clear();
  totals_.clear();
  for (int k = 0; k < call.steps; ++k) {
    add(kEmbedRows, k, rows_of(k));
    if (w2_) add(kBias, k, w2_->panels);
    add(kTopRows, k, rows_of(k));
    add(kGrow, k, n);
  }
  pool_.run(totals_.data(), static_cast<int>(plan_.size()), body, this);
  for (int i = 0; i < n; ++i) collect(i);
}

// The token that ends the path of a row; 0 where the row has none.
int32_t Tree::end_token(int level, int row) const {
  const int width = widths_[static_cast<size_t>(level)], i = row / width, end = end_of(i, row % width);
  if (end == -1) return call_.anchors[i];
  return end < 0 ? 0 : nodes_[static_cast<size_t>(i)][static_cast<size_t>(end)].token;
}

void Tree::embed_row(int level, int row) {
  const int i = row / widths_[static_cast<size_t>(level)];
  const float* hidden = call_.hidden + (int64_t{i} * call_.steps + level) * c_.hidden_size;
  float* embedded = embedded_.as<float>() + int64_t{row} * (c_.rank + 16);
  if (c_.kind != DSPARK_HEAD_NONE) {
    embed_token(c_, end_token(level, row), embedded);
    kernels_.prepare_row(embedded, nullptr, 0.0f, c_.rank, w2_->k_pad, w2_->dtype,
                         z_.as<uint8_t>() + row * z_stride_);
  }
  if (c_.confidence) rating_[static_cast<size_t>(row)] = rate_slot(c_, kernels_, hidden, embedded);
}

void Tree::top_row(int level, int row) {
  const int vocab = c_.draft_vocab_size;
  const int i = row / widths_[static_cast<size_t>(level)];
  const float* base = call_.logits + (int64_t{i} * call_.steps + level) * vocab;
  float* line = bias_.as<float>() + int64_t{row} * vocab;
  if (!w2_) std::memcpy(line, base, static_cast<size_t>(vocab) * 4);
  const size_t at = static_cast<size_t>(row) * static_cast<size_t>(call_.branch);
  top_count_[static_cast<size_t>(row)] =
      kernels_.top(line, w2_ ? base : nullptr, vocab, call_.branch, top_value_.data() + at, top_index_.data() + at,
                   &lse_[static_cast<size_t>(row)]);
}

void Tree::grow(int level, int sequence) {
  std::vector<Node>& nodes = nodes_[static_cast<size_t>(sequence)];
  const int width = widths_[static_cast<size_t>(level)];
  const int32_t first = static_cast<int32_t>(nodes.size());
  for (int j = 0; j < width; ++j) {
    const int32_t end = end_of(sequence, j);
    if (end < -1) continue;
    const size_t row = static_cast<size_t>(sequence * width + j);
    const float path = end < 0 ? 0.0f : nodes[static_cast<size_t>(end)].path;
    for (int b = 0; b < top_count_[row]; ++b) {
      const size_t at = row * static_cast<size_t>(call_.branch) + static_cast<size_t>(b);
      const int32_t token = c_.draft_to_target ? c_.draft_to_target[top_index_[at]] : top_index_[at];
      const float log_q = std::min(top_value_[at] - lse_[row], 0.0f);
      nodes.push_back({token, end, level, b, log_q, path + log_q, rating_[row]});
    }
  }
  if (level + 1 == call_.steps) return;
  const int next = widths_[static_cast<size_t>(level) + 1];
  std::vector<int32_t>& order = order_[static_cast<size_t>(sequence)];
  order.clear();
  for (int32_t k = first; k < static_cast<int32_t>(nodes.size()); ++k) order.push_back(k);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return nodes[static_cast<size_t>(a)].path > nodes[static_cast<size_t>(b)].path;
  });
  for (int j = 0; j < next; ++j) {
    end_of(sequence, j) = j < static_cast<int>(order.size()) ? order[static_cast<size_t>(j)] : -2;
  }
}

// The likeliest nodes of a sequence; a child is never likelier than its parent and was found later.
void Tree::collect(int sequence) {
  const std::vector<Node>& nodes = nodes_[static_cast<size_t>(sequence)];
  std::vector<int32_t>& order = order_[static_cast<size_t>(sequence)];
  order.resize(nodes.size());
  for (size_t k = 0; k < nodes.size(); ++k) order[k] = static_cast<int32_t>(k);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return nodes[static_cast<size_t>(a)].path > nodes[static_cast<size_t>(b)].path;
  });
  const int count = std::min(call_.max_nodes, static_cast<int>(nodes.size()));
  std::vector<int32_t> place(nodes.size(), -1);
  for (int k = 0; k < count; ++k) {
    const Node& node = nodes[static_cast<size_t>(order[static_cast<size_t>(k)])];
    const int64_t at = int64_t{sequence} * call_.max_nodes + k;
    place[static_cast<size_t>(order[static_cast<size_t>(k)])] = k;
    call_.tokens[at] = node.token;
    call_.parents[at] = node.parent < 0 ? -1 : place[static_cast<size_t>(node.parent)];
    call_.depths[at] = node.depth;
    call_.ranks[at] = node.rank;
    call_.log_q[at] = node.log_q;
    if (call_.rating) call_.rating[at] = node.rating;
  }
  call_.num_nodes[sequence] = count;
}

void Tree::run(PhaseInfo phase, int begin, int end) {
  switch (phase.kind) {
    case kEmbedRows:
      for (int row = begin; row < end; ++row) embed_row(phase.level, row);
      return;
    case kBias: {
      Gemm g{};
      g.rows = rows_of(phase.level);
      g.w = w2_;
      g.x = z_.as<uint8_t>();
      g.x_stride = z_stride_;
      g.epilogue = kStore;
      g.out = bias_.as<float>();
      g.out_stride = c_.draft_vocab_size;
      return kernels_.gemm(g, begin, end);
    }
    case kTopRows:
      for (int row = begin; row < end; ++row) top_row(phase.level, row);
      return;
    case kGrow:
      for (int i = begin; i < end; ++i) grow(phase.level, i);
      return;
  }
}

}  // namespace dspark

using namespace dspark;

extern "C" {

void* dspark_tree_create(const DSparkHeadConfig* config, void* pool) {
  return made([&] { return new Tree(*config, *static_cast<Pool*>(pool)); });
}

void dspark_tree_destroy(void* tree) { delete static_cast<Tree*>(tree); }

int32_t dspark_tree_build(void* tree, const DSparkTreeCall* call) {
  return guarded([&] { static_cast<Tree*>(tree)->build(*call); });
}

}  // extern "C"
