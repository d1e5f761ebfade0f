// Any text is a model or a std::invalid_argument of one line.
#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

#include "tests/fuzz/expect.h"
#include "tools/model_config.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace sparse_mla::command;
  using sparse_mla::fuzz::expect;
  try {
    const ModelConfig config =
        parse_model_config(std::string_view(reinterpret_cast<const char*>(data), size), "config");
    expect(config.num_attention_heads >= 1 && config.index_topk >= 1, "sizes are at least 1");
    expect(config.qk_rope_head_dim % 2 == 0, "rotary turns pairs");
    expect(std::isfinite(config.softmax_scale) && config.softmax_scale > 0, "a usable scale");
  } catch (const std::invalid_argument& error) {
    const std::string_view what = error.what();
    expect(what.starts_with("config: "), "the error names the file");
    expect(what.find('\n') == std::string_view::npos, "the error is one line");
  }
  return 0;
}
