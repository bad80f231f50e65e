#include "packed_weight.hpp"

#include <cstdlib>
#include <cstring>
#include <limits>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>

#if !defined(_WIN32)
#include <sys/mman.h>
#endif

namespace llmctl {
namespace {

constexpr int64_t kHugePage = 2 << 20;
constexpr int64_t kSharedMapping = 32 << 20;   // for pieces smaller than a huge page
constexpr int64_t kCacheLine = 64;
constexpr int64_t kWorthThreads = 256 << 10;   // bytes below which waking a pool costs more than it saves

int64_t round_up(int64_t bytes, int64_t unit) { return (bytes + unit - 1) / unit * unit; }

bool huge_pages_wanted() {
  const char* value = std::getenv("LLMCTL_HUGE_PAGES");
  return value == nullptr || std::strcmp(value, "0") != 0;
}

#if defined(_WIN32)
std::shared_ptr<uint8_t> map_memory(int64_t bytes) {
  auto* memory = static_cast<uint8_t*>(::operator new(bytes, std::align_val_t(kCacheLine)));
  std::memset(memory, 0, bytes);
  return {memory, [](uint8_t* p) { ::operator delete(p, std::align_val_t(kCacheLine)); }};
}
#else
// A mapping that begins on a huge page's border: a little more is mapped, and what is left over on both sides is given back.
std::shared_ptr<uint8_t> map_memory(int64_t bytes) {
  const int64_t size = round_up(bytes, 4096), mapped = size + kHugePage;
  void* start = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (start == MAP_FAILED) throw std::bad_alloc();
  auto* first = static_cast<uint8_t*>(start);
  const int64_t before = round_up(reinterpret_cast<int64_t>(first), kHugePage) - reinterpret_cast<int64_t>(first);
  if (before > 0) munmap(first, before);
  if (kHugePage - before > 0) munmap(first + before + size, kHugePage - before);
#if defined(MADV_HUGEPAGE)
  if (huge_pages_wanted()) madvise(first + before, size, MADV_HUGEPAGE);   // a wish: fails where the system has none
#endif
  return {first + before, [size](uint8_t* p) { munmap(p, size); }};
}
#endif

// Pieces cut off one mapping after another. A mapping lives as long as any piece of it.
class SharedMappings {
 public:
  std::shared_ptr<uint8_t> cut(int64_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto whole = current_.lock();
    if (!whole || used_ + bytes > kSharedMapping) {
      whole = map_memory(kSharedMapping);
      current_ = whole;
      used_ = 0;
    }
    uint8_t* piece = whole.get() + used_;
    used_ += bytes;
    return {std::move(whole), piece};
  }

 private:
  std::mutex mutex_;
  std::weak_ptr<uint8_t> current_;
  int64_t used_ = 0;
};

void check(bool holds, const std::string& message) {
  if (!holds) throw std::invalid_argument(message);
}

void check_shape(Layout layout, int64_t rows, int64_t columns, int64_t group_size, int64_t matrices) {
  const bool grouped = layout == Layout::I4 || layout == Layout::I8;
  check(rows >= 1 && columns >= 1 && matrices >= 1, "a weight has at least one row and one column");
  check(grouped == (group_size != 0), "a group size belongs to the layouts I4 and I8, and to them only");
  check(!grouped || (group_size >= kBlock && group_size % kBlock == 0), "group_size must be a multiple of 32");
  const LayoutInfo info = layout_info(layout, group_size);
  check(columns % info.columns == 0, std::string(info.name) + " needs rows of a multiple of " +
                                         std::to_string(info.columns) + " columns, got " + std::to_string(columns));
  const double bytes = double(matrices) * double(rows + kTileRows) * double(columns) * double(info.tile_bytes);
  if (bytes > double(std::numeric_limits<int64_t>::max())) throw std::bad_alloc();
}

// body(first, last) over consecutive parts of `count` tiles.
template <class Body>
void split_tiles(ThreadPool* pool, int64_t count, int64_t bytes, Body body) {
  if (pool == nullptr || pool->size() == 1 || bytes < kWorthThreads) return body(0, count);
  const int64_t parts = pool->size();
  pool->run([&](int worker) { body(count * worker / parts, count * (worker + 1) / parts); });
}

}  // namespace

std::shared_ptr<uint8_t> weight_memory(int64_t bytes) {
  static SharedMappings& mappings = *new SharedMappings;   // never destroyed: weights may outlive every static
  return bytes < kHugePage ? mappings.cut(round_up(bytes, kCacheLine)) : map_memory(bytes);
}

PackedWeight::PackedWeight(Layout layout, int64_t rows, int64_t columns, int64_t group_size, int64_t matrices)
    : matrix_{layout, rows, columns, group_size, nullptr}, matrices_(matrices) {
  check_shape(layout, rows, columns, group_size, matrices);
  matrix_bytes_ = matrix_.tiles() * matrix_.tile_bytes();
  memory_ = weight_memory(bytes());
  matrix_.data = memory_.get();
}

PackedMatrix PackedWeight::matrix(int64_t index) const {
  check(index >= 0 && index < matrices_, "there is no matrix of this number");
  PackedMatrix matrix = matrix_;
  matrix.data += index * matrix_bytes_;
  return matrix;
}

void PackedWeight::store(int64_t index, int64_t first_row, int64_t rows, const StoredRows& source, ThreadPool* pool) {
  PackedMatrix part = matrix(index);
  const int64_t end = first_row + rows;
  check(first_row >= 0 && first_row % kTileRows == 0 && rows >= 0 && end <= part.rows, "these rows are not in the weight");
  check(end % kTileRows == 0 || end == part.rows, "a part must end where a tile of 16 rows ends");
  part.data += first_row / kTileRows * part.tile_bytes();
  part.rows = rows;
  auto* destination = const_cast<uint8_t*>(part.data);
  split_tiles(pool, part.tiles(), part.tiles() * part.tile_bytes(),
              [&](int64_t first, int64_t last) { pack_tiles(part, source, first, last, destination); });
}

void PackedWeight::restore(int64_t index, const RestoredRows& target, ThreadPool* pool) const {
  const PackedMatrix whole = matrix(index);
  split_tiles(pool, whole.tiles(), matrix_bytes_,
              [&](int64_t first, int64_t last) { unpack_rows(whole, target, first, last); });
}

}  // namespace llmctl
