"""The log-probabilities of an answer are written piece by piece, to the text that one call would write."""

from __future__ import annotations

import asyncio
import json
import math

import pytest

from caramba.config.generate import GenerateConfig
from caramba.infer.engine import Engine
from caramba.serve.metrics import Metrics
from caramba.serve.reply import LogprobText
from caramba.serve.running import MOST_EVENTS, ActiveRequest, Alternative, EventQueue, SampledToken
from caramba.serve.schema import Usage
from caramba.serve.shapes import ChatShape, TextShape
from tests.unit.serve.served import subword_model

USAGE = Usage.of(3, 7)
TEXTS = ("a", '"', '"logprobs":null', "\\", "\ufffd", "é\n")


def tokens(n_alternatives: int) -> list[SampledToken]:
    """Tokens whose texts need escapes; one has the log-probability of what cannot come."""
    alternatives = tuple(Alternative(i, TEXTS[i % 6], -0.1 * i) for i in range(n_alternatives))
    values = (-0.5, -math.inf, -1e-17, -123.456, -2.0, -3.0)
    return [
        SampledToken(text, value, i, alternatives, i) for i, (text, value) in enumerate(zip(TEXTS, values, strict=True))
    ]


@pytest.mark.parametrize("n_alternatives", [0, 3])
@pytest.mark.parametrize("size", [1, 4, 6])
@pytest.mark.parametrize("text", ["", 'said {"logprobs":null} twice: "logprobs":null'])
def test_pieces_give_the_json_of_the_whole(n_alternatives: int, size: int, text: str) -> None:
    for shape in (ChatShape("m", with_logprobs=True), TextShape("m", True, n_alternatives)):
        sampled = tokens(n_alternatives)
        written = LogprobText()
        for at in range(0, len(sampled), size):
            some = shape.logprobs(sampled[at : at + size])
            assert some is not None
            written.add(some)
        answer = shape.whole(text, "stop", USAGE)
        whole = shape.logprobs(sampled)
        assert whole is not None
        expected = json.loads(answer.model_dump_json())
        expected["choices"][0]["logprobs"] = json.loads(whole.model_dump_json())
        assert json.loads(written.put_into(answer)) == expected


def test_an_answer_whose_request_asked_for_none_has_none() -> None:
    answer = ChatShape("m", with_logprobs=False).whole('"logprobs":null', "stop", USAGE)
    assert LogprobText().put_into(answer) == answer.model_dump_json().encode()


def test_tokens_of_a_slow_client_come_in_pieces_between_which_others_run() -> None:
    model, tokenizer = subword_model()
    n_new = 3 * MOST_EVENTS
    config = GenerateConfig(max_new_tokens=n_new, temperature=0.0)

    async def read(engine: Engine) -> tuple[list[int], int]:
        turns, queue = 0, EventQueue(asyncio.get_running_loop())
        metrics = Metrics(engine.stats)
        running = ActiveRequest(engine, tokenizer, lambda _: "a", metrics, queue, [1], config)
        while running.n_new < n_new:
            await asyncio.sleep(0.01)

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        sizes = [len(piece.sampled) async for piece in running.stream_text()]
        task.cancel()
        return sizes, turns

    with Engine(model, tokenizer=tokenizer, n_slots=1, max_len=n_new + 8) as engine:
        sizes, turns = asyncio.run(asyncio.wait_for(read(engine), 60))
    assert max(sizes) == MOST_EVENTS
    assert sum(sizes) == n_new
    assert turns >= 3
