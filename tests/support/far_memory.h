/// Device memory in which the parts of a tensor lie side by side or past 2^31 elements from each
/// other, and the comparison of what an entry makes of the two.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "sparse_mla/operation.h"
#include "sparse_mla/random.h"
#include "sparse_mla/types.h"

#include "tests/support/gpu.h"
#include "tests/support/run_entry.h"

namespace sparse_mla::support {

template <class T>
std::vector<T> normals(std::int64_t count, std::uint64_t stream) {
  std::vector<T> values(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = T(random_normal(7, stream, i));
  return values;
}

template <class T>
void put(const DeviceMemory& memory, std::int64_t element, const std::vector<T>& values) {
  copy_to_device(memory.data() + element * static_cast<std::int64_t>(sizeof(T)), values.data(),
                 values.size() * sizeof(T));
}

template <class T>
std::vector<T> take(const DeviceMemory& memory, std::int64_t element, std::int64_t count) {
  std::vector<T> values(static_cast<std::size_t>(count));
  copy_to_host(values.data(), memory.data() + element * static_cast<std::int64_t>(sizeof(T)),
               values.size() * sizeof(T));
  return values;
}

template <class T>
DeviceMemory on_device(const std::vector<T>& values) {
  DeviceMemory memory(values.size() * sizeof(T));
  put(memory, 0, values);
  return memory;
}

inline constexpr std::int64_t kFar = (std::int64_t{1} << 31) + 4096;  // elements

enum class Place {
  near,  ///< blocks side by side
  far,   ///< the last block begins past 2^31 elements
};

/// Equal blocks of elements on the device, poison before, between and behind them. Each starts at a
/// multiple of 64 elements: near and far ones are aligned alike.
template <class T>
class Blocks {
 public:
  /// `count` blocks of poison.
  Blocks(Place place, std::int64_t count, std::int64_t size)
      : count_(count),
        size_(size),
        stride_(stride_of(place, count, size)),
        memory_((2 * kGuard + (count - 1) * stride_ + size) * sizeof(T)) {}
  /// `values`, in `count` blocks.
  Blocks(Place place, std::int64_t count, const std::vector<T>& values)
      : Blocks(place, count, static_cast<std::int64_t>(values.size()) / count) {
    for (std::int64_t i = 0; i < count_; ++i)
      put(memory_, kGuard + i * stride_,
          std::vector<T>(values.begin() + i * size_, values.begin() + (i + 1) * size_));
  }

  T* data() const { return reinterpret_cast<T*>(memory_.data()) + kGuard; }
  std::int64_t stride() const { return stride_; }
  /// [blocks, size]
  View2<T> rows() const { return strided<T, 2>(data(), {count_, size_}, {stride_, 1}); }
  /// [blocks, inner, size / inner]
  View3<T> rows(std::int64_t inner) const {
    return strided<T, 3>(data(), {count_, inner, size_ / inner}, {stride_, size_ / inner, 1});
  }
  /// [outer, blocks, size / outer]
  View3<T> columns(std::int64_t outer) const {
    return strided<T, 3>(data(), {outer, count_, size_ / outer}, {size_ / outer, stride_, 1});
  }

  /// All blocks' elements. Poison around each has to be there still.
  std::vector<T> results() const {
    std::vector<T> all;
    for (std::int64_t i = 0; i < count_; ++i) {
      const auto block = take<T>(memory_, kGuard + i * stride_, size_);
      all.insert(all.end(), block.begin(), block.end());
      if (under_sanitizer()) continue;  // memory was not filled
      const std::int64_t gap = std::min(kGuard, stride_ - size_);
      expect_poison(i, -1, kGuard + i * stride_ - (i == 0 ? kGuard : gap), i == 0 ? kGuard : gap);
      expect_poison(i, 1, kGuard + i * stride_ + size_, i == count_ - 1 ? kGuard : gap);
    }
    return all;
  }

 private:
  static constexpr std::int64_t kGuard = 1024;  // elements

  /// Up to three blocks: a stride that 31 bits do not hold, and a third one past 2^32. More: a
  /// stride that 31 bits do hold, but not its product with the last one's number.
  static std::int64_t stride_of(Place place, std::int64_t count, std::int64_t size) {
    const auto whole = [](std::int64_t elements) { return (elements + 63) / 64 * 64; };
    if (place == Place::near) return whole(size);
    return std::max(whole(size + kGuard), count <= 3 ? kFar : whole(kFar / (count - 1)));
  }

  void expect_poison(std::int64_t block, int side, std::int64_t element, std::int64_t count) const {
    EXPECT_TRUE(same_bits(take<T>(memory_, element, count), poisoned<T>(count)))
        << "written " << (side < 0 ? "before" : "behind") << " block " << block << " of " << count_;
  }

  std::int64_t count_, size_, stride_;
  DeviceMemory memory_;
};

/// Which axis of [rows, heads, width] has the long stride.
enum class Axis { rows, heads };

/// [rows, heads, width]
template <class T>
class Tensor {
 public:
  Tensor(Place place, Axis axis, const std::array<std::int64_t, 3>& shape)
      : axis_(axis),
        rows_(shape[0]),
        heads_(shape[1]),
        blocks_(place, axis == Axis::rows ? rows_ : heads_,
                shape[2] * (axis == Axis::rows ? heads_ : rows_)) {}
  /// Filled with random numbers.
  Tensor(Place place, Axis axis, const std::array<std::int64_t, 3>& shape, std::uint64_t stream)
      : axis_(axis),
        rows_(shape[0]),
        heads_(shape[1]),
        blocks_(place, axis == Axis::rows ? rows_ : heads_,
                normals<T>(shape[0] * shape[1] * shape[2], stream)) {}

  View3<T> view() const {
    return axis_ == Axis::rows ? blocks_.rows(heads_) : blocks_.columns(rows_);
  }
  std::vector<T> results() const { return blocks_.results(); }

 private:
  Axis axis_;
  std::int64_t rows_, heads_;
  Blocks<T> blocks_;
};

struct Shape {
  Axis axis;
  std::int64_t rows, heads;
};
inline std::string to_string(const Shape& shape) {
  return std::to_string(shape.rows) + " rows of " + std::to_string(shape.heads) + " heads, " +
         (shape.axis == Axis::rows ? "rows" : "heads") + " far apart";
}
inline constexpr Shape kShapes[] = {{Axis::rows, 3, 2}, {Axis::rows, 20, 2}, {Axis::heads, 20, 2}};

template <class T>
const T* const_data(const DeviceMemory& memory) {
  return reinterpret_cast<const T*>(memory.data());
}

using Bytes = std::vector<unsigned char>;

template <class... T>
Bytes bytes_of(const std::vector<T>&... results) {
  Bytes bytes;
  const auto append = [&](const auto& values) {
    const std::size_t begin = bytes.size(), size = values.size() * sizeof values[0];
    bytes.resize(begin + size);
    std::memcpy(bytes.data() + begin, values.data(), size);
  };
  (append(results), ...);
  return bytes;
}

/// Runs `use(entry)` for each CUDA entry that can run `problem`; there has to be one.
template <class Problem, class Call, class Use>
void for_each_cuda_entry(const Operation<Problem, Call>& operation, const Problem& problem,
                         Use&& use) {
  int entries = 0;
  for (const auto& entry : operation.entries()) {
    if (entry.backend != Backend::cuda || !entry.why_not(problem).empty()) continue;
    ++entries;
    SCOPED_TRACE(operation.name() + ':' + entry.name);
    use(entry);
  }
  EXPECT_GT(entries, 0) << operation.name();
}

/// Runs an entry over device memory.
template <class Problem, class Call>
void launch(const Operation<Problem, Call>& operation, const Entry<Problem, Call>& entry,
            const Problem& problem, const Call& call) {
  const DeviceMemory workspace(entry.workspace_bytes(problem));
  const DeviceStream stream;
  operation.run(entry, problem, call, workspace.span(), stream.get());
  stream.synchronize();
}

/// The entry whose bits a far call of `entry` gives: cuBLASLt takes no strides beyond 2^31, and
/// cuda_rows' kernel serves such calls.
template <class Problem, class Call>
const Entry<Problem, Call>& serving_far(const Operation<Problem, Call>& operation,
                                        const Entry<Problem, Call>& entry) {
  for (const auto& other : operation.entries())
    if (entry.name == std::string("cuda_cublaslt") && other.name == std::string("cuda_rows"))
      return other;
  return entry;
}

/// `run(place, launch)` makes a call over memory of that kind, launches it and returns the results:
/// the same bits for both, and not the poison that was there.
template <class Problem, class Call, class Run>
void expect_same_near_and_far(const Operation<Problem, Call>& operation, const Problem& problem,
                              Run&& run) {
  for_each_cuda_entry(operation, problem, [&](const auto& entry) {
    const Bytes near = run(Place::near, [&](const Call& call) {
      launch(operation, serving_far(operation, entry), problem, call);
    });
    const Bytes far =
        run(Place::far, [&](const Call& call) { launch(operation, entry, problem, call); });
    ASSERT_EQ(near.size(), far.size());
    const auto differs = std::mismatch(near.begin(), near.end(), far.begin()).first;
    EXPECT_TRUE(differs == near.end())
        << "from byte " << differs - near.begin() << " of " << near.size();
    const auto poison = std::count(near.begin(), near.end(), 0xFF);
    EXPECT_LT(poison, static_cast<std::ptrdiff_t>(near.size() * 7 / 8)) << "nothing was written";
  });
}

}  // namespace sparse_mla::support
