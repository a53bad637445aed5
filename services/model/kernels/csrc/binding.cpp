// What Python sees: a model made of packed tensors, and its pass. Shapes are checked here, once, and nowhere further down.
#include <torch/extension.h>

#include <memory>
#include <string>

#include "pass.h"

namespace slipstream {
namespace {

using at::Tensor;

void require(bool condition, const std::string& message) {
  if (!condition) throw std::invalid_argument(message);
}

template <typename T>
const T* data(const Tensor& t, at::ScalarType type, int64_t size, const std::string& name) {
  require(t.is_contiguous() && t.device().is_cpu() && t.scalar_type() == type && t.numel() == size,
          name + ": expected a contiguous CPU tensor of " + std::to_string(size) + " " + c10::toString(type) + ", got " +
              std::to_string(t.numel()) + " " + c10::toString(t.scalar_type()));
  return static_cast<const T*>(t.data_ptr());
}

}  // namespace

// Owns the tensors that the model points into.
class FastModel {
 public:
  FastModel(int hidden, int heads, int kv_heads, int head_dim, int intermediate, int vocabulary, double epsilon, int threads) {
    require(hidden % 32 == 0 && intermediate % 32 == 0 && head_dim % 32 == 0 && kv_heads > 0 && heads % kv_heads == 0,
            "hidden size, intermediate size and head size must be multiples of 32, heads of key-value heads");
    model_.hidden = hidden;
    model_.heads = heads;
    model_.kv_heads = kv_heads;
    model_.head_dim = head_dim;
    model_.intermediate = intermediate;
    model_.vocabulary = vocabulary;
    model_.epsilon = static_cast<float>(epsilon);
    pass_ = std::make_unique<Pass>(model_, threads);
  }

  void set_tables(const Tensor& cosines, const Tensor& sines) {
    context_ = cosines.size(0);
    model_.cosines = data<float>(hold(cosines), at::kFloat, context_ * model_.head_dim / 2, "cosines");
    model_.sines = data<float>(hold(sines), at::kFloat, context_ * model_.head_dim / 2, "sines");
  }
  void set_embedding(const Tensor& table) {
    model_.embedding =
        data<uint16_t>(hold(table), at::kBFloat16, static_cast<int64_t>(model_.vocabulary) * model_.hidden, "embedding");
  }
  // The rows of a packed matrix as embedding.
  void set_embedding_rows(const Tensor& weights, const Tensor& scales, int bits, int outputs) {
    require(outputs >= model_.vocabulary, "the embedding needs a row for each token");
    model_.embedding_rows = linear(weights, scales, bits, outputs, model_.hidden, std::nullopt, "embedding");
  }
  // Weights, scales and bits of features and input.
  void set_fusion(const Tensor& embedding_norm, const Tensor& state_norm, int feature_layers, const std::vector<Tensor>& weights,
                  const std::vector<Tensor>& scales, const std::vector<int>& bits) {
    require(weights.size() == 2 && scales.size() == 2 && bits.size() == 2, "a fusion has two linear maps");
    Fusion& fusion = model_.fusion;
    fusion.embedding_norm = data<float>(hold(embedding_norm), at::kFloat, model_.hidden, "embedding norm");
    fusion.state_norm = data<float>(hold(state_norm), at::kFloat, model_.hidden, "state norm");
    fusion.features =
        linear(weights[0], scales[0], bits[0], model_.hidden, feature_layers * model_.hidden, std::nullopt, "features");
    fusion.input = linear(weights[1], scales[1], bits[1], model_.hidden, 2 * model_.hidden, std::nullopt, "input");
  }
  void set_head(const Tensor& norm, const Tensor& weights, const Tensor& scales, int bits, int outputs) {
    model_.final_norm = data<float>(hold(norm), at::kFloat, model_.hidden, "final norm");
    model_.head = linear(weights, scales, bits, outputs, model_.hidden, std::nullopt, "head");
  }
  // Weights, scales and bits of qkv, output, gate_up and down, in this order.
  void add_layer(const Tensor& attention_norm, const Tensor& feed_forward_norm, const std::vector<Tensor>& weights,
                 const std::vector<Tensor>& scales, const std::vector<int>& bits, const std::optional<Tensor>& qkv_bias,
                 const std::optional<Tensor>& query_norm, const std::optional<Tensor>& key_norm) {
    require(weights.size() == 4 && scales.size() == 4 && bits.size() == 4, "a layer has four linear maps");
    Layer layer{};
    layer.attention_norm = data<float>(hold(attention_norm), at::kFloat, model_.hidden, "attention norm");
    layer.feed_forward_norm = data<float>(hold(feed_forward_norm), at::kFloat, model_.hidden, "feed-forward norm");
    if (query_norm) layer.query_norm = data<float>(hold(*query_norm), at::kFloat, model_.head_dim, "query norm");
    if (key_norm) layer.key_norm = data<float>(hold(*key_norm), at::kFloat, model_.head_dim, "key norm");
    const int qkv = (model_.heads + 2 * model_.kv_heads) * model_.head_dim;
    layer.qkv = linear(weights[0], scales[0], bits[0], qkv, model_.hidden, qkv_bias, "qkv");
    layer.output = linear(weights[1], scales[1], bits[1], model_.hidden, model_.query_width(), std::nullopt, "output");
    layer.gate_up = linear(weights[2], scales[2], bits[2], 2 * model_.intermediate, model_.hidden, std::nullopt, "gate_up");
    layer.down = linear(weights[3], scales[3], bits[3], model_.hidden, model_.intermediate, std::nullopt, "down");
    model_.layers.push_back(layer);
  }

