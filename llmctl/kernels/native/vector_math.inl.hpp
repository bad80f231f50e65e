// exp, tanh and erf of 16 lanes. The polynomials are minimax fits made for this file; what they are off by stands beside each,
// relative and before rounding. A NaN stays a NaN.
#pragma once

namespace llmctl::LLMCTL_ISA {

inline F32 with_sign_of(F32 magnitude, F32 x) {
  return from_bits(bit_or(bits(magnitude), bit_and(bits(x), set_i32(INT32_MIN))));
}

// 2^x for x <= 0, what a softmax needs: 1 at 0 exactly, 0 from -126.5 down, where the exponent below is that of zero.
inline F32 exp2_negative(F32 x) {
  x = max(set_f32(-127.0f), x);
  F32 shift = set_f32(12582912.0f + 127.0f);   // 1.5 * 2^23: the sum is a whole number, its last bits the exponent of 2^n
  F32 shifted = add(x, shift);
  F32 part = sub(x, sub(shifted, shift));
  F32 sum = set_f32(1.3264727e-3f);   // (2^f - 1) / f on [-0.5, 0.5]: 9e-8
  sum = fma(sum, part, set_f32(9.671513e-3f));
  sum = fma(sum, part, set_f32(5.5507336e-2f));
  sum = fma(sum, part, set_f32(0.24022242f));
  sum = fma(sum, part, set_f32(0.693147f));
  sum = fma(sum, part, set_f32(1.0f));
  return mul(sum, from_bits(shift_left<23>(bits(shifted))));
}

// e^x: infinity from 88.73 on, 0 below -87.34, where numbers become subnormal.
inline F32 exp(F32 x) {
  F32 inside = max(set_f32(-88.0f), min(set_f32(89.0f), x));
  F32 whole = round_f32(mul(inside, set_f32(1.44269504f)));
  F32 part = fma(whole, set_f32(-0.693359375f), inside);   // ln 2 in two pieces; the first product is exact
  part = fma(whole, set_f32(2.12194440e-4f), part);
  F32 sum = set_f32(1.3814602e-3f);   // (e^r - 1 - r) / r^2 on [-ln 2 / 2, ln 2 / 2]: 3e-9
  sum = fma(sum, part, set_f32(8.368716e-3f));
  sum = fma(sum, part, set_f32(4.166839e-2f));
  sum = fma(sum, part, set_f32(0.16666521f));
  sum = fma(sum, part, set_f32(0.49999994f));
  sum = add(fma(mul(part, part), sum, part), set_f32(1.0f));
  return select_less(x, set_f32(-87.33654f), zero_f32(), scale_by_power_of_two(sum, whole));
}

inline F32 tanh(F32 x) {
  F32 square = mul(x, x);
  F32 sum = set_f32(-5.7170447e-3f);   // (tanh(x) / x - 1) / x^2 below 0.625: 4e-9
  sum = fma(sum, square, set_f32(2.0650586e-2f));
  sum = fma(sum, square, set_f32(-5.3743497e-2f));
  sum = fma(sum, square, set_f32(0.13331491f));
  sum = fma(sum, square, set_f32(-0.33333284f));
  F32 near = fma(mul(x, square), sum, x);
  F32 size = abs(x);
  F32 one = set_f32(1.0f);
  F32 far = sub(one, div(set_f32(2.0f), add(exp(add(size, size)), one)));
  return select_less(size, set_f32(0.625f), near, with_sign_of(far, x));
}

inline F32 erf(F32 x) {
  F32 square = mul(x, x);
  F32 sum = set_f32(7.889123e-5f);   // erf(x) / x - 1 below 1: 1e-9
  sum = fma(sum, square, set_f32(-8.020842e-4f));
  sum = fma(sum, square, set_f32(5.1895357e-3f));
  sum = fma(sum, square, set_f32(-2.6854444e-2f));
  sum = fma(sum, square, set_f32(0.112836f));
  sum = fma(sum, square, set_f32(-0.37612626f));
  sum = fma(sum, square, set_f32(0.12837917f));
  F32 near = fma(x, sum, x);
  F32 size = min(set_f32(4.0f), abs(x));   // beyond, 1 is the nearest
  F32 tail = set_f32(5.1509264e-6f);   // -log(1 - erf(x)) / x from 0.9 to 4: 2e-10 of what is left to 1
  tail = fma(tail, size, set_f32(-4.8202783e-5f));
  tail = fma(tail, size, set_f32(-3.606202e-5f));
  tail = fma(tail, size, set_f32(2.8922935e-3f));
  tail = fma(tail, size, set_f32(-2.2611998e-2f));
  tail = fma(tail, size, set_f32(0.1052029f));
  tail = fma(tail, size, set_f32(0.63565654f));
  tail = fma(tail, size, set_f32(1.1285449f));
  F32 far = sub(set_f32(1.0f), exp(sub(zero_f32(), mul(tail, size))));
  return select_less(size, set_f32(1.0f), near, with_sign_of(far, x));
}

}  // namespace llmctl::LLMCTL_ISA
