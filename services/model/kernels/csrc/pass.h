// The pass: all rows of a batch through all layers, by one team of threads.
//
// A layer has five steps, each shared out over the team:
//
//   qkv       norm, multiply, bias, head norm, rotary embedding; keys and values go to the cache
//   attend    attention of tiles of rows by key-value head; its output is quantised
//   output    multiply, add to the residual
//   gate_up   norm, multiply, silu(gate) * up, quantise
//   down      multiply, add to the residual
//
// With few rows every member norms all rows for itself: cheaper than a step. With many they share the rows out. Either way
// a row's numbers are the same.
#pragma once

#include "attention.h"
#include "model.h"
#include "team.h"

namespace slipstream {

class Pass {
 public:
  Pass(const Model& model, int threads) : model_(model), team_(threads), workers_(threads) {}

  void run(Batch batch, uint16_t* keys, uint16_t* values, size_t layer_stride, const Results& results) {
    plan(batch);
    batch.tiles = static_cast<int>(tiles_.size());
    reserve(batch.rows);
    team_.run([=, this](Member& member) {
      embed(member, batch);
      capture(member, batch, 0, results);
      for (int l = batch.first_layer; l < batch.last_layer; l++) {
        const CacheView cache{keys + l * layer_stride, values + l * layer_stride, model_.kv_heads, model_.head_dim};
        run_layer(member, batch, l, cache);
        capture(member, batch, l + 1, results);
      }
      if (results.hidden != nullptr) copy_hidden(member, batch, results);
      if (results.logits != nullptr) head(member, batch, results.logits);
    });
  }

 private:
  struct Worker {  // a member's own buffers
    QuantisedRows normed;
    std::vector<float> heads;  // rows of one head
    Attention attention;
  };
  struct Tile {  // rows of one sequence that attend together
    int sequence, first_row, rows;
    Context context;
  };

  static constexpr int OWN_NORM_ROWS = 8;

  // Depth of each row, and the tiles of rows with what they may see.
  void plan(const Batch& batch) {
    tiles_.clear();
    position_.resize(batch.rows);
    place_.resize(batch.rows);
    sequence_.resize(batch.rows);
    const int tile_rows = std::max(1, MAX_QUERIES / model_.group());
    for (int s = 0; s < batch.sequences; s++) {
      const int start = batch.starts[s], end = batch.starts[s + 1], base = batch.base[s];
      bool chain = true;
      for (int r = start; r < end; r++) {
        const int parent = batch.parents[r];
        position_[r] = parent < 0 ? base : position_[start + parent] + 1;
        place_[r] = base + r - start;
        sequence_[r] = s;
        chain = chain && parent == r - start - 1;
      }
      for (int first = start; first < end; first += tile_rows) {
        const int rows = std::min(tile_rows, end - first);
        Tile tile{s, first, rows, {batch.blocks + static_cast<size_t>(s) * batch.blocks_stride, base, 0, {}}};
        if (chain) tile.context.shared = place_[first] + 1;
        tile.context.places = place_[first + rows - 1] + 1;
        for (int r = first; r < first + rows; r++) tile.context.further.push_back(further(batch, start, r, chain, first));
        tiles_.push_back(std::move(tile));
      }
    }
  }
  std::vector<int> further(const Batch& batch, int start, int row, bool chain, int first) const {
    std::vector<int> places;
    if (chain) {
      for (int r = first + 1; r <= row; r++) places.push_back(place_[r]);
    } else {
      for (int r = row - start; r >= 0; r = batch.parents[start + r]) places.push_back(place_[start + r]);
      std::reverse(places.begin(), places.end());
    }
    return places;
  }

  void reserve(int rows) {
    residual_.resize(static_cast<size_t>(rows) * model_.hidden);
    queries_.resize(static_cast<size_t>(rows) * model_.query_width());
    shared_normed_.resize(rows, model_.hidden);
    mixed_.resize(rows, model_.query_width());
    activated_.resize(rows, model_.intermediate);
    if (model_.fusion.present()) {
      fed_.resize(rows, model_.fusion.features.inputs);
      joined_.resize(rows, 2 * model_.hidden);
      states_.resize(static_cast<size_t>(rows) * model_.hidden);
    }
  }
  float* residual(int row) { return residual_.data() + static_cast<size_t>(row) * model_.hidden; }

