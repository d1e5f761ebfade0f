#!/usr/bin/env python3
"""Recomputes a `sparse-mla run --dump DIR` from scratch, in fp64, with numpy alone.

    check_dump.py DIR [DIR ...]

A dump holds, for T checked tokens of one batch (bf16 as uint16 bit patterns):

    meta.json          dims, softmax_scale, block_size, cache_format, cache_scale, and per checked
                       token the lists tokens, requests, positions, paths, all_visible
    q.npy              uint16   [T, num_heads, P+R]
    latent_cache.npy   uint8    [num_blocks, block_size, row bytes]
    block_tables.npy   int32    [requests, max_blocks]; entries past a sequence are no pages
    kv_b_proj.npy      uint16   [num_heads, P+V, L]
    picks.npy          int32    [T, index_topk], request-local positions, -1 = none
    out.npy            uint16   [T, num_heads, V]
    lse.npy            float32  [T, num_heads], natural logarithm

all_visible: the token attends every key 0 ... position (dense attention), not its picks.
A token without keys has out 0 and lse -inf, exactly.

A cached row, by cache_format:

    bf16               (L+R) x bf16
    fp8_ds_mla         L x e4m3 | L/128 x float32, the scales of 128 numbers each | R x bf16
    fp8                (L+R) x e4m3, all under cache_scale

Prints one line per dump. The exit status is 1 when an error exceeds the bounds of bf16
arithmetic or the picks of a token are not distinct keys that it may see.
"""
import json
import pathlib
import sys

import numpy as np

REL_ERROR, MAX_REL_ERROR = 5e-3, 1e-2
# Of the logarithm of the sum: a quantised row may have been rounded to bf16 once more.
LSE_ERRORS = {"bf16": 1e-2, "fp8_ds_mla": 2e-2, "fp8": 2e-2}
SMALLEST_NORM = 1e-6


class Fault(Exception):
    pass


def bf16(bits):
    """bf16 bit patterns -> float64."""
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def e4m3(codes):
    """e4m3 bit patterns (sign, 4 exponent bits with bias 7, 3 of mantissa) -> float64."""
    exponent, mantissa = (codes >> 3 & 15).astype(int), (codes & 7).astype(float)
    value = np.where(exponent == 0, np.ldexp(mantissa, -9), np.ldexp(8 + mantissa, exponent - 10))
    value[codes & 127 == 127] = np.nan
    return np.where(codes < 128, value, -value)


def row_bytes(cache_format, lora_rank, rope):
    sizes = {
        "bf16": 2 * (lora_rank + rope),
        "fp8_ds_mla": lora_rank + lora_rank // 128 * 4 + 2 * rope,
        "fp8": lora_rank + rope,
    }
    if cache_format not in sizes:
        raise Fault(f"cache_format: got {cache_format}, expected one of {', '.join(sizes)}")
    return sizes[cache_format]


def decode(rows, cache_format, scale, lora_rank):
    """Cached rows, uint8 [keys, row bytes] -> float64 [keys, L+R]."""
    if cache_format == "bf16":
        return bf16(np.ascontiguousarray(rows).view("<u2"))
    if cache_format == "fp8":
        return e4m3(rows) * scale
    scales_end = lora_rank + lora_rank // 128 * 4
    scales = np.ascontiguousarray(rows[:, lora_rank:scales_end]).view("<f4").astype(np.float64)
    latent = e4m3(rows[:, :lora_rank]) * np.repeat(scales, 128, axis=1)
    rope = bf16(np.ascontiguousarray(rows[:, scales_end:]).view("<u2"))
    return np.concatenate([latent, rope], axis=1)


def load(directory, name, dtype, shape):
    array = np.load(directory / f"{name}.npy")
    if array.dtype != dtype:
        raise Fault(f"{name}.npy: got {array.dtype}, expected {np.dtype(dtype)}")
    if array.ndim != len(shape) or any(s not in (None, n) for s, n in zip(shape, array.shape)):
        raise Fault(f"{name}.npy: got shape {array.shape}, expected {shape}")
    return array


def keys_of(token, position, all_visible, picks):
    if all_visible:
        return np.arange(position + 1)
    keys = picks[picks != -1]
    if np.any((keys < 0) | (keys > position)):
        raise Fault(f"token {token}: a pick outside 0 ... {position}")
    if len(np.unique(keys)) != len(keys):
        raise Fault(f"token {token}: repeated picks")
    return keys


