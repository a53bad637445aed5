// Names for the AVX-512 intrinsics that the pass uses. Nothing else in the pass spells an intrinsic.
//
// Row-invariance rests on two rules that hold in every file here: a row's sums are added up in an order that does not
// depend on the other rows, and the compiler may not reorder or fuse floating-point operations (-ffp-contract=off, no
// -ffast-math): every fused multiply-add is written as such.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace slipstream {

using f32x16 = __m512;   // 16 floats
using i32x16 = __m512i;  // 16 32-bit integers
using u8x64 = __m512i;   // 64 bytes

constexpr int LANES = 16;

inline f32x16 zeros() { return _mm512_setzero_ps(); }
inline f32x16 splat(float v) { return _mm512_set1_ps(v); }
inline f32x16 load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, f32x16 v) { _mm512_storeu_ps(p, v); }
inline f32x16 load_first(const float* p, int n, float rest) {
  return _mm512_mask_loadu_ps(splat(rest), static_cast<__mmask16>((1u << n) - 1), p);
}
inline f32x16 add(f32x16 a, f32x16 b) { return _mm512_add_ps(a, b); }
inline f32x16 sub(f32x16 a, f32x16 b) { return _mm512_sub_ps(a, b); }
inline f32x16 mul(f32x16 a, f32x16 b) { return _mm512_mul_ps(a, b); }
inline f32x16 div(f32x16 a, f32x16 b) { return _mm512_div_ps(a, b); }
inline f32x16 maximum(f32x16 a, f32x16 b) { return _mm512_max_ps(a, b); }
inline f32x16 magnitude(f32x16 a) { return _mm512_abs_ps(a); }
inline f32x16 fused_multiply_add(f32x16 a, f32x16 b, f32x16 c) { return _mm512_fmadd_ps(a, b, c); }

// Sums and maxima over lanes, always in the same tree.
inline float sum_of_lanes(f32x16 v) { return _mm512_reduce_add_ps(v); }
inline float max_of_lanes(f32x16 v) { return _mm512_reduce_max_ps(v); }
inline int sum_of_lanes(i32x16 v) { return _mm512_reduce_add_epi32(v); }

// bfloat16 is the upper half of a float: widening is a shift, narrowing rounds to nearest even.
inline f32x16 load_bf16(const uint16_t* p) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
inline float widen_bf16(uint16_t v) {
  const uint32_t bits = static_cast<uint32_t>(v) << 16;
  float f;
  __builtin_memcpy(&f, &bits, sizeof f);
  return f;
}
inline uint16_t narrow_to_bf16(float f) {
  uint32_t bits;
  __builtin_memcpy(&bits, &f, sizeof bits);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
// 32 bfloat16 (a0 b0 a1 b1 ...) become 16 floats a and 16 floats b.
inline void load_bf16_pairs(const uint16_t* p, f32x16& a, f32x16& b) {
  const __m512i pairs = _mm512_loadu_si512(p);
  a = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
  b = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
}
inline f32x16 load_fp16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline float widen_fp16(uint16_t v) { return _cvtsh_ss(v); }

inline u8x64 load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline u8x64 low_nibbles(u8x64 v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
inline u8x64 high_nibbles(u8x64 v) { return _mm512_and_si512(_mm512_srli_epi16(v, 4), _mm512_set1_epi8(15)); }
inline i32x16 integer_zeros() { return _mm512_setzero_si512(); }
// Four consecutive signed bytes, the same in each lane.
inline i32x16 splat_four(const int8_t* p) {
  int32_t four;
  __builtin_memcpy(&four, p, sizeof four);
  return _mm512_set1_epi32(four);
}
// sum[lane] += four unsigned bytes of a . four signed bytes of b (VNNI; exact in 32 bits).
inline i32x16 dot_accumulate(i32x16 sum, u8x64 a, i32x16 b) { return _mm512_dpbusd_epi32(sum, a, b); }
inline f32x16 to_float(i32x16 v) { return _mm512_cvtepi32_ps(v); }
inline i32x16 round_to_integer(f32x16 v) { return _mm512_cvtps_epi32(v); }
inline i32x16 add(i32x16 a, i32x16 b) { return _mm512_add_epi32(a, b); }
inline void store_as_bytes(int8_t* p, i32x16 v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(v));
}
inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

// e^x for x <= 88: 2^n * polynomial on [-ln2/2, ln2/2] (Cephes' coefficients), within 2 ulp; below -87 it is 0.
inline f32x16 exponential(f32x16 x) {
  const __mmask16 keep = _mm512_cmp_ps_mask(x, splat(-87.0f), _CMP_GE_OQ);
  x = _mm512_min_ps(x, splat(88.0f));
  const f32x16 n = _mm512_roundscale_ps(mul(x, splat(1.44269504088896341f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  f32x16 r = _mm512_fnmadd_ps(n, splat(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, splat(-2.12194440e-4f), r);
  f32x16 p = splat(1.9875691500e-4f);
  p = fused_multiply_add(p, r, splat(1.3981999507e-3f));
  p = fused_multiply_add(p, r, splat(8.3334519073e-3f));
  p = fused_multiply_add(p, r, splat(4.1665795894e-2f));
  p = fused_multiply_add(p, r, splat(1.6666665459e-1f));
  p = fused_multiply_add(p, r, splat(5.0000001201e-1f));
  p = fused_multiply_add(p, mul(r, r), add(r, splat(1.0f)));
  return _mm512_maskz_mov_ps(keep, _mm512_scalef_ps(p, n));
}

}  // namespace slipstream
