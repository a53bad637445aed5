// The weights of a Llama-like model, and the batch that a pass takes.
#pragma once

#include <vector>

#include "linear.h"

namespace slipstream {

struct Layer {
  const float* attention_norm;
  const float* feed_forward_norm;
  const float* query_norm = nullptr;  // [head_dim], Qwen3
  const float* key_norm = nullptr;
  Linear qkv;      // outputs: query heads, key heads, value heads
  Linear output;
  Linear gate_up;  // tiles: two of gate, two of up, and so on: 32 channels of both lie side by side
  Linear down;
};

// How a feature-fed draft makes the input of its layer from a token and a state (services/draft/feature_head.py):
//   state = features . concat(rms(f) for each layer of f)
//   x     = input . concat(rms(embedding of token) * embedding_norm, rms(state) * state_norm)
struct Fusion {
  Linear features;  // inputs: feature layers times hidden
  Linear input;     // inputs: 2 hidden
  const float* embedding_norm;
  const float* state_norm;

  bool present() const { return input.weights != nullptr; }
};

struct Model {
  int hidden, heads, kv_heads, head_dim, intermediate, vocabulary;
  float epsilon;
  std::vector<Layer> layers;
  const float* final_norm = nullptr;
  Linear head;
  const uint16_t* embedding = nullptr;  // [vocabulary, hidden] bf16, or null: the rows of
  Linear embedding_rows;                // ... this, which may share the head's weights
  Fusion fusion{};
  const float* cosines = nullptr;       // [context, head_dim / 2]
  const float* sines = nullptr;

  int query_width() const { return heads * head_dim; }
  int group() const { return heads / kv_heads; }
};

// Rows of several sequences. Sequence s has rows starts[s] .. starts[s + 1] - 1; its row i stands at place base[s] + i of its
// blocks and follows row parents[i] of the same sequence (-1: the last token of the cache).
struct Batch {
  int rows, sequences;
  const int* tokens;     // [rows]; may be null when inputs are given
  const float* inputs;   // [rows, hidden] or null: what the first layer takes; with a fusion, the state before each token
  const uint16_t* fed;   // [rows, features' inputs] bf16 or null: with a fusion, features that the states are made of
  const int* starts;     // [sequences + 1]
  const int* base;       // [sequences]
  const int* parents;    // [rows]
  const int* blocks;     // [sequences, blocks_stride]
  int blocks_stride;
  const int* wanted;     // rows whose logits are wanted
  int wanted_rows;
  std::vector<int> features;  // layers whose outputs are wanted; 0 is the embedding
  int first_layer, last_layer;  // layers first .. last - 1 are run
  int tiles;                    // set by the pass
};

struct Results {
  float* logits;       // [wanted_rows, head.outputs], or null
  uint16_t* features;  // [rows, feature_layers, hidden] bf16, or null
  float* hidden;       // [rows, hidden]: the last layer's output, before the final norm, or null
};

}  // namespace slipstream
