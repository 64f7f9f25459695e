// Drives the native library the way the executors do, for builds under sanitizers: every weight type, every instruction
// set of the machine, chains, trees, moved caches, blocks, heads, drawn drafts, and pools that come and go. Exits 1 when a bit differs.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "dspark_native.h"
#include "dspark_tree.h"

namespace {

constexpr int kHidden = 40, kInner = 56, kLayers = 2, kHeads = 4, kKvHeads = 2, kDim = 12, kVocab = 70, kRank = 6;
constexpr int kPage = 8, kPages = 80, kBlock = 4;

struct Random {
  uint32_t state = 12345;
  float next() {
    state = state * 1664525u + 1013904223u;
    return static_cast<float>(state >> 8) / 8388608.0f - 1.0f;
  }
  std::vector<float> values(int n) {
    std::vector<float> out(static_cast<size_t>(n));
    for (float& v : out) v = next();
    return out;
  }
};

int failures = 0;

void expect_same(const std::vector<float>& a, const std::vector<float>& b, const std::string& what) {
  if (a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0) return;
  std::printf("differs: %s\n", what.c_str());
  ++failures;
}

class Model {
 public:
  Model(int dtype, const char* isa, int threads) : isa_(isa), pool_(dspark_pool_create(threads, threads % 2)) {
    arena_ = dspark_arena_create();
    DSparkDecoderConfig c{};
    c.hidden_size = kHidden;
    c.intermediate_size = kInner;
    c.num_layers = kLayers;
    c.num_heads = kHeads;
    c.num_kv_heads = kKvHeads;
    c.head_dim = kDim;
    c.dtype = dtype;
    c.cache_dtype = dtype == 0 ? 0 : 1;
    c.rms_norm_eps = 1e-5f;
    static const int32_t windows[kLayers] = {0, 9};
    c.windows = windows;
    c.isa = isa;
    decoder_ = dspark_decoder_create(&c, pool_);
    Random random;
    for (int l = 0; l < kLayers; ++l) {
      dspark_decoder_set_matrix(decoder_, l, DSPARK_QKV, matrix(random, dtype, (kHeads + 2 * kKvHeads) * kDim, kHidden));
      dspark_decoder_set_matrix(decoder_, l, DSPARK_OUTPUT, matrix(random, dtype, kHidden, kHeads * kDim));
      void* gate_up = dspark_matrix_create(arena_, dtype, 2 * 64, kHidden);
      for (int kind : {DSPARK_ROWS_GATE, DSPARK_ROWS_UP}) {
        const std::vector<float> rows = random.values(kInner * kHidden);
        dspark_matrix_pack(gate_up, pool_, rows.data(), kInner, 0, kind);
      }
      dspark_decoder_set_matrix(decoder_, l, DSPARK_GATE_UP, gate_up);
      dspark_decoder_set_matrix(decoder_, l, DSPARK_DOWN, matrix(random, dtype, kHidden, kInner));
      for (int which : {DSPARK_INPUT_NORM, DSPARK_POST_NORM}) {
        dspark_decoder_set_norm(decoder_, l, which, random.values(kHidden).data(), kHidden);
      }
      for (int which : {DSPARK_Q_NORM, DSPARK_K_NORM}) {
        dspark_decoder_set_norm(decoder_, l, which, random.values(kDim).data(), kDim);
      }
    }
    dspark_decoder_set_norm(decoder_, 0, DSPARK_FINAL_NORM, random.values(kHidden).data(), kHidden);
    ends_ = matrix(random, dtype, kVocab, kHidden);
    dspark_decoder_set_ends(decoder_, ends_, ends_);
    fc_ = matrix(random, dtype, kHidden, 2 * kHidden);
    norm_ = random.values(kHidden);
    w1_ = random.values(kVocab * kRank);
    w2_ = matrix(random, dtype, kVocab, kRank);
    gate_ = matrix(random, dtype, kRank, kHidden + kRank);
    joint_ = matrix(random, dtype, 3 * kRank, 2 * kRank + kHidden);
    bias_ = random.values(3 * kRank);
    confidence_ = random.values(kHidden + kRank);
    angles_ = random.values(1024 * kDim);
    if (dspark_decoder_allocate_cache(decoder_, kPage * kPages + 8 * kBlock) != 0) ++failures;
    dspark_decoder_touch_cache(decoder_);
  }
  ~Model() {
    dspark_decoder_destroy(decoder_);
    dspark_arena_destroy(arena_);
    dspark_pool_destroy(pool_);
  }
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  // Tokens [context, context + rows) of one sequence whose pages start at `first_page`.
  std::vector<float> chain(int first_page, int context, int rows, bool tree = false) {
    std::vector<int32_t> tokens, positions, slots, picked, pages, masks;
    for (int i = 0; i < rows; ++i) {
      const int at = context + i;
      tokens.push_back((at * 7 + 3) % kVocab);
      positions.push_back(at);
      slots.push_back((first_page + at / kPage) * kPage + at % kPage);
      picked.push_back(i);
      masks.push_back(static_cast<int32_t>(i >= 31 ? ~0u : (1u << (i + 1)) - 1u));
    }
    for (int p = 0; p <= (context + rows) / kPage; ++p) pages.push_back(first_page + p);
    const int32_t starts[2] = {0, rows};
    const int32_t contexts[1] = {context};
    const int32_t taps[2] = {-1, kLayers - 1};
    std::vector<float> logits(static_cast<size_t>(rows * kVocab)), features(static_cast<size_t>(rows * 2 * kHidden));
    std::vector<int32_t> best(static_cast<size_t>(rows));
    std::vector<uint8_t> finite(static_cast<size_t>(rows));
    DSparkPass p{};
    p.num_rows = p.num_logit_rows = rows;
    p.num_sequences = 1;
    p.max_pages = static_cast<int32_t>(pages.size());
    p.page_size = kPage;
    p.visibility = tree ? DSPARK_VISIBLE_MASK : DSPARK_VISIBLE_CHAIN;
    p.mask_words = tree ? 1 : 0;
    p.num_taps = 2;
    p.logits_width = kVocab;
    p.tokens = tokens.data();
    p.positions = positions.data();
    p.query_start = starts;
    p.context_len = contexts;
    p.page_table = pages.data();
    p.slots = slots.data();
    p.ancestors = tree ? masks.data() : nullptr;
    p.logit_rows = picked.data();
    p.taps = taps;
    p.cos = angles_.data();
    p.sin = angles_.data() + 512 * kDim / 2;
    p.features = features.data();
    p.logits = logits.data();
    p.argmax = best.data();
    p.finite = finite.data();
    dspark_decoder_forward(decoder_, &p);
    logits.insert(logits.end(), features.begin(), features.end());
    return logits;
  }

