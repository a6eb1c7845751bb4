"""Decode on one GPU and on two that share every layer, as the host drives it, captured, and compiled. Writes JSON.

Usage on a machine with two GPUs: python scripts/bench/run.py shared_decode [--out docs/benchmarks/shared_decode.json]
`--size tiny --forms false` shows on a CPU that the script works. Rows: median of `--repeats` generations, prefill and
step separately; `speed_up` is two ranks against one device in the same form.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from cases.decode_steps import FORMS
from models import model_of, prompts_of
from record import Record

from caramba import kernels
from caramba.evaluation.ladder_ranks import SharedRung, time_on_ranks
from caramba.infer import Generator
from caramba.model.identity import model_bytes

OPTIONS = """--size=1b|tiny --forms=false,graph,true --layouts=gqa,latent --batch=1 --prompt=512 --new=128
    --repeats=5"""


def run(words: argparse.Namespace, record: Record) -> None:
    kernels.load(record.device)
    record.start(size=words.size, batch=words.batch, prompt=words.prompt, new=words.new)
    for layout in words.layouts:
        model = model_of(words.size, layout, record.device)
        prompts = prompts_of(model, words.batch, words.prompt)
        for form in words.forms:
            keys = {"max_new_tokens": words.new, "temperature": 0.0, "read_every": 64}
            keys |= {"compiled": FORMS[form]}
            alone = Generator(model, None, **keys)
            times: list[tuple[float, float]] = []
            for repeat in range(words.repeats + 1):
                alone.generate(prompts)
                stats = alone.stats
                times += [(stats.prefill_s, stats.decode_s / stats.steps)] if repeat else []
            one = summary(times) | {"ran": alone.stats.decode, "weight_bytes": model_bytes(model)}
            dtype = str(model.embedder.token.weight.dtype).removeprefix("torch.")
            rung = SharedRung(record.device.type, dtype, "auto", False, prompts, 1, words.repeats, keys)
            found = time_on_ranks(model, rung)
            two = summary(found.timed) | {"ran": found.ran, "weight_bytes": found.weight_bytes}
            speed_up = one["step_ms"] / two["step_ms"]
            record.add({"layout": layout, "compiled": form, "one": one, "two": two, "speed_up": speed_up})


def summary(times: list[tuple[float, float]]) -> dict[str, Any]:
    """Return the medians of prefill and step times, in ms, and all step times."""
    prefill, steps = ([1000 * pair[index] for pair in times] for index in (0, 1))
    medians = {"prefill_ms": statistics.median(prefill), "step_ms": statistics.median(steps)}
    return medians | {"all_step_ms": steps}
