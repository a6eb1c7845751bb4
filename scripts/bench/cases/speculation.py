"""Speculation against the fastest plain decode of a trained model, by method and batch. Writes JSON.

Usage on a GPU: python scripts/bench/run.py speculation RUN|DIR --text FILE... [--batches 1,8]
Prompts are cut from the texts, evenly spaced; code is what lookup is good at. All of them run at every batch size, one
batch after the other, and a figure is of their sum: of one prompt it would be that of the text that happens to follow.
Random weights say nothing here: how many drafts are accepted is the model's.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from cases.decode_steps import FORMS
from record import Record
from registry import UsageError
from timing import interleave

from caramba.infer import Generator, SpeculativeGenerator, load_model
from caramba.infer.model_bundle import need_tokenizer
from caramba.infer.verification import SpeculativeStats


def prompts_of(texts: list[str], encode: Any, n: int, length: int) -> list[list[int]]:
    """Return n prompts of `length` tokens, evenly spaced over the texts."""
    ids = [token for text in texts for token in encode(text)]
    step = max(1, (len(ids) - length) // n)
    found = [ids[at : at + length] for at in range(0, n * step, step)]
    if any(len(prompt) < length for prompt in found):
        raise UsageError(
            f"the texts have {len(ids)} tokens, {n} prompts of {length} need more; give longer ones"
        )
    return found


@dataclass
class Decoded:
    """Sums of the decode of some batches; a step of speculation is a round."""

    tokens: int = 0
    seconds: float = 0.0
    steps: int = 0
    row_steps: int = 0
    drafted: int = 0
    accepted: int = 0

    @classmethod
    def of(cls, generator: Generator, prompts: list[list[int]], batch: int) -> Decoded:
        """Continue all prompts, `batch` at a time."""
        total = cls()
        for start in range(0, len(prompts), batch):
            generator.generate(prompts[start : start + batch])
            stats = generator.stats
            total.tokens += stats.new_tokens
            total.seconds += stats.decode_s
            total.steps += stats.steps
            if isinstance(stats, SpeculativeStats):
                total.row_steps += stats.row_steps
                total.drafted += stats.drafted
                total.accepted += stats.accepted
        return total

    @property
    def tok_s(self) -> float:
        """New tokens per second of the decode alone."""
        return self.tokens / self.seconds

    @property
    def step_ms(self) -> float:
        """Time per step, whatever it takes around its forward."""
        return 1e3 * self.seconds / self.steps


OPTIONS = """run --text=* --batches=1,8 --forms=false,graph,true --methods=lookup,early_exit --spec-k=7 --prompts=8
    --prompt=512 --new=256 --temperature=0.0 --repeats=3"""


def run(words: argparse.Namespace, record: Record) -> None:
    opened = load_model(words.run, device=record.device)
    model = opened.model.to(torch.bfloat16) if record.device.type == "cuda" else opened.model
    texts = [Path(file).read_text(encoding="utf-8") for file in words.text]
    encode = need_tokenizer(opened, "bench").encode
    options: dict[str, Any] = {"max_new_tokens": words.new, "temperature": words.temperature}
    generators: dict[str, Generator] = {
        f"plain, compiled={form}": Generator(model, None, compiled=FORMS[form], **options)
        for form in words.forms
    }
    options |= {"spec_k": words.spec_k}
    for method, form in itertools.product(words.methods, words.forms):
        generators[f"{method}, compiled={form}"] = SpeculativeGenerator(
            model, None, spec_method=method, compiled=FORMS[form], **options
        )
    prompts = prompts_of(texts, encode, words.prompts, words.prompt)
    names = ("run", "prompts", "prompt", "new", "temperature", "spec_k")
    record.start(settings={key: getattr(words, key) for key in names})
    for batch in words.batches:
        if len(prompts) % batch:
            raise UsageError(f"{len(prompts)} prompts make no whole batches of {batch}; set --prompts")
        sides: dict[str, Any] = {
            name: lambda one=one: Decoded.of(one, prompts, batch)  # noqa: B023 - called in this turn
            for name, one in generators.items()
        }
        runs: dict[str, list[Any]] = interleave(sides, repeats=words.repeats, warm=1)  # captures and compiles
        speeds = {name: statistics.median(one.tok_s for one in found) for name, found in runs.items()}
        step_ms = {name: statistics.median(one.step_ms for one in found) for name, found in runs.items()}
        best = max((name for name in speeds if name.startswith("plain")), key=lambda name: speeds[name])
        for name, generator in generators.items():
            row: dict[str, Any] = {"batch": batch, "way": name, "tok_s": speeds[name]}
            row |= {"against_best_plain": speeds[name] / speeds[best], "step_ms": step_ms[name]}
            row |= {"step_against_best_plain": step_ms[name] / step_ms[best]}
            row |= {"all": [one.tok_s for one in runs[name]], "ran": generator.stats.decode}
            if isinstance(generator, SpeculativeGenerator):
                last = runs[name][-1]
                row["acceptance_rate"] = last.accepted / last.drafted if last.drafted else 0.0
                row["tokens_per_step"] = last.tokens / last.row_steps
                row["drafted_per_step"] = last.drafted / last.row_steps
            record.add(row)
