// One pass over a stack of decoder layers, written as phases of the pool.
#include <cmath>
#include <cstring>
#include <vector>

#include "dspark_native.h"
#include "isa.hpp"
#include "kernels.hpp"
#include "memory.hpp"
#include "pool.hpp"

namespace dspark {
namespace {

enum Kind : int32_t {
  kInputRows,   // [rows] embedding at layer 0; tap; input norm unless fused
  kQkv,         // [panels]
  kHeads,       // [rows] norms, rotation, cache write
  kAttend,      // [tiles * kv_heads (* chunks)]
  kHeadsAttend, // [rows * kv_heads] both, when every sequence has one row
  kMergeRows,   // [rows] merge chunks; convert for the output projection
  kOutput,      // [panels] residual add
  kPostRows,    // [rows] post-attention norm
  kGateUp,      // [panels] silu(gate) * up
  kActRows,     // [rows] int8 only: quantise the activations
  kDown,        // [panels] residual add
  kTapRows,     // [rows] tap of the last layer
  kFinalRows,   // [logit rows] final norm
  kHead,        // [panels]
  kArgmax,      // [logit rows]
  kFeatureRows, // append: [rows] convert features
  kFeatures,    // append: [panels] fc
  kContextRows, // append: [rows] norm
  kKeysValues,  // append: [panels] K and V projections
  kKeyHeads,    // append: [rows]
  kTouch,       // touch_cache: [pieces of kTouchBytes]
};

struct PhaseInfo {
  Kind kind;
  int layer;
};

// What is attended to at a time: rows of one sequence, one key head, one chunk of keys.
struct Part {
  int tile, kv_head, chunk;
};

// Rows of one sequence that read keys and values together.
struct Tile {
  int first, num_rows;
};

struct Layer {
  const Matrix *qkv = nullptr, *output = nullptr, *gate_up = nullptr, *down = nullptr;
  std::vector<float> input_norm, post_norm, q_norm, k_norm;
  int window = 0;
};

}  // namespace

// Passes over few rows are short of work between two phases, so there each thread converts the input of a projection for
// itself (`fused_`): the same numbers twice are cheaper than a phase of their own.
constexpr int kFusedRows = 8;
constexpr int64_t kTouchBytes = int64_t{2} << 20;  // a huge page, where the system has them

class Decoder {
 public:
  Decoder(const DSparkDecoderConfig& c, Pool& pool);
  ~Decoder() { unmap_pages(cache_, cache_bytes_); }
  Decoder(const Decoder&) = delete;
  Decoder& operator=(const Decoder&) = delete;

  void allocate_cache(int64_t num_slots);
  void touch_cache();
  void move_cache(int num, const int32_t* from, const int32_t* to);
  void forward(const DSparkPass& pass);
  void append(const Matrix& fc, const float* norm, const float* features, int rows, const int32_t* positions,
              const int32_t* slots, const float* cos, const float* sin);

  std::vector<Layer> layers;
  std::vector<float> final_norm;
  const Matrix* embedding = nullptr;
  const Matrix* head = nullptr;

 private:
  static void body(void* self, int phase, int begin, int end, int thread);
  void run(int index, int begin, int end, int thread);
  void plan_layer(int l, bool single_rows);
  bool tapped(int layer) const;
  void convert(Kind kind, const Layer& layer, int t, uint8_t* out) const;
  const uint8_t* converted(int index, Kind kind, const Layer& layer, int thread, uint8_t* shared, int64_t stride);
  void heads(int layer, int t, int begin, int end, bool with_queries);
  void add(Kind kind, int layer, int64_t total) {
    plan_.push_back({kind, layer});
    totals_.push_back(static_cast<int32_t>(total));
  }
  void reserve_rows(int rows);
  void plan_sequences();
  void plan_tiles();
  int64_t cut_tiles(int most);
  void input_row(int layer, int t);
  void attend(int layer, int item, bool more, int thread);
  void attend_chunk(int layer, Part part, Part next, float* partial, int64_t row_stride, int thread);
  int window_begin(const Layer& layer, int t, int start) const;
  const int32_t* visible_slots(int t, int start, int end, int32_t* own) const;
  Part part(int item) const;
  void merge_row(int t);
  void project(const Matrix& w, const uint8_t* x, int64_t x_stride, Epilogue epilogue, float* out, int64_t out_stride,
               int rows, int begin, int end);
  CacheLayer cache_layer(int layer) const;
  float* residual(int t) const { return residual_.as<float>() + int64_t{t} * hidden_; }
  uint8_t* input(int t) { return input_.as<uint8_t>() + t * hidden_stride_; }

