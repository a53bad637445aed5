// Activations of a pass, quantised in blocks of 32: signed bytes, a scale, and scale times the sum of the bytes.
//
//   x[32 b + i]  ~  scale[b] * byte[32 b + i],   scale[b] = max|x| / 127
//
// The third number lets a linear layer with a minimum (w = s q + m) add m * sum(x) without touching the bytes again.
#pragma once

#include <algorithm>
#include <vector>

#include "simd.h"

namespace slipstream {

constexpr int QUANT_BLOCK = 32;

class QuantisedRows {
 public:
  void resize(int rows, int width) {
    width_ = width;
    blocks_ = width / QUANT_BLOCK;
    bytes_.resize(static_cast<size_t>(rows) * width);
    scales_.resize(static_cast<size_t>(rows) * blocks_ * 2);
  }
  int width() const { return width_; }
  const int8_t* bytes(int row) const { return bytes_.data() + static_cast<size_t>(row) * width_; }
  // Pairs (scale, scale * sum of bytes), one a block.
  const float* scales(int row) const { return scales_.data() + static_cast<size_t>(row) * blocks_ * 2; }

  // Quantise the 32 values a (first 16) and b as block `block` of `row`.
  void set_block(int row, int block, f32x16 a, f32x16 b) {
    const float peak = max_of_lanes(maximum(magnitude(a), magnitude(b)));
    const float scale = std::max(peak / 127.0f, 1e-10f);
    const f32x16 inverse = splat(1.0f / scale);
    const i32x16 qa = round_to_integer(mul(a, inverse)), qb = round_to_integer(mul(b, inverse));
    int8_t* bytes = bytes_.data() + static_cast<size_t>(row) * width_ + block * QUANT_BLOCK;
    store_as_bytes(bytes, qa);
    store_as_bytes(bytes + LANES, qb);
    float* scales = scales_.data() + (static_cast<size_t>(row) * blocks_ + block) * 2;
    scales[0] = scale;
    scales[1] = scale * static_cast<float>(sum_of_lanes(add(qa, qb)));
  }
  void set_row(int row, const float* x) {
    for (int b = 0; b < blocks_; b++) set_block(row, b, load(x + b * QUANT_BLOCK), load(x + b * QUANT_BLOCK + LANES));
  }

 private:
  int width_ = 0, blocks_ = 0;
  std::vector<int8_t> bytes_;
  std::vector<float> scales_;
};

// 1 / sqrt(mean(x^2) + epsilon): the factor of RMSNorm (Zhang and Sennrich 2019). `width` is a multiple of 16.
inline float inverse_rms(const float* x, int width, float epsilon) {
  f32x16 squares = zeros();
  for (int i = 0; i < width; i += LANES) squares = fused_multiply_add(load(x + i), load(x + i), squares);
  return 1.0f / __builtin_sqrtf(sum_of_lanes(squares) / static_cast<float>(width) + epsilon);
}

// RMSNorm(x) * weight, quantised into `row` from value `at` on; without weight where that is null.
inline void quantise_normed(QuantisedRows& out, int row, int at, const float* x, int width, const float* weight, float epsilon) {
  const f32x16 factor = splat(inverse_rms(x, width, epsilon));
  const auto normed = [&](int i) {
    const f32x16 scaled = mul(load(x + i), factor);
    return weight == nullptr ? scaled : mul(scaled, load(weight + i));
  };
  for (int i = 0; i < width; i += QUANT_BLOCK) out.set_block(row, (at + i) / QUANT_BLOCK, normed(i), normed(i + LANES));
}

}  // namespace slipstream
