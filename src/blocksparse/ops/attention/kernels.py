"""The Triton kernels of block-sparse attention; triton.py decides which program computes what.

A program has some rows: queries of one block row, of one head or of several that share their keys, or keys of one block
column. It walks over the blocks of its rows in lanes (see `gpu/device.py`), so one step gathers several small blocks.
Each output has one writer, and each sum one order, so results have equal bits in every run.

Scores are in units of ln 2, because GPUs compute 2^x. `inner` and `outer` are the factors before and after the softcap.
Masks select: a weight of 0 would not hide a NaN, because 0 NaN = NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..gpu.device import dot, lanes, tanh

# Entries whose spans are compared at a time.
CHUNK = tl.constexpr(128)
# Most lanes of a step that computes sums again: the usual steps get the registers.
MOST_LANES = tl.constexpr(32)
LN_2 = tl.constexpr(0.6931471805599453)

_SIZES = ["heads", "queries", "keys", "rows", "first_row", "block_rows", "skipped", "span_batch", "span_end"]


@triton.jit(do_not_specialize=_SIZES)
def attention_forward_kernel(
    q_ptr,  # [batch, heads, queries, d], features contiguous, as in all tensors
    k_ptr,  # [batch, heads / GROUP, keys, d]
    v_ptr,  # [batch, heads / GROUP, keys, d_v]
    span_ptr,  # int32 [2, batch or 1, queries], the first visible key and the end, which both rise; or None
    y_ptr,  # [batch, heads, queries, d_v], contiguous
    lse_ptr,  # [batch, heads, queries], contiguous
    order_ptr,  # int32 [layouts, block rows], rows in the order of the programs; None for ascending rows
    start_ptr,  # int32 [layouts, block rows + 1], the first entry of each row
    col_ptr,  # int32 [entries], block columns, ascending within a row
    heads, queries, keys,
    rows,  # block rows of the call
    first_row,  # the first of them
    block_rows,  # of a layout
    skipped,  # queries of the layout before the first one of the call
    span_batch,  # stride of the spans between sequences, 0 if all share them
    span_end,  # stride between the first keys and the ends
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token, inner, outer,
    height: tl.constexpr, width: tl.constexpr, d: tl.constexpr, d_v: tl.constexpr,
    D: tl.constexpr, D_V: tl.constexpr,  # d and d_v, rounded up to powers of two
    GROUP: tl.constexpr,  # heads that share keys
    HEADS: tl.constexpr,  # heads of a program
    PER_HEAD: tl.constexpr,  # whether each head has a layout of its own
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, SUM_DTYPE: tl.constexpr, WIDEN: tl.constexpr,
    BLOCK_M: tl.constexpr,  # queries of a program, those of all its heads
    BLOCK_K: tl.constexpr,  # lanes of keys
):  # fmt: skip
    """Compute y and its log-sum-exp for the queries of one program."""
    WIDTH: tl.constexpr = triton.next_power_of_2(width)
    FEW_LANES: tl.constexpr = min(BLOCK_K, MOST_LANES)
    batch, shared, head, query, row_mask, first, end = _queries(
        order_ptr, start_ptr, heads, queries, rows, first_row, block_rows, skipped, height, GROUP, HEADS, PER_HEAD,
        BLOCK_M,
    )  # fmt: skip
    q = _load_rows(q_ptr + batch * q_batch + head * q_head + query * q_token, row_mask, d, D)
    k_ptr += batch * k_batch + shared * k_head
    v_ptr += batch * v_batch + shared * v_head
    low, high = _spans(span_ptr, batch * span_batch, query, row_mask, span_end)
    if span_ptr is not None:
        first, end = _entries_within(col_ptr, first, end, low, high, row_mask, width)
    y = tl.zeros((BLOCK_M, D_V), SUM_DTYPE)
    top = tl.full((BLOCK_M,), float("-inf"), SUM_DTYPE)
    total = tl.zeros((BLOCK_M,), SUM_DTYPE)
    sees_bad = tl.zeros((BLOCK_M,), tl.int32)
    for lane0 in range(0, (end - first) * WIDTH, BLOCK_K):
        y, top, total, sees_bad = _attend(
            y, top, total, sees_bad, q, k_ptr, v_ptr, col_ptr, first, end, lane0, low, high, row_mask, keys,
            k_token, v_token, inner, outer, width, d, d_v, D, D_V, False, SOFTCAP, PRECISION, WIDEN, BLOCK_K,
        )  # fmt: skip
    if _has_bad(y):
        # A key that is not finite reached the sums of all queries of its step. The sums are computed again.
        y = tl.zeros((BLOCK_M, D_V), SUM_DTYPE)
        top = tl.full((BLOCK_M,), float("-inf"), SUM_DTYPE)
        total = tl.zeros((BLOCK_M,), SUM_DTYPE)
        for lane0 in tl.range(0, (end - first) * WIDTH, FEW_LANES, num_stages=1):
            y, top, total, sees_bad = _attend(
                y, top, total, sees_bad, q, k_ptr, v_ptr, col_ptr, first, end, lane0, low, high, row_mask, keys,
                k_token, v_token, inner, outer, width, d, d_v, D, D_V, True, SOFTCAP, PRECISION, WIDEN, FEW_LANES,
            )  # fmt: skip
        total = tl.where(sees_bad > 0, float("nan"), total)
    nothing = total == 0
    total = tl.where(nothing, 1, total)
    lse = tl.where(nothing, float("-inf"), (top + tl.log2(total)) * LN_2)
    number = (batch * heads + head) * queries + query
    tl.store(lse_ptr + number, lse, mask=row_mask)
    _store_rows(y_ptr + number * d_v, y / total[:, None], row_mask, d_v, D_V)


@triton.jit
def _attend(
    y, top, total, sees_bad, q, k_ptr, v_ptr, col_ptr, first, end, lane0, low, high, row_mask, keys, k_token, v_token,
    inner, outer, width: tl.constexpr, d: tl.constexpr, d_v: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr,
    CLEAN: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return the sums with one more step of keys: y and total are those of 2^(score - top) with and without values.

    With CLEAN, keys and values that are not finite are taken for 0, and `sees_bad` is 1 for queries that see one.
    """
    key, k_mask, k, v = _load_keys(
        k_ptr, v_ptr, col_ptr, first, end, lane0, keys, k_token, v_token, width, d, d_v, D, D_V, BLOCK_K
    )
    visible = _visible(key[None, :], k_mask[None, :], low, high, row_mask)
    if CLEAN:
        k, v, bad = _without_bad(k, v, total.dtype)
        sees_bad = tl.maximum(sees_bad, tl.max((visible & bad[None, :]).to(tl.int32), 1))
    scores = _scores(q, k, inner, outer, total.dtype, SOFTCAP, PRECISION, WIDEN)
    scores = tl.where(visible, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    origin = tl.where(new_top == float("-inf"), 0, new_top)
    weights = tl.exp2(scores - origin[:, None])
    shrink = tl.exp2(top - origin)
    y = dot(weights.to(v.dtype), v, y * shrink[:, None], PRECISION, WIDEN)
    return y, new_top, total * shrink + tl.sum(weights, 1), sees_bad


@triton.jit(do_not_specialize=_SIZES)
def attention_dq_kernel(
    q_ptr, k_ptr, v_ptr, span_ptr,
    grad_ptr,  # of y, [batch, heads, queries, d_v]
    lse_ptr,
    delta_ptr,  # like lse: the sum over the features of grad y, minus the gradient of lse
    grad_q_ptr,  # [batch, heads, queries, d], contiguous
    order_ptr, start_ptr, col_ptr, heads, queries, keys, rows, first_row, block_rows, skipped, span_batch, span_end,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token, grad_batch, grad_head, grad_token,
    inner, outer,
    scale,  # of the scores
    height: tl.constexpr, width: tl.constexpr, d: tl.constexpr, d_v: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr,
    GROUP: tl.constexpr, HEADS: tl.constexpr, PER_HEAD: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    SUM_DTYPE: tl.constexpr, WIDEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the queries of one program; the other arguments are those of the forward kernel."""
    WIDTH: tl.constexpr = triton.next_power_of_2(width)
    FEW_LANES: tl.constexpr = min(BLOCK_K, MOST_LANES)
    batch, shared, head, query, row_mask, first, end = _queries(
        order_ptr, start_ptr, heads, queries, rows, first_row, block_rows, skipped, height, GROUP, HEADS, PER_HEAD,
        BLOCK_M,
    )  # fmt: skip
    number = (batch * heads + head) * queries + query
    q = _load_rows(q_ptr + batch * q_batch + head * q_head + query * q_token, row_mask, d, D)
    grad = _load_rows(grad_ptr + batch * grad_batch + head * grad_head + query * grad_token, row_mask, d_v, D_V)
    lse, delta = _load_sums(lse_ptr + number, delta_ptr + number, row_mask)
    k_ptr += batch * k_batch + shared * k_head
    v_ptr += batch * v_batch + shared * v_head
    low, high = _spans(span_ptr, batch * span_batch, query, row_mask, span_end)
    if span_ptr is not None:
        first, end = _entries_within(col_ptr, first, end, low, high, row_mask, width)
    grad_q = tl.zeros((BLOCK_M, D), SUM_DTYPE)
    for lane0 in range(0, (end - first) * WIDTH, BLOCK_K):
        grad_q = _add_dq(
            grad_q, q, grad, lse, delta, k_ptr, v_ptr, col_ptr, first, end, lane0, low, high, row_mask, keys,
            k_token, v_token, inner, outer, width, d, d_v, D, D_V, False, SOFTCAP, PRECISION, WIDEN, BLOCK_K,
        )  # fmt: skip
    if _has_bad(grad_q):
        grad_q = tl.zeros((BLOCK_M, D), SUM_DTYPE)
        for lane0 in tl.range(0, (end - first) * WIDTH, FEW_LANES, num_stages=1):
            grad_q = _add_dq(
                grad_q, q, grad, lse, delta, k_ptr, v_ptr, col_ptr, first, end, lane0, low, high, row_mask, keys,
                k_token, v_token, inner, outer, width, d, d_v, D, D_V, True, SOFTCAP, PRECISION, WIDEN, FEW_LANES,
            )  # fmt: skip
    _store_rows(grad_q_ptr + number * d, grad_q * scale, row_mask, d, D)


@triton.jit
def _add_dq(
    grad_q, q, grad, lse, delta, k_ptr, v_ptr, col_ptr, first, end, lane0, low, high, row_mask, keys, k_token, v_token,
    inner, outer, width: tl.constexpr, d: tl.constexpr, d_v: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr,
    CLEAN: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return the gradient of the queries, not scaled yet, with one more step of keys."""
    key, k_mask, k, v = _load_keys(
        k_ptr, v_ptr, col_ptr, first, end, lane0, keys, k_token, v_token, width, d, d_v, D, D_V, BLOCK_K
    )
    visible = _visible(key[None, :], k_mask[None, :], low, high, row_mask)
    if CLEAN:
        k, v, _ = _without_bad(k, v, grad_q.dtype)
    scores = _scores(q, k, inner, outer, grad_q.dtype, SOFTCAP, PRECISION, WIDEN)
    products = dot(grad, tl.trans(v), tl.zeros_like(scores), PRECISION, WIDEN)
    _, of_scores = _weights_and_gradients(scores, products, visible, lse[:, None], delta[:, None], outer, SOFTCAP)
    return dot(of_scores.to(k.dtype), k, grad_q, PRECISION, WIDEN)


@triton.jit(do_not_specialize=["heads", "queries", "keys", "columns", "skipped", "span_batch", "span_end"])
def attention_dkv_kernel(
    q_ptr, k_ptr, v_ptr, span_ptr, grad_ptr, lse_ptr, delta_ptr,
    grad_k_ptr,  # [batch, heads / GROUP, keys, d], contiguous
    grad_v_ptr,  # [batch, heads / GROUP, keys, d_v], contiguous
    order_ptr,  # int32 [layouts, columns], block columns in the order of the programs
    start_ptr,  # int32 [layouts, columns + 1], the first entry of each column
    row_ptr,  # int32 [entries], block rows, ascending within a column
    heads, queries, keys,
    columns,  # of blocks
    skipped, span_batch, span_end, q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token,
    grad_batch, grad_head, grad_token, inner, outer, scale,
    height: tl.constexpr, width: tl.constexpr, d: tl.constexpr, d_v: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr,
    GROUP: tl.constexpr, PER_HEAD: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    SUM_DTYPE: tl.constexpr, WIDEN: tl.constexpr,
    BLOCK_M: tl.constexpr,  # keys of a program
    BLOCK_K: tl.constexpr,  # lanes of queries
):  # fmt: skip
    """Compute the gradients of the keys and values of one program; heads that share them are added in their order."""
    HEIGHT: tl.constexpr = triton.next_power_of_2(height)
    TILES: tl.constexpr = triton.cdiv(width, BLOCK_M)
    program = tl.program_id(0) // TILES
    rank = program % columns
    shared = (program // columns % (heads // GROUP)).to(tl.int64)
    batch = (program // columns // (heads // GROUP)).to(tl.int64)
    order_ptr += shared * GROUP * columns if PER_HEAD else 0
    column = tl.load(order_ptr + rank)
    in_block = tl.program_id(0) % TILES * BLOCK_M + tl.arange(0, BLOCK_M)
    key = column * width + in_block
    k_mask = (in_block < width) & (key < keys)
    k = _load_rows(k_ptr + batch * k_batch + shared * k_head + key.to(tl.int64) * k_token, k_mask, d, D)
    v = _load_rows(v_ptr + batch * v_batch + shared * v_head + key.to(tl.int64) * v_token, k_mask, d_v, D_V)
    grad_k = tl.zeros((BLOCK_M, D), SUM_DTYPE)
    grad_v = tl.zeros((BLOCK_M, D_V), SUM_DTYPE)
    for head in range(shared * GROUP, shared * GROUP + GROUP):
        starts = start_ptr + (head * (columns + 1) if PER_HEAD else 0)
        first = tl.load(starts + column)
        end = tl.load(starts + column + 1)
        if span_ptr is not None:
            first, end = _entries_that_see(
                span_ptr, batch * span_batch, span_end, row_ptr, first, end, tl.min(key, 0), tl.max(key, 0),
                queries, skipped, height,
            )  # fmt: skip
        for lane0 in range(0, (end - first) * HEIGHT, BLOCK_K):
            entry, i, q_mask = lanes(first, end, lane0, height, HEIGHT, BLOCK_K)
            query = tl.load(row_ptr + entry, mask=q_mask, other=0) * height + i - skipped
            q_mask = q_mask & (query >= 0) & (query < queries)
            query = query.to(tl.int64)
            number = (batch * heads + head) * queries + query
            q = _load_rows(q_ptr + batch * q_batch + head * q_head + query * q_token, q_mask, d, D)
            grad = _load_rows(grad_ptr + batch * grad_batch + head * grad_head + query * grad_token, q_mask, d_v, D_V)
            lse, delta = _load_sums(lse_ptr + number, delta_ptr + number, q_mask)
            low, high = _spans(span_ptr, batch * span_batch, query, q_mask, span_end)
            visible = tl.trans(_visible(key[None, :], k_mask[None, :], low, high, q_mask))
            scores = _scores(k, q, inner, outer, SUM_DTYPE, SOFTCAP, PRECISION, WIDEN)
            products = dot(v, tl.trans(grad), tl.zeros_like(scores), PRECISION, WIDEN)
            weights, of_scores = _weights_and_gradients(
                scores, products, visible, lse[None, :], delta[None, :], outer, SOFTCAP
            )
            grad_v = dot(weights.to(grad.dtype), grad, grad_v, PRECISION, WIDEN)
            grad_k = dot(of_scores.to(q.dtype), q, grad_k, PRECISION, WIDEN)
    number = (batch * (heads // GROUP) + shared) * keys + key
    _store_rows(grad_k_ptr + number * d, grad_k * scale, k_mask, d, D)
    _store_rows(grad_v_ptr + number * d_v, grad_v, k_mask, d_v, D_V)


# -- rows of a program, and lanes of a step ------------------------------------------------------------------------


@triton.jit
def _queries(
    order_ptr, start_ptr, heads, queries, rows, first_row, block_rows, skipped, height: tl.constexpr,
    GROUP: tl.constexpr, HEADS: tl.constexpr, PER_HEAD: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Return this program's sequence, its head of the keys, the head and number of each query, their mask, and entries.

    The entries are first <= entry < end. Programs of one head follow each other, so they share its keys in the cache.
    """
    QUERIES: tl.constexpr = BLOCK_M // HEADS
    TILES: tl.constexpr = triton.cdiv(height, QUERIES)
    program = tl.program_id(0) // TILES
    rank = program % rows
    head0 = (program // rows % (heads // HEADS) * HEADS).to(tl.int64)
    batch = (program // rows // (heads // HEADS)).to(tl.int64)
    block_row = first_row + rank
    if order_ptr is not None:
        block_row = tl.load(order_ptr + (head0 * block_rows if PER_HEAD else 0) + rank)
    starts = start_ptr + (head0 * (block_rows + 1) if PER_HEAD else 0) + block_row
    number = tl.arange(0, BLOCK_M)
    in_block = tl.program_id(0) % TILES * QUERIES + number % QUERIES
    query = (block_row * height + in_block - skipped).to(tl.int64)
    row_mask = (in_block < height) & (query >= 0) & (query < queries)
    return batch, head0 // GROUP, head0 + number // QUERIES, query, row_mask, tl.load(starts), tl.load(starts + 1)


@triton.jit
def _load_keys(
    k_ptr, v_ptr, col_ptr, first, end, lane0, keys, k_token, v_token, width: tl.constexpr, d: tl.constexpr,
    d_v: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return the number of the key of each lane, the mask of those that exist, and their rows of k and v."""
    WIDTH: tl.constexpr = triton.next_power_of_2(width)
    entry, i, k_mask = lanes(first, end, lane0, width, WIDTH, BLOCK_K)
    key = tl.load(col_ptr + entry, mask=k_mask, other=0) * width + i
    k_mask = k_mask & (key < keys)
    k = _load_rows(k_ptr + key.to(tl.int64) * k_token, k_mask, d, D)
    v = _load_rows(v_ptr + key.to(tl.int64) * v_token, k_mask, d_v, D_V)
    return key, k_mask, k, v


@triton.jit
def _load_rows(row_ptr, row_mask, features: tl.constexpr, FEATURES: tl.constexpr):
    """Return the features of some rows, 0 outside of the mask."""
    feature = tl.arange(0, FEATURES)
    mask = row_mask[:, None]
    if features != FEATURES:
        mask = mask & (feature < features)[None, :]
    return tl.load(row_ptr[:, None] + feature[None, :], mask=mask, other=0)


@triton.jit
def _store_rows(row_ptr, numbers, row_mask, features: tl.constexpr, FEATURES: tl.constexpr):
    """Store the features of the rows in the mask."""
    feature = tl.arange(0, FEATURES)
    tl.store(row_ptr[:, None] + feature[None, :], numbers, mask=row_mask[:, None] & (feature < features)[None, :])


@triton.jit
def _load_sums(lse_ptr, delta_ptr, row_mask):
    """Return the log-sum-exp of some queries, in units of ln 2, and their delta."""
    lse = tl.load(lse_ptr, mask=row_mask, other=0)
    return lse / LN_2, tl.load(delta_ptr, mask=row_mask, other=0)


# -- visible keys --------------------------------------------------------------------------------------------------


@triton.jit
def _spans(span_ptr, of_sequence, query, row_mask, span_end):
    """Return the first visible key and the end for some queries, or None twice."""
    low, high = None, None
    if span_ptr is not None:
        low = tl.load(span_ptr + of_sequence + query, mask=row_mask, other=0)
        high = tl.load(span_ptr + span_end + of_sequence + query, mask=row_mask, other=0)
    return low, high


@triton.jit
def _visible(key, k_mask, low, high, row_mask):
    """Return which keys [1, keys] each query sees, [queries, keys]."""
    visible = row_mask[:, None] & k_mask
    if low is not None:
        visible = visible & (key >= low[:, None]) & (key < high[:, None])
    return visible


@triton.jit
def _entries_within(col_ptr, first, end, low, high, row_mask, width: tl.constexpr):
    """Return the entries between first and end that have keys within the spans of any of the queries."""
    lowest = tl.min(tl.where(row_mask, low, 2147483647), 0)
    highest = tl.max(tl.where(row_mask, high, 0), 0)
    before, until = first * 0, first * 0
    for entry0 in range(first, end, CHUNK):
        entry = entry0 + tl.arange(0, CHUNK)
        key = tl.load(col_ptr + entry, mask=entry < end, other=0) * width
        before += tl.sum(((entry < end) & (key + width <= lowest)).to(tl.int32), 0)
        until += tl.sum(((entry < end) & (key < highest)).to(tl.int32), 0)
    return first + before, first + tl.maximum(until, before)


@triton.jit
def _entries_that_see(
    span_ptr, of_sequence, span_end, row_ptr, first, end, first_key, last_key, queries, skipped, height: tl.constexpr
):
    """Return the entries between first and end that have queries whose spans reach any of the keys.

    Both limits of the spans rise with the queries: those of a block's first and last query decide.
    """
    before, until = first * 0, first * 0
    for entry0 in range(first, end, CHUNK):
        entry = entry0 + tl.arange(0, CHUNK)
        query = tl.load(row_ptr + entry, mask=entry < end, other=0) * height - skipped
        last = tl.minimum(query + height, queries) - 1
        in_call = (entry < end) & (last >= 0) & (query < queries)
        low, _ = _spans(span_ptr, of_sequence, tl.maximum(query, 0), in_call, span_end)
        _, high = _spans(span_ptr, of_sequence, last, in_call, span_end)
        before += tl.sum(((entry < end) & ((last < 0) | (in_call & (high <= first_key)))).to(tl.int32), 0)
        until += tl.sum(((entry < end) & ((last < 0) | (in_call & (low <= last_key)))).to(tl.int32), 0)
    return first + before, first + tl.maximum(until, before)


# -- numbers -------------------------------------------------------------------------------------------------------


@triton.jit
def _scores(
    rows, columns, inner, outer, SUM_DTYPE: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """Return the scores of rows and columns [any, features], in units of ln 2."""
    products = tl.zeros((rows.shape[0], columns.shape[0]), SUM_DTYPE)
    products = dot(rows, tl.trans(columns), products, PRECISION, WIDEN) * inner
    return outer * tanh(products) if SOFTCAP else products


@triton.jit
def _weights_and_gradients(scores, products, visible, lse, delta, outer, SOFTCAP: tl.constexpr):
    """Return the weights of the softmax, and the gradients of the scores divided by their scale.

    `products` are those of the values with the gradient of y.
    """
    weights = tl.exp2(tl.where(visible, scores - lse, float("-inf")))
    of_scores = weights * (products - delta)
    if SOFTCAP:
        of_scores *= 1 - (scores / outer) * (scores / outer)
    return weights, tl.where(visible, of_scores, 0)


@triton.jit
def _is_bad(numbers):
    """Return 1 for numbers that are not finite, else 0."""
    return (~(tl.abs(numbers) < float("inf"))).to(tl.int32)


@triton.jit
def _has_bad(numbers):
    """Return whether any number is not finite."""
    return tl.max(_is_bad(numbers)) > 0


@triton.jit
def _without_bad(k, v, SUM_DTYPE: tl.constexpr):
    """Return k and v with 0 in the rows that are not finite, and which these are."""
    bad = tl.maximum(tl.max(_is_bad(k.to(SUM_DTYPE)), 1), tl.max(_is_bad(v.to(SUM_DTYPE)), 1)) > 0
    return tl.where(bad[:, None], tl.zeros_like(k), k), tl.where(bad[:, None], tl.zeros_like(v), v), bad