  const Kernels& kernels_;
  Pool& pool_;
  const int hidden_, intermediate_, heads_, kv_heads_, dim_, dim_pad_, group_, qkv_width_;
  const Dtype dtype_, cache_dtype_;
  const float eps_;
  const int64_t hidden_stride_, attention_stride_, activation_stride_, partial_size_;
  int64_t final_stride_ = 0;

  void* cache_ = nullptr;
  int64_t cache_bytes_ = 0, layer_bytes_ = 0, values_offset_ = 0;

  // Scratch of one pass.
  Buffer residual_, input_, qkv_, attention_, attention_in_, activation_, activation_in_, partial_, final_, staging_,
      append_in_;
  std::vector<Buffer> thread_partial_, thread_input_;
  std::vector<int64_t> thread_tag_;  // which conversion thread_input_ holds; one cache line a thread
  int64_t pass_number_ = 0;
  bool fused_ = false;
  std::vector<PhaseInfo> plan_;
  std::vector<int32_t> totals_;
  std::vector<int32_t> row_sequence_, row_visible_, key_slots_, mask_slots_;
  std::vector<int64_t> key_start_;
  std::vector<Tile> tiles_;
  int tile_rows_ = 1;  // of the largest tile
  bool split_ = false;
  int max_chunks_ = 1;
  DSparkPass pass_{};
  const Matrix* fc_ = nullptr;
  const float* context_norm_ = nullptr;
  const float* features_ = nullptr;
};

Decoder::Decoder(const DSparkDecoderConfig& c, Pool& pool)
    : layers(static_cast<size_t>(c.num_layers)),
      kernels_(kernels_for(c.isa)),
      pool_(pool),
      hidden_(c.hidden_size),
      intermediate_(c.intermediate_size),
      heads_(c.num_heads),
      kv_heads_(c.num_kv_heads),
      dim_(c.head_dim),
      dim_pad_(round_up(c.head_dim, 16)),
      group_(c.num_heads / c.num_kv_heads),
      qkv_width_((c.num_heads + 2 * c.num_kv_heads) * c.head_dim),
      dtype_(static_cast<Dtype>(c.dtype)),
      cache_dtype_(static_cast<Dtype>(c.cache_dtype)),
      eps_(c.rms_norm_eps),
      hidden_stride_(kernels_.row_bytes(dtype_, round_up(c.hidden_size, kGroup))),
      attention_stride_(kernels_.row_bytes(dtype_, round_up(c.num_heads * c.head_dim, kGroup))),
      activation_stride_(kernels_.row_bytes(dtype_, round_up(c.intermediate_size, kGroup))),
      partial_size_(static_cast<int64_t>(group_) * (2 + dim_pad_)),
      thread_partial_(static_cast<size_t>(pool.num_threads())),
      thread_input_(static_cast<size_t>(pool.num_threads())),
      thread_tag_(static_cast<size_t>(pool.num_threads()) * 8, 0) {
  for (int i = 0; i < c.num_layers; ++i) layers[static_cast<size_t>(i)].window = c.windows ? c.windows[i] : 0;
  staging_.reserve(int64_t{pool.num_threads()} * kChunk * dim_pad_ * 4);
}

void Decoder::allocate_cache(int64_t num_slots) {
  unmap_pages(cache_, cache_bytes_);
  const int64_t element = cache_dtype_ == kFloat32 ? 4 : 2;
  num_slots = (num_slots + 15) / 16 * 16;
  values_offset_ = (num_slots * kv_heads_ * dim_ * element + 63) / 64 * 64;
  layer_bytes_ = values_offset_ + (num_slots * kv_heads_ * dim_pad_ * element + 63) / 64 * 64;
  cache_bytes_ = layer_bytes_ * static_cast<int64_t>(layers.size());
  cache_ = map_pages(cache_bytes_);
  if (!cache_) throw OutOfMemory("a cache", cache_bytes_);
}

// Have the system give all of the cache's memory now, by all threads; what is in the cache stays.
void Decoder::touch_cache() {
  plan_.clear();
  totals_.clear();
  add(kTouch, 0, (cache_bytes_ + kTouchBytes - 1) / kTouchBytes);
  pool_.run(totals_.data(), 1, body, this);
}

// Copy keys and values of every layer from slot to slot, one after the other.
void Decoder::move_cache(int num, const int32_t* from, const int32_t* to) {
  const int64_t element = cache_dtype_ == kFloat32 ? 4 : 2, lane = 16 * element;
  for (int l = 0; l < static_cast<int>(layers.size()); ++l) {
    const CacheLayer c = cache_layer(l);
    for (int i = 0; i < num; ++i) {
      if (from[i] == to[i]) continue;
      const auto key = [&](int slot) {  // of head 0, dimension 0
        return c.keys + (c.key_block(slot, 0) + slot % 16) * element;
      };
      const uint8_t* source = key(from[i]);
      uint8_t* target = key(to[i]);
      for (int j = 0; j < kv_heads_ * dim_; ++j) {
        std::memcpy(target + j * lane, source + j * lane, static_cast<size_t>(element));
      }
      for (int h = 0; h < kv_heads_; ++h) {
        std::memcpy(c.values + c.value_row(to[i], h) * element, c.values + c.value_row(from[i], h) * element,
                    static_cast<size_t>(dim_pad_ * element));
      }
    }
  }
}

CacheLayer Decoder::cache_layer(int layer) const {
  uint8_t* base = static_cast<uint8_t*>(cache_) + layer * layer_bytes_;
  return {base, base + values_offset_, cache_dtype_, kv_heads_, dim_, dim_pad_};
}

void Decoder::reserve_rows(int rows) {
  residual_.reserve(int64_t{rows} * hidden_ * 4);
  input_.reserve(rows * hidden_stride_);
  qkv_.reserve(int64_t{rows} * qkv_width_ * 4);
  attention_.reserve(int64_t{rows} * heads_ * dim_ * 4);
  attention_in_.reserve(rows * attention_stride_);
  activation_in_.reserve(rows * activation_stride_);
  if (dtype_ == kInt8) activation_.reserve(int64_t{rows} * round_up(intermediate_, kGroup) * 4);
}

// Which keys every row sees: key_slots_ lists each sequence's cached slots, then those of its own rows.
void Decoder::plan_sequences() {
  const DSparkPass& p = pass_;
  row_sequence_.resize(static_cast<size_t>(p.num_rows));
  row_visible_.resize(static_cast<size_t>(p.num_rows));
  key_start_.resize(static_cast<size_t>(p.num_sequences));
  key_slots_.clear();
  int most = 1;
  for (int i = 0; i < p.num_sequences; ++i) {
    const int first = p.query_start[i], last = p.query_start[i + 1], context = p.context_len[i];
    const int32_t* pages = p.page_table + int64_t{i} * p.max_pages;
    key_start_[static_cast<size_t>(i)] = static_cast<int64_t>(key_slots_.size());
    for (int j = 0; j < context; ++j) key_slots_.push_back(pages[j / p.page_size] * p.page_size + j % p.page_size);
    for (int t = first; t < last; ++t) {
      key_slots_.push_back(p.slots[t]);
      int seen = t - first + 1;
      if (p.visibility == DSPARK_VISIBLE_BLOCK) seen = last - first;
      if (p.visibility == DSPARK_VISIBLE_MASK) {
        seen = 0;
        for (int w = 0; w < p.mask_words; ++w) {
          seen += __builtin_popcount(static_cast<uint32_t>(p.ancestors[int64_t{t} * p.mask_words + w]));
        }
      }
      row_sequence_[static_cast<size_t>(t)] = i;
      row_visible_[static_cast<size_t>(t)] = context + seen;
      most = context + seen > most ? context + seen : most;
    }
  }
  max_chunks_ = (most + kChunk - 1) / kChunk;
  const int64_t items = int64_t{p.num_rows} * kv_heads_;
  split_ = max_chunks_ > 1 && items < 8 * pool_.num_threads();
  plan_tiles();
  if (split_) {
    partial_.reserve(items * max_chunks_ * partial_size_ * 4, "the parts of an attention");
  } else {
    const int64_t bytes = int64_t{tile_rows_} * max_chunks_ * partial_size_ * 4;
    for (Buffer& b : thread_partial_) b.reserve(bytes, "the parts of an attention");
  }
}

// Cut the sequences into tiles of at most `most` rows, about equal within each; returns how long the busiest thread
// attends, in half rows: reading the keys of a tile takes about one.
int64_t Decoder::cut_tiles(int most) {
  tiles_.clear();
  int largest = 0;
  for (int i = 0; i < pass_.num_sequences; ++i) {
    const int last = pass_.query_start[i + 1];
    int tiles = (last - pass_.query_start[i] + most - 1) / most;
    for (int first = pass_.query_start[i], rows; first < last; first += rows, --tiles) {
      rows = (last - first + tiles - 1) / tiles;
      largest = rows > largest ? rows : largest;
      tiles_.push_back({first, rows});
    }
  }
  tile_rows_ = largest;
  const int64_t items = static_cast<int64_t>(tiles_.size()) * kv_heads_ * (split_ ? max_chunks_ : 1);
  return (items + pool_.num_threads() - 1) / pool_.num_threads() * (2 * largest + 1);
}

// The tiles that keep the busiest thread busy for the shortest time; among equals the largest, which read the least.
void Decoder::plan_tiles() {
  int best = 1;
  int64_t least = cut_tiles(1);
  const int longest = kAttendQueries / group_;
  for (int most = 2; most <= longest && static_cast<int>(tiles_.size()) > pass_.num_sequences; ++most) {
    const int64_t cost = cut_tiles(most);
    if (cost > least) continue;
    best = most;
    least = cost;
  }
  cut_tiles(best);
}

void Decoder::forward(const DSparkPass& pass) {
  pass_ = pass;
  const int rows = pass.num_rows, picked = pass.num_logit_rows;
  reserve_rows(rows);
  const Dtype final_dtype = head ? head->dtype : dtype_;
  final_stride_ = kernels_.row_bytes(final_dtype, round_up(hidden_, kGroup));
  final_.reserve(picked * final_stride_ + 64);
  plan_sequences();
  plan_.clear();
  totals_.clear();
  fused_ = rows <= kFusedRows && !split_;
  ++pass_number_;
  if (fused_) {
    int64_t widest = hidden_stride_ > attention_stride_ ? hidden_stride_ : attention_stride_;
    widest = widest > activation_stride_ ? widest : activation_stride_;
    for (Buffer& b : thread_input_) b.reserve(rows * widest);
  }
  bool single_rows = fused_;
  for (int i = 0; i < pass.num_sequences; ++i) {
    single_rows = single_rows && pass.query_start[i + 1] - pass.query_start[i] <= 1;
  }
  const int last = static_cast<int>(layers.size()) - 1;
  for (int l = 0; l <= last; ++l) plan_layer(l, single_rows);
  if (tapped(last)) add(kTapRows, last, rows);
  if (picked > 0) {
    add(kFinalRows, 0, picked);
    if (pass.logits) {
      add(kHead, 0, head->panels);
      if (pass.argmax) add(kArgmax, 0, picked);
    }
  }
  pool_.run(totals_.data(), static_cast<int>(plan_.size()), body, this);
}

bool Decoder::tapped(int layer) const {
  for (int i = 0; i < pass_.num_taps; ++i) {
    if (pass_.taps[i] == layer) return true;
  }
  return false;
}

void Decoder::plan_layer(int l, bool single_rows) {
  const Layer& layer = layers[static_cast<size_t>(l)];
  const int rows = pass_.num_rows;
  if (!fused_ || l == 0 || tapped(l - 1)) add(kInputRows, l, rows);
  add(kQkv, l, layer.qkv->panels);
  if (single_rows) {
    add(kHeadsAttend, l, int64_t{rows} * kv_heads_);
  } else {
    add(kHeads, l, rows);
    add(kAttend, l, static_cast<int64_t>(tiles_.size()) * kv_heads_ * (split_ ? max_chunks_ : 1));
  }
  if (!fused_) add(kMergeRows, l, rows);
  add(kOutput, l, layer.output->panels);
  if (!fused_) add(kPostRows, l, rows);
  add(kGateUp, l, layer.gate_up->panels);
  if (!fused_ && dtype_ == kInt8) add(kActRows, l, rows);
  add(kDown, l, layer.down->panels);
}

void Decoder::append(const Matrix& fc, const float* norm, const float* features, int rows, const int32_t* positions,
                     const int32_t* slots, const float* cos, const float* sin) {
  pass_ = DSparkPass{};
  pass_.num_rows = rows;
  pass_.positions = positions;
  pass_.slots = slots;
  pass_.cos = cos;
  pass_.sin = sin;
  fc_ = &fc;
  context_norm_ = norm;
  features_ = features;
  reserve_rows(rows);
  append_in_.reserve(rows * kernels_.row_bytes(fc.dtype, fc.k_pad));
  plan_.clear();
  totals_.clear();
  add(kFeatureRows, 0, rows);
  add(kFeatures, 0, fc.panels);
  add(kContextRows, 0, rows);
  const int skipped = heads_ * dim_ / kPanel;
  for (int l = 0; l < static_cast<int>(layers.size()); ++l) {
    add(kKeysValues, l, layers[static_cast<size_t>(l)].qkv->panels - skipped);
    add(kKeyHeads, l, rows);
  }
  pool_.run(totals_.data(), static_cast<int>(plan_.size()), body, this);
}

void Decoder::body(void* self, int phase, int begin, int end, int thread) {
  auto* d = static_cast<Decoder*>(self);
  d->run(phase, begin, end, thread);
}

void Decoder::project(const Matrix& w, const uint8_t* x, int64_t x_stride, Epilogue epilogue, float* out,
                      int64_t out_stride, int rows, int begin, int end) {
  Gemm g{};
  g.w = &w;
  g.x = x;
  g.x_stride = x_stride;
  g.rows = rows;
  g.epilogue = epilogue;
  g.out = out;
  g.out_stride = out_stride;
  if (epilogue == kSilu) {
    const bool raw = dtype_ == kInt8;
    g.activation = raw ? activation_.as<uint8_t>() : activation_in_.as<uint8_t>();
    g.activation_stride = raw ? int64_t{round_up(intermediate_, kGroup)} * 4 : activation_stride_;
    g.activation_dtype = raw ? kFloat32 : dtype_;
  }
  kernels_.gemm(g, begin, end);
}

void Decoder::input_row(int layer, int t) {
  float* x = residual(t);
  if (layer == 0) matrix_row(*embedding, pass_.tokens[t], x);
  for (int i = 0; i < pass_.num_taps; ++i) {
    if (pass_.taps[i] != layer - 1) continue;
    std::memcpy(pass_.features + (int64_t{t} * pass_.num_taps + i) * hidden_, x, static_cast<size_t>(hidden_) * 4);
  }
}

// The item's place, with its first chunk where chunks are no items of their own.
Part Decoder::part(int item) const {
  const int tiles = static_cast<int>(tiles_.size());
  if (split_) return {item / max_chunks_ / kv_heads_, item / max_chunks_ % kv_heads_, item % max_chunks_};
  return {item % tiles, item / tiles, 0};
}

// The first key of the chunk at `start` that row t's window holds.
int Decoder::window_begin(const Layer& layer, int t, int start) const {
  if (layer.window <= 0) return 0;
  int low = pass_.positions[t] - layer.window + 1;
  const int context = pass_.context_len[row_sequence_[static_cast<size_t>(t)]];
  low = low > context ? context : low;
  return low > start ? low - start : 0;
}

// Slots of keys [start, start + end) that row t sees; listed in `own` [kChunk] where a mask picks them.
const int32_t* Decoder::visible_slots(int t, int start, int end, int32_t* own) const {
  const size_t i = static_cast<size_t>(row_sequence_[static_cast<size_t>(t)]);
  const int context = pass_.context_len[i];
  const int32_t* keys = key_slots_.data() + key_start_[i];
  if (pass_.visibility != DSPARK_VISIBLE_MASK || context - start >= end) return keys + start;
  const int cached = context > start ? context - start : 0;
  std::memcpy(own, keys + start, static_cast<size_t>(cached) * 4);
  // Own rows that the mask names, in order; those that fell into earlier chunks are skipped.
  const uint32_t* mask = reinterpret_cast<const uint32_t*>(pass_.ancestors) + int64_t{t} * pass_.mask_words;
  int at = context - start;
  for (int w = 0; w < pass_.mask_words; ++w) {
    for (uint32_t bits = mask[w]; bits != 0; bits &= bits - 1, ++at) {
      if (at >= 0 && at < end) own[at] = keys[context + w * 32 + __builtin_ctz(bits)];
    }
  }
  return own;
}

// Rows of a tile whose windows begin at the same key go together; their partials are `row_stride` floats apart. `next`
// is what this thread attends to afterwards; its tile is -1 where that is not known.
void Decoder::attend_chunk(int layer, Part part, Part next, float* partial, int64_t row_stride, int thread) {
  const Tile tile = tiles_[static_cast<size_t>(part.tile)];
  const int start = part.chunk * kChunk;
  const int cached = pass_.context_len[row_sequence_[static_cast<size_t>(tile.first)]] - start;
  int32_t own[kAttendQueries][kChunk];
  AttentionRow rows[kAttendQueries];
  Attention a{};
  a.cache = cache_layer(layer);
  a.kv_head = part.kv_head;
  a.group = group_;
  a.rows = rows;
  a.alike = pass_.visibility != DSPARK_VISIBLE_MASK ? kChunk : cached > 0 ? cached : 0;
  a.staging = staging_.as<uint8_t>() + int64_t{thread} * kChunk * dim_pad_ * 4;
  if (next.tile >= 0) {
    const size_t row = static_cast<size_t>(tiles_[static_cast<size_t>(next.tile)].first);
    const int ahead = row_visible_[row] - next.chunk * kChunk;
    a.next = key_slots_.data() + key_start_[static_cast<size_t>(row_sequence_[row])] + next.chunk * kChunk;
    a.num_next = ahead < kChunk ? ahead : kChunk;
    a.next_head = next.kv_head;
  }
  for (int r = 0; r < tile.num_rows; ++r, partial += row_stride) {
    const int t = tile.first + r, left = row_visible_[static_cast<size_t>(t)] - start;
    if (left <= 0) continue;
    const int begin = window_begin(layers[static_cast<size_t>(layer)], t, start), end = left < kChunk ? left : kChunk;
    if (begin >= end) {  // the whole chunk lies before the window
      for (int h = 0; h < group_; ++h) {
        float* out = partial + int64_t{h} * (2 + dim_pad_);
        std::memset(out, 0, static_cast<size_t>(2 + dim_pad_) * 4);
        out[0] = -INFINITY;
      }
      continue;
    }
    if (a.num_rows > 0 && begin != a.begin) {
      kernels_.attend(a);
      a.num_rows = 0;
    }
    a.begin = begin;
    rows[a.num_rows] = {qkv_.as<float>() + int64_t{t} * qkv_width_ + int64_t{part.kv_head} * group_ * dim_,
                        visible_slots(t, start, end, own[a.num_rows]), end, partial};
    ++a.num_rows;
  }
  if (a.num_rows > 0) kernels_.attend(a);
}

void Decoder::attend(int layer, int item, bool more, int thread) {
  const auto [index, kv_head, chunk] = part(item);
  const Tile tile = tiles_[static_cast<size_t>(index)];
  const Part after = more ? part(item + 1) : Part{-1, 0, 0};
  if (split_) {
    float* partial = partial_.as<float>() +
                     ((int64_t{tile.first} * kv_heads_ + kv_head) * max_chunks_ + chunk) * partial_size_;
    return attend_chunk(layer, {index, kv_head, chunk}, after, partial, kv_heads_ * max_chunks_ * partial_size_, thread);
  }
  int most = 0;
  for (int t = tile.first; t < tile.first + tile.num_rows; ++t) {
    const int visible = row_visible_[static_cast<size_t>(t)];
    most = visible > most ? visible : most;
  }
  const int chunks = (most + kChunk - 1) / kChunk;
  const int64_t row_stride = max_chunks_ * partial_size_;
  float* partial = thread_partial_[static_cast<size_t>(thread)].as<float>();
  for (int c = 0; c < chunks; ++c) {
    const Part next = c + 1 < chunks ? Part{index, kv_head, c + 1} : after;
    attend_chunk(layer, {index, kv_head, c}, next, partial + c * partial_size_, row_stride, thread);
  }
  for (int r = 0; r < tile.num_rows; ++r) {
    const int t = tile.first + r;
    float* out = attention_.as<float>() + (int64_t{t} * heads_ + int64_t{kv_head} * group_) * dim_;
    kernels_.combine(partial + r * row_stride, (row_visible_[static_cast<size_t>(t)] + kChunk - 1) / kChunk,
                     partial_size_, group_, dim_, dim_pad_, out);
  }
}

void Decoder::merge_row(int t) {
  float* out = attention_.as<float>() + int64_t{t} * heads_ * dim_;
  if (split_) {
    const int chunks = (row_visible_[static_cast<size_t>(t)] + kChunk - 1) / kChunk;
    for (int h = 0; h < kv_heads_; ++h) {
      float* partial = partial_.as<float>() + (int64_t{t} * kv_heads_ + h) * max_chunks_ * partial_size_;
      kernels_.combine(partial, chunks, partial_size_, group_, dim_, dim_pad_, out + int64_t{h} * group_ * dim_);
    }
  }
}

// Row t as the input of projection `kind`.
void Decoder::convert(Kind kind, const Layer& layer, int t, uint8_t* out) const {
  if (kind == kQkv || kind == kGateUp) {
    const std::vector<float>& norm = kind == kQkv ? layer.input_norm : layer.post_norm;
    kernels_.prepare_row(residual(t), norm.data(), eps_, hidden_, round_up(hidden_, kGroup), dtype_, out);
  } else if (kind == kOutput) {
    const int width = heads_ * dim_;
    kernels_.prepare_row(attention_.as<float>() + int64_t{t} * width, nullptr, 0.0f, width, round_up(width, kGroup),
                         dtype_, out);
  } else {
    const int pad = round_up(intermediate_, kGroup);
    kernels_.prepare_row(activation_.as<float>() + int64_t{t} * pad, nullptr, 0.0f, intermediate_, pad, dtype_, out);
  }
}

// The input of projection `kind`: what an earlier phase left in `shared`, or, fused, this thread's own conversion.
const uint8_t* Decoder::converted(int index, Kind kind, const Layer& layer, int thread, uint8_t* shared,
                                  int64_t stride) {
  if (!fused_ || (kind == kDown && dtype_ != kInt8)) return shared;
  uint8_t* own = thread_input_[static_cast<size_t>(thread)].as<uint8_t>();
  int64_t& tag = thread_tag_[static_cast<size_t>(thread) * 8];
  const int64_t wanted = (pass_number_ << 20) + index;
  if (tag != wanted) {
    for (int t = 0; t < pass_.num_rows; ++t) convert(kind, layer, t, own + t * stride);
    tag = wanted;
  }
  return own;
}

void Decoder::heads(int layer, int t, int begin, int end, bool with_queries) {
  const Layer& l = layers[static_cast<size_t>(layer)];
  RowHeads r{};
  r.qkv = qkv_.as<float>() + int64_t{t} * qkv_width_;
  r.heads = heads_;
  r.q_norm = l.q_norm.empty() ? nullptr : l.q_norm.data();
  r.k_norm = l.k_norm.empty() ? nullptr : l.k_norm.data();
  r.eps = eps_;
  r.q_scale = 1.0f / std::sqrt(static_cast<float>(dim_));
  r.cos = pass_.cos + int64_t{pass_.positions[t]} * (dim_ / 2);
  r.sin = pass_.sin + int64_t{pass_.positions[t]} * (dim_ / 2);
  r.cache = cache_layer(layer);
  r.slot = pass_.slots[t];
  r.with_queries = with_queries;
  r.begin = begin;
  r.end = end;
  kernels_.heads(r);
}

void Decoder::run(int index, int begin, int end, int thread) {
  const PhaseInfo phase = plan_[static_cast<size_t>(index)];
  const Layer& layer = layers[static_cast<size_t>(phase.layer)];
  const int rows = pass_.num_rows, hidden_pad = round_up(hidden_, kGroup);
  uint8_t* attended = attention_in_.as<uint8_t>();
  uint8_t* activated = activation_in_.as<uint8_t>();
  const auto source = [&](uint8_t* shared, int64_t stride) {
    return converted(index, phase.kind, layer, thread, shared, stride);
  };
  switch (phase.kind) {
    case kInputRows:
      for (int t = begin; t < end; ++t) {
        input_row(phase.layer, t);
        if (!fused_) convert(kQkv, layer, t, input(t));
      }
      return;
    case kQkv:
      return project(*layer.qkv, source(input(0), hidden_stride_), hidden_stride_, kStore, qkv_.as<float>(),
                     qkv_width_, rows, begin, end);
    case kHeads:
    case kKeyHeads:
      for (int t = begin; t < end; ++t) heads(phase.layer, t, 0, kv_heads_, phase.kind == kHeads);
      return;
    case kHeadsAttend:
      for (int i = begin; i < end; ++i) {
        heads(phase.layer, i % rows, i / rows, i / rows + 1, true);
        attend(phase.layer, i, i + 1 < end, thread);
      }
      return;
    case kAttend:
      for (int i = begin; i < end; ++i) attend(phase.layer, i, i + 1 < end, thread);
      return;
    case kMergeRows:
      for (int t = begin; t < end; ++t) {
        merge_row(t);
        convert(kOutput, layer, t, attended + t * attention_stride_);
      }
      return;
    case kOutput:
      return project(*layer.output, source(attended, attention_stride_), attention_stride_, kAdd, residual(0), hidden_,
                     rows, begin, end);
    case kPostRows:
      for (int t = begin; t < end; ++t) convert(kGateUp, layer, t, input(t));
      return;
    case kGateUp:
      return project(*layer.gate_up, source(input(0), hidden_stride_), hidden_stride_, kSilu, nullptr, 0, rows, begin,
                     end);
    case kActRows:
      for (int t = begin; t < end; ++t) convert(kDown, layer, t, activated + t * activation_stride_);
      return;
    case kDown:
      return project(*layer.down, source(activated, activation_stride_), activation_stride_, kAdd, residual(0), hidden_,
                     rows, begin, end);
    case kTapRows:
      for (int t = begin; t < end; ++t) input_row(phase.layer + 1, t);
      return;
    case kFinalRows:
      for (int i = begin; i < end; ++i) {
        const float* x = residual(pass_.logit_rows[i]);
        if (pass_.hidden) {
          float* out = pass_.hidden + int64_t{i} * hidden_;
          std::memcpy(out, x, static_cast<size_t>(hidden_) * 4);
          kernels_.norm_row(out, final_norm.data(), eps_, hidden_);
        }
        kernels_.prepare_row(x, final_norm.data(), eps_, hidden_, hidden_pad, head ? head->dtype : dtype_,
                             final_.as<uint8_t>() + i * final_stride_);
      }
      return;
    case kHead:
      return project(*head, final_.as<uint8_t>(), final_stride_, kStore, pass_.logits, pass_.logits_width,
                     pass_.num_logit_rows, begin, end);
    case kArgmax:
      for (int i = begin; i < end; ++i) {
        kernels_.argmax(pass_.logits + int64_t{i} * pass_.logits_width, pass_.logits_width, pass_.argmax + i,
                        pass_.finite + i);
      }
      return;
    case kFeatureRows:
      for (int t = begin; t < end; ++t) {
        kernels_.prepare_row(features_ + int64_t{t} * fc_->k, nullptr, 0.0f, fc_->k, fc_->k_pad, fc_->dtype,
                             append_in_.as<uint8_t>() + t * kernels_.row_bytes(fc_->dtype, fc_->k_pad));
      }
      return;
    case kFeatures:
      return project(*fc_, append_in_.as<uint8_t>(), kernels_.row_bytes(fc_->dtype, fc_->k_pad), kStore, residual(0),
                     hidden_, rows, begin, end);
    case kContextRows:
      for (int t = begin; t < end; ++t) {
        kernels_.prepare_row(residual(t), context_norm_, eps_, hidden_, hidden_pad, dtype_, input(t));
      }
      return;
    case kTouch: {
      const int64_t from = begin * kTouchBytes, to = end * kTouchBytes < cache_bytes_ ? end * kTouchBytes : cache_bytes_;
      volatile uint8_t* cache = static_cast<uint8_t*>(cache_);
      for (int64_t at = from; at < to; at += 4096) cache[at] = cache[at];
      return;
    }
    case kKeysValues: {
      const int skipped = heads_ * dim_ / kPanel;
      return project(*layer.qkv, input(0), hidden_stride_, kStore, qkv_.as<float>(), qkv_width_, rows, begin + skipped,
                     end + skipped);
    }
  }
}

}  // namespace dspark