  void run_layer(Member& member, const Batch& batch, int l, const CacheView& cache) {
    const Layer& layer = model_.layers[l];
    project_qkv(member, layer, batch, cache);
    attend(member, batch, cache);
    add_product(member, layer.output, mixed_, batch.rows);
    gate(member, layer, batch.rows);
    add_product(member, layer.down, activated_, batch.rows);
  }

  void embed(Member& member, const Batch& batch) {
    if (model_.fusion.present()) return fuse(member, batch);
    member.share(batch.rows, [&](int r) {
      if (batch.inputs != nullptr)
        std::copy_n(batch.inputs + static_cast<size_t>(r) * model_.hidden, model_.hidden, residual(r));
      else
        embed_token(batch.tokens[r], residual(r));
    });
  }
  void embed_token(int token, float* x) const {
    if (model_.embedding == nullptr) return dequantise_row(model_.embedding_rows, token, x);
    const uint16_t* row = model_.embedding + static_cast<size_t>(token) * model_.hidden;
    for (int i = 0; i < model_.hidden; i++) x[i] = widen_bf16(row[i]);
  }

  // A feature-fed draft's input: states from features where those are fed, then token and state together.
  void fuse(Member& member, const Batch& batch) {
    const Fusion& fusion = model_.fusion;
    const int width = model_.hidden;
    if (batch.fed != nullptr) {
      member.share(batch.rows, [&](int r) {
        std::vector<float> part(width);
        for (int at = 0; at < fusion.features.inputs; at += width) {
          const uint16_t* fed = batch.fed + static_cast<size_t>(r) * fusion.features.inputs + at;
          for (int i = 0; i < width; i += LANES) store(part.data() + i, load_bf16(fed + i));
          quantise_normed(fed_, r, at, part.data(), width, nullptr, model_.epsilon);
        }
      });
      multiply(member, fusion.features, fed_, batch.rows, [&](int r) { return states_.data() + static_cast<size_t>(r) * width; });
    }
    member.share(batch.rows, [&](int r) {
      const float* state = (batch.fed != nullptr ? states_.data() : batch.inputs) + static_cast<size_t>(r) * width;
      embed_token(batch.tokens[r], residual(r));
      quantise_normed(joined_, r, 0, residual(r), width, fusion.embedding_norm, model_.epsilon);
      quantise_normed(joined_, r, width, state, width, fusion.state_norm, model_.epsilon);
    });
    multiply(member, fusion.input, joined_, batch.rows, [&](int r) { return residual(r); });
  }

  // out(r)[..] = W x for each row.
  template <typename Out>
  void multiply(Member& member, const Linear& w, const QuantisedRows& x, int rows, Out out_row) {
    member.share(w.tiles(), [&](int t) {
      f32x16 out[MAX_ROWS];
      for (int first = 0; first < rows; first += MAX_ROWS) {
        const int n = std::min(MAX_ROWS, rows - first);
        multiply_tile(w, t, x, first, n, out);
        for (int r = 0; r < n; r++) store(out_row(first + r) + t * LANES, out[r]);
      }
    });
  }

  void capture(Member& member, const Batch& batch, int layer, const Results& results) {
    for (size_t f = 0; f < batch.features.size(); f++) {
      if (batch.features[f] != layer) continue;
      member.share(batch.rows, [&](int r) {
        uint16_t* out = results.features + (r * batch.features.size() + f) * model_.hidden;
        for (int i = 0; i < model_.hidden; i++) out[i] = narrow_to_bf16(residual(r)[i]);
      });
    }
  }

  void copy_hidden(Member& member, const Batch& batch, const Results& results) {
    member.share(batch.rows, [&](int r) {
      std::copy_n(residual(r), model_.hidden, results.hidden + static_cast<size_t>(r) * model_.hidden);
    });
  }