  // Keys and values: [layers, blocks, kv_heads, 16 * head_dim] bf16.
  void set_cache(const Tensor& keys, const Tensor& values) {
    require(keys.dim() == 4 && keys.sizes() == values.sizes(), "keys and values must have four dimensions, the same ones");
    blocks_ = static_cast<int>(keys.size(1));
    layer_stride_ = static_cast<size_t>(blocks_) * model_.kv_heads * BLOCK * model_.head_dim;
    const auto size = static_cast<int64_t>(model_.layers.size() * layer_stride_);
    keys_ = const_cast<uint16_t*>(data<uint16_t>(keys, at::kBFloat16, size, "keys"));
    values_ = const_cast<uint16_t*>(data<uint16_t>(values, at::kBFloat16, size, "values"));
    cache_ = {keys, values};
  }

  // Returns (logits [wanted, head outputs] float32, features [rows, layers, hidden] bf16, hidden [rows, hidden] float32);
  // a tensor that was not asked for is empty.
  std::tuple<Tensor, Tensor, Tensor> run(const std::vector<int>& tokens, const std::optional<Tensor>& inputs,
                                         const std::optional<Tensor>& fed, const std::vector<int>& starts, const std::vector<int>& base,
                                         const std::vector<int>& parents, const std::vector<std::vector<int>>& blocks,
                                         const std::vector<int>& wanted, const std::vector<int>& features, int first_layer,
                                         int last_layer, bool want_hidden) {
    Batch batch{};
    batch.rows = static_cast<int>(parents.size());
    batch.sequences = static_cast<int>(base.size());
    batch.first_layer = first_layer;
    batch.last_layer = last_layer;
    require(0 <= first_layer && first_layer <= last_layer && last_layer <= static_cast<int>(model_.layers.size()),
            "layers out of range");
    if (inputs) batch.inputs = data<float>(*inputs, at::kFloat, static_cast<int64_t>(batch.rows) * model_.hidden, "inputs");
    if (fed) {
      require(model_.fusion.present(), "only a model with a fusion is fed features");
      batch.fed = data<uint16_t>(*fed, at::kBFloat16, static_cast<int64_t>(batch.rows) * model_.fusion.features.inputs, "fed");
    }
    require(!model_.fusion.present() || inputs || fed, "a model with a fusion wants states or features");
    if (!inputs || model_.fusion.present()) {
      require(static_cast<int>(tokens.size()) == batch.rows, "tokens: one a row");
      for (const int t : tokens) require(0 <= t && t < model_.vocabulary, "token outside the vocabulary");
      batch.tokens = tokens.data();
    }
    const std::vector<int> table = block_table(batch, starts, base, parents, blocks);
    batch.starts = starts.data();
    batch.base = base.data();
    batch.parents = parents.data();
    batch.blocks = table.data();
    for (const int w : wanted) require(0 <= w && w < batch.rows, "wanted row out of range");
    require(wanted.empty() || model_.head.weights != nullptr, "the model has no head");
    batch.wanted = wanted.data();
    batch.wanted_rows = static_cast<int>(wanted.size());
    batch.features = features;
    const auto feature_layers = static_cast<int64_t>(features.size());
    for (const int f : features) require(first_layer <= f && f <= last_layer, "feature layer out of range");

    Tensor logits = at::empty({batch.wanted_rows, model_.head.outputs}, at::kFloat);
    Tensor captured = at::empty({features.empty() ? 0 : batch.rows, feature_layers, model_.hidden}, at::kBFloat16);
    Tensor hidden = at::empty({want_hidden ? batch.rows : 0, model_.hidden}, at::kFloat);
    const Results results{wanted.empty() ? nullptr : logits.data_ptr<float>(),
                          features.empty() ? nullptr : static_cast<uint16_t*>(captured.data_ptr()),
                          want_hidden ? hidden.data_ptr<float>() : nullptr};
    if (batch.rows > 0) {
      const py::gil_scoped_release release;
      pass_->run(batch, keys_, values_, layer_stride_, results);
    }
    return {logits, captured, hidden};
  }

