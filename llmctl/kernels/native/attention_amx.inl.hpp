// Attention over pages of bf16 by the tile unit. TDPBF16PS gives each row of A its own sums, even and odd columns in a chain of
// fma each from 0 (subnormal numbers count as 0), then even + odd, then added to C.
#pragma once

#include "attention_bf16.inl.hpp"

namespace llmctl {
namespace LLMCTL_ISA {

constexpr int64_t kHalfTileBytes = 512;
constexpr int64_t kStepKeys = 32;   // keys that one product of weights and values takes

// ---- The tile registers. With two blocks of rows: 0, 1 are the first one's sums in two columns of tiles, 2, 3 the second
// one's; 4, 5 their factors A; 6, 7 the tiles B. With one block: 0 to 3 its sums in four columns, 4 A, 5 to 7 B.

struct alignas(64) RowTiles {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// `second` 0: one block.
inline void configure_rows(int64_t first, int64_t second) {
  RowTiles config;
  for (int tile = 0; tile < 8; ++tile) {
    bool of_second = second && (tile == 2 || tile == 3 || tile == 5), b = tile >= (second ? 6 : 5);
    config.row_bytes[tile] = 64;
    config.rows[tile] = uint8_t(b ? 16 : of_second ? second : first);
  }
  asm volatile("ldtilecfg %0" ::"m"(config));
}

// GCC does not say that its tile loads read memory.
inline void written_to_memory() { asm volatile("" ::: "memory"); }

inline void zero_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

// sums += A B of one step, N columns of tiles.
template <int N>
inline void multiply_one(const void* a, int64_t a_stride, const uint8_t* const* b) {
  _tile_loadd(4, a, a_stride);
  _tile_loadd(5, b[0], 64);
  _tile_dpbf16ps(0, 4, 5);
  _tile_loadd(6, b[1], 64);
  _tile_dpbf16ps(1, 4, 6);
  if constexpr (N == 4) {
    _tile_loadd(7, b[2], 64);
    _tile_dpbf16ps(2, 4, 7);
    _tile_loadd(5, b[3], 64);
    _tile_dpbf16ps(3, 4, 5);
  }
}

inline void multiply_two(const uint8_t* a, int64_t a_stride, const uint8_t* b0, const uint8_t* b1) {
  _tile_loadd(4, a, a_stride);
  _tile_loadd(6, b0, 64);
  _tile_dpbf16ps(0, 4, 6);
  _tile_loadd(7, b1, 64);
  _tile_dpbf16ps(1, 4, 7);
  _tile_loadd(5, a + 16 * a_stride, a_stride);
  _tile_dpbf16ps(2, 5, 6);
  _tile_dpbf16ps(3, 5, 7);
}

template <int N>
inline void store_one(float* c, int64_t c_stride) {   // strides in bytes
  _tile_stored(0, c, c_stride);
  _tile_stored(1, c + 16, c_stride);
  if constexpr (N == 4) {
    _tile_stored(2, c + 32, c_stride);
    _tile_stored(3, c + 48, c_stride);
  }
}

inline void store_two(float* c, int64_t c_stride) {
  float* second = c + 4 * c_stride;   // 16 rows further
  _tile_stored(0, c, c_stride);
  _tile_stored(1, c + 16, c_stride);
  _tile_stored(2, second, c_stride);
  _tile_stored(3, second + 16, c_stride);
}

class TileRun : public BlockRun<TileRun> {
 public:
  using BlockRun::BlockRun;

  static bool serves(const KvShape& shape) { return pair_pages(shape); }

  void run(float* partials) {
    BlockRun::run(partials);
    _tile_release();
  }

  void begin_values() {
    if (!resident()) return;
    for (int64_t step = item_range_.low / kStepKeys; step * kStepKeys < item_range_.high; ++step) {
      copy_step(step, 0, value_dim_ / 16, item_range_, values_ + step * step_bytes());
    }
  }

  void begin_block(int64_t rows) { configure(smaller(rows, 16), larger(rows - 16, 0)); }

  void score(int64_t row, int64_t rows, Range all) {
    const uint8_t* queries = queries_ + row * dim_ * 2;
    written_to_memory();
    for (int64_t key = tiles(all).low; key < tiles(all).high; key += kKeyTile) {
      const uint8_t* const* pages = key_pages_ + key / kPageTokens;
      if (rows > 16) {
        score_two(queries, pages, scores_ + key);
        score_two(queries, pages + 2, scores_ + key + 32);
      } else {
        bool more = key + kKeyTile < all.high;
        ask_for(more ? key_pages_ : value_pages_, more ? key + kKeyTile : tiles(all).low, all.high);
        score_one(queries, pages, scores_ + key);
      }
    }
  }

  void add_values(int64_t row, int64_t rows, Range all, const Softmax& to) {
    if (rows > 16) add_values_two(all, to);
    else add_values_one(0, all, !resident(), to.rows, to.stride);
  }

  void add_values_alone(int64_t row, int64_t rows, const Softmax& to) {
    configure(1, 0);
    for (int64_t r = 0; r < rows; ++r) add_values_one(r, seen(row + r), true, to.rows + r * to.stride, to.stride);
  }