  // Calls body(x, item) for each item, x the normed rows: each member's own copy, or one that the team made before.
  template <typename Row, typename Body>
  void share_normed(Member& member, int rows, Row row, const float* weight, int items, Body body) {
    Worker& worker = workers_[member.index()];
    const auto norm = [&](QuantisedRows& x, int r) { quantise_normed(x, r, 0, row(r), model_.hidden, weight, model_.epsilon); };
    if (rows > OWN_NORM_ROWS) {
      member.share(rows, [&](int r) { norm(shared_normed_, r); });
      member.share(items, [&](int i) { body(shared_normed_, i); });
      return;
    }
    const auto prepare = [&] {
      worker.normed.resize(rows, model_.hidden);
      for (int r = 0; r < rows; r++) norm(worker.normed, r);
    };
    member.share(items, prepare, [&](int i) { body(worker.normed, i); });
  }

  void project_qkv(Member& member, const Layer& layer, const Batch& batch, const CacheView& cache) {
    const int width = model_.head_dim, tiles = width / LANES;
    const auto project = [&](const QuantisedRows& x, int h) {
      std::vector<float>& heads = workers_[member.index()].heads;
      heads.resize(static_cast<size_t>(MAX_ROWS) * width);
      f32x16 out[MAX_ROWS];
      for (int first = 0; first < batch.rows; first += MAX_ROWS) {
        const int rows = std::min(MAX_ROWS, batch.rows - first);
        for (int t = 0; t < tiles; t++) {
          multiply_tile(layer.qkv, h * tiles + t, x, first, rows, out);
          for (int r = 0; r < rows; r++) store(heads.data() + r * width + t * LANES, out[r]);
        }
        for (int r = 0; r < rows; r++) place_head(layer, batch, cache, h, first + r, heads.data() + r * width);
      }
    };
    share_normed(member, batch.rows, [&](int r) { return residual(r); }, layer.attention_norm,
                 model_.heads + 2 * model_.kv_heads, project);
  }

  // One head of one row: where it goes, after norm and rotation.
  void place_head(const Layer& layer, const Batch& batch, const CacheView& cache, int head, int row, float* x) {
    const int* blocks = batch.blocks + static_cast<size_t>(sequence_[row]) * batch.blocks_stride;
    if (head < model_.heads) {
      if (layer.query_norm != nullptr) norm_head(x, layer.query_norm);
      rotate(x, position_[row]);
      const f32x16 scale = splat(1.0f / __builtin_sqrtf(static_cast<float>(model_.head_dim)));
      float* out = queries_.data() + static_cast<size_t>(row) * model_.query_width() + head * model_.head_dim;
      for (int d = 0; d < model_.head_dim; d += LANES) store(out + d, mul(load(x + d), scale));
    } else if (head < model_.heads + model_.kv_heads) {
      if (layer.key_norm != nullptr) norm_head(x, layer.key_norm);
      rotate(x, position_[row]);
      cache.write_key(blocks, place_[row], head - model_.heads, x);
    } else {
      cache.write_value(blocks, place_[row], head - model_.heads - model_.kv_heads, x);
    }
  }

  void norm_head(float* x, const float* weight) const {
    const f32x16 factor = splat(inverse_rms(x, model_.head_dim, model_.epsilon));
    for (int d = 0; d < model_.head_dim; d += LANES) store(x + d, mul(mul(load(x + d), factor), load(weight + d)));
  }

  // Rotary embedding (Su et al. 2021), halves rotated against each other; tables carry any scaling.
  void rotate(float* x, int position) const {
    const int half = model_.head_dim / 2;
    const float* cosine = model_.cosines + static_cast<size_t>(position) * half;
    const float* sine = model_.sines + static_cast<size_t>(position) * half;
    for (int i = 0; i < half; i += LANES) {
      const f32x16 a = load(x + i), b = load(x + half + i), c = load(cosine + i), s = load(sine + i);
      store(x + i, sub(mul(a, c), mul(b, s)));
      store(x + half + i, fused_multiply_add(a, s, mul(b, c)));
    }
  }

  void attend(Member& member, const Batch& batch, const CacheView& cache) {
    const int items = static_cast<int>(batch.tiles) * model_.kv_heads;
    // Tiles differ in length: one claim each.
    member.share(items, [&](int i) { attend_tile(member, tiles_[i / model_.kv_heads], i % model_.kv_heads, cache); }, items);
  }

