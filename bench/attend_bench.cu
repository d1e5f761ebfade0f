// Operation `attend` on the cases of attention alone (no gather, no up-projection): head widths
// 192 / 128 (`glm5`: 256 / 256), keys and values in one [rows, heads, P+V] tensor as the
// up-projection leaves them. Names: mode/queries x keys x heads.
//
//   dense, causal
//   full_mask      masked, every bit set
//   dsa_mask       masked, tiles of 64 queries × 128 keys, alternate ones empty (a checkerboard),
//                  half of the bits of the others set at random; dsa_mask_128: 128 queries per tile
//   varlen         dense: one request of 513 × 60,000 beside 31 of 513 × 16
//
// TFLOP/s counts 2 · queries · keys · heads · (P+R + V), of a causal mask half of it, of a DSA-like
// mask the tiles that are not empty.
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "sparse_mla/attention.h"
#include "sparse_mla/masks.h"

#include "bench/support/gpu.cuh"
#include "bench/support/prepared.cuh"

namespace sparse_mla::bench {
namespace {

enum class Data { dense, causal, full_mask, dsa_mask };

struct Shape {
  std::string name;
  Data data;
  int heads;
  struct Member {
    std::int32_t queries, keys;
  };
  std::vector<Member> members;
  MaskTile tile = {};
  int nope = 128, rope = 64, value = 128;
};

bool masked(Data data) { return data == Data::full_mask || data == Data::dsa_mask; }
AttendMode mode_of(Data data) {
  if (masked(data)) return AttendMode::masked;
  return data == Data::causal ? AttendMode::causal : AttendMode::dense;
}

/// Word i of one member's mask.
struct MakeMaskWord {
  Data data;
  MaskTile tile;
  MaskMember member;
  __device__ std::uint32_t operator()(std::int64_t i) const {
    const std::int64_t row = i / member.row_words, key = i % member.row_words * 32;
    if (key >= member.num_keys) return 0;
    const std::int64_t left = member.num_keys - key;
    const std::uint32_t tail = left >= 32 ? ~0u : (1u << left) - 1;
    if (data == Data::full_mask) return tail;
    if ((row / tile.queries + key / tile.keys) % 2 != 0) return 0;
    return tail & random_bits(1, 9, static_cast<std::uint64_t>(i));
  }
};

/// A case's tensors. One member per mask.
class AttendCase {
 public:
  explicit AttendCase(const Shape& shape) {
    const std::int64_t heads = shape.heads, qk = shape.nope + shape.rope;
    std::vector<ChunkMember> members;
    std::int32_t tokens = 0, rows = 0;
    for (const Shape::Member& m : shape.members) {
      ChunkMember member;
      member.request = static_cast<std::int32_t>(members.size());
      member.query_start = member.packed_token = tokens;
      member.query_len = m.queries;
      member.context_len = shape.data == Data::causal ? 0 : m.keys;
      member.num_keys = m.keys;
      member.key_row = rows;
      members.push_back(member);
      tokens += m.queries;
      rows += m.keys;
      flops_ += 2.0 * m.queries * m.keys * static_cast<double>(heads * (qk + shape.value));
    }
    if (shape.data == Data::causal) flops_ /= 2;

    members_ = DeviceBuffer<ChunkMember>(members);
    q_ = DeviceBuffer<bfloat16>(tokens * heads * qk);
    kv_ = DeviceBuffer<bfloat16>(rows * heads * (shape.nope + shape.value));
    k_pe_ = DeviceBuffer<bfloat16>(std::int64_t{rows} * shape.rope);
    out_ = DeviceBuffer<float>(tokens * heads * shape.value);
    lse_ = DeviceBuffer<float>(tokens * heads);
    fill_normal(q_, 1, 0);
    fill_normal(kv_, 1, 1);
    fill_normal(k_pe_, 1, 2);

    const std::int64_t kv = shape.nope + shape.value;
    call_.q = contiguous<const bfloat16>(q_.data(), tokens, heads, qk);
    call_.k_nope =
        strided<const bfloat16, 3>(kv_.data(), {rows, heads, shape.nope}, {heads * kv, kv, 1});
    call_.v = strided<const bfloat16, 3>(kv_.data() + shape.nope, {rows, heads, shape.value},
                                         {heads * kv, kv, 1});
    call_.k_pe = contiguous<const bfloat16>(k_pe_.data(), rows, shape.rope);
    call_.members = members_.span();
    call_.softmax_scale = 1 / std::sqrt(static_cast<float>(qk));
    call_.running.out = contiguous(out_.data(), tokens, heads, shape.value);
    call_.running.lse = contiguous(lse_.data(), heads, tokens);
    const AttendProblem problem{shape.heads,         shape.nope, shape.rope, shape.value,
                                mode_of(shape.data), tokens,     rows};
    if (masked(shape.data)) make_masks(shape, members);
    prepared_.emplace(attend_operation(), problem);
  }