  // Copy tokens [0, count) of a sequence to other pages, in two calls, some slots onto themselves.
  void move(int from_page, int to_page, int count) {
    std::vector<int32_t> from, to;
    for (int at = 0; at < count; ++at) {
      from.push_back(from_page * kPage + at);
      to.push_back(to_page * kPage + at);
    }
    dspark_decoder_move_cache(decoder_, 0, from.data(), to.data());
    dspark_decoder_move_cache(decoder_, count, from.data(), to.data());
    dspark_decoder_move_cache(decoder_, count, to.data(), to.data());
  }

  std::vector<float> block(int kind, bool reduced) {
    std::vector<float> features(20 * 2 * kHidden, 0.25f);
    std::vector<int32_t> positions(20), slots(20);
    for (int i = 0; i < 20; ++i) positions[static_cast<size_t>(i)] = slots[static_cast<size_t>(i)] = i;
    dspark_decoder_append(decoder_, fc_, norm_.data(), features.data(), 20, positions.data(), slots.data(),
                          angles_.data(), angles_.data());
    const int rows = 2 * kBlock;
    std::vector<int32_t> tokens(rows, 5), at(rows), own(rows), picked(rows);
    for (int i = 0; i < rows; ++i) {
      at[static_cast<size_t>(i)] = 20 + i % kBlock;
      own[static_cast<size_t>(i)] = kPage * kPages + i;
      picked[static_cast<size_t>(i)] = i;
    }
    const int32_t starts[3] = {0, kBlock, rows}, contexts[2] = {20, 0}, pages[6] = {0, 1, 2, -1, -1, -1};
    const int32_t anchors[2] = {4, 9};
    std::vector<float> hidden(rows * kHidden), logits(rows * kVocab), rated(rows);
    std::vector<float> logits_out;
    std::vector<int32_t> drawn(rows);
    std::vector<uint8_t> finite(rows);
    DSparkPass p{};
    p.num_rows = p.num_logit_rows = rows;
    p.num_sequences = 2;
    p.max_pages = 3;
    p.page_size = kPage;
    p.visibility = DSPARK_VISIBLE_BLOCK;
    p.logits_width = kVocab;
    p.tokens = tokens.data();
    p.positions = at.data();
    p.query_start = starts;
    p.context_len = contexts;
    p.page_table = pages;
    p.slots = own.data();
    p.logit_rows = picked.data();
    p.cos = p.sin = angles_.data();
    p.hidden = hidden.data();
    p.logits = logits.data();
    dspark_decoder_forward(decoder_, &p);
    DSparkHeadConfig c{};
    c.hidden_size = kHidden;
    c.rank = kind == DSPARK_HEAD_NONE ? 0 : kRank;
    c.kind = kind;
    c.draft_vocab_size = kVocab;
    std::vector<int32_t> ids(kVocab), previous(3 * kVocab, kVocab - 1);
    for (int e = 0; e < kVocab; ++e) {
      ids[static_cast<size_t>(e)] = 3 * e + 1;
      previous[static_cast<size_t>(3 * e + 1)] = e;
    }
    if (reduced) {
      c.draft_to_target = ids.data();
      c.previous_to_row = previous.data();
    }
    c.confidence_sees_previous = kind != DSPARK_HEAD_NONE;
    c.w1 = w1_.data();
    c.mix_bias = bias_.data();
    c.confidence = confidence_.data();
    c.w2 = kind == DSPARK_HEAD_NONE ? nullptr : w2_;
    c.mix = kind == DSPARK_HEAD_GATED ? gate_ : kind == DSPARK_HEAD_RNN ? joint_ : nullptr;
    c.isa = isa_;
    void* head = dspark_head_create(&c, pool_);
    if (kind != DSPARK_HEAD_NONE) {
      std::vector<float> state(2 * kRank, 0.0f), bias(2 * kVocab);
      dspark_head_step(head, 2, anchors, hidden.data(), state.data(), bias.data());
    }
    dspark_head_greedy(head, 2, kBlock, anchors, hidden.data(), logits.data(), drawn.data(), finite.data(), rated.data());
    // Both draws, with and without the noise of all tokens at once, cut and whole, and an arg-max beside them.
    const DSparkSampling ways[] = {{7, 1.0, 1.0f, -INFINITY, 0, 1, 9, 9},   {~0ull, 0.8, 2.0f, -3.0f, 20, 0, 5, 5},
                                   {5, 0.9, 0.5f, -INFINITY, 10, 1, 0, 0},  {6, 1.0, 1.0f, -INFINITY, 0, 0, 3, 1},
                                   {8, 0.01, 1.0f, -INFINITY, 0, 1, 2, 2},  {9, 1.0, 0.0f, -INFINITY, 0, 0, 2, 2}};
    std::vector<double> probs(2 * kBlock * kVocab);
    std::vector<int32_t> entries(probs.size()), kept(2 * kBlock);
    for (int w = 0; w < 6; w += 2) {
      std::vector<float> base(logits);
      dspark_head_sample(head, 2, kBlock, anchors, hidden.data(), base.data(), ways + w, drawn.data(), finite.data(),
                         rated.data(), probs.data(), entries.data(), kept.data());
      for (int i = 0; i < rows; ++i) {
        const double* q = probs.data() + i * kVocab;
        logits_out.push_back(static_cast<float>(drawn[static_cast<size_t>(i)]));
        for (int e = 0; e < kept[static_cast<size_t>(i)]; ++e) logits_out.push_back(static_cast<float>(q[e]));
      }
    }
    if (kind <= DSPARK_HEAD_VANILLA) {
      for (float value : tree(c, anchors, hidden, logits)) logits_out.push_back(value);
    }
    logits_out.insert(logits_out.end(), logits.begin(), logits.end());
    dspark_head_confidence(head, 2, anchors, hidden.data(), rated.data());
    dspark_head_destroy(head);
    return logits_out;
  }

