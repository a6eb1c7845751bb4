"""Split-K decode attention on stored streams, and the kernel that joins the splits."""

from caramba.kernels.triton.dba_decode_share import share
from caramba.kernels.triton.dba_decode_tile import blocks, columns, numbers

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def queries(q, row, ok, STREAM: tl.constexpr):
    """Load the queries at offsets `row` as the stream's tiles are laid out; both the same where it has one."""
    D: tl.constexpr = STREAM[1]
    P: tl.constexpr = STREAM[2]
    E: tl.constexpr = STREAM[3]
    HALVED: tl.constexpr = STREAM[5]
    HALF: tl.constexpr = 0 if HALVED else -1
    d = columns(D, P, E, HALF)
    first = tl.load(q + row[:, None] + d[None, :], ok[:, None] & (d < D)[None, :], other=0.0)
    if HALVED:
        d = columns(D, P, E, 1)
        second = tl.load(q + row[:, None] + d[None, :], ok[:, None] & (d < D)[None, :], other=0.0)
    else:
        second = first
    return first, second


@triton.jit
def tokens(
    x,
    s_plane,
    s_n,
    scale,
    z_plane,
    z_n,
    i,
    n,
    ok,
    head,
    STREAM: tl.constexpr,
    IS_NUMBERS: tl.constexpr,
    DTYPE: tl.constexpr,
    PACKED_MATH: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Load tokens i + n of a head, from numbers (an exact stream, or a tail) or from blocks."""
    KIND: tl.constexpr = STREAM[0]
    D: tl.constexpr = STREAM[1]
    P: tl.constexpr = STREAM[2]
    E: tl.constexpr = STREAM[3]
    SPREAD: tl.constexpr = STREAM[4]
    HALVED: tl.constexpr = STREAM[5]
    UNIFORM: tl.constexpr = STREAM[6]
    i = tl.full([], i, tl.int64)
    x += i * s_n
    if IS_NUMBERS:
        if HALVED:
            low = numbers(x, s_n, n, ok, D, P, E, 0, MASKED).to(DTYPE)
            high = numbers(x, s_n, n, ok, D, P, E, 1, MASKED).to(DTYPE)
        else:
            low = numbers(x, s_n, n, ok, D, P, E, -1, MASKED).to(DTYPE)
            high = low
    else:
        at = scale + i * z_n
        low, high = blocks(x, s_plane, s_n, at, z_plane, z_n, n, ok, head * D, KIND, D, P, E, SPREAD, HALVED, UNIFORM, DTYPE, PACKED_MATH, MASKED)  # fmt: skip
    return low, high


@triton.jit
def attend(
    q_sem,
    q_sem_2,
    q_geo,
    q_geo_2,
    sem,
    sem_2,
    geo,
    geo_2,
    v,
    v_2,
    seen,
    m,
    l,
    acc,
    acc_2,
    SEM_HALVED: tl.constexpr,
    GEO_HALVED: tl.constexpr,
    V_HALVED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Take a tile of tokens into the running maximum m, sum l and weighted values, in base-2 logarithms."""
    s = tl.dot(q_sem, tl.trans(sem), input_precision="ieee")
    g = tl.dot(q_geo, tl.trans(geo), input_precision="ieee")
    if SEM_HALVED:
        s += tl.dot(q_sem_2, tl.trans(sem_2), input_precision="ieee")
    if GEO_HALVED:
        g += tl.dot(q_geo_2, tl.trans(geo_2), input_precision="ieee")
    s = (s + g) * LOG2_E
    if MASKED:
        s = tl.where(seen, s, -float("inf"))
    top = tl.maximum(m, tl.max(s, 1))
    finite = tl.where(top == -float("inf"), 0.0, top)  # -inf minus -inf where nothing has been seen
    p = tl.exp2(s - finite[:, None])
    a = tl.exp2(m - finite)
    l = l * a + tl.sum(p, 1)
    p = p.to(v.dtype)
    acc = acc * a[:, None] + tl.dot(p, v, input_precision="ieee")
    if V_HALVED:
        acc_2 = acc_2 * a[:, None] + tl.dot(p, v_2, input_precision="ieee")
    return top, l, acc, acc_2


@triton.jit
def split_kv_kernel(
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
    ANNOUNCED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One split of one sequence's key/value head, for BLOCK_ROWS of its GROUP * QUERIES queries.

    SEM, GEO and V describe a stream: (KIND, D, P, E, SPREAD, HALVED, UNIFORM), see `dba_decode_tile`. Numbers
    have strides (b, head, token), blocks (b, plane, token). With FINAL there is one split and no other kernel. With
    ANNOUNCED the kernel that joins may begin when every program has read its tokens; it waits there for what they store.
    EARLY it may itself begin before the kernel ahead has ended, whose numbers it waits for.
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()
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
    end = length - QUERIES + 1 + t  # tokens that each row sees
    start = 0
    if HAS_WINDOW:
        start = tl.maximum(length - QUERIES + 1 - window, 0) // BLOCK_TOKENS * BLOCK_TOKENS
    low, until, first, high = share(start, held, length, split, n_splits, BLOCK_TOKENS, HAS_PACKED)

    qs_row = b * qs_b + h * qs_h + t * qs_t
    qg_row = b * qg_b + h * qg_h + t * qg_t
    qs, qs_2 = queries(q_sem, qs_row, is_row, SEM)
    qg, qg_2 = queries(q_geo, qg_row, is_row, GEO)

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

    V_P: tl.constexpr = V[2]
    V_HALVED: tl.constexpr = V[5]
    WIDTH: tl.constexpr = V_P // 2 if V_HALVED else V_P
    m = tl.full([BLOCK_ROWS], -float("inf"), tl.float32)
    l = tl.zeros([BLOCK_ROWS], tl.float32)
    acc = tl.zeros([BLOCK_ROWS, WIDTH], tl.float32)
    acc_2 = tl.zeros([BLOCK_ROWS, WIDTH if V_HALVED else 1], tl.float32)
    n = tl.arange(0, BLOCK_TOKENS)

    # Blocks of quantised streams, numbers of exact ones: whole tiles first, without masks on the loads, whose
    # token axis is that along which scales are contiguous.
    CUT: tl.constexpr = HAS_WINDOW or QUERIES > 1
    middle = low + tl.maximum(until - low, 0) // BLOCK_TOKENS * BLOCK_TOKENS
    for i in tl.range(low, middle, BLOCK_TOKENS):
        ok = n >= 0
        s0, s1 = tokens(sem, sem_k, sem_n, sem_scale, sem_zk, sem_zn, i, n, ok, head, SEM, SEM_NUMBERS, DTYPE, PACKED_MATH, False)  # fmt: skip
        g0, g1 = tokens(geo, geo_k, geo_n, geo_scale, geo_zk, geo_zn, i, n, ok, head, GEO, GEO_NUMBERS, DTYPE, PACKED_MATH, False)  # fmt: skip
        if LATENT:
            v0, v1 = s0, s1
        else:
            v0, v1 = tokens(v, v_k, v_n, v_scale, v_zk, v_zn, i, n, ok, head, V, V_NUMBERS, DTYPE, PACKED_MATH, False)  # fmt: skip
        seen = (i + n)[None, :] < end[:, None]
        if HAS_WINDOW:
            seen = seen & ((i + n)[None, :] >= end[:, None] - window)
        m, l, acc, acc_2 = attend(qs, qs_2, qg, qg_2, s0, s1, g0, g1, v0, v1, seen, m, l, acc, acc_2, SEM[5], GEO[5], V[5], CUT)  # fmt: skip
    for i in tl.range(middle, until, BLOCK_TOKENS, num_stages=1):
        ok = i + n < until
        s0, s1 = tokens(sem, sem_k, sem_n, sem_scale, sem_zk, sem_zn, i, n, ok, head, SEM, SEM_NUMBERS, DTYPE, PACKED_MATH, True)  # fmt: skip
        g0, g1 = tokens(geo, geo_k, geo_n, geo_scale, geo_zk, geo_zn, i, n, ok, head, GEO, GEO_NUMBERS, DTYPE, PACKED_MATH, True)  # fmt: skip
        if LATENT:
            v0, v1 = s0, s1
        else:
            v0, v1 = tokens(v, v_k, v_n, v_scale, v_zk, v_zn, i, n, ok, head, V, V_NUMBERS, DTYPE, PACKED_MATH, True)  # fmt: skip
        seen = ok[None, :] & ((i + n)[None, :] < end[:, None])
        if HAS_WINDOW:
            seen = seen & ((i + n)[None, :] >= end[:, None] - window)
        m, l, acc, acc_2 = attend(qs, qs_2, qg, qg_2, s0, s1, g0, g1, v0, v1, seen, m, l, acc, acc_2, SEM[5], GEO[5], V[5], True)  # fmt: skip
    if HAS_PACKED:
        # Tokens of quantised streams that are still in 16 bits; the tail has its own positions from 0.
        if not SEM_NUMBERS:
            sem_tail += b * sem_tb + head * sem_tk
        if not GEO_NUMBERS:
            geo_tail += b * geo_tb + head * geo_tk
        if not V_NUMBERS:
            v_tail += b * v_tb + head * v_tk
        for i in tl.range(first, high, BLOCK_TOKENS, num_stages=1):
            ok = i + n < high
            if not SEM_NUMBERS:
                s0, s1 = tokens(sem_tail, 0, sem_tn, sem_tail, 0, 0, i - held, n, ok, 0, SEM, True, DTYPE, False, True)  # fmt: skip
            else:
                s0, s1 = tokens(sem, 0, sem_n, sem, 0, 0, i, n, ok, 0, SEM, True, DTYPE, False, True)  # fmt: skip
            if not GEO_NUMBERS:
                g0, g1 = tokens(geo_tail, 0, geo_tn, geo_tail, 0, 0, i - held, n, ok, 0, GEO, True, DTYPE, False, True)  # fmt: skip
            else:
                g0, g1 = tokens(geo, 0, geo_n, geo, 0, 0, i, n, ok, 0, GEO, True, DTYPE, False, True)  # fmt: skip
            if LATENT:
                v0, v1 = s0, s1
            elif not V_NUMBERS:
                v0, v1 = tokens(v_tail, 0, v_tn, v_tail, 0, 0, i - held, n, ok, 0, V, True, DTYPE, False, True)  # fmt: skip
            else:
                v0, v1 = tokens(v, 0, v_n, v, 0, 0, i, n, ok, 0, V, True, DTYPE, False, True)  # fmt: skip
            seen = ok[None, :] & ((i + n)[None, :] < end[:, None])
            if HAS_WINDOW:
                seen = seen & ((i + n)[None, :] >= end[:, None] - window)
            m, l, acc, acc_2 = attend(qs, qs_2, qg, qg_2, s0, s1, g0, g1, v0, v1, seen, m, l, acc, acc_2, SEM[5], GEO[5], V[5], True)  # fmt: skip

    if ANNOUNCED:
        tl.extra.cuda.gdc_launch_dependents()
    some = l > 0
    total = tl.where(some, l, 1.0)
    inverse = (1.0 / total)[:, None]  # a division each takes as many instructions as all else that comes here
    # Rows of the output are [B, H, QUERIES], those of the parts [B, H, QUERIES, splits].
    row = (b * KV_HEADS * GROUP + h) * QUERIES + t
    if FINAL:
        tl.store(sums + row, tl.where(some, (m + tl.log2(total)) * LN_2, -float("inf")), is_row)
    else:
        row = row * n_splits + split
        tl.store(sums + row, tl.where(some, m + tl.log2(total), -float("inf")), is_row)
    row = row * V[1]
    HALF: tl.constexpr = 0 if V_HALVED else -1
    d = columns(V[1], V_P, V[3], HALF)
    kept = is_row[:, None] & (d < V[1])[None, :]
    tl.store(out + row[:, None] + d[None, :], (acc * inverse).to(out.dtype.element_ty), kept)
    if V_HALVED:
        d = columns(V[1], V_P, V[3], 1)
        kept = is_row[:, None] & (d < V[1])[None, :]
        tl.store(out + row[:, None] + d[None, :], (acc_2 * inverse).to(out.dtype.element_ty), kept)


@triton.jit
def combine_kernel(
    parts, part_sums, q_sem, q_geo, null_sem, null_geo, null_v, out, sums, qs_b, qs_h, qs_t, qg_b, qg_h, qg_t, n_splits,
    HEADS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, DS: tl.constexpr, DG: tl.constexpr, DV: tl.constexpr,
    PS: tl.constexpr, PG: tl.constexpr, HAS_NULL: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Join the splits of one row, and the null key where there is one, for BLOCK of its DV features.

    With EARLY it begins while the splits end, and waits until all that they stored can be read.
    """
    row = tl.program_id(0).to(tl.int64)
    h, t = row // QUERIES % HEADS, row % QUERIES
    b = row // QUERIES // HEADS
    split = tl.arange(0, SPLITS)
    is_split = split < n_splits
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    # Both loads before the first is used, so that they are in flight together.
    l = tl.load(part_sums + row * n_splits + split, is_split, other=-float("inf"))
    at = (row * n_splits + split)[:, None] * DV + d[None, :]
    part = tl.load(parts + at, is_split[:, None] & (d < DV)[None, :], other=0.0).to(tl.float32)
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
