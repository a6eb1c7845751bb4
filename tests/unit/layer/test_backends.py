"""The order of attention backends that plan nothing: one of the process, whose blocks may overlap and nest."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from caramba.layer import score, unplanned_attention

CUDA = torch.device("cuda")  # nothing runs there: the flags are of every build
FLAGS = ("flash", "mem_efficient", "math", "cudnn")


def flags() -> dict[str, bool]:
    return {name: getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in FLAGS}


def test_overlapping_blocks_bring_back_what_was_before_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score, "TWO_WIDTHS", True)
    before, order = flags(), torch._C._get_sdp_priority_order()
    assert before["cudnn"]
    first, second = unplanned_attention(CUDA, 1), unplanned_attention(CUDA, 1)
    first.__enter__()  # in the order in which two threads may come and go
    inside = flags()
    second.__enter__()
    first.__exit__(None, None, None)
    assert flags() == inside == {**before, "cudnn": False}
    assert not score.TWO_WIDTHS
    second.__exit__(None, None, None)
    assert (flags(), torch._C._get_sdp_priority_order()) == (before, order)
    assert score.TWO_WIDTHS
    with pytest.raises(ValueError, match="of a forward"), unplanned_attention(CUDA, 1):
        raise ValueError("of a forward")
    assert flags() == before


def test_where_flash_and_efficient_are_off_nothing_changes() -> None:
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]):
        chosen = flags()
        with unplanned_attention(CUDA, 1):
            assert flags() == chosen
            assert chosen["cudnn"]
    with (
        sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]),
        unplanned_attention(CUDA, 1),
    ):
        assert flags() == dict.fromkeys(FLAGS, False) | {"mem_efficient": True}
