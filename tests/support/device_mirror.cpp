#include "tests/support/device_mirror.h"

#include <algorithm>
#include <stdexcept>

namespace sparse_mla::support {
namespace {

constexpr std::size_t kAlignment = 256, kGuard = 256;

}  // namespace

void DeviceMirror::note(const void* data, std::size_t bytes, bool written) {
  const auto begin = reinterpret_cast<std::uintptr_t>(data);
  pieces_.push_back({begin, begin + bytes, written, nullptr});
}

void DeviceMirror::upload() {
  std::sort(pieces_.begin(), pieces_.end(),
            [](const Piece& a, const Piece& b) { return a.begin < b.begin; });
  std::vector<Piece> joined;
  for (const Piece& piece : pieces_) {
    if (joined.empty() || piece.begin >= joined.back().end) {
      joined.push_back(piece);
      continue;
    }
    joined.back().end = std::max(joined.back().end, piece.end);
    joined.back().written = joined.back().written || piece.written;
  }
  pieces_ = std::move(joined);

  const auto size = [](const Piece& piece) { return piece.end - piece.begin; };
  if (under_sanitizer()) {
    for (Piece& piece : pieces_) {
      const std::size_t skew = piece.begin % kAlignment;
      memory_.emplace_back(skew + size(piece));
      piece.device = memory_.back().data() + skew;
      copy_to_device(piece.device, reinterpret_cast<const void*>(piece.begin), size(piece));
    }
    return;
  }
  std::size_t bytes = 0;
  for (const Piece& piece : pieces_) bytes += 2 * kAlignment + 2 * kGuard + size(piece);
  memory_.emplace_back(bytes);
  std::byte* next = memory_.back().data();
  for (Piece& piece : pieces_) {
    const auto address = reinterpret_cast<std::uintptr_t>(next) + kGuard;
    const std::size_t skew = (piece.begin - address) % kAlignment;
    piece.device = next + kGuard + skew;
    copy_to_device(piece.device, reinterpret_cast<const void*>(piece.begin), size(piece));
    next = piece.device + size(piece) + kGuard;
  }
}

std::byte* DeviceMirror::find(const void* host) const {
  const auto address = reinterpret_cast<std::uintptr_t>(host);
  auto piece =
      std::upper_bound(pieces_.begin(), pieces_.end(), address,
                       [](std::uintptr_t value, const Piece& p) { return value < p.begin; });
  if (piece == pieces_.begin() || address >= std::prev(piece)->end)
    throw std::logic_error("device mirror: got a pointer that was not noted");
  piece = std::prev(piece);
  return piece->device + (address - piece->begin);
}

void DeviceMirror::refresh() {
  for (const Piece& piece : pieces_)
    copy_to_device(piece.device, reinterpret_cast<const void*>(piece.begin),
                   piece.end - piece.begin);
}

void DeviceMirror::download() {
  for (const Piece& piece : pieces_)
    if (piece.written)
      copy_to_host(reinterpret_cast<void*>(piece.begin), piece.device, piece.end - piece.begin);
  if (under_sanitizer() || pieces_.empty()) return;
  std::vector<std::byte> guard(kGuard);
  for (const Piece& piece : pieces_)
    for (const std::byte* place :
         {piece.device - kGuard, piece.device + (piece.end - piece.begin)}) {
      copy_to_host(guard.data(), place, kGuard);
      if (std::any_of(guard.begin(), guard.end(), [](std::byte b) { return b != std::byte{0xFF}; }))
        throw std::runtime_error("something was written beside a buffer of " +
                                 std::to_string(piece.end - piece.begin) + " bytes");
    }
}

}  // namespace sparse_mla::support
