// What the linear kernels know about each layout of layouts.hpp: how a block's codes and scales are unpacked. A value is
// scale * (code - kOffset or the row's zero point) + minimum, in the order of operations of the format's definition.
//
// A format offers
//   its Shape (below), kUnitScales (scales a row and unit, or 1 where a whole group shares one), kUnitBlocks (blocks of 32
//   columns in a unit; 0: of a group, known at run time),
//   codes(unit, block, codes): the 8 groups of a block as unsigned bytes, before dot_form,
//   scales(unit, scale, minimum): float scales (and minima to add) of all blocks of the unit,
//   zero(unit): zero points, if kZero.
#pragma once

#include "layouts.hpp"

#define LLMCTL_INLINE inline __attribute__((always_inline))
#define LLMCTL_LAMBDA_INLINE __attribute__((always_inline))

namespace llmctl::LLMCTL_ISA {

// MaxCode: no code is larger. Scales: 1 or 2 a block. Offset: subtracted from every code. Minimum, Zero: as above.
template <int MaxCode, int Scales, int Offset, bool Minimum, bool Zero> struct Shape {
  static constexpr int kMaxCode = MaxCode, kScales = Scales, kOffset = Offset;
  static constexpr bool kMinimum = Minimum, kZero = Zero;
  // What dot_form already took from the code.
  static constexpr int kFormOffset = kDotSigned && MaxCode > 127 ? 128 : 0;
  static constexpr int kStart = kOffset - kFormOffset;   // to be taken from the integer sum, times the sum of activations
};

template <int Value> struct Index { static constexpr int value = Value; };
template <class F> LLMCTL_INLINE void for_2(F f) { f(Index<0>{}), f(Index<1>{}); }
template <class F> LLMCTL_INLINE void for_4(F f) { f(Index<0>{}), f(Index<1>{}), f(Index<2>{}), f(Index<3>{}); }
template <class F> LLMCTL_INLINE void for_8(F f) {
  for_4(f);
  f(Index<4>{}), f(Index<5>{}), f(Index<6>{}), f(Index<7>{});
}

// The bits of a byte at From moved to At (others are left for a mask to remove).
template <int From, int At> LLMCTL_INLINE U8 move_bits(U8 a) {
  if constexpr (From > At) return shift_right<From - At>(a);
  else if constexpr (From < At) return shift_left<At - From>(a);
  else return a;
}

LLMCTL_INLINE void unpack_4bit(const uint8_t* p, U8* codes) {
  U8 low = set_u8(15);
  for_4([&](auto v) {
    U8 both = load_u8(p + 64 * v.value);
    codes[v.value] = bit_and(both, low);
    codes[v.value + 4] = bit_and(shift_right<4>(both), low);
  });
}

// A fifth (At = 4) or third (At = 2) bit from its plane.
template <int At> LLMCTL_INLINE void add_1bit_plane(const uint8_t* p, U8* codes) {
  U8 plane = load_u8(p), mask = set_u8(1 << At);
  for_8([&](auto g) { codes[g.value] = and_or(move_bits<g.value, At>(plane), mask, codes[g.value]); });
}

// Groups 4v to 4v + 3 from vector v of a 2-bit plane, as codes of their own (At = 0) or as bits 4 and 5.
template <int At> LLMCTL_INLINE void unpack_2bit_plane(const uint8_t* p, U8* codes) {
  U8 mask = set_u8(3 << At);
  for (int v = 0; v < 2; ++v) {
    U8 plane = load_u8(p + 64 * v);
    for_4([&](auto j) {
      U8 moved = move_bits<2 * j.value, At>(plane);
      U8& code = codes[4 * v + j.value];
      code = At ? and_or(moved, mask, code) : bit_and(moved, mask);
    });
  }
}

LLMCTL_INLINE void look_up_all(const uint8_t* table, U8* codes) {
  U8 values = load_table(table);
  for_8([&](auto g) { codes[g.value] = look_up(values, codes[g.value]); });
}

LLMCTL_INLINE F32 f16_at(const uint8_t* p) { return load_f16((const uint16_t*)p); }

// Blocks of 32 columns.
struct Q4_0 : Shape<15, 1, 8, false, false> {
  static constexpr int kUnitBlocks = 1, kUnitScales = 1;
  static LLMCTL_INLINE void codes(const uint8_t* p, int64_t, U8* codes) { unpack_4bit(p + 32, codes); }
  static LLMCTL_INLINE void scales(const uint8_t* p, F32* scale, F32*) { scale[0] = f16_at(p); }
};
struct Q4_1 : Shape<15, 1, 0, true, false> {
  static constexpr int kUnitBlocks = 1, kUnitScales = 1;
  static LLMCTL_INLINE void codes(const uint8_t* p, int64_t, U8* codes) { unpack_4bit(p + 64, codes); }
  static LLMCTL_INLINE void scales(const uint8_t* p, F32* scale, F32* minimum) {
    scale[0] = f16_at(p);
    minimum[0] = f16_at(p + 32);
  }
};
struct Q5_0 : Shape<31, 1, 16, false, false> {
  static constexpr int kUnitBlocks = 1, kUnitScales = 1;
  static LLMCTL_INLINE void codes(const uint8_t* p, int64_t, U8* codes) {
    unpack_4bit(p + 96, codes);
    add_1bit_plane<4>(p + 32, codes);
  }
  static LLMCTL_INLINE void scales(const uint8_t* p, F32* scale, F32*) { scale[0] = f16_at(p); }
};
struct Q5_1 : Shape<31, 1, 0, true, false> {
  static constexpr int kUnitBlocks = 1, kUnitScales = 1;
  static LLMCTL_INLINE void codes(const uint8_t* p, int64_t, U8* codes) {
    unpack_4bit(p + 128, codes);
    add_1bit_plane<4>(p + 64, codes);
  }
  static LLMCTL_INLINE void scales(const uint8_t* p, F32* scale, F32* minimum) { Q4_1::scales(p, scale, minimum); }
};
struct Q8_0 : Shape<255, 1, 128, false, false> {
  static constexpr int kUnitBlocks = 1, kUnitScales = 1;
  static LLMCTL_INLINE void codes(const uint8_t* p, int64_t, U8* codes) {
    for_8([&](auto g) { codes[g.value] = load_u8(p + 32 + 64 * g.value); });
  }
  static LLMCTL_INLINE void scales(const uint8_t* p, F32* scale, F32*) { scale[0] = f16_at(p); }
};

// The values of IQ4_NL's codes plus 128.
alignas(16) constexpr uint8_t kIq4Values[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
struct IQ4_NL : Shape<255, 1, 128, false, false> {
  static constexpr int kUnitBlocks = 1, kUnitScales = 1;
  static LLMCTL_INLINE void codes(const uint8_t* p, int64_t, U8* codes) {
    unpack_4bit(p + 32, codes);
    look_up_all(kIq4Values, codes);
  }
  static LLMCTL_INLINE void scales(const uint8_t* p, F32* scale, F32*) { scale[0] = f16_at(p); }
};

// Twice the values of the 4-bit floats plus 12; the scale is halved in turn. Code 8 is plain zero.
alignas(16) constexpr uint8_t kE2m1Values[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
struct MXFP4 : Shape<31, 1, 12, false, false> {
  static constexpr int kUnitBlocks = 1, kUnitScales = 1;
  static LLMCTL_INLINE void codes(const uint8_t* p, int64_t, U8* codes) {
    unpack_4bit(p + 16, codes);
    look_up_all(kE2m1Values, codes);
  }
  static LLMCTL_INLINE void scales(const uint8_t* p, F32* scale, F32*) {
    scale[0] = scale_by_power_of_two(set_f32(1), sub(to_f32(load_u8_i32(p)), set_f32(128)));
  }
};

// Super-blocks of 256 columns.
// Packed scales of Q4_K and Q5_K: the first four of a row are the low six bits of words 0 (scales) and 1 (minima); the last
// four have their low nibbles in word 2 and their top two bits above the first four.
LLMCTL_INLINE void packed_scales(const uint8_t* p, F32* scale, F32* minimum) {
  U8 first_scales = load_u8(p + 64), first_minima = load_u8(p + 128), nibbles = load_u8(p + 192);
  U8 six = set_u8(63), four = set_u8(15), top = set_u8(0x30);
  U8 scales[2] = {bit_and(first_scales, six), and_or(shift_right<2>(first_scales), top, bit_and(nibbles, four))};
  U8 minima[2] = {bit_and(first_minima, six),
                  and_or(shift_right<2>(first_minima), top, bit_and(shift_right<4>(nibbles), four))};
  F32 d = f16_at(p), dmin = sub(zero_f32(), f16_at(p + 32));
  for (int half = 0; half < 2; ++half) {
    for_4([&](auto j) {
      scale[4 * half + j.value] = mul(d, to_f32(byte_i32<j.value>(scales[half])));
      minimum[4 * half + j.value] = mul(dmin, to_f32(byte_i32<j.value>(minima[half])));
    });
  }
}
struct Q4_K : Shape<15, 1, 0, true, false> {
  static constexpr int kUnitBlocks = 8, kUnitScales = 8;
  static LLMCTL_INLINE void codes(const uint8_t* p, int64_t block, U8* codes) { unpack_4bit(p + 256 + 256 * block, codes); }
  static LLMCTL_INLINE void scales(const uint8_t* p, F32* scale, F32* minimum) { packed_scales(p, scale, minimum); }
};
struct Q5_K : Shape<31, 1, 0, true, false> {
  static constexpr int kUnitBlocks = 8, kUnitScales = 8;
  static LLMCTL_INLINE void codes(const uint8_t* p, int64_t block, U8* codes) {
    unpack_4bit(p + 256 + 320 * block + 64, codes);
    add_1bit_plane<4>(p + 256 + 320 * block, codes);
  }
  static LLMCTL_INLINE void scales(const uint8_t* p, F32* scale, F32* minimum) { packed_scales(p, scale, minimum); }
};

// Signed bytes [Count][16 rows] times d.
template <int Count> LLMCTL_INLINE void signed_scales(const uint8_t* d, const uint8_t* p, F32* scale) {
  F32 unit = f16_at(d);
  for (int i = 0; i < Count; ++i) scale[i] = mul(unit, to_f32(load_i8_i32((const int8_t*)p + 16 * i)));
}
struct Q6_K : Shape<63, 2, 32, false, false> {
  static constexpr int kUnitBlocks = 8, kUnitScales = 16;
  static LLMCTL_INLINE void codes(const uint8_t* p, int64_t block, U8* codes) {
    unpack_4bit(p + 288 + 384 * block + 128, codes);
    unpack_2bit_plane<4>(p + 288 + 384 * block, codes);
  }
  static LLMCTL_INLINE void scales(const uint8_t* p, F32* scale, F32*) { signed_scales<16>(p, p + 32, scale); }
};
struct Q3_K : Shape<15, 2, 4, false, false> {
  static constexpr int kUnitBlocks = 8, kUnitScales = 16;
  static LLMCTL_INLINE void codes(const uint8_t* p, int64_t block, U8* codes) {
    unpack_2bit_plane<0>(p + 288 + 192 * block, codes);
    add_1bit_plane<2>(p + 288 + 192 * block + 128, codes);
  }
  static LLMCTL_INLINE void scales(const uint8_t* p, F32* scale, F32*) { signed_scales<16>(p, p + 32, scale); }
};
struct Q2_K : Shape<15, 2, 0, true, false> {
  static constexpr int kUnitBlocks = 8, kUnitScales = 16;
  static LLMCTL_INLINE void codes(const uint8_t* p, int64_t block, U8* codes) {
    unpack_2bit_plane<0>(p + 320 + 128 * block, codes);
  }
  static LLMCTL_INLINE void scales(const uint8_t* p, F32* scale, F32* minimum) {
    F32 d = f16_at(p), dmin = sub(zero_f32(), f16_at(p + 32));
    I32 low = set_i32(15);
    for (int i = 0; i < 16; ++i) {
      I32 both = load_u8_i32(p + 64 + 16 * i);
      scale[i] = mul(d, to_f32(bit_and(both, low)));
      minimum[i] = mul(dmin, to_f32(shift_right<4>(both)));
    }
  }
};
struct IQ4_XS : Shape<255, 1, 128, false, false> {
  static constexpr int kUnitBlocks = 8, kUnitScales = 8;
  static LLMCTL_INLINE void codes(const uint8_t* p, int64_t block, U8* codes) {
    unpack_4bit(p + 160 + 256 * block, codes);
    look_up_all(kIq4Values, codes);
  }
  static LLMCTL_INLINE void scales(const uint8_t* p, F32* scale, F32*) { signed_scales<8>(p, p + 32, scale); }
};

// Groups of packed integers.
struct I4 : Shape<15, 1, 0, false, true> {
  static constexpr int kUnitBlocks = 0, kUnitScales = 1;
  static LLMCTL_INLINE void codes(const uint8_t* p, int64_t block, U8* codes) { unpack_4bit(p + 80 + 256 * block, codes); }
  static LLMCTL_INLINE void scales(const uint8_t* p, F32* scale, F32*) { scale[0] = load_f32((const float*)p); }
  static LLMCTL_INLINE I32 zero(const uint8_t* p) { return load_u8_i32(p + 64); }
};
struct I8 : Shape<255, 1, 0, false, true> {
  static constexpr int kUnitBlocks = 0, kUnitScales = 1;
  static LLMCTL_INLINE void codes(const uint8_t* p, int64_t block, U8* codes) {
    for_8([&](auto g) { codes[g.value] = load_u8(p + 80 + 512 * block + 64 * g.value); });
  }
  static LLMCTL_INLINE void scales(const uint8_t* p, F32* scale, F32*) { scale[0] = load_f32((const float*)p); }
  static LLMCTL_INLINE I32 zero(const uint8_t* p) { return load_u8_i32(p + 64); }
};

template <class L> LLMCTL_INLINE int64_t unit_blocks(const PackedMatrix& matrix) {
  return L::kUnitBlocks ? L::kUnitBlocks : matrix.group_size / kBlock;
}
// The index of a block's first scale within its unit.
template <class L> LLMCTL_INLINE int64_t scale_index(int64_t block) { return L::kUnitBlocks ? block * L::kScales : 0; }

}  // namespace llmctl::LLMCTL_ISA
