#include "tests/support/dump.h"

#include <cstddef>
#include <fstream>
#include <stdexcept>
#include <vector>

#include <nlohmann/json.hpp>

#include "tests/support/npy.h"

namespace sparse_mla::support {

void write_dump(const std::filesystem::path& dir, const LayerData& data,
                std::span<const CheckedToken> tokens, const std::string& prefill_path) {
  std::filesystem::create_directories(dir);
  const ModelDims& d = data.problem().dims;
  const std::int64_t block_size = data.problem().block_size;
  const LatentRowFormat format = data.latent_format();
  const auto count = static_cast<std::int64_t>(tokens.size());

  nlohmann::json meta{{"num_heads", d.num_heads},
                      {"kv_lora_rank", d.kv_lora_rank},
                      {"qk_rope_head_dim", d.qk_rope_head_dim},
                      {"qk_nope_head_dim", d.qk_nope_head_dim},
                      {"v_head_dim", d.v_head_dim},
                      {"index_topk", d.index_topk},
                      {"softmax_scale", d.softmax_scale},
                      {"block_size", block_size},
                      {"cache_format", name_of(format.format)},
                      {"cache_scale", format.scale}};
  for (const char* list : {"tokens", "requests", "positions", "paths", "all_visible"}) {
    meta[list] = nlohmann::json::array();
  }
  for (const CheckedToken& token : tokens) {
    meta["tokens"].push_back(token.token);
    meta["requests"].push_back(token.request);
    meta["positions"].push_back(token.position);
    meta["paths"].push_back(token.kind == RequestKind::decode ? "decode" : prefill_path);
    meta["all_visible"].push_back(token.all_visible);
  }
  std::ofstream file(dir / "meta.json");
  file << meta.dump(1) << '\n';
  file.close();
  if (!file) throw std::runtime_error((dir / "meta.json").string() + ": cannot be written");

  const auto bytes_of_bf16 = [](std::int64_t elements) {
    return static_cast<std::size_t>(2 * elements);
  };
  NpyWriter q(dir / "q.npy", "<u2", {count, d.num_heads, d.qk_head_dim()});
  NpyWriter out(dir / "out.npy", "<u2", {count, d.num_heads, d.v_head_dim});
  NpyWriter lse(dir / "lse.npy", "<f4", {count, d.num_heads});
  NpyWriter picks(dir / "picks.npy", "<i4", {count, d.index_topk});
  for (const CheckedToken& token : tokens) {
    for (int head = 0; head < d.num_heads; ++head) {
      q.append(data.q(token.token, head), bytes_of_bf16(d.qk_head_dim()));
      out.append(data.out(token.token, head), bytes_of_bf16(d.v_head_dim));
      const float value = data.lse(token.token, head);
      lse.append(&value, sizeof(value));
    }
    picks.append(data.picks(token.token).data(), data.picks(token.token).size_bytes());
  }
  q.close();
  out.close();
  lse.close();
  picks.close();

  NpyWriter cache(dir / "latent_cache.npy", "|u1",
                  {data.num_blocks(), block_size, format.row_bytes()});
  for (std::int64_t block = 0; block < data.num_blocks(); ++block) {
    for (std::int64_t row = 0; row < block_size; ++row) {
      cache.append(data.latent_page(block) + row * data.latent_row_stride(),
                   static_cast<std::size_t>(format.row_bytes()));
    }
  }
  cache.close();

  NpyWriter tables(dir / "block_tables.npy", "<i4",
                   {data.problem().num_requests(), data.max_blocks()});
  for (std::int64_t request = 0; request < data.problem().num_requests(); ++request) {
    tables.append(data.block_table(request).data(), data.block_table(request).size_bytes());
  }
  tables.close();

  const Buffer<bfloat16>& projection = data.weights().kv_b_proj;
  NpyWriter weights(dir / "kv_b_proj.npy", "<u2",
                    {d.num_heads, d.qk_nope_head_dim + d.v_head_dim, d.kv_lora_rank});
  weights.append(projection.data(), projection.size_bytes());
  weights.close();
}

}  // namespace sparse_mla::support
