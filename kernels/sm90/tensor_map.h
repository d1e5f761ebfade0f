/// Tensor maps: how the copy engine of compute capability 9.0 is told of a view.
#pragma once

#include <cuda.h>

#include "sparse_mla/types.h"

namespace sparse_mla::sm90 {

/// Columns of a box: 128 bytes of a row, which the copy swizzles as wgmma reads them (16-byte chunk
/// c of row r goes to c ^ (r % 8)).
constexpr int box_columns() { return 64; }

/// False where the driver cannot make tensor maps.
bool has_tensor_maps();

/// A map of `view` [rows, heads, columns], whose boxes are `box_rows` rows × `box_heads` heads × 64
/// columns; coordinates (column, head, row). False where the copy engine cannot address the view: a
/// base or a stride that is no multiple of 16 bytes, a stride that is not positive, an empty view.
bool make_map(const View3<const bfloat16>& view, int box_rows, CUtensorMap& map, int box_heads = 1);
/// The same of [rows, columns]; coordinates (column, row).
bool make_map(const View2<const bfloat16>& view, int box_rows, CUtensorMap& map);

}  // namespace sparse_mla::sm90
