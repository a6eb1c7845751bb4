"""A tiny model of bytes behind a real server on a free port, in a thread."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from caramba.config.model import ModelSpec
from caramba.data import ByteTokenizer, Tokenizer
from caramba.data.tokenizer import train_bpe
from caramba.infer.engine import Engine
from caramba.model import Model, build_model
from caramba.serve.connections import BACKLOG
from caramba.serve.server import Server, bind
from caramba.serve.service import Limits, Service
from tests.unit.model.model_specs import transformer

if TYPE_CHECKING:
    import httpx

NAME = "tiny/bytes"
CONTEXT = 1024


def byte_model(context: int | None = None) -> Model:
    """A model that is sharp enough that its choices do not hang on rounding, and says bytes of text."""
    values = transformer("gqa_scaled").model_dump()
    values["embedder"] |= {"vocab_size": 257, "max_positions": context}
    model = build_model(ModelSpec.model_validate(values), seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    return model.eval()


def subword_model() -> tuple[Model, Tokenizer]:
    """A tiny model of subwords and its tokenizer."""
    tokenizer = train_bpe(["the quick brown fox jumps over the lazy dog abc abc ab\n"] * 4, 300)
    values = transformer("gqa_scaled").model_dump()
    values["embedder"] |= {"vocab_size": tokenizer.vocab_size, "max_positions": None}
    return build_model(ModelSpec.model_validate(values), seed=0).eval(), tokenizer


def service_of(
    model: Model,
    *,
    tokenizer: Tokenizer | None = None,
    template: str | None = None,
    timeout_s: float = 60.0,
    max_tokens: int = CONTEXT - 16,
    request_bytes: int = 4096,
    **values: int,
) -> Service:
    tokenizer = tokenizer or ByteTokenizer()
    engine = Engine(model, tokenizer=tokenizer, **({"n_slots": 4, "max_len": CONTEXT} | values))
    limits = Limits(max_tokens=max_tokens, request_bytes=request_bytes, timeout_s=timeout_s)
    return Service(engine, tokenizer, NAME, limits, template=template)


@contextlib.contextmanager
def serving(service: Service, key: str | None = None) -> Iterator[str]:
    """Serve until the block ends; yield the address."""
    listener = bind("127.0.0.1", 0)
    listener.listen(BACKLOG)
    server = Server(service, api_key=key)
    with service.engine, listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(30)
    assert not thread.is_alive()


def eventually(is_so, seconds: float = 60.0) -> bool:
    limit = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > limit:
            return False
        time.sleep(0.005)
    return True


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the chunks of a whole stream."""
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