using namespace dspark;

extern "C" {

void* dspark_decoder_create(const DSparkDecoderConfig* config, void* pool) {
  return made([&] { return new Decoder(*config, *static_cast<Pool*>(pool)); });
}

void dspark_decoder_destroy(void* decoder) { delete static_cast<Decoder*>(decoder); }

void dspark_decoder_set_matrix(void* decoder, int32_t layer, int32_t which, void* matrix) {
  Layer& l = static_cast<Decoder*>(decoder)->layers[static_cast<size_t>(layer)];
  const Matrix* m = static_cast<Matrix*>(matrix);
  switch (which) {
    case DSPARK_QKV: l.qkv = m; return;
    case DSPARK_OUTPUT: l.output = m; return;
    case DSPARK_GATE_UP: l.gate_up = m; return;
    case DSPARK_DOWN: l.down = m; return;
  }
}

int32_t dspark_decoder_set_norm(void* decoder, int32_t layer, int32_t which, const float* values, int32_t n) {
  return guarded([&] {
    auto* d = static_cast<Decoder*>(decoder);
    if (which == DSPARK_FINAL_NORM) {
      d->final_norm.assign(values, values + n);
      return;
    }
    Layer& l = d->layers[static_cast<size_t>(layer)];
    switch (which) {
      case DSPARK_INPUT_NORM: l.input_norm.assign(values, values + n); return;
      case DSPARK_POST_NORM: l.post_norm.assign(values, values + n); return;
      case DSPARK_Q_NORM: l.q_norm.assign(values, values + n); return;
      case DSPARK_K_NORM: l.k_norm.assign(values, values + n); return;
    }
  });
}

void dspark_decoder_set_ends(void* decoder, void* embedding, void* head) {
  auto* d = static_cast<Decoder*>(decoder);
  d->embedding = static_cast<Matrix*>(embedding);
  d->head = static_cast<Matrix*>(head);
}

int32_t dspark_decoder_allocate_cache(void* decoder, int64_t num_slots) {
  return guarded([&] { static_cast<Decoder*>(decoder)->allocate_cache(num_slots); });
}

int32_t dspark_decoder_touch_cache(void* decoder) {
  return guarded([&] { static_cast<Decoder*>(decoder)->touch_cache(); });
}

void dspark_decoder_move_cache(void* decoder, int32_t num, const int32_t* from, const int32_t* to) {
  static_cast<Decoder*>(decoder)->move_cache(num, from, to);
}

int32_t dspark_decoder_forward(void* decoder, const DSparkPass* pass) {
  return guarded([&] { static_cast<Decoder*>(decoder)->forward(*pass); });
}

int32_t dspark_decoder_append(void* decoder, void* fc, const float* norm, const float* features, int32_t num_rows,
                           const int32_t* positions, const int32_t* slots, const float* cos, const float* sin) {
  return guarded([&] {
    static_cast<Decoder*>(decoder)->append(*static_cast<Matrix*>(fc), norm, features, num_rows, positions, slots, cos,
                                           sin);
  });
}

}  // extern "C"
