"""The server over captured steps on a CUDA device: many clients, each with the text that is its own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

pytest.importorskip("starlette", reason="the extra `serve`")

import httpx

from caramba.data import ByteTokenizer
from caramba.infer import generate
from tests.unit.serve.served import NAME, byte_model, events, service_of, serving

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_many_clients_get_each_their_own_text_from_captured_steps() -> None:
    settings: dict[str, Any] = {"temperature": 0.9, "top_p": 0.9}
    lengths: dict[str, Any] = {"max_new_tokens": 24, "compiled": False}
    prompts = [f"one of many clients, {index}" for index in range(32)]
    model = byte_model().cuda()
    rows = generate(model, prompts, ByteTokenizer(), seeds=range(32), **lengths, **settings)
    service = service_of(model, n_slots=8, prefix_cache_bytes=1 << 20)
    with serving(service) as address, httpx.Client(base_url=address, timeout=60) as client:

        def ask(index: int) -> str:
            body = {"model": NAME, "prompt": prompts[index], "max_tokens": 24, "seed": index, "stream": True}
            chunks = events(client.post("/v1/completions", json=body | settings))
            return "".join(chunk["choices"][0]["text"] for chunk in chunks)

        with ThreadPoolExecutor(16) as threads:
            assert list(threads.map(ask, range(32))) == [row.text for row in rows]
    stats = service.engine.stats()
    assert (stats.decode, stats.failed, stats.finished) == ("graph", 0, 32)