  // Trees of both blocks, twice from the same handle, the second time smaller.
  std::vector<float> tree(const DSparkHeadConfig& config, const int32_t* anchors, const std::vector<float>& hidden,
                          const std::vector<float>& logits) {
    void* tree = dspark_tree_create(&config, pool_);
    std::vector<float> out;
    for (int most : {40, 3}) {
      std::vector<int32_t> tokens(2 * 40), parents(2 * 40), depths(2 * 40), ranks(2 * 40), count(2);
      std::vector<float> log_q(2 * 40), rating(2 * 40);
      DSparkTreeCall call{};
      call.num_sequences = 2;
      call.steps = most == 3 ? 2 : kBlock;
      call.width = 5;
      call.branch = most == 3 ? 1 : 4;
      call.max_nodes = most;
      call.anchors = anchors;
      call.hidden = hidden.data();
      call.logits = logits.data();
      call.tokens = tokens.data();
      call.parents = parents.data();
      call.depths = depths.data();
      call.ranks = ranks.data();
      call.log_q = log_q.data();
      call.rating = most == 3 ? nullptr : rating.data();
      call.num_nodes = count.data();
      dspark_tree_build(tree, &call);
      for (int i = 0; i < 2; ++i) {
        if (count[static_cast<size_t>(i)] < 1) ++failures;
        for (int k = 0; k < count[static_cast<size_t>(i)]; ++k) {
          const size_t at = static_cast<size_t>(i * most + k);
          if (parents[at] >= k) ++failures;
          out.push_back(static_cast<float>(tokens[at]));
          out.push_back(static_cast<float>(parents[at]));
          out.push_back(log_q[at]);
          out.push_back(rating[at]);
        }
      }
    }
    dspark_tree_destroy(tree);
    return out;
  }