def attend(q, rows, kv_b_proj, lora_rank, nope, scale):
    """q [H, P+R], rows [keys, L+R], kv_b_proj [H, P+V, L] -> out [H, V], lse [H]."""
    if len(rows) == 0:
        return np.zeros((len(q), kv_b_proj.shape[1] - nope)), np.full(len(q), -np.inf)
    latent, rope = rows[:, :lora_rank], rows[:, lora_rank:]
    w_uk, w_uv = kv_b_proj[:, :nope], kv_b_proj[:, nope:]
    # q . (W_UK c) = (q W_UK) . c, and a weighted sum of W_UV c is W_UV times that of c.
    absorbed = np.einsum("hp,hpl->hl", q[:, :nope], w_uk)
    logits = scale * (absorbed @ latent.T + q[:, nope:] @ rope.T)
    peak = logits.max(axis=1, keepdims=True)
    weights = np.exp(logits - peak)
    total = weights.sum(axis=1, keepdims=True)
    out = np.einsum("hvl,hl->hv", w_uv, (weights / total) @ latent)
    return out, (peak + np.log(total))[:, 0]


def check(directory):
    meta = json.loads((directory / "meta.json").read_text())
    cache_format = meta["cache_format"]
    heads, lora_rank, rope, nope, value, topk = (
        meta[k] for k in ("num_heads", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim",
                          "v_head_dim", "index_topk"))
    tokens, block_size = meta["tokens"], meta["block_size"]
    count = len(tokens)
    if count == 0:
        raise Fault("no checked tokens")
    q = load(directory, "q", np.uint16, (count, heads, nope + rope))
    cache = load(directory, "latent_cache", np.uint8,
                 (None, block_size, row_bytes(cache_format, lora_rank, rope)))
    tables = load(directory, "block_tables", np.int32, (None, None))
    kv_b_proj = bf16(load(directory, "kv_b_proj", np.uint16, (heads, nope + value, lora_rank)))
    picks = load(directory, "picks", np.int32, (count, topk))
    out = bf16(load(directory, "out", np.uint16, (count, heads, value)))
    lse = load(directory, "lse", np.float32, (count, heads)).astype(np.float64)

    reference, reference_lse = np.empty_like(out), np.empty_like(lse)
    for i, token in enumerate(tokens):
        position = meta["positions"][i]
        keys = keys_of(token, position, meta["all_visible"][i], picks[i])
        pages = tables[meta["requests"][i], keys // block_size]
        if np.any((pages < 0) | (pages >= len(cache))):
            raise Fault(f"token {token}: a page outside the cache")
        rows = decode(cache[pages, keys % block_size], cache_format, meta["cache_scale"], lora_rank)
        reference[i], reference_lse[i] = attend(bf16(q[i]), rows, kv_b_proj, lora_rank, nope,
                                                meta["softmax_scale"])

    empty = np.isneginf(reference_lse)
    if np.any(out[empty] != 0) or np.any(lse[empty] != -np.inf):
        raise Fault("a token without keys: expected out 0 and lse -inf")
    norm = np.linalg.norm
    rel_error = norm(out - reference) / max(norm(reference), SMALLEST_NORM)
    max_rel_error = np.max(norm(out - reference, axis=2) /
                           np.maximum(norm(reference, axis=2), SMALLEST_NORM))
    lse_error = np.max(np.abs(lse[~empty] - reference_lse[~empty]), initial=0.0)
    text = (f"{count} tokens ({', '.join(sorted(set(meta['paths'])))}), {heads} heads: rel_error "
            f"{rel_error:.3g}, max_rel_error {max_rel_error:.3g}, lse_error {lse_error:.3g}")
    # Written so that NaN does not pass.
    bound = LSE_ERRORS[cache_format]
    if not (rel_error <= REL_ERROR and max_rel_error <= MAX_REL_ERROR and lse_error <= bound):
        raise Fault(f"{text}; expected at most {REL_ERROR}, {MAX_REL_ERROR}, {bound}")
    return text


def main(arguments):
    if not arguments:
        print("usage: check_dump.py DIR [DIR ...]", file=sys.stderr)
        return 2
    status = 0
    for name in arguments:
        try:
            print(f"{name}: {check(pathlib.Path(name))}")
        except (Fault, OSError, ValueError, KeyError) as fault:
            print(f"{name}: FAILED: {fault}", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
