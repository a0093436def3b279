"""Triton kernels for training on a GPU. The functions of `cuda.py` call them."""

# Axes of a tile: R rows, C columns; in attention Q queries, M attended positions, K = d_k, U = d_v.

from __future__ import annotations

import triton
import triton.language as tl

PAST_ALL_KEYS = tl.constexpr(1 << 30)
LOG2_E = tl.constexpr(1.4426950408889634)


# Dropout: a hash of the key and the index of a value gives 24 bits.


@triton.jit
def is_kept(keys, place, at, threshold):
    # The key is mixed in between two rounds: added to the index, it would only shift the same sequence of bits.
    bits = at.to(tl.uint32) * 0x9E3779B9
    bits = ((bits ^ (bits >> 16)) * 0x85EBCA6B) ^ tl.load(keys + place).to(tl.uint32)
    bits = (bits ^ (bits >> 13)) * 0xC2B2AE35
    return ((bits ^ (bits >> 16)) >> 8).to(tl.int32) >= threshold


# Embedding


@triton.jit(do_not_specialize=["place"])
def embed_kernel(
    ids,
    positions,
    table,
    position_table,
    out,
    keys,
    place,
    threshold,
    factor,
    keep_factor,
    n_columns,
    HAS_DROPOUT: tl.constexpr,
    C: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column_C = tl.arange(0, C)
    is_column_C = column_C < n_columns
    x_C = tl.load(table + tl.load(ids + row).to(tl.int64) * n_columns + column_C, is_column_C).to(tl.float32) * factor
    x_C += tl.load(position_table + tl.load(positions + row) * n_columns + column_C, is_column_C).to(tl.float32)
    if HAS_DROPOUT:
        is_kept_C = is_kept(keys, place, row * n_columns + column_C, threshold)
        x_C = tl.where(is_kept_C, x_C * keep_factor, 0.0)
    tl.store(out + row * n_columns + column_C, x_C, is_column_C)


@triton.jit(do_not_specialize=["place"])
def drop_kernel(x, out, keys, place, threshold, factor, n, HAS_DROPOUT: tl.constexpr, C: tl.constexpr):
    at_C = tl.program_id(0).to(tl.int64) * C + tl.arange(0, C)
    x_C = tl.load(x + at_C, at_C < n).to(tl.float32) * factor
    if HAS_DROPOUT:
        x_C = tl.where(is_kept(keys, place, at_C, threshold), x_C, 0.0)
    tl.store(out + at_C, x_C, at_C < n)


# Add & Norm


@triton.jit(do_not_specialize=["place"])
def add_and_norm_kernel(
    x,
    y,
    gain,
    bias,
    sum_out,
    out,
    mean_out,
    rate_out,
    keys,
    place,
    threshold,
    keep_factor,
    eps,
    n_rows,
    n_columns,
    HAS_DROPOUT: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    row_R1 = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)[:, None]
    column_1C = tl.arange(0, C)[None, :]
    is_in_RC = (row_R1 < n_rows) & (column_1C < n_columns)
    at_RC = row_R1 * n_columns + column_1C
    y_RC = tl.load(y + at_RC, is_in_RC, 0.0).to(tl.float32)
    if HAS_DROPOUT:
        y_RC = tl.where(is_kept(keys, place, at_RC, threshold), y_RC * keep_factor, 0.0)
    x_RC = tl.load(x + at_RC, is_in_RC, 0.0).to(tl.float32) + y_RC
    tl.store(sum_out + at_RC, x_RC, is_in_RC)
    mean_R1 = (tl.sum(x_RC, 1) / n_columns)[:, None]
    centred_RC = tl.where(is_in_RC, x_RC - mean_R1, 0.0)
    rate_R1 = (1 / tl.sqrt(tl.sum(centred_RC * centred_RC, 1) / n_columns + eps))[:, None]
    is_column_1C = column_1C < n_columns
    gain_1C, bias_1C = tl.load(gain + column_1C, is_column_1C), tl.load(bias + column_1C, is_column_1C)
    tl.store(out + at_RC, centred_RC * rate_R1 * gain_1C + bias_1C, is_in_RC)
    tl.store(mean_out + row_R1, mean_R1, row_R1 < n_rows)
    tl.store(rate_out + row_R1, rate_R1, row_R1 < n_rows)


@triton.jit(do_not_specialize=["place"])
def add_and_norm_backward_kernel(
    grad,
    sum_in,
    mean_in,
    rate_in,
    gain,
    grad_x,
    grad_y,
    partials,
    keys,
    place,
    threshold,
    keep_factor,
    n_rows,
    n_columns,
    HAS_DROPOUT: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    column_C = tl.arange(0, C)
    column_1C = column_C[None, :]
    is_column_1C = column_1C < n_columns
    gain_1C = tl.load(gain + column_1C, is_column_1C, 0.0)
    # The rows of a tile are summed after the loop: inside it, warps would wait for each other at every tile.
    grad_gain_RC, grad_bias_RC = tl.zeros([R, C], tl.float32), tl.zeros([R, C], tl.float32)
    grad_y_sum_RC = tl.zeros([R, C], tl.float32)
    for start in range(tl.program_id(0) * R, n_rows, tl.num_programs(0) * R):
        row_R1 = (start + tl.arange(0, R)).to(tl.int64)[:, None]
        is_in_RC = (row_R1 < n_rows) & is_column_1C
        at_RC = row_R1 * n_columns + column_1C
        grad_RC = tl.load(grad + at_RC, is_in_RC, 0.0).to(tl.float32)
        rate_R1 = tl.load(rate_in + row_R1, row_R1 < n_rows, 0.0)
        centred_RC = tl.load(sum_in + at_RC, is_in_RC, 0.0) - tl.load(mean_in + row_R1, row_R1 < n_rows, 0.0)
        normal_RC = tl.where(is_in_RC, centred_RC * rate_R1, 0.0)
        grad_gain_RC += grad_RC * normal_RC
        grad_bias_RC += grad_RC
        grad_RC *= gain_1C
        mean_R1 = (tl.sum(grad_RC, 1) / n_columns)[:, None]
        projection_R1 = (tl.sum(grad_RC * normal_RC, 1) / n_columns)[:, None]
        grad_x_RC = (grad_RC - mean_R1 - normal_RC * projection_R1) * rate_R1
        tl.store(grad_x + at_RC, grad_x_RC, is_in_RC)
        grad_y_RC = tl.where(is_in_RC, grad_x_RC, 0.0)
        if HAS_DROPOUT:
            grad_y_RC = tl.where(is_kept(keys, place, at_RC, threshold), grad_y_RC * keep_factor, 0.0)
            tl.store(grad_y + at_RC, grad_y_RC, is_in_RC)
        grad_y_sum_RC += grad_y_RC
    partial = partials + tl.program_id(0) * 3 * n_columns + column_C
    tl.store(partial, tl.sum(grad_gain_RC, 0), column_C < n_columns)
    tl.store(partial + n_columns, tl.sum(grad_bias_RC, 0), column_C < n_columns)
    tl.store(partial + 2 * n_columns, tl.sum(grad_y_sum_RC, 0), column_C < n_columns)


@triton.jit
def add_partials_kernel(
    partials, total_0, total_1, total_2, n_partials, n_kinds, n_columns, R: tl.constexpr, C: tl.constexpr
):
    kind, column_C = tl.program_id(1), tl.program_id(0) * C + tl.arange(0, C)
    is_column_C = column_C < n_columns
    sum_RC = tl.zeros([R, C], tl.float32)
    for start in range(0, n_partials, R):
        row_R1 = (start + tl.arange(0, R))[:, None]
        at_RC = (row_R1 * n_kinds + kind) * n_columns + column_C[None, :]
        sum_RC += tl.load(partials + at_RC, (row_R1 < n_partials) & is_column_C[None, :], 0.0)
    sum_C = tl.sum(sum_RC, 0)
    if kind == 0:
        tl.store(total_0 + column_C, tl.load(total_0 + column_C, is_column_C) + sum_C, is_column_C)
    elif kind == 1:
        tl.store(total_1 + column_C, tl.load(total_1 + column_C, is_column_C) + sum_C, is_column_C)
    else:
        tl.store(total_2 + column_C, tl.load(total_2 + column_C, is_column_C) + sum_C, is_column_C)


# The backward pass of the activation


@triton.jit
def relu_backward_kernel(grad, hidden, partials, n_rows, n_columns, R: tl.constexpr, C: tl.constexpr):
    column_C = tl.program_id(1) * C + tl.arange(0, C)
    sum_RC = tl.zeros([R, C], tl.float32)
    for start in range(tl.program_id(0) * R, n_rows, tl.num_programs(0) * R):
        row_R1 = (start + tl.arange(0, R)).to(tl.int64)[:, None]
        is_in_RC = (row_R1 < n_rows) & (column_C < n_columns)[None, :]
        at_RC = row_R1 * n_columns + column_C[None, :]
        is_on_RC = tl.load(hidden + at_RC, is_in_RC, 0.0) > 0
        grad_RC = tl.where(is_on_RC, tl.load(grad + at_RC, is_in_RC, 0.0), 0.0)
        tl.store(grad + at_RC, grad_RC, is_in_RC)
        sum_RC += grad_RC.to(tl.float32)
    tl.store(partials + tl.program_id(0) * n_columns + column_C, tl.sum(sum_RC, 0), column_C < n_columns)


# Attention. A tile of queries goes through all keys from the first to the last that any of them sees.


@triton.jit
def attend_kernel(
    query,
    key,
    value,
    out,
    log_Z_out,
    first_in,
    last_in,
    query_stride,
    key_stride,
    value_stride,
    out_stride,
    n_queries,
    scale,
    D_K: tl.constexpr,
    D_V: tl.constexpr,
    Q: tl.constexpr,
    M: tl.constexpr,
):
    head = tl.program_id(0)
    row_Q = tl.program_id(1) * Q + tl.arange(0, Q)
    is_row_Q = row_Q < n_queries
    first_Q, last_Q = tl.load(first_in + row_Q, is_row_Q, 0), tl.load(last_in + row_Q, is_row_Q, 0)
    column_K, column_U = tl.arange(0, D_K), tl.arange(0, D_V)
    query_at_QK = query + row_Q.to(tl.int64)[:, None] * query_stride + head * D_K + column_K[None, :]
    query_QK = tl.load(query_at_QK, is_row_Q[:, None], 0.0)
    max_Q, sum_Q = tl.full([Q], float("-inf"), tl.float32), tl.zeros([Q], tl.float32)
    head_QU = tl.zeros([Q, D_V], tl.float32)
    begin = tl.min(tl.where(first_Q < last_Q, first_Q, PAST_ALL_KEYS))
    end = tl.max(last_Q)
    for start in range(begin, end, M):
        place_M = start + tl.arange(0, M)
        visible_QM = (place_M[None, :] >= first_Q[:, None]) & (place_M[None, :] < last_Q[:, None])
        is_key_M1 = (place_M < end)[:, None]
        key_MK = tl.load(
            key + place_M.to(tl.int64)[:, None] * key_stride + head * D_K + column_K[None, :], is_key_M1, 0.0
        )
        score_QM = tl.where(visible_QM, tl.dot(query_QK, tl.trans(key_MK)) * (scale * LOG2_E), float("-inf"))
        new_max_Q = tl.maximum(max_Q, tl.max(score_QM, 1))
        # The maximum is -inf for a query that has seen no key yet; 0 instead avoids -inf minus -inf.
        safe_max_Q = tl.where(new_max_Q == float("-inf"), 0.0, new_max_Q)
        weight_QM = tl.exp2(score_QM - safe_max_Q[:, None])
        rescale_Q = tl.exp2(max_Q - safe_max_Q)
        sum_Q = sum_Q * rescale_Q + tl.sum(weight_QM, 1)
        value_MU = tl.load(
            value + place_M.to(tl.int64)[:, None] * value_stride + head * D_V + column_U[None, :], is_key_M1, 0.0
        )
        head_QU = head_QU * rescale_Q[:, None] + tl.dot(weight_QM.to(value_MU.dtype), value_MU)
        max_Q = new_max_Q
    sees_Q = sum_Q > 0
    head_QU = tl.where(sees_Q[:, None], head_QU / tl.where(sees_Q, sum_Q, 1.0)[:, None], 0.0)
    out_at_QU = out + row_Q.to(tl.int64)[:, None] * out_stride + head * D_V + column_U[None, :]
    tl.store(out_at_QU, head_QU, is_row_Q[:, None])
    log_Z_Q = tl.where(sees_Q, tl.where(sees_Q, max_Q, 0.0) + tl.log2(tl.where(sees_Q, sum_Q, 1.0)), 0.0)
    tl.store(log_Z_out + head * n_queries + row_Q, log_Z_Q, is_row_Q)


@triton.jit
def grad_score(query_QK, key_MK, value_MU, grad_QU, log_Z_Q, delta_Q, first_Q, last_Q, place_M, scale):
    """The attention weights of a tile, and the gradient of its scores."""
    visible_QM = (place_M[None, :] >= first_Q[:, None]) & (place_M[None, :] < last_Q[:, None])
    score_QM = tl.dot(query_QK, tl.trans(key_MK)) * (scale * LOG2_E) - log_Z_Q[:, None]
    weight_QM = tl.where(visible_QM, tl.exp2(tl.where(visible_QM, score_QM, 0.0)), 0.0)
    grad_weight_QM = tl.dot(grad_QU, tl.trans(value_MU))
    return weight_QM, weight_QM * (grad_weight_QM - delta_Q[:, None]) * scale


@triton.jit
def attend_backward_query_kernel(
    query,
    key,
    value,
    out,
    grad,
    log_Z_in,
    delta_out,
    grad_query,
    first_in,
    last_in,
    query_stride,
    key_stride,
    value_stride,
    out_stride,
    grad_query_stride,
    n_queries,
    scale,
    D_K: tl.constexpr,
    D_V: tl.constexpr,
    Q: tl.constexpr,
    M: tl.constexpr,
):
    head = tl.program_id(0)
    row_Q = tl.program_id(1) * Q + tl.arange(0, Q)
    is_row_Q = row_Q < n_queries
    first_Q, last_Q = tl.load(first_in + row_Q, is_row_Q, 0), tl.load(last_in + row_Q, is_row_Q, 0)
    column_K, column_U = tl.arange(0, D_K), tl.arange(0, D_V)
    row_Q1 = row_Q.to(tl.int64)[:, None]
    query_QK = tl.load(query + row_Q1 * query_stride + head * D_K + column_K[None, :], is_row_Q[:, None], 0.0)
    at_QU = row_Q1 * out_stride + head * D_V + column_U[None, :]
    grad_QU = tl.load(grad + at_QU, is_row_Q[:, None], 0.0)
    out_QU = tl.load(out + at_QU, is_row_Q[:, None], 0.0)
    # The gradient of the softmax needs this sum of gradient times output, as in FlashAttention.
    delta_Q = tl.sum(grad_QU.to(tl.float32) * out_QU.to(tl.float32), 1)
    tl.store(delta_out + head * n_queries + row_Q, delta_Q, is_row_Q)
    log_Z_Q = tl.load(log_Z_in + head * n_queries + row_Q, is_row_Q, 0.0)
    grad_query_QK = tl.zeros([Q, D_K], tl.float32)
    begin = tl.min(tl.where(first_Q < last_Q, first_Q, PAST_ALL_KEYS))
    end = tl.max(last_Q)
    for start in range(begin, end, M):
        place_M = start + tl.arange(0, M)
        place_M1, is_key_M1 = place_M.to(tl.int64)[:, None], (place_M < end)[:, None]
        key_MK = tl.load(key + place_M1 * key_stride + head * D_K + column_K[None, :], is_key_M1, 0.0)
        value_MU = tl.load(value + place_M1 * value_stride + head * D_V + column_U[None, :], is_key_M1, 0.0)
        _, grad_score_QM = grad_score(
            query_QK, key_MK, value_MU, grad_QU, log_Z_Q, delta_Q, first_Q, last_Q, place_M, scale
        )
        grad_query_QK += tl.dot(grad_score_QM.to(key_MK.dtype), key_MK)
    grad_at_QK = grad_query + row_Q1 * grad_query_stride + head * D_K + column_K[None, :]
    tl.store(grad_at_QK, grad_query_QK, is_row_Q[:, None])


@triton.jit
def attend_backward_key_kernel(
    query,
    key,
    value,
    grad,
    log_Z_in,
    delta_in,
    grad_key,
    grad_value,
    first_in,
    last_in,
    seen_first_in,
    seen_last_in,
    query_stride,
    key_stride,
    value_stride,
    out_stride,
    grad_key_stride,
    grad_value_stride,
    n_queries,
    n_keys,
    scale,
    D_K: tl.constexpr,
    D_V: tl.constexpr,
    Q: tl.constexpr,
    M: tl.constexpr,
):
    head = tl.program_id(0)
    place_M = tl.program_id(1) * M + tl.arange(0, M)
    is_key_M = place_M < n_keys
    place_M1, column_K, column_U = place_M.to(tl.int64)[:, None], tl.arange(0, D_K), tl.arange(0, D_V)
    key_MK = tl.load(key + place_M1 * key_stride + head * D_K + column_K[None, :], is_key_M[:, None], 0.0)
    value_MU = tl.load(value + place_M1 * value_stride + head * D_V + column_U[None, :], is_key_M[:, None], 0.0)
    seen_first_M = tl.load(seen_first_in + place_M, is_key_M, 0)
    seen_last_M = tl.load(seen_last_in + place_M, is_key_M, 0)
    grad_key_MK, grad_value_MU = tl.zeros([M, D_K], tl.float32), tl.zeros([M, D_V], tl.float32)
    begin = tl.min(tl.where(seen_first_M < seen_last_M, seen_first_M, PAST_ALL_KEYS))
    for start in range(begin, tl.max(seen_last_M), Q):
        row_Q = start + tl.arange(0, Q)
        is_row_Q = row_Q < n_queries
        row_Q1 = row_Q.to(tl.int64)[:, None]
        first_Q, last_Q = tl.load(first_in + row_Q, is_row_Q, 0), tl.load(last_in + row_Q, is_row_Q, 0)
        query_QK = tl.load(query + row_Q1 * query_stride + head * D_K + column_K[None, :], is_row_Q[:, None], 0.0)
        grad_QU = tl.load(grad + row_Q1 * out_stride + head * D_V + column_U[None, :], is_row_Q[:, None], 0.0)
        log_Z_Q = tl.load(log_Z_in + head * n_queries + row_Q, is_row_Q, 0.0)
        delta_Q = tl.load(delta_in + head * n_queries + row_Q, is_row_Q, 0.0)
        weight_QM, grad_score_QM = grad_score(
            query_QK, key_MK, value_MU, grad_QU, log_Z_Q, delta_Q, first_Q, last_Q, place_M, scale
        )
        grad_value_MU += tl.dot(tl.trans(weight_QM.to(grad_QU.dtype)), grad_QU)
        grad_key_MK += tl.dot(tl.trans(grad_score_QM.to(query_QK.dtype)), query_QK)
    grad_key_at_MK = grad_key + place_M1 * grad_key_stride + head * D_K + column_K[None, :]
    tl.store(grad_key_at_MK, grad_key_MK, is_key_M[:, None])
    grad_value_at_MU = grad_value + place_M1 * grad_value_stride + head * D_V + column_U[None, :]
    tl.store(grad_value_at_MU, grad_value_MU, is_key_M[:, None])


# The smoothed loss


@triton.jit
def loss_kernel(
    logits,
    target_in,
    loss_out,
    factor_pointer,
    smoothing,
    pad_id,
    ROW_STRIDE: tl.constexpr,
    N_COLUMNS: tl.constexpr,
    C: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_in + row)
    at = logits + row * ROW_STRIDE
    if target == pad_id:
        tl.store(loss_out + row, 0.0)
        for start in range(0, N_COLUMNS, C):
            column_C = start + tl.arange(0, C)
            tl.store(at + column_C, tl.zeros([C], tl.float32), column_C < N_COLUMNS)
    else:
        max_logit, sum_C, plain_sum_C = float("-inf"), tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
        for start in range(0, N_COLUMNS, C):
            column_C = start + tl.arange(0, C)
            is_in_C = column_C < N_COLUMNS
            x_C = tl.load(at + column_C, is_in_C, float("-inf")).to(tl.float32)
            new_max_logit = tl.maximum(max_logit, tl.max(x_C))
            sum_C = sum_C * tl.exp2((max_logit - new_max_logit) * LOG2_E) + tl.exp2((x_C - new_max_logit) * LOG2_E)
            plain_sum_C += tl.where(is_in_C, x_C, 0.0)
            max_logit = new_max_logit
        log_Z = max_logit + tl.log2(tl.sum(sum_C)) / LOG2_E
        target_logit = tl.load(at + target).to(tl.float32)
        mean = tl.sum(plain_sum_C) / N_COLUMNS
        tl.store(loss_out + row, log_Z - (1 - smoothing) * target_logit - smoothing * mean)
        factor = tl.load(factor_pointer)
        for start in range(0, N_COLUMNS, C):
            column_C = start + tl.arange(0, C)
            x_C = tl.load(at + column_C, column_C < N_COLUMNS, 0.0).to(tl.float32)
            grad_C = tl.exp2((x_C - log_Z) * LOG2_E) - smoothing / N_COLUMNS
            grad_C -= tl.where(column_C == target, 1 - smoothing, 0.0)
            tl.store(at + column_C, grad_C * factor, column_C < N_COLUMNS)
