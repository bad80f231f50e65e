// Pages: writing a token, reading it back, and a tile of keys or values as float32.
#pragma once

#include "attention_elements.inl.hpp"
#include "transpose.inl.hpp"

namespace llmctl::LLMCTL_ISA {

// Calls function(a value of the element's or block's type).
template <class Function>
inline void with_element(KvType type, Function function) {
  switch (type) {
    case KvType::F32: return function(float());
    case KvType::F16: return function(Half());
    case KvType::BF16: return function(Brain());
    case KvType::FP8: return function(Small());
    case KvType::Q8_0: return function(Q8());
    case KvType::Q5_1: return function(Q5());
    case KvType::Q4_0: return function(Q4());
  }
}

// Where one kv head of a page keeps what. The scales are null where the type has none. `ahead` bytes further lies the page that
// will be read a tile later (0: none): whoever reads here asks for the same place there.
struct PageHead {
  uint16_t* key_scales;
  uint8_t* keys;
  uint16_t* value_scales;
  uint8_t* values;
  int64_t ahead;
};

inline PageHead page_head(const KvPages& pages, int64_t page, int64_t kv_head) {
  const KvShape& shape = pages.shape;
  uint8_t* key = pages.data + page * pages.page_stride + kv_head * kv_head_bytes(shape);
  uint8_t* value = key + kv_key_bytes(shape);
  return {(uint16_t*)key, key + kv_scale_bytes(shape.key_type, shape.head_dim), (uint16_t*)value,
          value + kv_scale_bytes(shape.value_type, shape.head_dim), 0};
}

template <class T>
inline void put_row(const T* row, int64_t n, T* first, int64_t stride) {
  for (int64_t i = 0; i < n; ++i) first[i * stride] = row[i];
}

template <class T>
inline void store_key(const KvShape& shape, const PageHead& head, int64_t offset, const float* key) {
  if constexpr (is_block<T>) {
    const int64_t blocks = kv_blocks(shape.head_dim);
    BlockRow row;
    quantize_row<T>(key, shape.head_dim, row);
    put_row(row.scales, blocks * T::kScales, head.key_scales + offset, kPageTokens);
    put_row(row.codes, blocks * T::kCodes, head.keys + offset, kPageTokens);
    put_row(row.high, blocks * T::kHigh, head.keys + blocks * T::kCodes * kPageTokens + offset, kPageTokens);
  } else {
    T row[kMaxHeadDim];
    round_row(key, shape.head_dim, row);
    put_row(row, shape.head_dim, (T*)head.keys + offset, kPageTokens);
  }
}

template <class T>
inline void store_value(const KvShape& shape, const PageHead& head, int64_t offset, const float* value) {
  if constexpr (is_block<T>) {
    const int64_t blocks = kv_blocks(shape.head_dim);
    BlockRow row;
    quantize_row<T>(value, shape.head_dim, row);
    for (int i = 0; i < T::kScales; ++i) {
      memcpy(head.value_scales + (i * kPageTokens + offset) * blocks, row.scales + i * blocks, size_t(blocks) * 2);
    }
    memcpy(head.values + offset * blocks * T::kCodes, row.codes, size_t(blocks * T::kCodes));
    memcpy(head.values + kPageTokens * blocks * T::kCodes + offset * blocks * T::kHigh, row.high, size_t(blocks * T::kHigh));
  } else {
    round_row(value, shape.head_dim, (T*)head.values + offset * padded_head_dim(shape.head_dim));
  }
}

// What is stored of a row: itself, or turned.
inline const float* rotated(const float* x, int64_t n, int64_t block, float* copy) {
  if (!block) return x;
  memcpy(copy, x, size_t(n) * 4);
  rotate_blocks(copy, n, block);
  return copy;
}

inline void store(const KvPages& pages, int64_t kv_head, int64_t slot, const float* key, const float* value) {
  if (slot < 0) return;
  const KvShape& shape = pages.shape;
  PageHead head = page_head(pages, slot / kPageTokens, kv_head);
  float copy[kMaxHeadDim];
  if (key) {
    const float* row = rotated(key, shape.head_dim, kv_key_rotation(shape), copy);
    with_element(shape.key_type, [&](auto element) { store_key<decltype(element)>(shape, head, slot % kPageTokens, row); });
  }
  if (value) {
    const float* row = rotated(value, shape.head_dim, kv_value_rotation(shape), copy);
    with_element(shape.value_type, [&](auto element) { store_value<decltype(element)>(shape, head, slot % kPageTokens, row); });
  }
}

// Rows of keys or values as the sums read them: at(k, v) is vector v of row k, columns(n) what begins n vectors further. The
// value of an element is the same from each. kRows: how many sums of a column are kept at a time at most. kBlocks: rows come
// in blocks of 32 with scales for the vectors of all of them, scales(block, v).

inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }   // to the second-level cache

