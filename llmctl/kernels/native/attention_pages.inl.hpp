// Pages: writing a token, reading it back, and a tile of keys or values as float32.
#pragma once

#include "attention_merge.inl.hpp"
#include "transpose.inl.hpp"

namespace llmctl::LLMCTL_ISA {

inline F32 load_lanes(const float* p) { return load_f32(p); }
struct Half { uint16_t bits; };
struct Brain { uint16_t bits; };
inline F32 load_lanes(const Half* p) { return load_f16(&p->bits); }
inline F32 load_lanes(const Brain* p) { return load_bf16(&p->bits); }
inline F32 load_lanes(const int8_t* p) { return to_f32(load_i8_i32(p)); }

inline void round_to(float* to, F32 x) { store_f32(to, x); }
inline void round_to(Half* to, F32 x) { store_f16(&to->bits, x); }
inline void round_to(Brain* to, F32 x) {   // nearest even; a NaN keeps its upper bits and gets one that cannot vanish
  I32 word = bits(x);
  I32 odd = bit_and(shift_right<16>(word), set_i32(1));
  int32_t rounded[16], quiet[16];
  store_i32(rounded, shift_right<16>(add(add(word, set_i32(0x7FFF)), odd)));
  store_i32(quiet, bit_or(shift_right<16>(word), set_i32(0x40)));
  float lanes[16];
  store_f32(lanes, x);
  for (int i = 0; i < 16; ++i) to[i].bits = uint16_t(lanes[i] == lanes[i] ? rounded[i] : quiet[i]);
}

// Calls function(a value of the element's type).
template <class Function>
inline void with_element(KvType type, Function function) {
  switch (type) {
    case KvType::F32: return function(float());
    case KvType::F16: return function(Half());
    case KvType::BF16: return function(Brain());
    case KvType::Q8_0: return function(int8_t());
  }
}

// Where one kv head of a page keeps what. The scales are null but for Q8_0. `ahead` bytes further lies the page that will be
// read a tile later (0: none): whoever reads here asks for the same place there.
struct PageHead {
  uint16_t* key_scales;
  uint8_t* keys;
  uint16_t* value_scales;
  uint8_t* values;
  int64_t ahead;
};

inline PageHead page_head(const KvPages& pages, int64_t page, int64_t kv_head) {
  uint8_t* key = pages.data + page * pages.page_stride + kv_head * kv_head_bytes(pages.shape);
  uint8_t* value = key + kv_key_bytes(pages.shape);
  if (pages.shape.type != KvType::Q8_0) return {nullptr, key, nullptr, value, 0};
  int64_t scales = kv_scales(pages.shape) * kPageTokens * 2;
  return {(uint16_t*)key, key + scales, (uint16_t*)value, value + scales, 0};
}

// x [n] to out [n], out rounded up to whole vectors and 0 there.
template <class T>
inline void round_row(const float* x, int64_t n, T* out) {
  for (int64_t i = 0; i < n; i += 16) round_to(out + i, load_f32_first(x + i, int(smaller(16, n - i))));
}

// Q8_0: d = max|x| / 127 over 32 columns, rounded to f16; codes round(x / d) by the scale before rounding. An infinity or a
// NaN makes a NaN of the scale, so that it stays seen.
inline void quantize_row(const float* x, int64_t n, int8_t* codes, uint16_t* scales) {
  for (int64_t block = 0; block * 32 < n; ++block) {
    int64_t first = block * 32, rest = smaller(32, n - first);
    F32 low = load_f32_first(x + first, int(smaller(16, rest)));
    F32 high = rest > 16 ? load_f32_first(x + first + 16, int(rest - 16)) : zero_f32();
    float scale = reduce_max(max(abs(low), abs(high))) / 127.0f + 0.0f * reduce_add(add(low, high));
    F32 inverse = set_f32(scale > 0 ? 1.0f / scale : 0.0f);
    store_i8(codes + first, to_i32(mul(low, inverse)));
    if (rest > 16) store_i8(codes + first + 16, to_i32(mul(high, inverse)));
    uint16_t half[16];
    store_f16(half, set_f32(scale));
    scales[block] = half[0];
  }
}

template <class T>
inline void put_row(const T* row, int64_t n, T* first, int64_t stride) {
  for (int64_t i = 0; i < n; ++i) first[i * stride] = row[i];
}

template <class T>
inline void store_key(const KvShape& shape, const PageHead& head, int64_t offset, const float* key) {
  T row[kMaxHeadDim];
  if constexpr (sizeof(T) == 1) {
    uint16_t scales[kMaxHeadDim / 32];
    quantize_row(key, shape.head_dim, row, scales);
    put_row(scales, kv_scales(shape), head.key_scales + offset, kPageTokens);
  } else {
    round_row(key, shape.head_dim, row);
  }
  put_row(row, shape.head_dim, (T*)head.keys + offset, kPageTokens);
}

template <class T>
inline void store_value(const KvShape& shape, const PageHead& head, int64_t offset, const float* value) {
  T* values = (T*)head.values + offset * padded_head_dim(shape.head_dim);
  if constexpr (sizeof(T) == 1) {
    quantize_row(value, shape.head_dim, values, head.value_scales + offset * kv_scales(shape));
  } else {
    round_row(value, shape.head_dim, values);
  }
}

inline void store(const KvPages& pages, int64_t kv_head, int64_t slot, const float* key, const float* value) {
  if (slot < 0) return;
  PageHead head = page_head(pages, slot / kPageTokens, kv_head);
  with_element(pages.shape.type, [&](auto element) {
    using T = decltype(element);
    if (key) store_key<T>(pages.shape, head, slot % kPageTokens, key);
    if (value) store_value<T>(pages.shape, head, slot % kPageTokens, value);
  });
}

// Rows of keys or values as the sums read them: at(k, v) is vector v of row k, columns(n) what begins n vectors further. The
// value of an element is the same from each. kRows: how many sums of a column are kept at a time at most.

inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }   // to the second-level cache

