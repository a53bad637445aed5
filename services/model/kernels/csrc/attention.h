// Attention over a paged cache: several rows of a sequence read its keys and values once.
//
// The cache holds blocks of 16 places. For one layer and one key-value head a block is
//
//   keys    [head_dim / 2][16 places][2]    bf16: one register is one pair of dimensions of all 16 places
//   values  [16 places][head_dim]           bf16: one register is 16 dimensions of one place (widened)
//
// A *lane* here is one query vector: a row and a query head of the group that shares the key-value head. A tile of rows makes
// up to 12 lanes. Each lane's scores are summed over dimensions in order, and its output over positions in order, whatever
// other lanes there are: that is what makes a row's bits its own.
//
// Reference in torch: services/model/kernels/torch_pass.py.
#pragma once

#include <cmath>
#include <vector>

#include "activations.h"

namespace slipstream {

constexpr int BLOCK = 16;
constexpr int MAX_QUERIES = 12;

struct CacheView {
  uint16_t* keys;
  uint16_t* values;
  int kv_heads, head_dim;

  size_t offset(int block, int kv_head) const {
    return (static_cast<size_t>(block) * kv_heads + kv_head) * BLOCK * head_dim;
  }
  void write_key(const int* blocks, int place, int kv_head, const float* key) const {
    uint16_t* out = keys + offset(blocks[place / BLOCK], kv_head) + (place % BLOCK) * 2;
    for (int d = 0; d < head_dim; d++) out[(d / 2) * BLOCK * 2 + d % 2] = narrow_to_bf16(key[d]);
  }
  void write_value(const int* blocks, int place, int kv_head, const float* value) const {
    uint16_t* out = values + offset(blocks[place / BLOCK], kv_head) + (place % BLOCK) * head_dim;
    for (int d = 0; d < head_dim; d++) out[d] = narrow_to_bf16(value[d]);
  }
  void move_place(const int* blocks, int from, int to) const {
    for (int h = 0; h < kv_heads; h++) {
      const uint16_t* k = keys + offset(blocks[from / BLOCK], h) + (from % BLOCK) * 2;
      uint16_t* k_out = keys + offset(blocks[to / BLOCK], h) + (to % BLOCK) * 2;
      const uint16_t* v = values + offset(blocks[from / BLOCK], h) + (from % BLOCK) * head_dim;
      uint16_t* v_out = values + offset(blocks[to / BLOCK], h) + (to % BLOCK) * head_dim;
      for (int d = 0; d < head_dim; d++) {
        k_out[(d / 2) * BLOCK * 2 + d % 2] = k[(d / 2) * BLOCK * 2 + d % 2];
        v_out[d] = v[d];
      }
    }
  }
};

// What the rows of one tile may see: places 0 .. shared-1, all of them, and then each row its own further places.
struct Context {
  const int* blocks;
  int shared;
  int places;  // places to score: shared and everything behind it that a row may see
  std::vector<std::vector<int>> further;  // [row] places in order of position

  int length(int row) const { return shared + static_cast<int>(further[row].size()); }
};

// scores[n][at ..] = queries . keys of 16 places; queries lie as [head_dim][N].
template <int N>
inline void score_block(const float* queries, const uint16_t* keys, int head_dim, float* const* scores, int at) {
  f32x16 even[N], odd[N];
  for (int n = 0; n < N; n++) even[n] = odd[n] = zeros();
  for (int d = 0; d < head_dim; d += 2, keys += 2 * BLOCK, queries += 2 * N) {
    f32x16 a, b;
    load_bf16_pairs(keys, a, b);
    for (int n = 0; n < N; n++) {
      even[n] = fused_multiply_add(a, splat(queries[n]), even[n]);
      odd[n] = fused_multiply_add(b, splat(queries[N + n]), odd[n]);
    }
  }
  for (int n = 0; n < N; n++) store(scores[n] + at, add(even[n], odd[n]));
}

// outputs[n] += sum over places of weights[place][n] * values[place], W registers of dimensions at a time.
template <int N, int W>
inline void mix_block(const float* weights, int places, const uint16_t* values, int head_dim, float* const* outputs) {
  for (int v = 0; v < head_dim; v += W * LANES) {
    f32x16 sums[N][W];
    for (int n = 0; n < N; n++)
      for (int w = 0; w < W; w++) sums[n][w] = load(outputs[n] + v + w * LANES);
    for (int p = 0; p < places; p++) {
      f32x16 value[W];
      for (int w = 0; w < W; w++) value[w] = load_bf16(values + p * head_dim + v + w * LANES);
      for (int n = 0; n < N; n++) {
        const f32x16 weight = splat(weights[p * N + n]);
        for (int w = 0; w < W; w++) sums[n][w] = fused_multiply_add(weight, value[w], sums[n][w]);
      }
    }
    for (int n = 0; n < N; n++)
      for (int w = 0; w < W; w++) store(outputs[n] + v + w * LANES, sums[n][w]);
  }
}

// scores -> e^(score - max), and their sum. Lanes of the sum are positions modulo 16.
inline float exponentiate(float* scores, int length) {
  f32x16 peaks = splat(-INFINITY);
  for (int i = 0; i < length; i += LANES)
    peaks = maximum(peaks, load_first(scores + i, std::min(LANES, length - i), -INFINITY));
  const f32x16 peak = splat(max_of_lanes(peaks));
  f32x16 sums = zeros();
  for (int i = 0; i < length; i += LANES) {
    const f32x16 e = exponential(sub(load_first(scores + i, std::min(LANES, length - i), -INFINITY), peak));
    store(scores + i, e);
    sums = add(sums, e);
  }
  return sum_of_lanes(sums);
}

class Attention {
 public:
  // queries: N lanes of head_dim floats, already scaled; row_of[n] is the lane's row in the tile; outputs [N][head_dim].
  void run(const CacheView& cache, int kv_head, const Context& context, int n, const float* const* queries,
           const int* row_of, float* const* outputs) {
    const int padded = (context.places + BLOCK - 1) / BLOCK * BLOCK;
    scores_.resize(static_cast<size_t>(n) * padded);
    queries_.resize(static_cast<size_t>(n) * cache.head_dim);
    for (int i = 0; i < n; i++) {
      lane_[i] = scores_.data() + static_cast<size_t>(i) * padded;
      for (int d = 0; d < cache.head_dim; d++) queries_[d * n + i] = queries[i][d];
    }
    score(cache, kv_head, context, n);
    float total[MAX_QUERIES];
    for (int i = 0; i < n; i++) {
      gather_further(context, row_of[i], lane_[i]);
      total[i] = exponentiate(lane_[i], context.length(row_of[i]));
      std::fill_n(outputs[i], cache.head_dim, 0.0f);
    }
    mix(cache, kv_head, context, n, row_of, outputs);
    for (int i = 0; i < n; i++) {
      const f32x16 inverse = splat(1.0f / total[i]);
      for (int d = 0; d < cache.head_dim; d += LANES) store(outputs[i] + d, mul(load(outputs[i] + d), inverse));
    }
  }