  // What no address space holds is refused, and the next call works on.
  void ask_for_too_much() {
    const bool refused = !dspark_matrix_create(arena_, 0, 1 << 30, 1 << 20) && *dspark_last_error() != 0 &&
                         dspark_decoder_allocate_cache(decoder_, int64_t{1} << 48) == -1 &&
                         std::strstr(dspark_last_error(), "no memory for a cache") != nullptr;
    if (!refused || dspark_decoder_allocate_cache(decoder_, kPage * kPages + 8 * kBlock) != 0) ++failures;
  }

  std::vector<double> read_times() {
    std::vector<double> seconds(3);
    dspark_arena_read_seconds(arena_, pool_, isa_, 3, seconds.data());
    return seconds;
  }

  std::vector<float> rows_and_product() {
    const int32_t ids[3] = {0, kVocab - 1, 17};
    std::vector<float> rows(3 * kHidden), out(3 * kVocab);
    dspark_matrix_rows(ends_, pool_, ids, 3, rows.data());
    dspark_matrix_apply(ends_, pool_, isa_, rows.data(), 3, out.data());
    return out;
  }

 private:
  void* matrix(Random& random, int dtype, int n, int k) {
    void* m = dspark_matrix_create(arena_, dtype, n, k);
    const std::vector<float> rows = random.values(n * k);
    dspark_matrix_pack(m, pool_, rows.data(), n, 0, DSPARK_ROWS_PLAIN);
    return m;
  }

  const char* isa_;
  void *pool_, *arena_ = nullptr, *decoder_ = nullptr, *ends_ = nullptr, *fc_ = nullptr, *w2_ = nullptr,
      *gate_ = nullptr, *joint_ = nullptr;
  std::vector<float> norm_, w1_, bias_, confidence_, angles_;
};

void compare(int dtype, const char* isa) {
  const std::string name = std::string(isa) + " dtype " + std::to_string(dtype);
  Model one(dtype, isa, 1), four(dtype, isa, 4);
  const std::vector<float> whole = one.chain(0, 0, 300);
  expect_same(whole, four.chain(0, 0, 300), name + ": threads");
  expect_same(one.chain(40, 0, 20), four.chain(61, 0, 20), name + ": pages");
  expect_same(one.chain(40, 20, 31), four.chain(61, 20, 31, true), name + ": tree of one path");
  four.move(61, 40, 51);
  expect_same(one.chain(40, 51, 2), four.chain(40, 51, 2), name + ": moved cache");
  for (int context : {0, 250, 256, 290}) {  // rows that attend together, in as many as there are threads for
    for (int rows = 2; rows <= 9; ++rows) {
      const std::vector<float> chain = one.chain(0, context, rows);
      expect_same(chain, four.chain(0, context, rows), name + ": rows together");
      expect_same(chain, one.chain(0, context, rows, true), name + ": rows of a tree together");
      const std::vector<float> last = one.chain(0, context + rows - 1, 1);
      const auto logits = chain.begin() + (rows - 1) * kVocab;
      expect_same({last.begin(), last.begin() + kVocab}, {logits, logits + kVocab}, name + ": a row alone");
    }
  }
  for (int i = 0; i < 20; ++i) expect_same(one.chain(0, 299, 1), four.chain(0, 299, 1), name + ": split attention");
  for (int kind = DSPARK_HEAD_NONE; kind <= DSPARK_HEAD_RNN; ++kind) {
    for (bool reduced : {false, true}) {
      expect_same(one.block(kind, reduced), four.block(kind, reduced), name + ": block");
    }
  }
  four.ask_for_too_much();
  expect_same(one.rows_and_product(), four.rows_and_product(), name + ": product");
  expect_same(whole, four.chain(0, 0, 300), name + ": a new cache");
  for (const double seconds : four.read_times()) failures += seconds > 0.0 ? 0 : 1;
}

}  // namespace

int main() {
  for (const char* isa : {"portable", "avx2", "avxvnni", "avx512"}) {
    if (std::strcmp(dspark_isa(isa), isa) != 0) continue;
    for (int dtype : {0, 1, 2}) compare(dtype, isa);
  }
  for (int i = 0; i < 50; ++i) {  // pools that come and go, some without ever working
    void* pool = dspark_pool_create(1 + i % 5, 0);
    if (i % 2 && !(dspark_read_seconds(pool, nullptr, int64_t{1} << 21) > 0.0)) ++failures;
    dspark_pool_destroy(pool);
  }
  std::printf(failures ? "%d failures\n" : "ok\n", failures);
  return failures ? 1 : 0;
}
