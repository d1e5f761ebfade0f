/// Dumps: .npy files and their check in numpy.
#include "tests/support/dump.h"

#include <bit>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/npy.h"
#include "tests/support/number_formats.h"
#include "tests/support/reference.h"

namespace sparse_mla::support {
namespace {

using testing::ElementsAre;
namespace fs = std::filesystem;

class DumpTest : public testing::Test {
 protected:
  DumpTest() {
    std::string name = (fs::temp_directory_path() / "sparse_mla_dump_XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("no temporary directory");
    dir_ = name;
  }
  ~DumpTest() override { fs::remove_all(dir_); }

  template <class T>
  void round_trip(const std::vector<T>& values, const std::vector<std::int64_t>& shape,
                  const std::string& type) {
    write_npy<T>(dir_ / "array.npy", shape, values);
    const NpyArray array = read_npy(dir_ / "array.npy");
    EXPECT_EQ(array.type, type);
    EXPECT_EQ(array.shape, shape);
    ASSERT_EQ(array.bytes.size(), values.size() * sizeof(T));
    EXPECT_TRUE(values.empty() ||
                std::memcmp(array.bytes.data(), values.data(), array.bytes.size()) == 0);
    EXPECT_EQ((fs::file_size(dir_ / "array.npy") - array.bytes.size()) % 64, 0u);
  }

  fs::path dir_;
};

TEST_F(DumpTest, NpyRoundTrip) {
  round_trip<float>({1, -2.5f, 3}, {3}, "<f4");
  round_trip<double>({1, 2, 3, 4, 5, 1e300}, {2, 3}, "<f8");
  round_trip<std::int32_t>({-1, 1 << 30}, {1, 2, 1}, "<i4");
  round_trip<std::int64_t>({std::int64_t{1} << 40}, {}, "<i8");
  round_trip<std::uint16_t>({0x3F80, 0xFFFF}, {2}, "<u2");
  round_trip<std::uint8_t>({}, {0, 7}, "|u1");
}

TEST_F(DumpTest, NpyFaultsNameTheFile) {
  const std::vector<float> values(3);
  EXPECT_THROW(write_npy<float>(dir_ / "none" / "a.npy", {3}, values), std::runtime_error);
  EXPECT_THROW(write_npy<float>(dir_ / "a.npy", {4}, values), std::runtime_error);
  EXPECT_THROW(read_npy(dir_ / "a.npy"), std::runtime_error);  // too short
  std::ofstream(dir_ / "b.npy") << "no array";
  EXPECT_THROW(read_npy(dir_ / "b.npy"), std::runtime_error);
  // Headers that a hostile file may have: each is refused, none takes memory for what it claims.
  for (const char* shape : {"(3", "(x,)", "(-3,)", "(99999999999999999999,)",
                            "(4611686018427387904,)", "(4294967296,4294967296,)", "(4,)"}) {
    std::string header = std::string("{'descr': '<f4', 'fortran_order': False, 'shape': ") + shape;
    std::ofstream file(dir_ / "c.npy", std::ios::binary);
    file << std::string("\x93NUMPY\x01\x00", 8) << static_cast<char>(header.size()) << '\0'
         << header << std::string(12, '\0');
    file.close();
    EXPECT_THROW(read_npy(dir_ / "c.npy"), std::runtime_error) << shape;
  }
}

/// A layer call that went well: the reference, rounded.
// The Python that has numpy.
std::string python() {
  const char* name = std::getenv("SPARSE_MLA_PYTHON");
  return name == nullptr ? "python3" : "'" + std::string(name) + "'";
}

class DumpOfALayer : public DumpTest {
 protected:
  explicit DumpOfALayer(CacheFormat format = CacheFormat::bf16)
      : data_(problem(format)), tokens_(sample_tokens(problem(format))) {
    data_.write_new_rows();
    for (CheckedToken& token : tokens_) {
      token.all_visible = token.kind == RequestKind::prefill;
    }
    // One token without a key, exact zeros expected.
    for (int i = 0; i < 32; ++i) data_.tensors().picks(0, i) = -1;
    const auto references = reference_attention(data_, tokens_);
    const LayerTensors t = data_.tensors();
    const std::int64_t width = data_.problem().dims.v_head_dim;
    for (std::size_t i = 0; i < tokens_.size(); ++i) {
      for (std::int64_t h = 0; h < 2; ++h) {
        t.lse(h, tokens_[i].token) =
            static_cast<float>(references[i].lse[static_cast<std::size_t>(h)]);
        for (std::int64_t v = 0; v < width; ++v) {
          t.out(tokens_[i].token, h, v) = std::bit_cast<bfloat16>(encode_bf16(
              static_cast<float>(references[i].out[static_cast<std::size_t>(h * width + v)])));
        }
      }
    }
  }
  static LayerProblem problem(CacheFormat format) {
    LayerProblem problem{.query_lens = {1, 3, 4},
                         .context_lens = {50, 70, 0},
                         .block_size = 16,
                         .cache_format = format,
                         .selection = SelectionKind::random,
                         .strided = true};
    problem.dims.num_heads = 2;
    problem.dims.kv_lora_rank = 128;
    problem.dims.v_head_dim = 48;
    problem.dims.index_topk = 32;
    return problem;
  }
  /// The script's exit status on this dump.
  int check() {
    write_dump(dir_ / "dump", data_, tokens_, "masked");
    const std::string script = SPARSE_MLA_TESTS_DIR "/check_dump.py";
    const int status =
        std::system((python() + " '" + script + "' '" + (dir_ / "dump").string() + "'").c_str());
    return WEXITSTATUS(status);
  }

