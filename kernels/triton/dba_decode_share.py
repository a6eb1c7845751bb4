"""Which tokens a split reads: those that are blocks, or exact, and the 16-bit tail behind blocks."""

import triton
import triton.language as tl


@triton.jit
def share(start, held, length, split, n_splits, BLOCK_TOKENS: tl.constexpr, HAS_TAIL: tl.constexpr):
    """Return what a split reads of tokens `start` to `length`: of the first `held` those from low to until, then of the
    tail those from first to high.

    A tail is read by a loop of its own, whose waits come on top. Where that makes no split's share longer, whole tiles
    being shared, the last split reads the tail and nothing else. Elsewhere, and where there is one split, all tokens
    are shared out alike. A range is empty where its end is not behind its begin.
    """
    each = tl.cdiv(tl.cdiv(tl.maximum(length - start, 0), n_splits), BLOCK_TOKENS) * BLOCK_TOKENS
    if HAS_TAIL:
        n_others = n_splits - 1
        behind = tl.maximum(held, start)
        n_blocks = tl.maximum(held - start, 0)
        of_blocks = tl.cdiv(tl.cdiv(n_blocks, tl.maximum(n_others, 1)), BLOCK_TOKENS) * BLOCK_TOKENS
        is_apart = (n_others > 0) & (length > behind) & (tl.maximum(length - behind, of_blocks) <= each)
        each = tl.where(is_apart, of_blocks, each)
    low = start + split * each
    high = tl.minimum(low + each, length)
    until, first = tl.minimum(high, held), tl.maximum(low, held)
    if HAS_TAIL:
        has_tail = is_apart & (split == n_others)
        until = tl.where(has_tail, low, until)
        first = tl.where(is_apart, tl.where(has_tail, behind, length), first)
        high = tl.where(is_apart, length, high)
    return low, until, first, high
