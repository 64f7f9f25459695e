#include "sampling.hpp"

#include <algorithm>
#include <cmath>
#include <functional>

namespace dspark {
namespace {

constexpr uint32_t kDraft = 0, kTokenFine = 5;  // dspark/sampling/philox.py: Purpose
constexpr float kNear = 3.0f;                   // tokens this close to the likeliest are tried for the first bound
constexpr double kFinest = 1.0 / (int64_t{1} << 41);
constexpr int kBlock = 256;                     // entries summed at once by the inverse of the running total

struct Words {
  uint32_t w[4];
};

Words philox(uint64_t seed, uint32_t c0, uint32_t c1, uint32_t c2) {
  uint32_t c3 = 0, k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int i = 0; i < 10; ++i) {
    const uint64_t a = uint64_t{0xD2511F53u} * c0, b = uint64_t{0xCD9E8D57u} * c2;
    c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(b);
    c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(a);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

double gumbel(double u) { return -std::log(-std::log(u)); }

// Bounds of the noise of a token whose leading byte is known, a hair wider than exact.
struct Bounds {
  double lower[256], upper[256];
  Bounds() {
    for (int i = 0; i < 256; ++i) {
      lower[i] = gumbel(std::max(i / 256.0, kFinest)) - 1e-9;
      upper[i] = gumbel(std::min((i + 1) / 256.0, 1.0 - kFinest)) + 1e-9;
    }
  }
};
const Bounds& bounds() {
  static const Bounds made;
  return made;
}

struct Race {
  const DSparkSampling& s;
  const DrawRow& row;
  uint32_t position;
  uint32_t token(int entry) const { return static_cast<uint32_t>(row.token_ids ? row.token_ids[entry] : entry); }
  int byte(int entry) const {
    const uint32_t t = token(entry);
    if (row.bytes) return row.bytes[t];
    return static_cast<int>(philox(s.seed, t / 16, position, kTokenCoarse).w[t / 4 % 4] >> (t % 4 * 8) & 255u);
  }
  double noise(int entry, int byte) const {
    const uint32_t t = token(entry);
    const uint32_t word = philox(s.seed, t / 4, position, kTokenFine).w[t % 4];
    return gumbel((byte + (word + 0.5) / 4294967296.0) / 256.0);
  }
};

// The arg-max of log weight + the token's own noise, the first among equals. `kept` null = all n entries.
int race(const Race& r, const float* scaled, const int32_t* kept, int count) {
  const Bounds& b = bounds();
  double bound = -INFINITY;
  for (int j = 0; j < count; ++j) {
    const int e = kept ? kept[j] : j;
    if (scaled[e] >= -kNear) bound = std::max(bound, scaled[e] + b.lower[r.byte(e)]);
  }
  bound -= 1e-9 * 64.0;
  const float usual = static_cast<float>(bound - b.upper[254]) - 1e-4f, lucky = static_cast<float>(bound - b.upper[255]) - 1e-4f;
  int best = -1;
  double most = -INFINITY;
  for (int j = 0; j < count; ++j) {
    const int e = kept ? kept[j] : j;
    if (scaled[e] < lucky) continue;
    const int byte = r.byte(e);
    if (scaled[e] < usual && byte != 255) continue;
    if (scaled[e] + b.upper[byte] < bound) continue;
    const double value = scaled[e] + r.noise(e, byte);
    if (value > most) {
      most = value;
      best = e;
    }
  }
  return best;
}

// The place whose share of the running total holds u; never one of weight 0.
int inverse(const double* probs, int n, double u) {
  double total = 0.0;
  std::vector<double> sums;
  for (int start = 0; start < n; start += kBlock) {
    double lanes[8] = {};
    const int end = std::min(start + kBlock, n);
    int j = start;
    for (; j + 8 <= end; j += 8) {
      for (int l = 0; l < 8; ++l) lanes[l] += probs[j + l];
    }
    for (; j < end; ++j) lanes[0] += probs[j];
    double sum = 0.0;
    for (double lane : lanes) sum += lane;
    sums.push_back(sum);
    total += sum;
  }
  double rest = u * total;
  size_t block = 0;
  while (block + 1 < sums.size() && sums[block] <= rest) rest -= sums[block++];
  int last = -1;
  double running = 0.0;
  for (int j = static_cast<int>(block) * kBlock; j < n; ++j) {
    running += probs[j];
    if (probs[j] > 0.0) last = j;
    if (running > rest) return j;
  }
  while (last < 0) {
    if (probs[--n] > 0.0) last = n;
  }
  return last;
}

// Keep the k largest of `values` [n] among `kept`, the earliest of those equal to the k-th.
template <class T>
void first_k(std::vector<int32_t>& kept, const T* values, T cutoff, int k) {
  int missing = k;
  for (int32_t e : kept) missing -= values[e] > cutoff;
  size_t at = 0;
  for (int32_t e : kept) {
    if (values[e] > cutoff || (values[e] == cutoff && missing-- > 0)) kept[at++] = e;
  }
  kept.resize(at);
}

void keep_top_k(std::vector<int32_t>& kept, const float* scaled, int k, std::vector<float>& values) {
  values.clear();
  for (int32_t e : kept) values.push_back(scaled[e]);
  std::nth_element(values.begin(), values.begin() + (k - 1), values.end(), std::greater<float>());
  first_k(kept, scaled, values[static_cast<size_t>(k - 1)], k);
}

void keep_top_p(std::vector<int32_t>& kept, const double* weights, double top_p,
                std::vector<std::pair<double, int32_t>>& ordered) {
  double total = 0.0;
  for (int32_t e : kept) total += weights[e];
  const double wanted = top_p * total;
  const double floor = (1.0 - top_p) * total / static_cast<double>(kept.size()) * (1.0 - 1e-6);
  for (const double low : {floor * 256.0, floor}) {  // what lies below the floor weighs less than may stay outside
    ordered.clear();
    double sum = 0.0;
    for (int32_t e : kept) {
      if (weights[e] < low) continue;
      ordered.emplace_back(-weights[e], e);
      sum += weights[e];
    }
    if (sum >= wanted) break;
  }
  std::sort(ordered.begin(), ordered.end());
  double running = 0.0;
  size_t k = 0;
  while (k < ordered.size() && running < wanted) running -= ordered[k++].first;
  kept.clear();
  for (size_t j = 0; j < std::max(k, size_t{1}); ++j) kept.push_back(ordered[j].second);
  std::sort(kept.begin(), kept.end());
}

}  // namespace

int draw_row(const Kernels& kernels, const DSparkSampling& s, const DrawRow& row, DrawScratch& scratch) {
  const int n = row.n;
  scratch.scaled.resize(static_cast<size_t>(n));
  float* scaled = scratch.scaled.data();
  double total = kernels.soft(row.logits, n, row.logits[row.best], s.scale, scaled, row.probs);
  const bool cut = (s.top_k > 0 && s.top_k < n) || s.top_p < 1.0 || s.min_log > -INFINITY;
  const int32_t* kept = nullptr;
  int count = n;
  if (cut) {
    std::vector<int32_t>& list = scratch.kept;
    list.resize(static_cast<size_t>(n));
    for (int e = 0; e < n; ++e) list[static_cast<size_t>(e)] = e;
    if (s.top_k > 0 && s.top_k < n) keep_top_k(list, scaled, s.top_k, scratch.values);
    if (s.top_p < 1.0) keep_top_p(list, row.probs, s.top_p, scratch.ordered);
    if (s.min_log > -INFINITY) {
      list.erase(std::remove_if(list.begin(), list.end(), [&](int32_t e) { return scaled[e] < s.min_log; }), list.end());
    }
    count = static_cast<int>(list.size());
    total = 0.0;
    for (int j = 0; j < count; ++j) {  // entries ascend, so nothing is overwritten before it is read
      row.entries[j] = list[static_cast<size_t>(j)];
      row.probs[j] = row.probs[row.entries[j]];
      total += row.probs[j];
    }
    kept = row.entries;
  }
  *row.count = count;
  const double share = 1.0 / total;
  for (int j = 0; j < count; ++j) row.probs[j] *= share;
  if (count == 1) return kept ? kept[0] : 0;
  const uint32_t position = static_cast<uint32_t>(s.position + row.step);
  if (s.coupled) return race({s, row, position}, scaled, kept, count);
  const int lane = std::max(static_cast<int>(position) - s.num_committed, 0);
  const Words words = philox(s.seed, static_cast<uint32_t>(lane), position, kDraft);
  const uint64_t bits = uint64_t{words.w[0]} << 20 | words.w[1] >> 12;
  const int at = inverse(row.probs, count, (static_cast<double>(bits) + 0.5) / 4503599627370496.0);
  return kept ? kept[at] : at;
}

}  // namespace dspark