  void attend_tile(Member& member, const Tile& tile, int kv_head, const CacheView& cache) {
    const int group = model_.group(), width = model_.head_dim, lanes = tile.rows * group;
    Worker& worker = workers_[member.index()];
    worker.heads.resize(static_cast<size_t>(MAX_QUERIES) * width);
    for (int first = 0; first < lanes; first += MAX_QUERIES) {
      const float* queries[MAX_QUERIES];
      float* outputs[MAX_QUERIES];
      int row_of[MAX_QUERIES], head_of[MAX_QUERIES];
      const int n = std::min(MAX_QUERIES, lanes - first);
      for (int i = 0; i < n; i++) {
        row_of[i] = (first + i) / group;
        head_of[i] = kv_head * group + (first + i) % group;
        outputs[i] = worker.heads.data() + static_cast<size_t>(i) * width;
        queries[i] = queries_.data() + static_cast<size_t>(tile.first_row + row_of[i]) * model_.query_width() + head_of[i] * width;
      }
      worker.attention.run(cache, kv_head, tile.context, n, queries, row_of, outputs);
      for (int i = 0; i < n; i++)
        for (int d = 0; d < width; d += QUANT_BLOCK)
          mixed_.set_block(tile.first_row + row_of[i], (head_of[i] * width + d) / QUANT_BLOCK, load(outputs[i] + d),
                           load(outputs[i] + d + LANES));
    }
  }

  // residual += W x
  void add_product(Member& member, const Linear& w, const QuantisedRows& x, int rows) {
    member.share(w.tiles(), [&](int t) {
      f32x16 out[MAX_ROWS];
      for (int first = 0; first < rows; first += MAX_ROWS) {
        const int n = std::min(MAX_ROWS, rows - first);
        multiply_tile(w, t, x, first, n, out);
        for (int r = 0; r < n; r++) {
          float* y = residual(first + r) + t * LANES;
          store(y, add(load(y), out[r]));
        }
      }
    });
  }

  // silu(gate) * up, 32 channels at a time: exactly one block to quantise.
  void gate(Member& member, const Layer& layer, int rows) {
    const auto activate = [&](const QuantisedRows& x, int block) {
      f32x16 out[4][MAX_ROWS];
      for (int first = 0; first < rows; first += MAX_ROWS) {
        const int n = std::min(MAX_ROWS, rows - first);
        for (int t = 0; t < 4; t++) multiply_tile(layer.gate_up, 4 * block + t, x, first, n, out[t]);
        for (int r = 0; r < n; r++)
          activated_.set_block(first + r, block, mul(silu(out[0][r]), out[2][r]), mul(silu(out[1][r]), out[3][r]));
      }
    };
    share_normed(member, rows, [&](int r) { return residual(r); }, layer.feed_forward_norm,
                 model_.intermediate / QUANT_BLOCK, activate);
  }
  static f32x16 silu(f32x16 x) { return div(x, add(splat(1.0f), exponential(sub(zeros(), x)))); }

  // Logits of the wanted rows only.
  void head(Member& member, const Batch& batch, float* logits) {
    const auto multiply = [&](const QuantisedRows& x, int t) {
      f32x16 out[MAX_ROWS];
      for (int first = 0; first < batch.wanted_rows; first += MAX_ROWS) {
        const int n = std::min(MAX_ROWS, batch.wanted_rows - first);
        multiply_tile(model_.head, t, x, first, n, out);
        for (int r = 0; r < n; r++) store(logits + static_cast<size_t>(first + r) * model_.head.outputs + t * LANES, out[r]);
      }
    };
    share_normed(member, batch.wanted_rows, [&](int r) { return residual(batch.wanted[r]); }, model_.final_norm,
                 model_.head.tiles(), multiply);
  }

  const Model& model_;
  Team team_;
  std::vector<Worker> workers_;
  std::vector<Tile> tiles_;
  std::vector<int> position_, place_, sequence_;
  std::vector<float> residual_, queries_, states_;
  QuantisedRows shared_normed_, mixed_, activated_, fed_, joined_;
};

}  // namespace slipstream