// float32, `stride` apart: a tile that has been loaded.
struct LoadedRows {
  static constexpr int kRows = 6;
  static constexpr bool kBlocks = false;
  const float* rows;
  int64_t stride;
  F32 at(int64_t k, int v) const { return load_f32(rows + k * stride + 16 * v); }
  LoadedRows columns(int64_t n) const { return {rows + 16 * n, stride}; }
};

// Keys straight from pages: a row is a dimension, a vector the 16 tokens of a page. `blocks` of a row.
template <class T>
struct PageKeys {
  static constexpr int kRows = 4;
  static constexpr bool kBlocks = is_block<T>;
  const PageHead* heads;
  int64_t blocks;

  F32 at(int64_t d, int v) const {
    if constexpr (kBlocks) {
      return d % 32 < 16 ? at_scaled<false>(d, v, scales(d / 32, v)) : at_scaled<true>(d, v, scales(d / 32, v));
    } else {
      const T* keys = (const T*)heads[v].keys + d * kPageTokens;
      prefetch((const char*)keys + heads[v].ahead);
      return load_lanes(keys);
    }
  }
  Scales scales(int64_t block, int v) const {
    const uint16_t* p = heads[v].key_scales + block * kPageTokens;
    return {load_f16(p), T::kScales > 1 ? load_f16(p + blocks * kPageTokens) : zero_f32()};
  }
  // `d` is among the block's upper 16 or its lower ones.
  template <bool kUpper>
  F32 at_scaled(int64_t d, int v, const Scales& s) const {
    const PageHead& head = heads[v];
    if constexpr (T::kCodes == 32) {
      const uint8_t* codes = head.keys + d * kPageTokens;
      prefetch(codes + head.ahead);
      return mul(to_f32(load_i8_i32((const int8_t*)codes)), s.scale);
    } else {
      const uint8_t* codes = head.keys + (d / 32 * 16 + d % 16) * kPageTokens;
      if constexpr (!kUpper) prefetch(codes + head.ahead);
      if constexpr (T::kHigh == 0) return mul(load_fours<kUpper, 8>(codes), s.scale);
      const uint8_t* high = head.keys + (blocks * T::kCodes + d / 8) * kPageTokens;
      return fma(load_fives<kUpper>(codes, high, int(d % 8)), s.scale, s.offset);
    }
  }
  PageKeys columns(int64_t n) const { return {heads + n, blocks}; }
};

// Values straight from a page: a row is a token, a vector 16 dimensions. Of blocks: `scales` [kScales][tokens][blocks].
template <class T>
struct PageValues {
  static constexpr int kRows = 4;
  static constexpr bool kBlocks = false;
  const uint8_t* values;
  const float* scales;
  int64_t width, blocks, vector, token, ahead;