// float32, `stride` apart: a tile that has been loaded.
struct LoadedRows {
  static constexpr int kRows = 6;
  const float* rows;
  int64_t stride;
  F32 at(int64_t k, int v) const { return load_f32(rows + k * stride + 16 * v); }
  LoadedRows columns(int64_t n) const { return {rows + 16 * n, stride}; }
};

// Keys straight from pages: a row is a dimension, a vector the 16 tokens of a page.
template <class T>
struct PageKeys {
  static constexpr int kRows = 4;
  const PageHead* heads;
  F32 at(int64_t d, int v) const {
    const T* keys = (const T*)heads[v].keys + d * kPageTokens;
    prefetch((const char*)keys + heads[v].ahead);
    F32 lanes = load_lanes(keys);
    if constexpr (sizeof(T) == 1) lanes = mul(lanes, load_f16(heads[v].key_scales + d / 32 * kPageTokens));
    return lanes;
  }
  PageKeys columns(int64_t n) const { return {heads + n}; }
};

// Values straight from a page: a row is a token, a vector 16 dimensions. `scales` [tokens][blocks] for Q8_0.
template <class T>
struct PageValues {
  static constexpr int kRows = 4;
  const T* rows;
  int64_t stride;
  const float* scales;
  int64_t blocks, vector, ahead;
  F32 at(int64_t k, int v) const {
    const T* values = rows + k * stride + 16 * v;
    prefetch((const char*)values + ahead);
    F32 lanes = load_lanes(values);
    if constexpr (sizeof(T) == 1) lanes = mul(lanes, set_f32(scales[k * blocks + (vector + v) / 2]));
    return lanes;
  }
  PageValues columns(int64_t n) const { return {rows + 16 * n, stride, scales, blocks, vector + n, ahead}; }
};

