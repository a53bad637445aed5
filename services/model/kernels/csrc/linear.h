// y = W x with W in 4 or 8 bits and x in 8: the layout of W, and the tile that multiplies it.
//
// W [outputs, inputs] is cut into tiles of 16 outputs; a tile is a run of groups of 32 inputs. In a group the outputs are
// the 16 lanes of a register, and each lane holds four consecutive inputs, as VNNI's dot product wants them:
//
//   8 bit, 512 bytes a group:   8 chunks of 64 bytes; chunk c, lane n, byte i  =  W[n, 4 c + i] + 128
//   4 bit, 256 bytes a group:   4 chunks of 64 bytes; chunk c, lane n, byte i  =  q[n, 8 c + i] | q[n, 8 c + 4 + i] << 4
//
//   scales, fp16, a group:      8 bit: s[16]           W[n, k] = s[n] * byte, byte signed
//                               4 bit: s[16], m[16]    W[n, k] = s[n] * q[n, k] + m[n]
//
// Reference in torch: services/model/kernels/packing.py.
#pragma once

#include "activations.h"

namespace slipstream {

enum class Bits { four, eight };

struct Linear {
  Bits bits = Bits::eight;
  int outputs = 0, inputs = 0;  // multiples of 16 and 32
  const uint8_t* weights = nullptr;
  const uint16_t* scales = nullptr;
  const float* bias = nullptr;  // [outputs] or null

  int tiles() const { return outputs / LANES; }
  int groups() const { return inputs / QUANT_BLOCK; }
  size_t group_bytes() const { return bits == Bits::four ? 256 : 512; }
  size_t group_scales() const { return bits == Bits::four ? 32 : 16; }
  const uint8_t* tile_weights(int tile) const { return weights + static_cast<size_t>(tile) * groups() * group_bytes(); }
  const uint16_t* tile_scales(int tile) const { return scales + static_cast<size_t>(tile) * groups() * group_scales(); }
};

constexpr int MAX_ROWS = 8;  // rows whose sums fit into registers beside a tile's weights

// One tile by ROWS rows. The weights are read and unpacked once for all rows; each row's sum runs over the groups in order.
template <Bits BITS, int ROWS>
inline void multiply_tile(const Linear& w, int tile, const QuantisedRows& x, int first_row, f32x16* out) {
  const uint8_t* weights = w.tile_weights(tile);
  const uint16_t* scales = w.tile_scales(tile);
  const int8_t* bytes[ROWS];
  const float* row_scales[ROWS];
  f32x16 sums[ROWS];
  for (int r = 0; r < ROWS; r++) {
    bytes[r] = x.bytes(first_row + r);
    row_scales[r] = x.scales(first_row + r);
    sums[r] = zeros();
  }
  constexpr int CHUNKS = BITS == Bits::four ? 4 : 8;
  constexpr int AHEAD = 4096;  // bytes between what is read and what is asked for
  for (int g = 0; g < w.groups(); g++) {
    i32x16 dots[ROWS];
    for (int r = 0; r < ROWS; r++) dots[r] = integer_zeros();
#pragma GCC unroll 8
    for (int c = 0; c < CHUNKS; c++) {
      prefetch(weights + AHEAD + 64 * c);
      const u8x64 chunk = load_bytes(weights + 64 * c);
      if constexpr (BITS == Bits::four) {
        const u8x64 low = low_nibbles(chunk), high = high_nibbles(chunk);
        for (int r = 0; r < ROWS; r++) {
          dots[r] = dot_accumulate(dots[r], low, splat_four(bytes[r] + g * QUANT_BLOCK + 8 * c));
          dots[r] = dot_accumulate(dots[r], high, splat_four(bytes[r] + g * QUANT_BLOCK + 8 * c + 4));
        }
      } else {
        for (int r = 0; r < ROWS; r++)
          dots[r] = dot_accumulate(dots[r], chunk, splat_four(bytes[r] + g * QUANT_BLOCK + 4 * c));
      }
    }
    weights += 64 * CHUNKS;
    const f32x16 scale = load_fp16(scales);
    // What is added for each unit of the row's sum: the minimum, or minus the 128 that made the bytes unsigned.
    const f32x16 offset = BITS == Bits::four ? load_fp16(scales + LANES) : mul(scale, splat(-128.0f));
    scales += BITS == Bits::four ? 2 * LANES : LANES;
    for (int r = 0; r < ROWS; r++) {
      sums[r] = fused_multiply_add(to_float(dots[r]), mul(scale, splat(row_scales[r][2 * g])), sums[r]);
      sums[r] = fused_multiply_add(splat(row_scales[r][2 * g + 1]), offset, sums[r]);
    }
  }
  for (int r = 0; r < ROWS; r++)
    out[r] = w.bias == nullptr ? sums[r] : add(sums[r], load(w.bias + tile * LANES));
}

template <Bits BITS>
inline void multiply_tile(const Linear& w, int tile, const QuantisedRows& x, int first_row, int rows, f32x16* out) {
  switch (rows) {
    case 1: return multiply_tile<BITS, 1>(w, tile, x, first_row, out);
    case 2: return multiply_tile<BITS, 2>(w, tile, x, first_row, out);
    case 3: return multiply_tile<BITS, 3>(w, tile, x, first_row, out);
    case 4: return multiply_tile<BITS, 4>(w, tile, x, first_row, out);
    case 5: return multiply_tile<BITS, 5>(w, tile, x, first_row, out);
    case 6: return multiply_tile<BITS, 6>(w, tile, x, first_row, out);
    case 7: return multiply_tile<BITS, 7>(w, tile, x, first_row, out);
    default: return multiply_tile<BITS, 8>(w, tile, x, first_row, out);
  }
}

// out[r] = outputs 16 tile .. 16 tile + 15 of row first_row + r, for `rows` <= MAX_ROWS rows.
inline void multiply_tile(const Linear& w, int tile, const QuantisedRows& x, int first_row, int rows, f32x16* out) {
  if (w.bits == Bits::four)
    multiply_tile<Bits::four>(w, tile, x, first_row, rows, out);
  else
    multiply_tile<Bits::eight>(w, tile, x, first_row, rows, out);
}

// Row `row` of W as floats, for embeddings that share the head's weights.
inline void dequantise_row(const Linear& w, int row, float* out) {
  const int lane = row % LANES;
  const uint8_t* weights = w.tile_weights(row / LANES);
  const uint16_t* scales = w.tile_scales(row / LANES);
  for (int g = 0; g < w.groups(); g++, weights += w.group_bytes(), scales += w.group_scales()) {
    const float scale = widen_fp16(scales[lane]);
    for (int k = 0; k < QUANT_BLOCK; k++) {
      float& value = out[g * QUANT_BLOCK + k];
      if (w.bits == Bits::eight) {
        value = scale * static_cast<float>(weights[(k / 4) * 64 + lane * 4 + k % 4] - 128);
      } else {
        const uint8_t byte = weights[(k / 8) * 64 + lane * 4 + k % 4];
        value = __builtin_fmaf(scale, static_cast<float>(k % 8 < 4 ? byte & 15 : byte >> 4), widen_fp16(scales[LANES + lane]));
      }
    }
  }
}

}  // namespace slipstream
