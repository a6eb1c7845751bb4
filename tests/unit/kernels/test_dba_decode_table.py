"""The table of decode attention: what is asked, what is borrowed, what the rule says, and its file."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from caramba.kernels.cuda import blocks, launch_configs
from caramba.kernels.triton import dba_decode_table as table
from caramba.kernels.triton.dba_decode_table import (
    DecodeConfig,
    DecodeShape,
    candidates,
    choose,
    rule,
    written,
)

from caramba import kernels
from caramba.config.kvcache import BLOCKS
from caramba.errors import ConfigError
from caramba.ops.dba_decode import MAX_SPLITS
from caramba.runtime import tuned

SHAPE = DecodeShape("sm90", ("q4_0", "q8_0"), (128, 64, 128), rows=32, lanes=8, tokens=32768)


@pytest.fixture(autouse=True)
def chosen_anew() -> Iterator[None]:
    """Forget what was chosen by other tables, before a test and after it."""
    choose.cache_clear()
    yield
    choose.cache_clear()


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> DecodeConfig:
    choice = DecodeConfig(block_rows=32, block_tokens=256, n_warps=8, n_stages=2, n_splits=48)
    monkeypatch.setattr(table, "measured", lambda: {SHAPE.key: choice})
    return choice


def test_what_was_measured_is_chosen_and_a_near_neighbour_borrows_it(only: DecodeConfig) -> None:
    assert SHAPE.key == "sm90|q4_0+q8_0|128x64x128|32|8|32768"
    assert choose(SHAPE, 132) == only
    assert choose(replace(SHAPE, tokens=30000, lanes=7), 132) == only  # the same powers of two
    assert choose(replace(SHAPE, tokens=65536), 132) == only
    assert choose(replace(SHAPE, lanes=16), 132) == replace(only, n_splits=24)
    far = choose(replace(SHAPE, lanes=64, tokens=4096), 132)
    assert far.reading == only.reading, "tiles are read alike at any size"
    assert far.n_splits == 4, "at most two programs a processor, by the rule"
    for other in (
        replace(SHAPE, arch="sm100"),
        replace(SHAPE, dims=(96, 32, 96)),
        replace(SHAPE, formats=("bf16", "q8_0")),
        replace(SHAPE, rows=64),
        replace(SHAPE, dims=(128, 32, 128), lanes=1, tokens=4096),
    ):
        assert choose(other, 132) == rule(other, 132)


@pytest.mark.parametrize(("tokens", "n_splits"), [(32768, 129), (33280, 131), (65536, 132)])
def test_splits_in_cuda_of_more_tokens_than_were_measured_stay_as_long_while_there_are_processors(
    tokens: int, n_splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = replace(SHAPE, lanes=1)
    choice = DecodeConfig(block_rows=32, block_tokens=32, n_warps=8, n_splits=129, n_heads=1, in_cuda=1)
    monkeypatch.setattr(table, "measured", lambda: {shape.key: choice})
    assert choose(replace(shape, tokens=tokens), 132) == replace(choice, n_splits=n_splits)


@pytest.mark.parametrize("tokens", [33280, 65536])
@pytest.mark.parametrize(
    ("n_splits", "in_cuda", "stays"),
    [(table.FEW_READERS - 1, 1, True), (table.FEW_READERS, 1, False), (129, 0, True)],
    ids=("few readers", "readers enough", "Triton's"),
)
def test_splits_of_few_readers_and_tritons_are_no_more_for_more_tokens(
    tokens: int, n_splits: int, in_cuda: int, stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = replace(SHAPE, lanes=1)
    choice = DecodeConfig(block_rows=32, block_tokens=32, n_warps=8, n_splits=n_splits, n_heads=1, in_cuda=in_cuda)
    monkeypatch.setattr(table, "measured", lambda: {shape.key: choice})
    found = choose(replace(shape, tokens=tokens), 132)
    assert found.reading == choice.reading
    assert (found.n_splits == n_splits) == stays
    assert found.n_splits >= n_splits


def test_of_two_neighbours_the_one_of_more_like_lengths_lends_its_choice(
    only: DecodeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    longer = replace(only, n_splits=64, n_heads=1)
    keys = replace(SHAPE, tokens=131072).key, SHAPE.key
    monkeypatch.setattr(table, "measured", lambda: dict(zip(keys, (longer, only), strict=True)))
    # All of these have the power of two between both lengths above them, or the longer one.
    assert choose(replace(SHAPE, tokens=32768 + 128), 132) == only
    assert choose(replace(SHAPE, tokens=65536), 132) == only
    assert choose(replace(SHAPE, tokens=65536 + 128), 132) == longer


def test_latents_of_16_bits_are_read_for_a_warp_groups_rows_where_they_fit() -> None:
    shape = replace(SHAPE, formats=("bf16", "bf16"), dims=(96, 64, 96), lanes=32, tokens=16384)
    assert rule(shape, 132) == DecodeConfig(64, 64, n_warps=4, n_stages=3, n_splits=8)
    assert choose(replace(shape, dims=(128, 64, 128)), 132) == rule(shape, 132), "far from what was measured"
    assert rule(replace(shape, dims=(128, 256, 128)), 132).n_splits == 4  # one program a processor: more do not fit
    per_head = replace(shape, formats=("bf16",) * 3, dims=(32, 32, 64), rows=4, lanes=256)
    assert rule(per_head, 132) == DecodeConfig(16, 64, n_warps=4, n_stages=3, n_splits=2)  # four: tiles are small
    others = (
        {"rows": 16},
        {"rows": 33},
        {"dims": (256, 256, 256)},
        {"arch": "sm80"},
        {"formats": ("fp32",) * 2},
    )
    for other in others:
        assert rule(replace(shape, **other), 132) != rule(shape, 132)
    for key, choice in table.measured().items():
        _, formats, dims, rows, *_ = key.split("|")
        if formats == "bf16+bf16" and rows == "32":
            sizes = (choice.block_rows, choice.block_tokens, choice.n_warps)
            assert sizes == (64, 64, 4), f"{dims}: the rule says what was measured"


@pytest.mark.parametrize("lanes", [1, 8, 64, 512])
@pytest.mark.parametrize("tokens", [1, 100, 4096, 131072])
def test_the_rule_fills_the_processors_and_never_cuts_finer_than_a_tile(lanes: int, tokens: int) -> None:
    shape = replace(SHAPE, lanes=lanes, tokens=tokens)
    choice = rule(shape, 132)
    assert 1 <= choice.n_splits <= max(1, -(-tokens // choice.block_tokens))
    if tokens == 131072:
        assert (choice.n_splits + 1) * lanes > 2 * 132
        assert choice.n_splits == 1 or lanes * choice.n_splits <= 2 * 132
    assert candidates(shape, 132)[0] == choice
    assert len(set(candidates(shape, 132))) == len(candidates(shape, 132))


def test_heads_of_quantised_streams_may_be_read_together() -> None:
    shape = replace(SHAPE, formats=("q4_0", "q8_0", "q4_0"), dims=(16, 32, 64), rows=4, lanes=64)

    def together(shape: DecodeShape) -> set[int]:
        return {choice.n_heads for choice in candidates(shape, 132)}

    assert together(shape) == {0, 4}
    assert together(replace(shape, rows=7)) == {0, 2}
    assert together(replace(shape, rows=1)) == {0, 4}
    assert rule(shape, 132).n_heads == 0, "what was measured"
    for other in (
        {"rows": 9},
        {"formats": ("q4_0", "bf16", "q4_0")},
        {"formats": ("q4_0", "q4_0")},
        {"in_fp32": True},
    ):
        assert together(replace(shape, **other)) == {0}
    read = [choice for choice in candidates(shape, 132) if choice.n_heads]
    assert max(choice.n_splits * shape.lanes // 4 for choice in read) <= max(table.COUNTED_PER_SM) * 132
    assert all(table.shared_bytes(shape, choice) < table.SHARED_BYTES for choice in read)
    # 256 bytes of codes and scales a token in two stages, queries, weights, as compiled for sm_90.
    q4_0 = replace(shape, formats=("q4_0",) * 3)
    assert table.shared_bytes(q4_0, DecodeConfig(block_tokens=128, n_stages=3, n_heads=4)) == 75776


def test_a_quantised_latent_may_be_read_by_words() -> None:
    def by_words(shape: DecodeShape) -> bool:
        return any(choice.n_heads == 1 for choice in candidates(shape, 132))

    assert by_words(SHAPE)
    assert rule(SHAPE, 132).n_heads == 0, "what was measured"
    for other in (
        {"formats": ("q4_0", "bf16")},
        {"formats": ("bf16", "bf16")},
        {"dims": (128, 96, 128)},
        {"dims": (32, 64, 32)},
        {"in_fp32": True},
    ):
        assert not by_words(replace(SHAPE, **other))
    read = [choice for choice in candidates(replace(SHAPE, rows=128), 132) if choice.n_heads]
    assert {choice.block_rows for choice in read} == {32}
    assert all(table.shared_bytes(SHAPE, choice) < table.SHARED_BYTES for choice in read)
    # A stage of 64 tokens, of 128 features in 4 bits and 64 in 8, scales of the former twice; queries; weights.
    assert table.shared_bytes(SHAPE, DecodeConfig(32, 64, n_stages=2, n_heads=1)) == 23808


def test_ways_in_cuda_are_timed_first_where_their_compiler_is() -> None:
    per_head = replace(SHAPE, formats=("q4_0", "q8_0", "q4_0"), dims=(16, 32, 64), rows=4, lanes=64)
    for shape, n_heads in ((SHAPE, 1), (per_head, 2), (replace(per_head, lanes=8), 2)):
        plain, ways = candidates(shape, 132), candidates(shape, 132, in_cuda=True)
        assert [way for way in ways if not way.in_cuda] == plain
        made = [way for way in ways if way.in_cuda]
        assert ways[0] == plain[0] == rule(shape, 132), "what was measured"
        early = made[: len(made) // 2]
        assert ways[1 : 1 + len(early)] == early
        assert all(way.early_join for way in early)
        assert ways[-len(early) :] == [replace(way, early_join=False) for way in early]
        assert {way.n_heads for way in made} == {n_heads}
        for way in made:
            assert way.in_cuda * (table.shared_bytes(shape, way) + 1024) <= table.SM_BYTES
            assert 2 <= way.n_splits <= 513
            # As many blocks as the processors have place for, a few times, and the tails'.
            blocks = (way.n_splits - 1) * shape.lanes // n_heads
            assert blocks <= 4 * way.in_cuda * 132
            assert way.in_triton == replace(
                DecodeConfig(), n_splits=way.n_splits, n_registers=168,
                block_rows=32 if n_heads == 1 else 16, n_heads=1 if n_heads == 1 else 4,
            )  # fmt: skip
    alone = {way.n_splits for way in made if way.in_cuda == 1}
    assert {34, 33} <= alone, "with the tails behind 132 blocks of four pairs of heads, and beside 128"
    nf4 = candidates(replace(per_head, formats=("q4_0", "q8_0", "nf4")), 132, in_cuda=True)
    assert {way.variant for way in nf4 if way.in_cuda} == {0, 2, 3}
    for other in ({"arch": "sm80"}, {"in_fp32": True}, {"formats": ("q4_0", "bf16")}):
        shape = replace(SHAPE, **other)
        assert candidates(shape, 132, in_cuda=True) == candidates(shape, 132)


def test_blocks_are_those_that_caches_store() -> None:
    stored = {kind.value: (block.elements, block.code_bytes, block.scale_bytes) for kind, block in BLOCKS.items()}
    assert stored == blocks.BLOCKS


def test_what_is_shipped_in_cuda_can_be_read_so_and_has_place() -> None:
    shipped = [(key, choice) for key, choice in table.measured().items() if choice.in_cuda]
    assert shipped
    for key, choice in shipped:
        arch, formats, dims, rows, lanes, tokens = key.split("|")
        widths = tuple(int(width) for width in dims.split("x"))
        shape = DecodeShape(
            arch, tuple(formats.split("+")), (widths[0], widths[1], widths[2]), int(rows), int(lanes), int(tokens)
        )  # fmt: skip
        assert arch == "sm90", key
        assert launch_configs.can_read(choice, shape.formats, shape.dims, len(shape.formats) - 1, shape.rows), key
        assert choice.in_cuda * (table.shared_bytes(shape, choice) + 1024) <= table.SM_BYTES, key


def test_what_was_measured_in_cuda_keeps_its_tails_split(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = DecodeConfig(32, 32, n_warps=8, n_stages=2, n_splits=17, n_heads=1, in_cuda=1)
    monkeypatch.setattr(table, "measured", lambda: {SHAPE.key: choice})
    far = choose(replace(SHAPE, lanes=9, tokens=524288), 132)
    assert far == replace(choice, n_splits=132 // 9 + 1)
    many = choose(replace(SHAPE, lanes=64, tokens=262144), 132)
    assert many == replace(choice, n_splits=132 // 64), "of few splits of a latent the last takes blocks too"


def test_long_tiles_are_timed_of_numbers_of_narrow_heads() -> None:
    narrow = replace(SHAPE, formats=("bf16",) * 3, dims=(16, 32, 64), rows=4)
    for shape, wide in (
        (narrow, True),
        (replace(narrow, dims=(16, 64, 64)), False),
        (replace(narrow, in_fp32=True), False),
    ):
        assert any(way.block_tokens == 256 for way in candidates(shape, 132)) == wide


@pytest.mark.parametrize("rows", [4, 32])
def test_no_way_has_more_splits_than_the_op_takes(rows: int) -> None:
    long = replace(SHAPE, lanes=1, rows=rows, tokens=2**20)
    ways = candidates(long, 132, in_cuda=True)
    assert any(way.in_cuda for way in ways)
    assert max(way.n_splits for way in ways) <= MAX_SPLITS


def test_a_refreshed_table_is_read_back(only: DecodeConfig) -> None:
    other = replace(SHAPE, lanes=64)
    rows = json.loads(written({other.key: DecodeConfig(n_splits=3)}))["choices"]
    assert {key: DecodeConfig(**row) for key, row in rows.items()} == {
        SHAPE.key: only,
        other.key: DecodeConfig(n_splits=3),
    }


def test_the_shipped_table_can_be_read() -> None:
    assert all(isinstance(choice, DecodeConfig) for choice in table.measured().values())


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        ({"block_row": 16}, "unexpected keyword argument 'block_row'"),
        ({"block_tokens": 48}, "block_tokens is 48, expected a power of two"),
        ({"n_splits": 0}, "n_splits is 0, expected a whole number of 1 or more"),
        ({"n_heads": 3}, "n_heads is 3, expected a power of two"),
        ({"n_registers": -1}, "n_registers is -1, expected a whole number of 0 or more"),
    ],
)
def test_a_tuned_table_of_another_version_is_refused(
    choice: dict[str, int], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = replace(SHAPE, arch="sm1").key  # which no table has
    monkeypatch.setattr(tuned, "decode_choices", lambda device: {key: choice})
    with pytest.raises(ConfigError, match=rf"tuned.json: .*{text}.*run caramba tune again"):
        kernels._adopt_tuned(torch.device("cpu"))
    assert key not in table.measured()


@pytest.mark.parametrize("in_fp32", [False, True])
@pytest.mark.parametrize("kind", ["bf16", "q8_0", "q4_0", "nf4"])
def test_the_rule_takes_no_more_shared_memory_than_a_program_can_have(kind: str, in_fp32: bool) -> None:
    widest = 128 if in_fp32 else 512  # of which there are kernels
    widths = [width for width in (16, 40, 64, 80, 128, 192, 256, 320, 512) if width <= widest]
    for formats, sem, geo, rows in itertools.product(((kind,) * 2, (kind,) * 3), widths, widths, (1, 17, 32, 64)):
        shape = DecodeShape("sm90", formats, (sem, geo, sem), rows, lanes=8, tokens=4096, in_fp32=in_fp32)
        assert table.shared_bytes(shape, rule(shape, 132)) <= table.SHARED_BYTES - table.LEEWAY, shape


def test_queries_in_float32_borrow_nothing_from_those_of_16_bits(only: DecodeConfig) -> None:
    shape = replace(SHAPE, in_fp32=True)
    assert shape.key == "sm90|fp32:q4_0+q8_0|128x64x128|32|8|32768"
    assert choose(shape, 132) == rule(shape, 132)
    sizes = replace(rule(shape, 132), n_splits=1)
    assert sizes == DecodeConfig(32, 32, n_warps=4, n_stages=2), "tiles take twice the memory"
    assert rule(SHAPE, 132).block_tokens == 128


@pytest.mark.parametrize("rows", [1, 2, 7, 8])
@pytest.mark.parametrize(
    ("formats", "dims"),
    [
        (("q8_0", "zeros", "q8_0"), (128, 16, 128)),
        (("q4_0", "zeros", "nf4"), (128, 16, 128)),
        (("nf4", "zeros", "nf4"), (64, 16, 64)),
        (("q4_0", "zeros", "q4_0"), (96, 16, 96)),
        (("q4_0", "q8_0", "q4_0"), (32, 32, 64)),
        (("q8_0", "q8_0", "q8_0"), (64, 64, 64)),
        (("nf4", "nf4", "nf4"), (64, 64, 64)),
    ],
)
def test_heads_of_which_nothing_was_measured_are_read_in_cuda_on_hopper(
    formats: tuple[str, ...], dims: tuple[int, int, int], rows: int
) -> None:
    shape = DecodeShape("sm90", formats, dims, rows, lanes=64, tokens=32768)
    assert not any(key.startswith(f"{shape.family}|") for key in table.measured())
    way = choose(shape, 132)
    assert way.in_cuda
    assert launch_configs.can_read(way, formats, dims, 8, rows)
    assert 132 < 32 * way.n_splits <= 132 * way.in_cuda + 32, "pairs of heads fill the processors, and one has the tail"
    for other in (
        replace(shape, arch="sm120"),
        replace(shape, in_fp32=True),
        replace(shape, rows=16),
        replace(shape, dims=(256, 16, 256)),
    ):
        assert choose(other, 132) == rule(other, 132)
    assert choose(shape, 132, in_cuda=False) == rule(shape, 132)
    assert any(other.in_cuda for other in candidates(shape, 132, in_cuda=True)), "and is tuned among such"


@pytest.mark.parametrize(("rows", "block_rows"), [(8, 16), (16, 16), (24, 32), (32, 32)])
@pytest.mark.parametrize("dims", [(64, 64, 64), (128, 128, 128), (256, 64, 256)])
@pytest.mark.parametrize(("lanes", "tokens", "n_splits"), [(1, 32768, 129), (8, 32768, 17), (64, 32768, 2)])
def test_latents_of_which_nothing_was_measured_are_read_in_cuda_on_hopper(
    dims: tuple[int, int, int], rows: int, block_rows: int, lanes: int, tokens: int, n_splits: int
) -> None:
    for formats in (("q8_0", "q8_0"), ("q4_0", "q8_0"), ("nf4", "nf4")):
        way = choose(DecodeShape("sm90", formats, dims, rows, lanes, tokens), 132)
        assert way.in_cuda
        assert (way.block_rows, way.n_splits) == (block_rows, n_splits)
        assert launch_configs.can_read(way, formats, dims, 1, rows)