constexpr int64_t kMaxPageScales = kPageTokens * kMaxHeadDim / 32;

// The values of a page from token `first` on; `scales` [kMaxPageScales] is filled where the type has some.
template <class T>
inline PageValues<T> page_values(const KvShape& shape, const PageHead& head, int64_t first, float* scales) {
  int64_t width = padded_head_dim(shape.head_dim), blocks = kv_scales(shape);
  if constexpr (sizeof(T) == 1) {
    for (int64_t i = 0; i < blocks * kPageTokens; i += 16) store_f32(scales + i, load_f16(head.value_scales + i));
  }
  return {(const T*)head.values + first * width, width, scales + first * blocks, blocks, 0, head.ahead};
}

// The keys of a page into 16 columns of a tile: out[d * kKeyTile + token].
inline void load_keys(const KvShape& shape, const PageHead& head, float* out) {
  with_element(shape.type, [&](auto element) {
    PageKeys<decltype(element)> keys = {&head};
    for (int64_t d = 0; d < shape.head_dim; ++d) store_f32(out + d * kKeyTile, keys.at(d, 0));
  });
}

// The values of tokens first .. last - 1 of a page. A tile of values lies in panels of 64 columns (the last one narrower),
// [64 tokens][columns] each, so that what one inner loop reads is contiguous; `token` is where token 0 of the page goes.
inline void load_values(const KvShape& shape, const PageHead& head, int64_t first, int64_t last, int64_t token, float* out) {
  int64_t width = padded_head_dim(shape.head_dim);
  with_element(shape.type, [&](auto element) {
    float scales[kMaxPageScales];
    auto values = page_values<decltype(element)>(shape, head, 0, scales);
    for (int64_t panel = 0; panel < width; panel += 64, values = values.columns(4)) {
      int64_t columns = smaller(64, width - panel);
      for (int64_t row = first; row < last; ++row) {
        float* to = out + panel * kKeyTile + (token + row) * columns;
        for (int v = 0; v < columns / 16; ++v) store_f32(to + 16 * v, values.at(row, v));
      }
    }
  });
}

// The values of latent pages: the first dimensions of a loaded tile of keys, turned. As load_values otherwise.
inline void turn_keys(const KvShape& shape, const float* keys, int64_t first, int64_t last, int64_t token, float* out) {
  const int64_t width = padded_head_dim(shape.latent);
  for (int64_t d = 0; d < width; d += 16) {
    int64_t panel = d / 64 * 64, columns = smaller(64, width - panel);
    float* to = out + panel * kKeyTile + token * columns + d - panel;
    F32 rows[16];
    for (int64_t i = 0; i < 16; ++i) rows[i] = d + i < shape.head_dim ? load_f32(keys + (d + i) * kKeyTile + token) : zero_f32();
    transpose(rows);
    for (int64_t row = first; row < last; ++row) store_f32(to + row * columns, rows[row]);
  }
}

inline void load(const KvPages& pages, int64_t kv_head, int64_t slot, float* key, float* value) {
  PageHead head = page_head(pages, slot / kPageTokens, kv_head);
  int64_t offset = slot % kPageTokens, dim = pages.shape.head_dim;
  with_element(pages.shape.type, [&](auto element) {
    using T = decltype(element);
    float scales[kMaxPageScales], tokens[kPageTokens];
    for (int64_t d = 0; d < dim; ++d) {
      store_f32(tokens, PageKeys<T>{&head}.at(d, 0));
      key[d] = tokens[offset];
    }
    if (pages.shape.latent) {
      memcpy(value, key, pages.shape.latent * sizeof(float));
      return;
    }
    auto values = page_values<T>(pages.shape, head, offset, scales);
    for (int64_t d = 0; d < dim; d += 16) store_f32_first(value + d, values.at(0, int(d / 16)), int(smaller(16, dim - d)));
  });
}

}  // namespace llmctl::LLMCTL_ISA
