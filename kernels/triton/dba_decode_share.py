"""Which tokens a split reads: those that are blocks, or exact, and the 16-bit tail behind blocks."""

import triton
import triton.language as tl


@triton.jit
def share(start, held, length, split, n_splits, BLOCK_TOKENS: tl.constexpr, HAS_TAIL: tl.constexpr):
    """Return the token ranges of a split: low to until in the blocks, then first to high in the tail.

    Whole tiles are shared out, no split getting two more than another: of 131,072 tokens by 33 splits all but one get
    31 tiles of 128; as many for each as the largest share would leave a split without any. A tail is read by a loop of
    its own, whose waits come on top. Where that makes no split's share longer, the last split reads the tail and nothing
    else. Elsewhere, and where there is one split, all tokens are shared out alike. A range is empty where its end is not
    behind its begin.
    """
    tiles = tl.cdiv(tl.maximum(length - start, 0), BLOCK_TOKENS)
    sharers = n_splits
    if HAS_TAIL:
        n_others = n_splits - 1
        behind = tl.maximum(held, start)
        of_blocks = tl.cdiv(tl.maximum(held - start, 0), BLOCK_TOKENS)
        most = tl.maximum(tl.cdiv(of_blocks, tl.maximum(n_others, 1)) * BLOCK_TOKENS, length - behind)
        is_apart = (n_others > 0) & (length > behind) & (most <= tl.cdiv(tiles, n_splits) * BLOCK_TOKENS)
        tiles = tl.where(is_apart, of_blocks, tiles)
        sharers = tl.where(is_apart, n_others, n_splits)
    fewest, rest = tiles // sharers, tiles % sharers
    low = start + (split * fewest + tl.minimum(split, rest)) * BLOCK_TOKENS
    high = tl.minimum(low + (fewest + tl.where(split < rest, 1, 0)) * BLOCK_TOKENS, length)
    until, first = tl.minimum(high, held), tl.maximum(low, held)
    if HAS_TAIL:
        has_tail = is_apart & (split == n_others)
        until = tl.where(has_tail, low, until)
        first = tl.where(is_apart, tl.where(has_tail, behind, length), first)
        high = tl.where(is_apart, length, high)
    return low, until, first, high
