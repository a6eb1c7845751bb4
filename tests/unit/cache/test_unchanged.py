"""What a cache refuses leaves it as it was: no stream is ahead of the others, whoever goes on after the error."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from caramba.cache import KVCacheKind, LatentLayerKVCache, LayerCache, LayerKVCache
from caramba.errors import CacheFull, ConfigError

PLAIN = (("k", 2, 8), ("v", 2, 4))
LATENT = (("c", 1, 8), ("k_geo", 1, 4))


def made(kind: str, cls: type[LayerCache] = LayerKVCache, max_tokens: int = 10, tail: int = 2) -> LayerCache:
    streams = LATENT if cls is LatentLayerKVCache else PLAIN
    return cls(streams, batch_size=2, max_tokens=max_tokens, kind=KVCacheKind(kind), tail_tokens=tail, static=True)


def tokens(cache: LayerCache, n_tokens: int, **changed: Tensor) -> dict[str, Tensor]:
    return {name: torch.randn(2, heads, n_tokens, width) for name, heads, width in cache.streams} | changed


def counts(cache: LayerCache) -> set[int]:
    return {tensor.n_tokens for tensor in cache.tensors.values()}


@pytest.mark.parametrize("kind", ["fp32", "q8_0"])
@pytest.mark.parametrize("cls", [LayerKVCache, LatentLayerKVCache])
def test_an_append_that_is_refused_stores_no_stream(kind: str, cls: type[LayerCache]) -> None:
    cache = made(kind, cls)
    cache.append(tokens(cache, 3))
    before = {name: values.clone() for name, values in cache.read().items()}
    (first, _, _), (last, heads, width) = cache.streams
    wrong: list[dict[str, Tensor]] = [
        tokens(cache, 1, **{last: torch.randn(2, heads, 1, width + 1)}),
        tokens(cache, 2, **{last: torch.randn(2, heads, 1, width)}),
        tokens(cache, 1, **{last: torch.randn(2, heads, 1, width, requires_grad=True)}),
        tokens(cache, 1, **{last: torch.randn(2, width)}),
        tokens(cache, 1, **{last: torch.randn(3, heads, 1, width)}),
        tokens(cache, 1, **{first: torch.ones(2, heads, 1, 8, dtype=torch.int64)}),
    ]
    if cls is LatentLayerKVCache:  # widths that add up, at other columns
        wrong.append({first: torch.randn(2, 1, 1, 4), last: torch.randn(2, 1, 1, 8)})
    for streams in wrong:
        if kind == "fp32" and cls is LatentLayerKVCache and streams[first].dtype == torch.int64:
            continue  # joined with numbers it is one
        with pytest.raises(ConfigError):
            cache.append(streams)
        assert counts(cache) == {3}
    with pytest.raises(CacheFull):
        cache.append(tokens(cache, 8))
    for name, values in cache.read().items():
        assert torch.equal(values, before[name])
    cache.append(tokens(cache, 1))
    assert counts(cache) == {4}


def without(state: dict[str, Tensor], stream: str) -> dict[str, Tensor]:
    return {name: part for name, part in state.items() if not name.startswith(stream)}


DAMAGED: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], str]] = {
    "a shorter stream": (
        lambda state: state | {name: part[:, :, :-1] for name, part in state.items() if name[0] == "v"},
        "streams hold k 9 .*, v .*expected as many each",
    ),
    "another dtype": (
        lambda state: state | {name: part.double() for name, part in state.items() if name[0] == "v"},
        "expected torch",
    ),
    "a stream that is missing": (lambda state: without(state, "v"), r"got \[\]"),
}


@pytest.mark.parametrize("kind", ["fp32", "q8_0"])
@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_state_is_refused_whole(kind: str, damage: str) -> None:
    source = made(kind)
    source.append(tokens(source, 9))
    change, message = DAMAGED[damage]
    cache = made(kind)
    cache.append(tokens(cache, 3))
    before = {name: values.clone() for name, values in cache.read().items()}
    with pytest.raises(ConfigError, match=message):
        cache.load_state_dict(change(source.state_dict()))
    assert counts(cache) == {3}
    for name, values in cache.read().items():
        assert torch.equal(values, before[name])


def test_a_state_with_unlike_blocks_is_refused() -> None:
    """A decode step reads one number of blocks for all streams."""
    states = []
    for tail in (2, 5):
        cache = made("q8_0", max_tokens=20, tail=tail)
        cache.append(tokens(cache, 9))
        states.append(cache.state_dict())
    mixed = without(states[0], "v") | without(states[1], "k")
    with pytest.raises(ConfigError, match=r"k 9 \(8 in blocks\), v 9 \(0 in blocks\) tokens"):
        made("q8_0", max_tokens=20, tail=5).load_state_dict(mixed)


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    source = made("q4_0")
    source.append(tokens(source, 9))
    cache = made("q4_0", max_tokens=8)
    cache.append(tokens(cache, 3))
    before = {name: values.clone() for name, values in cache.read().items()}
    with pytest.raises(CacheFull):
        cache.load_state_dict(source.state_dict())
    for name, values in cache.read().items():
        assert torch.equal(values, before[name])


def test_rows_that_are_not_there_are_refused_by_number() -> None:
    cache = made("fp32")
    cache.append(tokens(cache, 3))
    for rows in ([0, 2], [-1]):
        with pytest.raises(ConfigError, match=r"expected numbers from 0 to 1"):
            cache.select(torch.tensor(rows))
    for index, n_rows in ((2, 1), (-1, 1), (1, 2), (0, 0)):
        with pytest.raises(ConfigError, match="expected some from 0 to 1"):
            cache.row(index, n_rows)
    assert cache.row(1).read()["k"].shape == (1, 2, 3, 8)
    assert cache.row(0, 2).read()["k"].shape == (2, 2, 3, 8)
