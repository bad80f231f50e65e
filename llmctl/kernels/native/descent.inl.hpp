// The kernel of descent.hpp for the instruction set this is compiled for.
#pragma once

#include <algorithm>
#include <vector>

#include "descent.hpp"
#include "feedback.inl.hpp"

namespace llmctl::LLMCTL_ENCODE {

constexpr int kVectors = kStripRows / kLanes;   // of a column of a strip
constexpr float kLeastCurve = 1e-30f;

struct Column {   // of a strip
  F32 part[kVectors];
};

inline F32 fused(F32 a, F32 b, F32 c) {   // a * b + c
#if defined(__AVX512F__)
  return (F32)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (F32)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

// 1 / x, 0 where that is not finite.
inline F32 inverse_of(F32 x) {
  const F32 found = 1.f / x;
  return select(abs(found) < INFINITY, found, F32{});
}

class Strip {
 public:
  Strip(const DescentTask& task, int64_t first, int64_t last)
      : task_(task), first_(first), last_(last), groups_(task.columns / task.group_size), gradient_(task.columns),
        levels_(task.columns), steps_(groups_), offsets_(task.offsets ? groups_ : 0) {
    load(task.levels, levels_);
    load(task.steps, steps_);
    if (task.offsets) load(task.offsets, offsets_);
  }

  void descend() {
    begin();
    for (int64_t pass = 0; pass < task_.passes; pass++) {
      for (int64_t group = 0; group < groups_; group++) refit(group);
      bool moved = false;
      for (int64_t start = 0; start < task_.columns; start += kMostColumns)
        moved |= refine(start, std::min(start + kMostColumns, task_.columns));
      if (!moved) break;
    }
    store(task_.levels, levels_);
    store(task_.steps, steps_);
    if (task_.offsets) store(task_.offsets, offsets_);
  }

 private:
  void load(const float* source, std::vector<Column>& columns) const {
    for (size_t k = 0; k < columns.size(); k++)
      for (int v = 0; v < kVectors; v++) columns[k].part[v] = rows_of(source, static_cast<int64_t>(k), v);
  }
  // kLanes rows of a column; beyond the last row there are zeros.
  F32 rows_of(const float* source, int64_t column, int v) const {
    const int64_t row = first_ + v * kLanes;
    return row < last_ ? load_rows(source + column * task_.rows, row, last_) : F32{};
  }
  void store(float* target, const std::vector<Column>& columns) const {
    for (size_t k = 0; k < columns.size(); k++)
      for (int v = 0; v < kVectors && first_ + v * kLanes < last_; v++)
        store_rows(target + static_cast<int64_t>(k) * task_.rows, first_ + v * kLanes, last_, columns[k].part[v]);
  }

  F32 value(int64_t column, int v) const {
    const int64_t group = column / task_.group_size;
    const F32 offset = task_.offsets ? offsets_[group].part[v] : F32{};
    return steps_[group].part[v] * levels_[column].part[v] + offset;
  }

  // gradient_: hessian times what the values are off by.
  void begin() {
    for (int64_t start = 0; start < task_.columns; start += kMostColumns) {
      const int64_t stop = std::min(start + kMostColumns, task_.columns);
      for (int64_t k = start; k < stop; k++)
        for (int v = 0; v < kVectors; v++) changes_[k - start].part[v] = value(k, v) - rows_of(task_.wanted, k, v);
      follow(start, stop);
    }
  }

  // The gradients of all columns after elements of columns start .. stop - 1 changed by changes_.
  void follow(int64_t start, int64_t stop) {
    constexpr int kAtOnce = kVectors <= 4 ? 2 : 1;   // columns: what registers hold
    int64_t k = 0;
    for (; k + kAtOnce <= task_.columns; k += kAtOnce) follow_some<kAtOnce>(k, start, stop - start);
    for (; k < task_.columns; k++) follow_some<1>(k, start, stop - start);
  }
  template <int N>
  void follow_some(int64_t k, int64_t start, int64_t count) {
    F32 sum[N][kVectors];
    for (int n = 0; n < N; n++)
      for (int v = 0; v < kVectors; v++) sum[n][v] = gradient_[k + n].part[v];
    for (int64_t i = 0; i < count; i++)
      for (int n = 0; n < N; n++) {
        const F32 coupling = splat(task_.hessian[(k + n) * task_.columns + start + i]);
        for (int v = 0; v < kVectors; v++) sum[n][v] = fused(coupling, changes_[i].part[v], sum[n][v]);
      }
    for (int n = 0; n < N; n++)
      for (int v = 0; v < kVectors; v++) gradient_[k + n].part[v] = sum[n][v];
  }

  // What the loss of kLanes rows does when the step and the offset of a group move: it is quadratic in both.
  struct Bowl {
    F32 step, offset, slope, curve, offset_slope, cross;
    float offset_curve;

    F32 gain(F32 new_step, F32 new_offset) const {
      const F32 moved = new_step - step, shifted = new_offset - offset;
      return moved * (2.f * slope + moved * curve) +
             shifted * (2.f * (offset_slope + moved * cross) + shifted * offset_curve);
    }
  };

  void refit(int64_t group) {
    bool moved = false;
    for (int v = 0; v < kVectors && first_ + v * kLanes < last_; v++) moved |= refit_rows(group, v);
    if (moved) follow(group * task_.group_size, (group + 1) * task_.group_size);
  }

  bool refit_rows(int64_t group, int v) {
    const Bowl bowl = bowl_of(group, v);
    F32 best_step = bowl.step, best_offset = bowl.offset, best_gain = {};
    const auto attempt = [&](F32 step, F32 offset) {
      const F32 gain = bowl.gain(step, offset);
      const I32 better = gain < best_gain;
      best_gain = select(better, gain, best_gain);
      best_step = select(better, step, best_step);
      best_offset = select(better, offset, best_offset);
    };
    const F32 curve = max(bowl.curve, splat(kLeastCurve));
    attempt(stored_step(group, v, bowl.step - bowl.slope / curve), bowl.offset);
    if (task_.offsets) {
      attempt(bowl.step, stored_offset(group, v, bowl.offset - bowl.offset_slope / bowl.offset_curve));
      const F32 least = 1e-6f * curve * bowl.offset_curve;
      const F32 determinant = max(curve * bowl.offset_curve - bowl.cross * bowl.cross, least);
      const F32 ideal = bowl.step - (bowl.slope * bowl.offset_curve - bowl.offset_slope * bowl.cross) / determinant;
      const F32 step = stored_step(group, v, ideal);
      const F32 rest = bowl.offset_slope + (step - bowl.step) * bowl.cross;   // the best offset for the step as it is stored
      attempt(step, stored_offset(group, v, bowl.offset - rest / bowl.offset_curve));
    }
    for (int64_t e = 0; e < task_.group_size; e++) {
      const F32 level = levels_[group * task_.group_size + e].part[v];
      changes_[e].part[v] = (best_step - bowl.step) * level + (best_offset - bowl.offset);
    }
    steps_[group].part[v] = best_step;
    if (task_.offsets) offsets_[group].part[v] = best_offset;
    return any(best_gain < 0.f);
  }

  Bowl bowl_of(int64_t group, int v) const {
    const int64_t start = group * task_.group_size;
    Bowl bowl{steps_[group].part[v], task_.offsets ? offsets_[group].part[v] : F32{}, F32{}, F32{}, F32{}, F32{}, 0.f};
    double total = 0;
    for (int64_t e = 0; e < task_.group_size; e++) {
      const float* couplings = task_.hessian + (start + e) * task_.columns + start;
      const F32 level = levels_[start + e].part[v], gradient = gradient_[start + e].part[v];
      F32 along = {};
      for (int64_t k = 0; k < task_.group_size; k++) {
        along = fused(splat(couplings[k]), levels_[start + k].part[v], along);
        total += couplings[k];
      }
      bowl.slope += level * gradient;
      bowl.curve += level * along;
      bowl.offset_slope += gradient;
      bowl.cross += along;
    }
    bowl.offset_curve = std::max(static_cast<float>(total), kLeastCurve);
    return bowl;
  }

  // What the file can hold nearest to a step or an offset; infinite, and so never better, where float16 ends.
  F32 stored_step(int64_t group, int v, F32 wanted) const {
    return task_.units ? multiple(task_.units, group, v, wanted) : from_half(to_half(wanted));
  }
  F32 stored_offset(int64_t group, int v, F32 wanted) const {
    return task_.units ? -multiple(task_.offset_units, group, v, -wanted) : from_half(to_half(wanted));
  }
  F32 multiple(const float* units, int64_t group, int v, F32 wanted) const {
    const F32 unit = rows_of(units, group / task_.groups_per_unit, v);
    return unit * rounded(max(min(wanted * inverse_of(unit), splat(task_.greatest_code)), splat(task_.least_code)),
                          task_.least_code, task_.greatest_code);
  }

  // Levels of columns start .. stop - 1 in turn, each to where its gradient is nearest to zero. True if any moved.
  bool refine(int64_t start, int64_t stop) {
    bool moved = false;
    for (int v = 0; v < kVectors; v++) {
      if (first_ + v * kLanes >= last_) {
        for (int64_t k = start; k < stop; k++) changes_[k - start].part[v] = F32{};
      } else {
        moved |= refine_rows(start, stop, v);
      }
    }
    if (moved) follow(start, stop);
    return moved;
  }

  bool refine_rows(int64_t start, int64_t stop, int v) {
    F32 gradient[kMostColumns];
    I32 moved = {};
    for (int64_t k = start; k < stop; k++) gradient[k - start] = gradient_[k].part[v];
    for (int64_t k = start; k < stop; k++) {
      const int64_t group = k / task_.group_size;
      const F32 step = steps_[group].part[v], offset = task_.offsets ? offsets_[group].part[v] : F32{};
      const F32 old = value(k, v);
      const F32 ideal = (old - gradient[k - start] * task_.pivots[k] - offset) * inverse_of(step);
      levels_[k].part[v] = nearest_level(task_, ideal);
      const F32 change = value(k, v) - old;
      changes_[k - start].part[v] = change;
      if (!any(change != 0)) continue;
      moved |= change != 0;
      const float* couplings = task_.hessian + k * task_.columns;
      for (int64_t j = k + 1; j < stop; j++) gradient[j - start] = fused(splat(couplings[j]), change, gradient[j - start]);
    }
    return any(moved);
  }

  const DescentTask& task_;
  const int64_t first_, last_, groups_;
  std::vector<Column> gradient_, levels_, steps_, offsets_;
  Column changes_[kMostColumns] = {};
};

inline void descend(const DescentTask& task, int64_t first, int64_t last) { Strip(task, first, last).descend(); }

extern const RunDescent kDescent;
const RunDescent kDescent = descend;

}  // namespace llmctl::LLMCTL_ENCODE