  Range values_read(Range all) const {
    if (!resident()) return all;
    return {larger(all.low / kStepKeys * kStepKeys, item_range_.low),
            smaller((all.high + kStepKeys - 1) / kStepKeys * kStepKeys, item_range_.high)};
  }

 private:
  bool resident() const { return rows_ > kBlockRows; }   // whether a partition's values are copied at once
  int64_t step_bytes() const { return value_dim_ / 16 * kTileBytes; }

  // Values of 32 keys in `count` columns of tiles from the column `first` on.
  void copy_step(int64_t step, int64_t first, int64_t count, Range range, uint8_t* tiles) const {
    for (int64_t half = 0; half < 2; ++half) {
      int64_t page = 2 * step + half;
      for (int64_t c = 0; c < count; ++c) {
        uint8_t* half_tile = tiles + c * kTileBytes + half * kHalfTileBytes;
        const int64_t key = page * kPageTokens, low = range.low, high = range.high;
        if (latent_) turn_values(value_pages_[page] + (first + c) * kHalfTileBytes, key, low, high, half_tile);
        else copy_values(value_pages_[page] + (first + c) * 64, dim_ * 4, key, low, high, half_tile);
      }
    }
  }

  void configure(int64_t first, int64_t second) {
    if (first == configured_first_ && second == configured_second_) return;
    configure_rows(configured_first_ = first, configured_second_ = second);
  }

  void score_two(const uint8_t* queries, const uint8_t* const* pages, float* scores) {
    zero_sums();
    for (int64_t step = 0; step < dim_ / 32; ++step) {
      multiply_two(queries + step * 64, dim_ * 2, pages[0] + step * kTileBytes, pages[1] + step * kTileBytes);
    }
    store_two(scores, kScoreBytes);
  }

  void score_one(const uint8_t* queries, const uint8_t* const* pages, float* scores) {
    const uint8_t* tiles[4] = {pages[0], pages[1], pages[2], pages[3]};
    zero_sums();
    for (int64_t step = 0; step < dim_ / 32; ++step) {
      multiply_one<4>(queries + step * 64, dim_ * 2, tiles);
      for (const uint8_t*& tile : tiles) tile += kTileBytes;
    }
    store_one<4>(scores, kScoreBytes);
  }

  void add_values_two(Range all, const Softmax& to) {
    bool copy = !resident();
    written_to_memory();
    for (int64_t column = 0; column < value_dim_ / 16; column += 2) {
      zero_sums();
      for (int64_t step = all.low / kStepKeys; step * kStepKeys < all.high; ++step) {
        uint8_t* tiles = values_ + (copy ? step % 2 * 2 * kTileBytes : step * step_bytes() + column * kTileBytes);
        if (copy) {
          copy_step(step, column, 2, all, tiles);
          written_to_memory();
        }
        multiply_two(score_row(scores_, 0) + step * 64, kScoreBytes, tiles, tiles + kTileBytes);
      }
      store_two(to.rows + column * 16, to.stride * 4);
    }
  }

  // Up to 16 rows from the block's row `r` on, to `out`.
  void add_values_one(int64_t r, Range keys, bool copy, float* out, int64_t stride) {
    int64_t column = 0;
    for (; column + 4 <= value_dim_ / 16; column += 4) add_columns<4>(r, keys, copy, column, out + column * 16, stride * 4);
    if (column < value_dim_ / 16) add_columns<2>(r, keys, copy, column, out + column * 16, stride * 4);
  }

  template <int N>
  void add_columns(int64_t r, Range keys, bool copy, int64_t column, float* out, int64_t stride) {
    written_to_memory();
    zero_sums();
    for (int64_t step = keys.low / kStepKeys; step * kStepKeys < keys.high; ++step) {
      uint8_t* tiles = spare_values() + step % 2 * N * kTileBytes;
      if (copy) {
        if (column == 0 && step % 2 == 0) ask_for(value_pages_, (step + 2) * kStepKeys, keys.high);
        copy_step(step, column, N, keys, tiles);
        written_to_memory();
      } else {
        tiles = values_ + step * step_bytes() + column * kTileBytes;
      }
      const uint8_t* b[4] = {tiles, tiles + kTileBytes, tiles + 2 * kTileBytes, tiles + 3 * kTileBytes};
      multiply_one<N>(score_row(scores_, r) + step * 64, kScoreBytes, b);
    }
    store_one<N>(out, stride);
  }

  // Two steps' tiles for a row that needs values of its own while those of the partition stay.
  uint8_t* spare_values() { return spare_; }

  int64_t configured_first_ = 0, configured_second_ = 0;
  alignas(64) uint8_t spare_[8 * kTileBytes];
};

extern const AttentionKernels tile_attention;   // not inline: cpu.cpp asks for it
const AttentionKernels tile_attention = {store_pairs<TileRun>, load_pairs<TileRun>,     run_pairs<TileRun>, merge_pairs,
                                         move_pairs<TileRun>,  load_pair_keys<TileRun>, vote_pairs};

}  // namespace LLMCTL_ISA
}  // namespace llmctl
