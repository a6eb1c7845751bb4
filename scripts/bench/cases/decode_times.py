"""Decode steps as replays of a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def capture(call: Callable[[], Any], turns: int) -> Callable[[], Any]:
    """Return the replay of a graph of so many calls."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(turns):
            call()
    graph.replay()
    torch.cuda.synchronize()
    return graph.replay