 private:
  template <int N>
  void score_all(const CacheView& cache, int kv_head, const Context& context) {
    for (int at = 0; at < context.places; at += BLOCK) {
      prefetch_next(cache.keys, cache, kv_head, context, at, context.places);
      score_block<N>(queries_.data(), cache.keys + cache.offset(context.blocks[at / BLOCK], kv_head), cache.head_dim, lane_, at);
    }
  }
  // Blocks lie anywhere: the processor cannot guess where the next one begins.
  static void prefetch_next(const uint16_t* of, const CacheView& cache, int kv_head, const Context& context, int at, int end) {
    if (at + BLOCK >= end) return;
    const uint16_t* next = of + cache.offset(context.blocks[at / BLOCK + 1], kv_head);
    for (int i = 0; i < BLOCK * cache.head_dim; i += 32) prefetch(next + i);
  }
  void score(const CacheView& cache, int kv_head, const Context& context, int n) {
    switch (n) {
#define SLIPSTREAM_CASE(N) \
  case N: return score_all<N>(cache, kv_head, context);
      SLIPSTREAM_CASE(1) SLIPSTREAM_CASE(2) SLIPSTREAM_CASE(3) SLIPSTREAM_CASE(4) SLIPSTREAM_CASE(5) SLIPSTREAM_CASE(6)
      SLIPSTREAM_CASE(7) SLIPSTREAM_CASE(8) SLIPSTREAM_CASE(9) SLIPSTREAM_CASE(10) SLIPSTREAM_CASE(11)
      default: return score_all<12>(cache, kv_head, context);
#undef SLIPSTREAM_CASE
    }
  }

  // Scores lie by place; softmax and mixing want them by position. In a chain the two agree.
  void gather_further(const Context& context, int row, float* scores) {
    const std::vector<int>& further = context.further[row];
    moved_.resize(further.size());
    for (size_t i = 0; i < further.size(); i++) moved_[i] = scores[further[i]];
    std::copy(moved_.begin(), moved_.end(), scores + context.shared);
  }

  template <int N>
  void mix_shared(const CacheView& cache, int kv_head, const Context& context, float* const* outputs) {
    float weights[BLOCK * N];
    for (int at = 0; at < context.shared; at += BLOCK) {
      const int places = std::min(BLOCK, context.shared - at);
      prefetch_next(cache.values, cache, kv_head, context, at, context.shared);
      for (int p = 0; p < places; p++)
        for (int n = 0; n < N; n++) weights[p * N + n] = lane_[n][at + p];
      const uint16_t* values = cache.values + cache.offset(context.blocks[at / BLOCK], kv_head);
      if (N <= 6 && cache.head_dim % (4 * LANES) == 0)
        mix_block<N, 4>(weights, places, values, cache.head_dim, outputs);
      else
        mix_block<N, 2>(weights, places, values, cache.head_dim, outputs);
    }
  }
  void mix(const CacheView& cache, int kv_head, const Context& context, int n, const int* row_of, float* const* outputs) {
    switch (n) {
#define SLIPSTREAM_CASE(N) \
  case N: mix_shared<N>(cache, kv_head, context, outputs); break;
      SLIPSTREAM_CASE(1) SLIPSTREAM_CASE(2) SLIPSTREAM_CASE(3) SLIPSTREAM_CASE(4) SLIPSTREAM_CASE(5) SLIPSTREAM_CASE(6)
      SLIPSTREAM_CASE(7) SLIPSTREAM_CASE(8) SLIPSTREAM_CASE(9) SLIPSTREAM_CASE(10) SLIPSTREAM_CASE(11)
      default: mix_shared<12>(cache, kv_head, context, outputs);
#undef SLIPSTREAM_CASE
    }
    for (int i = 0; i < n; i++) {
      const std::vector<int>& further = context.further[row_of[i]];
      for (size_t f = 0; f < further.size(); f++) {
        const uint16_t* values = cache.values + cache.offset(context.blocks[further[f] / BLOCK], kv_head) +
                                 (further[f] % BLOCK) * cache.head_dim;
        const f32x16 weight = splat(lane_[i][context.shared + f]);
        for (int d = 0; d < cache.head_dim; d += LANES)
          store(outputs[i] + d, fused_multiply_add(weight, load_bf16(values + d), load(outputs[i] + d)));
      }
    }
  }

  std::vector<float> queries_, scores_, moved_;
  float* lane_[MAX_QUERIES];
};

}  // namespace slipstream
