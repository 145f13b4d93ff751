#pragma once

// Rows of tensors in loops that calculate in C, float or double. A row in half precision is converted through a short
// buffer, `stage`: compilers vectorize loops that only convert and loops that only calculate. Which rows are
// halves is known at run time, so that a loop is compiled once for each C.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "core/aten.h"
#include "core/cpu/half.h"

namespace liger::core {

enum class Storage : uint8_t { compute, float16, bfloat16 };

inline Storage storage_of(at::ScalarType dtype) {
  return dtype == at::kHalf ? Storage::float16 : dtype == at::kBFloat16 ? Storage::bfloat16 : Storage::compute;
}

/// Of a tensor that loops in C read or write.
template <class C>
Storage storage_of(const at::Tensor& t) {
  const Storage storage = storage_of(t.scalar_type());
  TORCH_INTERNAL_ASSERT(
      storage == Storage::compute ? t.scalar_type() == c10::CppTypeToScalarType<C>::value : (std::is_same_v<C, float>),
      t.scalar_type());
  return storage;
}

/// Where a row is. Pointer is const void* for rows that are read, void* for rows that are written. Null stays null,
/// whatever is added.
template <class C, class Pointer>
struct RowPointer {
  Pointer data = nullptr;
  Storage storage = Storage::compute;

  explicit operator bool() const { return data; }
  int64_t bytes_of(int64_t numbers) const { return numbers * int64_t(storage == Storage::compute ? sizeof(C) : 2); }
  RowPointer operator+(int64_t numbers) const {
    using Byte = std::conditional_t<std::is_same_v<Pointer, void*>, char, const char>;
    return data ? RowPointer{static_cast<Byte*>(data) + bytes_of(numbers), storage} : *this;
  }
  operator RowPointer<C, const void*>() const { return {data, storage}; }
};

template <class C>
using Input = RowPointer<C, const void*>;
template <class C>
using Output = RowPointer<C, void*>;

template <class C>
Input<C> input(const at::Tensor& t) {
  return t.defined() ? Input<C>{t.const_data_ptr(), storage_of<C>(t)} : Input<C>{};
}
template <class C>
Output<C> output(const at::Tensor& t) {
  return t.defined() ? Output<C>{t.data_ptr(), storage_of<C>(t)} : Output<C>{};
}

/// Numbers that are converted at once.
constexpr int64_t kStage = 512;

/// n numbers of the row: the row itself, or the stage.
template <class C>
const C* widen_all(Input<C> x, C* stage, int64_t n) {
  if constexpr (std::is_same_v<C, float>) {
    if (x.storage == Storage::float16) {
      widen_half(static_cast<const c10::Half*>(x.data), stage, n);
      return stage;
    }
    if (x.storage == Storage::bfloat16) {
      const auto* from = static_cast<const c10::BFloat16*>(x.data);
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) stage[i] = widen(from[i]);
      return stage;
    }
  }
  return static_cast<const C*>(x.data);
}

/// Where a loop writes its results: in place, or in the stage that narrow_all() converts.
template <class C>
C* target(Output<C> out, C* stage) {
  return out.storage == Storage::compute ? static_cast<C*>(out.data) : stage;
}

/// Converts what target() put in the stage, if anything.
template <class C>
void narrow_all(Output<C> out, const C* stage, int64_t n) {
  if constexpr (std::is_same_v<C, float>) {
    if (out.storage == Storage::float16) return narrow_half(static_cast<c10::Half*>(out.data), stage, n);
    if (out.storage == Storage::bfloat16) {
      auto* to = static_cast<c10::BFloat16*>(out.data);
      // Assign the bits, because compilers do not vectorize copies of the struct.
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) to[i].x = narrow<c10::BFloat16>(stage[i]).x;
    }
  }
}

/// Writes numbers that are not in the stage of target().
template <class C>
void store_all(Output<C> out, const C* from, int64_t n) {
  if (out.storage == Storage::compute) {
    std::copy_n(from, n, static_cast<C*>(out.data));
  } else {
    narrow_all(out, from, n);
  }
}

/// Rounds numbers as a tensor of this storage would.
template <class C>
void round_all(Storage storage, C* x, int64_t n) {
  if constexpr (std::is_same_v<C, float>) {
    if (storage == Storage::float16) {
      c10::Half rounded[kStage];
      for (int64_t first = 0; first < n; first += kStage) {
        const int64_t count = std::min(kStage, n - first);
        narrow_half(rounded, x + first, count);
        widen_half(rounded, x + first, count);
      }
    } else if (storage == Storage::bfloat16) {
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) x[i] = round_to<c10::BFloat16>(x[i]);
    }
  }
}

/// The first number of a row.
template <class C>
C first_number(Input<C> x) {
  C stage;
  return *widen_all(x, &stage, 1);
}

template <class C>
void write_zeros(Output<C> out, int64_t n) {
  std::memset(out.data, 0, size_t(out.bytes_of(n)));
}

/// A stage for widen_all of n numbers; empty if no conversion is needed.
template <class C>
std::vector<C> make_stage(Storage storage, int64_t n) {
  return std::vector<C>(storage == Storage::compute ? 0 : n);
}

}  // namespace liger::core