  void run(Stream stream) const { prepared_->run(call_, stream); }
  double flops() const { return flops_; }

 private:
  void make_masks(const Shape& shape, const std::vector<ChunkMember>& members) {
    const MaskLayout layout = plan_masks(members, MaskScope::per_chunk, shape.tile);
    std::vector<std::int32_t> counts, ids(static_cast<std::size_t>(layout.num_tile_ids), -1);
    double tiles = 0, visited = 0;
    for (std::size_t m = 0; m < members.size(); ++m)
      for (std::int64_t q = 0; q * shape.tile.queries < members[m].query_len; ++q) {
        const MaskMember& mask = layout.members[m];
        std::int32_t count = 0;
        for (std::int32_t t = 0; t < mask.max_tiles; ++t)
          if (shape.data == Data::full_mask || (q + t) % 2 == 0)
            ids[static_cast<std::size_t>(mask.tile_offset + q * mask.max_tiles + count++)] = t;
        counts.push_back(count);
        tiles += mask.max_tiles;
        visited += count;
      }
    flops_ *= visited / tiles;
    words_ = DeviceBuffer<std::uint32_t>(layout.num_words);
    fill(words_, MakeMaskWord{shape.data, shape.tile, layout.members.front()});
    mask_members_ = DeviceBuffer<MaskMember>(layout.members);
    tile_counts_ = DeviceBuffer<std::int32_t>(counts);
    tile_ids_ = DeviceBuffer<std::int32_t>(ids);
    call_.mask = {shape.tile, mask_members_.span(), words_.data(), tile_counts_.data(),
                  tile_ids_.data()};
  }

  AttendCall call_;
  double flops_ = 0;
  std::optional<Prepared<AttendProblem, AttendCall>> prepared_;
  DeviceBuffer<ChunkMember> members_;
  DeviceBuffer<bfloat16> q_, kv_, k_pe_;
  DeviceBuffer<float> out_, lse_;
  DeviceBuffer<MaskMember> mask_members_;
  DeviceBuffer<std::uint32_t> words_;
  DeviceBuffer<std::int32_t> tile_counts_, tile_ids_;
};

std::vector<Shape> shapes() {
  struct Size {
    std::int32_t queries, keys;
    int heads;
  };
  std::vector<Shape> list;
  const auto add = [&](const char* mode, Data data, const Size& size, MaskTile tile = {}) {
    list.push_back({std::string(mode) + "/" + std::to_string(size.queries) + "x" +
                        std::to_string(size.keys) + "x" + std::to_string(size.heads),
                    data,
                    size.heads,
                    {{size.queries, size.keys}},
                    tile});
  };
  for (const Size& size : {Size{4096, 4096, 128}, Size{4096, 8192, 128}, Size{2048, 16384, 128},
                           Size{4096, 32768, 16}, Size{513, 60000, 16}}) {
    add("dense", Data::dense, size);
    add("full_mask", Data::full_mask, size);
    add("dsa_mask", Data::dsa_mask, size);
    add("dsa_mask_128", Data::dsa_mask, size, {128, 128});
  }
  add("causal", Data::causal, {4096, 4096, 128});
  Shape varlen{"varlen", Data::dense, 16, {{513, 60000}}};
  varlen.members.insert(varlen.members.end(), 31, {513, 16});
  list.push_back(varlen);
  Shape glm5{"glm5/dense/4096x4096x64", Data::dense, 64, {{4096, 4096}}};
  glm5.nope = 192;
  glm5.value = 256;
  list.push_back(glm5);
  glm5.name = "glm5/full_mask/4096x4096x64";
  glm5.data = Data::full_mask;
  list.push_back(glm5);
  return list;
}

[[maybe_unused]] const bool registered = [] {
  for (const Shape& shape : shapes())
    register_gpu_bench("attend/" + shape.name, [shape](benchmark::State& state) {
      const AttendCase attend(shape);
      const GpuTimes times = time_on_gpu(state, [&](int, Stream stream) { attend.run(stream); });
      count_flops(state, times, attend.flops());
    });
  return true;
}();

}  // namespace
}  // namespace sparse_mla::bench