  LayerData data_;
  std::vector<CheckedToken> tokens_;
};

TEST_F(DumpOfALayer, FilesAndShapes) {
  write_dump(dir_, data_, tokens_, "masked");
  EXPECT_THAT(read_npy(dir_ / "q.npy").shape, ElementsAre(8, 2, 192));
  EXPECT_THAT(read_npy(dir_ / "latent_cache.npy").shape,
              ElementsAre(data_.num_blocks(), 16, 2 * 192));
  EXPECT_THAT(read_npy(dir_ / "block_tables.npy").shape, ElementsAre(3, data_.max_blocks()));
  EXPECT_THAT(read_npy(dir_ / "kv_b_proj.npy").shape, ElementsAre(2, 128 + 48, 128));
  EXPECT_THAT(read_npy(dir_ / "picks.npy").shape, ElementsAre(8, 32));
  EXPECT_THAT(read_npy(dir_ / "out.npy").shape, ElementsAre(8, 2, 48));
  EXPECT_THAT(read_npy(dir_ / "lse.npy").shape, ElementsAre(8, 2));
}

TEST_F(DumpOfALayer, NumpyAgreesAndSeesFaults) {
  ASSERT_EQ(std::system((python() + " -c 'import numpy'").c_str()), 0)
      << "./dev setup brings numpy";
  const LayerTensors t = data_.tensors();
  EXPECT_EQ(check(), 0);

  const bfloat16 out = t.out(5, 1, 7);
  t.out(5, 1, 7) = std::bit_cast<bfloat16>(encode_bf16(__bfloat162float(out) + 0.5f));
  EXPECT_EQ(check(), 1);
  t.out(5, 1, 7) = std::bit_cast<bfloat16>(std::uint16_t{0x7FC0});  // NaN
  EXPECT_EQ(check(), 1);
  t.out(5, 1, 7) = out;

  t.lse(0, 2) += 0.1f;
  EXPECT_EQ(check(), 1);
  t.lse(0, 2) -= 0.1f;

  t.lse(0, 0) = 0;  // the token without keys
  EXPECT_EQ(check(), 1);
  t.lse(0, 0) = -std::numeric_limits<float>::infinity();

  const std::int32_t pick = t.picks(1, 4);
  t.picks(1, 4) = t.picks(1, 5);
  EXPECT_EQ(check(), 1);
  t.picks(1, 4) = pick;
  EXPECT_EQ(check(), 0);
}

class DumpOfAFormat : public DumpOfALayer, public testing::WithParamInterface<CacheFormat> {
 protected:
  DumpOfAFormat() : DumpOfALayer(GetParam()) {}
};
INSTANTIATE_TEST_SUITE_P(Quantised, DumpOfAFormat,
                         testing::Values(CacheFormat::fp8_ds_mla, CacheFormat::fp8));

TEST_P(DumpOfAFormat, NumpyReadsTheBytes) {
  write_dump(dir_, data_, tokens_, "masked");
  const NpyArray cache = read_npy(dir_ / "latent_cache.npy");
  EXPECT_THAT(cache.shape,
              ElementsAre(data_.num_blocks(), 16,
                          GetParam() == CacheFormat::fp8 ? 128 + 64 : 128 + 4 + 2 * 64));
  const auto row = static_cast<std::size_t>(data_.block_table(1)[1] * 16 + 3);
  const auto bytes = static_cast<std::size_t>(data_.latent_format().row_bytes());
  EXPECT_EQ(std::memcmp(cache.bytes.data() + row * bytes, data_.latent_row(1, 19), bytes), 0);

  ASSERT_EQ(std::system((python() + " -c 'import numpy'").c_str()), 0)
      << "./dev setup brings numpy";
  EXPECT_EQ(check(), 0);
  // A wrong byte that a checked token reads is seen: the first key's scale or first number.
  const LayerTensors t = data_.tensors();
  const std::int64_t slot = t.block_tables(2, 0) * 16;
  t.latent_cache.row(slot)[GetParam() == CacheFormat::fp8 ? 0 : 128 + 3] ^= std::byte{0x02};
  for (std::int64_t i = 1; GetParam() == CacheFormat::fp8 && i < 128; ++i)
    t.latent_cache.row(slot)[i] ^= std::byte{0x40};
  EXPECT_EQ(check(), 1);
}

}  // namespace
}  // namespace sparse_mla::support