  // Moves the rows of `path` to places base, base + 1, ...; path ascends, so a place is read before it is overwritten.
  void keep(const std::vector<int>& blocks, int base, const std::vector<int>& path) {
    for (size_t l = 0; l < model_.layers.size(); l++) {
      const CacheView cache{keys_ + l * layer_stride_, values_ + l * layer_stride_, model_.kv_heads, model_.head_dim};
      for (size_t i = 0; i < path.size(); i++) {
        const int from = base + path[i], to = base + static_cast<int>(i);
        require(path[i] >= static_cast<int>(i) && from / BLOCK < static_cast<int>(blocks.size()), "path out of range");
        if (from != to) cache.move_place(blocks.data(), from, to);
      }
    }
  }

 private:
  // Checks every index that the pass will follow, and lays the block tables side by side.
  std::vector<int> block_table(Batch& batch, const std::vector<int>& starts, const std::vector<int>& base,
                               const std::vector<int>& parents, const std::vector<std::vector<int>>& blocks) const {
    require(starts.size() == base.size() + 1 && blocks.size() == base.size() && starts.front() == 0 &&
                starts.back() == batch.rows,
            "starts, base and blocks must describe the same sequences and cover all rows");
    size_t stride = 0;
    for (const auto& b : blocks) stride = std::max(stride, b.size());
    batch.blocks_stride = static_cast<int>(stride);
    std::vector<int> table(stride * blocks.size(), 0);
    for (size_t s = 0; s < blocks.size(); s++) {
      const int rows = starts[s + 1] - starts[s];
      require(rows > 0 && base[s] >= 0, "a sequence needs a row and a base of at least 0");
      require(base[s] + rows <= static_cast<int>(blocks[s].size()) * BLOCK, "row outside its block table");
      require(base[s] + rows <= context_, "position outside the context");
      for (int r = 0; r < rows; r++)
        require(-1 <= parents[starts[s] + r] && parents[starts[s] + r] < r, "a row must follow an earlier row or -1");
      for (const int b : blocks[s]) require(0 <= b && b < blocks_, "block outside the cache");
      std::copy(blocks[s].begin(), blocks[s].end(), table.begin() + static_cast<int64_t>(s * stride));
    }
    return table;
  }

  Linear linear(const Tensor& weights, const Tensor& scales, int bits, int outputs, int inputs,
                const std::optional<Tensor>& bias, const std::string& name) {
    require((bits == 4 || bits == 8) && outputs % LANES == 0 && inputs % QUANT_BLOCK == 0,
            name + ": 4 or 8 bits, outputs a multiple of 16, inputs of 32");
    Linear w;
    w.bits = bits == 4 ? Bits::four : Bits::eight;
    w.outputs = outputs;
    w.inputs = inputs;
    const int64_t groups = static_cast<int64_t>(w.tiles()) * w.groups();
    w.weights = data<uint8_t>(hold(weights), at::kByte, groups * static_cast<int64_t>(w.group_bytes()), name + " weights");
    w.scales = data<uint16_t>(hold(scales), at::kHalf, groups * static_cast<int64_t>(w.group_scales()), name + " scales");
    if (bias) w.bias = data<float>(hold(*bias), at::kFloat, outputs, name + " bias");
    return w;
  }

  const Tensor& hold(const Tensor& t) {
    held_.push_back(std::make_unique<Tensor>(t));
    return *held_.back();
  }

  Model model_{};
  std::unique_ptr<Pass> pass_;
  std::vector<std::unique_ptr<Tensor>> held_;
  std::vector<Tensor> cache_;
  uint16_t *keys_ = nullptr, *values_ = nullptr;
  size_t layer_stride_ = 0;
  int64_t context_ = 0;
  int blocks_ = 0;
};

}  // namespace slipstream

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using slipstream::FastModel;
  py::class_<FastModel>(m, "FastModel")
      .def(py::init<int, int, int, int, int, int, double, int>())
      .def("set_tables", &FastModel::set_tables)
      .def("set_embedding", &FastModel::set_embedding)
      .def("set_embedding_rows", &FastModel::set_embedding_rows)
      .def("set_fusion", &FastModel::set_fusion)
      .def("set_head", &FastModel::set_head)
      .def("add_layer", &FastModel::add_layer)
      .def("set_cache", &FastModel::set_cache)
      .def("run", &FastModel::run)
      .def("keep", &FastModel::keep);
}
