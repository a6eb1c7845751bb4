"""Decode on one GPU and on two that share every layer, as the host drives it, captured, and compiled. Writes JSON.

Usage on a machine with two GPUs: python scripts/bench/run.py shared_decode [--out docs/benchmarks/shared_decode.json]
`--size tiny --forms false` shows on a CPU that the script works. Rows: median of `--repeats` generations, prefill and
step separately; `speed_up` is two ranks against one device in the same form.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
from cases.decode_steps import FORMS, LAYOUTS
from models import SIZES, model_of
from record import Record, machine_facts

from caramba import kernels
from caramba.evaluation.ladder_ranks import SharedRung, time_on_ranks
from caramba.infer import Generator
from caramba.metrics import model_bytes


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", default="1b", choices=tuple(SIZES))
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)


def run(words: argparse.Namespace, record: Record) -> int | None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kernels.load(device)
    rows: list[dict[str, Any]] = []
    for layout in words.layouts.split(","):
        model = model_of(words.size, layout, device)
        prompts = torch.randint(SIZES[words.size][-1], (words.batch, words.prompt)).tolist()
        for form in words.forms.split(","):
            keys = {
                "max_new_tokens": words.new,
                "temperature": 0.0,
                "read_every": 64,
                "compiled": FORMS[form],
            }
            alone = Generator(model, None, **keys)
            times: list[tuple[float, float]] = []
            for repeat in range(words.repeats + 1):
                alone.generate(prompts)
                stats = alone.stats
                times += [(stats.prefill_s, stats.decode_s / stats.steps)] if repeat else []
            one = summary(times) | {"ran": alone.stats.decode, "weight_bytes": model_bytes(model)}
            dtype = str(model.embedder.token.weight.dtype).removeprefix("torch.")
            rung = SharedRung(device.type, dtype, "auto", False, prompts, 1, words.repeats, keys)
            found = time_on_ranks(model, rung)
            two = summary(found.timed) | {"ran": found.ran, "weight_bytes": found.weight_bytes}
            speed_up = one["step_ms"] / two["step_ms"]
            rows.append({"layout": layout, "compiled": form, "one": one, "two": two, "speed_up": speed_up})
            print(
                f"{layout} compiled={form}: {one['step_ms']:.3f} ms, two ranks {two['step_ms']:.3f} ms, {speed_up:.2f}x"
            )
    shape = {"size": words.size, "batch": words.batch, "prompt": words.prompt, "new": words.new}
    record.write(machine_facts(device), **shape, rows=rows)
    return 0


def summary(times: list[tuple[float, float]]) -> dict[str, Any]:
    """Return the medians of prefill and step times, in ms, and all step times."""
    prefill, steps = ([1000 * pair[index] for pair in times] for index in (0, 1))
    return {
        "prefill_ms": statistics.median(prefill),
        "step_ms": statistics.median(steps),
        "all_step_ms": steps,
    }
