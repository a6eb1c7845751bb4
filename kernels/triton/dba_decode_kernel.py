"""Split-K decode attention on stored streams, and the kernel that joins the splits."""

from caramba.kernels.triton.dba_decode_tile import blocks, numbers, scales

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def queries(q, row, ok, STREAM: tl.constexpr, TOKENS_FIRST: tl.constexpr):
    """Load the queries at offsets `row`: [rows, P], or [P, rows] where tokens come first."""
    d = tl.arange(0, STREAM[2])
    if TOKENS_FIRST:
        x = tl.load(q + d[:, None] + row[None, :], (d < STREAM[1])[:, None] & ok[None, :], other=0.0)
    else:
        x = tl.load(q + row[:, None] + d[None, :], ok[:, None] & (d < STREAM[1])[None, :], other=0.0)
    return x


@triton.jit
def exact(x, s_n, i, n, ok, STREAM: tl.constexpr, DTYPE: tl.constexpr, MASKED: tl.constexpr):
    """Load tokens i + n of a head from numbers: an exact stream, or a tail."""
    return numbers(x + tl.full([], i, tl.int64) * s_n, s_n, n, ok, STREAM[1], STREAM[2], MASKED).to(DTYPE)


@triton.jit
def scale_of(x, s_plane, s_n, i, n, ok, head, STREAM: tl.constexpr, MASKED: tl.constexpr):
    """Load the scales of tokens i + n of a head."""
    return scales(x + tl.full([], i, tl.int64) * s_n, s_plane, s_n, n, ok, head * STREAM[1], STREAM, MASKED)