  F32 at(int64_t k, int v) const {
    if constexpr (is_block<T>) {
      return (vector + v) % 2 ? in_block<true>(token + k, (vector + v) / 2) : in_block<false>(token + k, (vector + v) / 2);
    } else {
      const T* p = (const T*)values + (token + k) * width + 16 * (vector + v);
      prefetch((const char*)p + ahead);
      return load_lanes(p);
    }
  }
  template <bool kUpper>
  F32 in_block(int64_t row, int64_t block) const {
    const int64_t place = row * blocks + block;
    const uint8_t* codes = values + place * T::kCodes;
    Scales s = {set_f32(scales[place]), T::kScales > 1 ? set_f32(scales[kPageTokens * blocks + place]) : zero_f32()};
    if constexpr (T::kCodes == 32 || !kUpper) prefetch(codes + ahead);
    if constexpr (T::kCodes == 32) {
      return mul(to_f32(load_i8_i32((const int8_t*)codes + (kUpper ? 16 : 0))), s.scale);
    } else {
      if constexpr (T::kHigh == 0) return mul(load_fours<kUpper, 8>(codes), s.scale);
      uint16_t fifths;
      memcpy(&fifths, values + kPageTokens * blocks * T::kCodes + place * T::kHigh + (kUpper ? 2 : 0), 2);
      return fma(load_fives<kUpper>(codes, fifths), s.scale, s.offset);
    }
  }
  PageValues columns(int64_t n) const { return {values, scales, width, blocks, vector + n, token, ahead}; }
};

constexpr int64_t kMaxPageScales = 2 * kPageTokens * kMaxBlocks;

// The values of a page from token `first` on; `scales` [kMaxPageScales] is filled where the type has some.
template <class T>
inline PageValues<T> page_values(const KvShape& shape, const PageHead& head, int64_t first, float* scales) {
  const int64_t width = padded_head_dim(shape.head_dim), blocks = kv_blocks(shape.head_dim);
  if constexpr (is_block<T>) {
    for (int64_t i = 0; i < T::kScales * blocks * kPageTokens; i += 16) store_f32(scales + i, load_f16(head.value_scales + i));
  }
  return {head.values, scales, width, blocks, 0, first, head.ahead};
}

// The keys of a page into 16 columns of a tile: out[d * kKeyTile + token].
inline void load_keys(const KvShape& shape, const PageHead& head, float* out) {
  with_element(shape.key_type, [&](auto element) {
    PageKeys<decltype(element)> keys = {&head, kv_blocks(shape.head_dim)};
    for (int64_t d = 0; d < shape.head_dim; ++d) store_f32(out + d * kKeyTile, keys.at(d, 0));
  });
}

// The values of tokens first .. last - 1 of a page. A tile of values lies in panels of 64 columns (the last one narrower),
// [64 tokens][columns] each, so that what one inner loop reads is contiguous; `token` is where token 0 of the page goes.
inline void load_values(const KvShape& shape, const PageHead& head, int64_t first, int64_t last, int64_t token, float* out) {
  int64_t width = padded_head_dim(shape.head_dim);
  with_element(shape.value_type, [&](auto element) {
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
  const KvShape& shape = pages.shape;
  PageHead head = page_head(pages, slot / kPageTokens, kv_head);
  int64_t offset = slot % kPageTokens, dim = shape.head_dim;
  with_element(shape.key_type, [&](auto element) {
    float tokens[kPageTokens];
    for (int64_t d = 0; d < dim; ++d) {
      store_f32(tokens, PageKeys<decltype(element)>{&head, kv_blocks(dim)}.at(d, 0));
      key[d] = tokens[offset];
    }
  });
  rotate_blocks(key, dim, kv_key_rotation(shape));
  if (shape.latent) {
    memcpy(value, key, size_t(shape.latent) * sizeof(float));
    return;
  }
  with_element(shape.value_type, [&](auto element) {
    float scales[kMaxPageScales];
    auto values = page_values<decltype(element)>(shape, head, offset, scales);
    for (int64_t d = 0; d < dim; d += 16) store_f32_first(value + d, values.at(0, int(d / 16)), int(smaller(16, dim - d)));
  });
  rotate_blocks(value, dim, kv_value_rotation(shape));
}

}  // namespace llmctl::LLMCTL_ISA