@triton.jit
def packed_tile(
    x,
    s_plane,
    s_n,
    scale,
    i,
    n,
    ok,
    head,
    STREAM: tl.constexpr,
    DTYPE: tl.constexpr,
    PACKED_MATH: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Load tokens i + n of a head from blocks with these scales."""
    x += tl.full([], i, tl.int64) * s_n
    return blocks(x, s_plane, s_n, scale, n, ok, head * STREAM[1], STREAM, DTYPE, PACKED_MATH, MASKED)


@triton.jit
def attend(
    q_sem,
    q_geo,
    sem,
    geo,
    v,
    place,
    start,
    end,
    m,
    l,
    acc,
    TOKENS_FIRST: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Take a tile of tokens into the running maximum m, sums l and weighted values, in base-2 logarithms.

    The sums are kept apart by the place in a tile, and joined at the end: that spares a reduction over threads here.

    MASKED: a row sees the tokens of `place` before its `end`, with a window from its `start` on. Where tokens come
    first they are the rows of the products: scores are [tokens, rows] and values [features, rows].
    """
    TOKENS: tl.constexpr = 0 if TOKENS_FIRST else 1
    if TOKENS_FIRST:
        s = tl.dot(sem, q_sem, input_precision="ieee") + tl.dot(geo, q_geo, input_precision="ieee")
    else:
        s = tl.dot(q_sem, tl.trans(sem), input_precision="ieee")
        s += tl.dot(q_geo, tl.trans(geo), input_precision="ieee")
    if MASKED:
        at = tl.expand_dims(place, 1 - TOKENS)
        seen = at < tl.expand_dims(end, TOKENS)
        if HAS_WINDOW:
            seen = seen & (at >= tl.expand_dims(start, TOKENS))
        s = tl.where(seen, s, -float("inf"))
    top = tl.maximum(m, tl.max(s, TOKENS) * LOG2_E)
    finite = tl.where(top == -float("inf"), 0.0, top)  # -inf minus -inf where nothing has been seen
    p = tl.exp2(s * LOG2_E - tl.expand_dims(finite, TOKENS))
    a = tl.exp2(m - finite)
    l = l * tl.expand_dims(a, TOKENS) + p
    p = p.to(v.dtype)
    if TOKENS_FIRST:
        acc = acc * a[None, :] + tl.dot(tl.trans(v), p, input_precision="ieee")
    else:
        acc = acc * a[:, None] + tl.dot(p, v, input_precision="ieee")
    return top, l, acc


@triton.jit
def decode_split(
    q_sem,
    q_geo,
    sem,
    geo,
    v,
    sem_scale,
    geo_scale,
    v_scale,
    sem_tail,
    geo_tail,
    v_tail,
    seqlens,
    packed,
    out,
    sums,
    qs_b,
    qs_h,
    qs_t,
    qg_b,
    qg_h,
    qg_t,
    sem_b,
    sem_k,
    sem_n,
    geo_b,
    geo_k,
    geo_n,
    v_b,
    v_k,
    v_n,
    sem_zb,
    sem_zk,
    sem_zn,
    geo_zb,
    geo_zk,
    geo_zn,
    v_zb,
    v_zk,
    v_zn,
    sem_tb,
    sem_tk,
    sem_tn,
    geo_tb,
    geo_tk,
    geo_tn,
    v_tb,
    v_tk,
    v_tn,
    packed_b,
    capacity,
    packed_capacity,
    tail_capacity,
    window,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    SEM: tl.constexpr,
    GEO: tl.constexpr,
    V: tl.constexpr,
    LATENT: tl.constexpr,
    HAS_PACKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    FINAL: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    PACKED_MATH: tl.constexpr,
    TOKENS_FIRST: tl.constexpr,
):
    """One split of one sequence's key/value head, for BLOCK_ROWS of its GROUP * QUERIES queries.

    SEM, GEO and V describe a stream: (KIND, D, P, E, SPREAD, HALVED, UNIFORM), see `dba_decode_tile`. Numbers
    have strides (b, head, token), blocks (b, plane, token). With FINAL there is one split and no other kernel.
    """
    DTYPE: tl.constexpr = q_sem.dtype.element_ty
    pid = tl.program_id(0)
    rows = pid % ROW_BLOCKS * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    head = pid // ROW_BLOCKS % KV_HEADS
    b = (pid // ROW_BLOCKS // KV_HEADS).to(tl.int64)
    split, n_splits = tl.program_id(1), tl.num_programs(1)
    is_row = rows < GROUP * QUERIES
    h, t = head * GROUP + rows // QUERIES, rows % QUERIES

    length = tl.minimum(tl.load(seqlens + b), capacity)
    if HAS_PACKED:
        held = tl.maximum(tl.minimum(tl.load(packed + b * packed_b), packed_capacity), 0)
        length = tl.minimum(length, held + tail_capacity)
        held = tl.minimum(held, length)
    else:
        held = length
    end = length - QUERIES + 1 + t  # tokens that each row sees, with a window those from `first` on
    first = end - window
    start = 0
    if HAS_WINDOW:
        start = tl.maximum(length - QUERIES + 1 - window, 0) // BLOCK_TOKENS * BLOCK_TOKENS
    each = tl.cdiv(tl.cdiv(tl.maximum(length - start, 0), n_splits), BLOCK_TOKENS) * BLOCK_TOKENS
    low = start + split * each
    high = tl.minimum(low + each, length)

    qs_row = b * qs_b + h * qs_h + t * qs_t
    qg_row = b * qg_b + h * qg_h + t * qg_t
    qs = queries(q_sem, qs_row, is_row, SEM, TOKENS_FIRST)
    qg = queries(q_geo, qg_row, is_row, GEO, TOKENS_FIRST)

    far = head.to(tl.int64)
    sem += b * sem_b
    geo += b * geo_b
    v += b * v_b
    SEM_NUMBERS: tl.constexpr = SEM[0] == "exact"
    if SEM_NUMBERS:
        sem += far * sem_k
    else:
        sem_scale += b * sem_zb
    GEO_NUMBERS: tl.constexpr = GEO[0] == "exact"
    if GEO_NUMBERS:
        geo += far * geo_k
    else:
        geo_scale += b * geo_zb
    V_NUMBERS: tl.constexpr = V[0] == "exact"
    if V_NUMBERS:
        v += far * v_k
    else:
        v_scale += b * v_zb

    m = tl.full([BLOCK_ROWS], -float("inf"), tl.float32)
    WIDTH: tl.constexpr = V[2]
    if TOKENS_FIRST:
        l = tl.zeros([BLOCK_TOKENS, BLOCK_ROWS], tl.float32)
        acc = tl.zeros([WIDTH, BLOCK_ROWS], tl.float32)
    else:
        l = tl.zeros([BLOCK_ROWS, BLOCK_TOKENS], tl.float32)
        acc = tl.zeros([BLOCK_ROWS, WIDTH], tl.float32)
    n = tl.arange(0, BLOCK_TOKENS)

    # Blocks of quantised streams, numbers of exact ones: whole tiles first, without masks on the loads, whose
    # token axis is that along which scales are contiguous.
    CUT: tl.constexpr = HAS_WINDOW or QUERIES > 1
    until = tl.minimum(high, held)
    middle = low + tl.maximum(until - low, 0) // BLOCK_TOKENS * BLOCK_TOKENS
    # The scales of blocks are fetched a tile ahead into registers: they are too few to be copied asynchronously.
    ok = low + n < middle
    if not SEM_NUMBERS:
        s_z = scale_of(sem_scale, sem_zk, sem_zn, low, n, ok, head, SEM, True)
    if not GEO_NUMBERS:
        g_z = scale_of(geo_scale, geo_zk, geo_zn, low, n, ok, head, GEO, True)
    if not LATENT and not V_NUMBERS:
        u_z = scale_of(v_scale, v_zk, v_zn, low, n, ok, head, V, True)
    for i in tl.range(low, middle, BLOCK_TOKENS):
        ahead = tl.minimum(i + BLOCK_TOKENS, middle - BLOCK_TOKENS)
        if SEM_NUMBERS:
            s = exact(sem, sem_n, i, n, ok, SEM, DTYPE, False)
        else:
            s = packed_tile(sem, sem_k, sem_n, s_z, i, n, ok, head, SEM, DTYPE, PACKED_MATH, False)  # fmt: skip
            s_z = scale_of(sem_scale, sem_zk, sem_zn, ahead, n, ok, head, SEM, False)
        if GEO_NUMBERS:
            g = exact(geo, geo_n, i, n, ok, GEO, DTYPE, False)
        else:
            g = packed_tile(geo, geo_k, geo_n, g_z, i, n, ok, head, GEO, DTYPE, PACKED_MATH, False)  # fmt: skip
            g_z = scale_of(geo_scale, geo_zk, geo_zn, ahead, n, ok, head, GEO, False)
        if LATENT:
            u = s
        elif V_NUMBERS:
            u = exact(v, v_n, i, n, ok, V, DTYPE, False)
        else:
            u = packed_tile(v, v_k, v_n, u_z, i, n, ok, head, V, DTYPE, PACKED_MATH, False)  # fmt: skip
            u_z = scale_of(v_scale, v_zk, v_zn, ahead, n, ok, head, V, False)
        m, l, acc = attend(qs, qg, s, g, u, i + n, first, end, m, l, acc, TOKENS_FIRST, CUT, HAS_WINDOW)
    for i in tl.range(middle, until, BLOCK_TOKENS, num_stages=1):
        ok = i + n < until
        if SEM_NUMBERS:
            s = exact(sem, sem_n, i, n, ok, SEM, DTYPE, True)
        else:
            s = packed_tile(sem, sem_k, sem_n, scale_of(sem_scale, sem_zk, sem_zn, i, n, ok, head, SEM, True), i, n, ok, head, SEM, DTYPE, PACKED_MATH, True)  # fmt: skip
        if GEO_NUMBERS:
            g = exact(geo, geo_n, i, n, ok, GEO, DTYPE, True)
        else:
            g = packed_tile(geo, geo_k, geo_n, scale_of(geo_scale, geo_zk, geo_zn, i, n, ok, head, GEO, True), i, n, ok, head, GEO, DTYPE, PACKED_MATH, True)  # fmt: skip
        if LATENT:
            u = s
        elif V_NUMBERS:
            u = exact(v, v_n, i, n, ok, V, DTYPE, True)
        else:
            u = packed_tile(v, v_k, v_n, scale_of(v_scale, v_zk, v_zn, i, n, ok, head, V, True), i, n, ok, head, V, DTYPE, PACKED_MATH, True)  # fmt: skip
        m, l, acc = attend(qs, qg, s, g, u, i + n, first, tl.minimum(end, until), m, l, acc, TOKENS_FIRST, True, HAS_WINDOW)  # fmt: skip
    if HAS_PACKED:
        # What quantised streams still have in 16 bits, at token i - held of the tail.
        if not SEM_NUMBERS:
            sem_tail += b * sem_tb + head * sem_tk
        if not GEO_NUMBERS:
            geo_tail += b * geo_tb + head * geo_tk
        if not V_NUMBERS:
            v_tail += b * v_tb + head * v_tk
        for i in tl.range(tl.maximum(low, held), high, BLOCK_TOKENS, num_stages=1):
            ok = i + n < high
            if SEM_NUMBERS:
                s = exact(sem, sem_n, i, n, ok, SEM, DTYPE, True)
            else:
                s = exact(sem_tail, sem_tn, i - held, n, ok, SEM, DTYPE, True)
            if GEO_NUMBERS:
                g = exact(geo, geo_n, i, n, ok, GEO, DTYPE, True)
            else:
                g = exact(geo_tail, geo_tn, i - held, n, ok, GEO, DTYPE, True)
            if LATENT:
                u = s
            elif V_NUMBERS:
                u = exact(v, v_n, i, n, ok, V, DTYPE, True)
            else:
                u = exact(v_tail, v_tn, i - held, n, ok, V, DTYPE, True)
            m, l, acc = attend(qs, qg, s, g, u, i + n, first, tl.minimum(end, high), m, l, acc, TOKENS_FIRST, True, HAS_WINDOW)  # fmt: skip

    total = tl.sum(l, 0 if TOKENS_FIRST else 1)
    some = total > 0
    total = tl.where(some, total, 1.0)
    # Rows of the output are [B, H, QUERIES], those of the parts [B, H, QUERIES, splits].
    row = (b * KV_HEADS * GROUP + h) * QUERIES + t
    if FINAL:
        tl.store(sums + row, tl.where(some, (m + tl.log2(total)) * LN_2, -float("inf")), is_row)
    else:
        row = row * n_splits + split
        tl.store(sums + row, tl.where(some, m + tl.log2(total), -float("inf")), is_row)
    row = row * V[1]
    d = tl.arange(0, WIDTH)
    if TOKENS_FIRST:
        kept = (d < V[1])[:, None] & is_row[None, :]
        tl.store(out + row[None, :] + d[:, None], (acc / total[None, :]).to(out.dtype.element_ty), kept)
    else:
        kept = is_row[:, None] & (d < V[1])[None, :]
        tl.store(out + row[:, None] + d[None, :], (acc / total[:, None]).to(out.dtype.element_ty), kept)


@triton.jit
def decode_join(
    parts,
    part_sums,
    q_sem,
    q_geo,
    null_sem,
    null_geo,
    null_v,
    out,
    sums,
    qs_b,
    qs_h,
    qs_t,
    qg_b,
    qg_h,
    qg_t,
    n_splits,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    DS: tl.constexpr,
    DG: tl.constexpr,
    DV: tl.constexpr,
    PS: tl.constexpr,
    PG: tl.constexpr,
    HAS_NULL: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Join the splits of one row, and the null key where there is one, for BLOCK of its DV features."""
    row = tl.program_id(0).to(tl.int64)
    h, t = row // QUERIES % HEADS, row % QUERIES
    b = row // QUERIES // HEADS
    split = tl.arange(0, SPLITS)
    is_split = split < n_splits
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    l = tl.load(part_sums + row * n_splits + split, is_split, other=-float("inf"))
    top = tl.max(l, 0)
    if HAS_NULL:
        i, j = tl.arange(0, PS), tl.arange(0, PG)
        key = h // GROUP
        qs = tl.load(q_sem + b * qs_b + h * qs_h + t * qs_t + i, i < DS, other=0.0).to(tl.float32)
        qg = tl.load(q_geo + b * qg_b + h * qg_h + t * qg_t + j, j < DG, other=0.0).to(tl.float32)
        ks = tl.load(null_sem + key * DS + i, i < DS, other=0.0).to(tl.float32)
        kg = tl.load(null_geo + key * DG + j, j < DG, other=0.0).to(tl.float32)
        own = (tl.sum(qs * ks, 0) + tl.sum(qg * kg, 0)) * LOG2_E
        top = tl.maximum(top, own)
    finite = tl.where(top == -float("inf"), 0.0, top)
    weight = tl.exp2(l - finite)
    total = tl.sum(weight, 0)
    at = (row * n_splits + split)[:, None] * DV + d[None, :]
    part = tl.load(parts + at, is_split[:, None] & (d < DV)[None, :], other=0.0)
    read = tl.sum(part * weight[:, None], 0)
    if HAS_NULL:
        weight_null = tl.exp2(own - finite)
        total += weight_null
        read += weight_null * tl.load(null_v + key * DV + d, d < DV, other=0.0).to(tl.float32)
    some = total > 0
    total = tl.where(some, total, 1.0)
    tl.store(out + row * DV + d, (read / total).to(out.dtype.element_ty), d < DV)
    if tl.program_id(1) == 0:
        tl.store(sums + row, tl.where(some, (finite + tl.log2(total)) * LN_2, -float("inf")))
