"""Training steps through caramba's module and Trainer against bare loops and transformers, in turns in one process.

Parts: `bf16` weights and states in bfloat16, `masters` with float32 masters, each at every shape; `fp8` products in
float8 against our own bfloat16 at the first shape: `--float8` through the Trainer, all of `--recipes` bare, with the
losses of their first steps (`rowwise/torchao` leaves the casts to torchao); `long` is the peak memory of one sequence
under full checkpointing; `profile` the kernels of our step at the first shape against roofs (step_profile.py), and
`profile_fp8` those of the step with `--float8`. Peers take their turns within a callback of our
Trainer, which is idle meanwhile: LlamaForCausalLM compiled, as it comes and with the attention backend that
caramba picks; a bare loop with joined products; and our own compiled model without Lightning, callbacks and monitors
(the overhead is the ratio to that one). Peers read the same batch again and again from the device; our side reads its
own data. Nobody clips unless --clip.

Usage on a GPU: python scripts/bench/run.py training [--parts bf16,masters,fp8,long,profile,profile_fp8]
    [--shapes 8x2048,2x8192] [--float8 rowwise] [--recipes rowwise,tensorwise] [--seconds 580] [--again]
    [--out docs/benchmarks/training.json]
The JSON is written after every part. Called again, it measures what is missing: parts of another commit or machine, or
that failed, are measured again, and all with --again.
`--size tiny --steps 2 --turns 2 --out FILE` shows on a CPU that the script works.
"""

from __future__ import annotations

import argparse
import functools
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from cases import step_profile
from cases.training_float8 import RECIPES, float8_of, recipes_of
from cases.training_sides import (
    LOSSES,
    Side,
    as_it_comes,
    bare_side,
    ours_bare,
    torchs_own_backends,
    transformers_side,
    without_masks,
)
from cases.training_turns import Traced, Turns, ratios_of, rows_of
from plots import draw_training
from record import Record

from caramba import kernels
from caramba.config.estimate import estimate_phase, model_cost
from caramba.config.surgery import attention_configs
from caramba.config.train import PhaseConfig
from caramba.distill import LanguageModelObjective
from caramba.errors import CarambaError
from caramba.experiment.planning.trial import RandomWindows
from caramba.launch.freeze import freeze
from caramba.layer import attention_backends
from caramba.model import build_with_random_weights
from caramba.runtime import (
    choose_attention,
    choose_precision,
    device_facts,
    families_of,
    plan,
    release_memory,
)
from caramba.train import PhaseData, fit
from caramba.train.throughput import device_peak

SIZES = {"1b": "llama32_1b", "tiny": "tiny"}
SHAPES = {"1b": "8x2048,2x8192", "tiny": "1x16,1x32"}
FLOAT8_WIDTH = {"1b": 1024, "tiny": 16}  # of the narrowest layer that takes part
LONG = {"1b": "65536", "tiny": "64"}
PART_S = {"bf16": 100.0, "masters": 75.0, "fp8": 120.0, "long": 40.0, "profile": 60.0, "profile_fp8": 60.0}
"""What a part takes at least, compilation included: it is not begun with less left."""
KEYS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "masters": {"master_weights": True},
}
THEIRS, THEIRS_OUR_WAY, BARE, OURS_BARE = (
    "transformers",
    "transformers, our attention backend",
    "bare loop",
    "our model bare",
)
SIDES = {
    "bf16": (THEIRS, THEIRS_OUR_WAY, BARE, OURS_BARE),
    "masters": (BARE, OURS_BARE),  # whose target is a bare loop with masters
    "fp8": (OURS_BARE,),  # and every recipe bare
}
FLOAT8_TURNS = 4
MUST = {BARE: 0.98, OURS_BARE: 0.98}
MUST_THEIRS = {2048: 1.15, 8192: 1.5}
MUST_SPARE = 0.3


class Bench:
    """One model on one device: runs phases of it through `fit`."""

    def __init__(self, words: Any) -> None:
        self.words = words
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.ops = kernels.load(self.device)
        self.manifest = freeze(
            [f"model={SIZES[words.size]}", "train=pretrain", "settings.instrument=none"]
        ).manifest
        self.spec = self.manifest.model
        self.compiled = self.device.type == "cuda" or words.compile
        self.choice = choose_attention(self.device, families_of(attention_configs(self.spec.topology)))
        self.torchs_own = torchs_own_backends(self.device)

    def phase(self, batch: int, length: int, **keys: Any) -> PhaseConfig:
        """A phase with weights in bfloat16 that no bench comes to the end of."""
        given = {"batch_size": batch, "block_size": length, "compile_model": self.compiled, **keys}
        base = {"phase": "pretrain", "trains": "student", "steps": 100_000, "lr": 1e-5, "scheduler": "none"}
        more = {"max_grad_norm": self.words.clip, "float8_min_width": FLOAT8_WIDTH[self.words.size]}
        return PhaseConfig.model_validate(base | more | {"dtype": "bfloat16", "use_amp": False} | given)

    def train(self, phase: PhaseConfig, callback: pl.Callback) -> Any:
        """Train a fresh model until the callback ends it."""
        made = plan(phase, device="auto", kernels="auto", ops=self.ops, name="bench", attention=self.choice)
        windows = RandomWindows(
            64 * int(phase.batch_size), phase.block_size, self.spec.embedder.vocab_size, False
        )
        flops = estimate_phase(phase, model_cost(self.spec), None).flops_per_token
        with tempfile.TemporaryDirectory() as folder:
            return fit(
                LanguageModelObjective(build_with_random_weights(self.spec, self.device).train()),
                phase,
                PhaseData(windows, windows, seed=0, start=0),
                made,
                manifest=self.manifest,
                run_dir=Path(folder),
                save_final=lambda: None,
                flops_per_token=flops,
                callbacks=[callback],
            )

    def sides(self, part: str, batch: int, length: int) -> dict[str, Side]:
        """The peers of a part; float8 has our own model alone, in bfloat16 and by every recipe."""
        drawn = torch.randint(self.spec.embedder.vocab_size, (batch, length + 1), device=self.device)
        x, y = drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
        options: dict[str, Any] = {"has_masters": part == "masters", "clip": self.words.clip}
        own = as_it_comes(self.torchs_own)
        made: dict[str, Callable[[], Side]] = {
            THEIRS: lambda: transformers_side(self.spec, x, self.compiled, surroundings=own, **options),
            THEIRS_OUR_WAY: lambda: transformers_side(
                self.spec, x, self.compiled, surroundings=without_masks, **options
            ),
            BARE: lambda: bare_side(self.spec, x, y, self.compiled, **options),
            OURS_BARE: lambda: ours_bare(self.spec, x, y, self.compiled, **options),
        }
        sides = {name: made[name]() for name in SIDES[part]}
        for name, recipe in recipes_of(self.words.recipes, self.device) if part == "fp8" else ():
            least = FLOAT8_WIDTH[self.words.size]
            sides[name] = ours_bare(
                self.spec, x, y, self.compiled, float8=recipe, least_width=least, **options
            )
        return sides

    def beside(self, part: str, batch: int, length: int, deadline: float) -> dict[str, Any]:
        """Measure our step and its peers at one shape."""
        keys = {"float8": self.words.float8} if part == "fp8" else KEYS[part]
        phase = self.phase(batch, length, **keys)
        choose_precision(phase, self.device)  # refused before anything is made
        sides = self.sides(part, batch, length)
        turns = Turns(
            sides,
            self.device,
            steps=self.words.steps,
            turns=min(self.words.turns, FLOAT8_TURNS) if part == "fp8" else self.words.turns,
            deadline=deadline,
            tokens=batch * length,
        )
        with attention_backends(self.device, self.choice):
            self.train(phase, turns)
        peak = device_peak(self.device, "bfloat16", None)
        ratios = ratios_of(turns)
        about = float8_of(turns, sides, OURS_BARE, self.words.float8) if part == "fp8" else {}
        return {
            "part": part,
            "batch": batch,
            "tokens": length,
            "steps_a_turn": self.words.steps,
            "rows": rows_of(turns, self.flops_per_token(length), peak),
            "ratios": ratios,
            "musts": musts_of(part, length, ratios),
            "transformers_attention": [backend.name for backend in self.torchs_own],
            "bare_optimizer": "ours",
            **about,
        }

    def flops_per_token(self, length: int) -> float:
        """6 N + 6 L M S: causal attention counted once."""
        layers = len(attention_configs(self.spec.topology))
        return 6 * model_cost(self.spec).params + 6 * layers * self.spec.embedder.d_model * length

    def long(self, length: int) -> dict[str, Any]:
        """Peak memory of a step on one long sequence, with all of a block computed again in backward."""
        stop = Turns({}, self.device, steps=2, turns=1, deadline=0.0, tokens=length)
        with attention_backends(self.device, self.choice):
            outcome = self.train(self.phase(1, length, activation_checkpointing="full"), stop)
        found = {key: value for key, value in outcome.measured.items() if key.startswith("peak_")}
        total = torch.cuda.get_device_properties(0).total_memory if self.device.type == "cuda" else None
        reserved = found.get("peak_reserved_bytes")
        spare = 1 - reserved / total if total and reserved else None
        must = {"over": "memory that is spare", "limit": MUST_SPARE, "got": spare}
        return {
            "part": "long",
            "batch": 1,
            "tokens": length,
            "spare": spare,
            "step_s": stop.seconds["caramba"],
            "musts": [must] if spare is not None and length <= 65536 else [],
            **found,
        }

    def profile(self, part: str, batch: int, length: int) -> dict[str, Any]:
        """Trace steps of ours and compare their kernels with the roofs; the report is next to the JSON."""
        trace = self.words.trace or Path(tempfile.gettempdir()) / f"training_{batch}x{length}.trace.json.gz"
        if is_float8 := part == "profile_fp8":
            trace = trace.with_name(f"float8_{trace.name}")
        phase = self.phase(batch, length, **({"float8": self.words.float8} if is_float8 else {}))
        with attention_backends(self.device, self.choice):
            self.train(phase, traced := Traced(trace, self.device))
        found = step_profile.report(
            trace,
            Traced.STEPS,
            traced.step_ms,
            step_profile.roofs_of(self.device, model_cost(self.spec).params),
            self.words.out.with_name(f"{self.words.out.stem}_{part}.json"),
            {
                "made_by": f"python scripts/bench/run.py training --parts {part}",
                "float8": phase.float8,
                "machine": device_facts(self.device),
                "model": SIZES[self.words.size],
                "batch": batch,
                "tokens": length,
                "commit": head_commit(),
            },
        )
        return {"part": part, "batch": batch, "tokens": length, **found}


def musts_of(part: str, length: int, ratios: dict[str, float]) -> list[dict[str, Any]]:
    """Return what the ratios of a part are compared with; float8 has its own, over bfloat16."""
    if part == "fp8":
        return []
    limits = MUST | {THEIRS: MUST_THEIRS.get(length)}
    return [
        {"over": name, "limit": limit, "got": ratios[name]}
        for name, limit in limits.items()
        if limit is not None and name in ratios
    ]


def head_commit() -> str:
    """Return the commit that is checked out."""
    return subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()


def is_measured(
    known: dict[str, Any] | None, commit: str, machine: dict[str, Any], clip: float | None
) -> bool:
    """Whether a part has figures of this commit, machine and clipping."""
    if known is None or "skipped" in known:
        return False
    return (known.get("commit"), known.get("gpu"), known.get("clip")) == (commit, machine["name"], clip)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", default="1b", choices=tuple(SIZES))
    parser.add_argument("--parts", default="bf16,masters,fp8,long,profile")
    parser.add_argument("--shapes", help="BATCHxTOKENS, several with commas")
    parser.add_argument("--steps", type=int, default=10, help="of a side's turn")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument(
        "--float8", default="rowwise", help="recipe of `fp8` and `profile_fp8` through the Trainer"
    )
    parser.add_argument(
        "--recipes", default=RECIPES, help="of `fp8` bare; NAME/torchao leaves casts to torchao"
    )
    parser.add_argument("--clip", type=float, help="clip all sides by this norm")
    parser.add_argument("--long-tokens", help="lengths of `long`, several with commas")
    parser.add_argument("--seconds", type=float, default=580.0, help="after which no further part is begun")
    parser.add_argument("--again", action="store_true", help="measure what is in the file already, too")
    parser.add_argument("--trace", type=Path, help="where `profile` keeps its trace, .json or .json.gz")
    parser.add_argument("--compile", action="store_true", help="compile on a CPU too")


def run(words: argparse.Namespace, record: Record) -> int | None:
    deadline = time.monotonic() + words.seconds
    bench, commit = Bench(words), head_commit()
    machine = device_facts(bench.device)
    result: dict[str, Any] = record.read() or {"parts": {}}
    result |= {
        **record.head(machine),
        "model": SIZES[words.size],
        "commit": commit,
    }
    failed = 0
    for name, part, run in todo_of(bench, words, deadline):
        left, needed = deadline - time.monotonic(), 0.0 if words.size == "tiny" else PART_S[part]
        if not words.again and is_measured(result["parts"].get(name), commit, machine, words.clip):
            print(f"{name}: measured already", flush=True)
            continue
        if left < needed:
            print(f"{name}: not begun, {left:.0f} s are left and it takes {needed:.0f}", flush=True)
            continue
        print(f"{name}: begun with {left:.0f} s left", flush=True)
        began = time.monotonic()
        try:
            found: dict[str, Any] = run()
        except (CarambaError, RuntimeError) as error:  # memory, a peer, a compiler: the other parts continue
            found, failed = {"skipped": f"{type(error).__name__}: {error}"[:500]}, failed + 1
        about = {
            "attention": bench.choice.order,
            "clip": words.clip,
            "commit": commit,
            "gpu": machine["name"],
        }
        result["parts"][name] = found | {"seconds": time.monotonic() - began} | about
        if (image := draw_training(result)) is not None:
            result["plot"] = record.write_plot(image)
        record.write_data(result)
        torch.compiler.reset()  # whose graphs hold the sides
        release_memory()
        print(f"{name} ({result['parts'][name]['seconds']:.0f} s): {said(found)}", flush=True)
    return 1 if failed else 0


def todo_of(bench: Bench, words: Any, deadline: float) -> list[tuple[str, str, Callable[[], dict[str, Any]]]]:
    """Return the name, part and measurement of everything that was asked for, in order."""
    shapes = [tuple(map(int, text.split("x"))) for text in (words.shapes or SHAPES[words.size]).split(",")]
    todo: list[tuple[str, str, Callable[[], dict[str, Any]]]] = []
    for part in words.parts.split(","):
        if part == "long":
            lengths = map(int, (words.long_tokens or LONG[words.size]).split(","))
            todo += [
                (f"long 1x{length}", part, lambda length=length: bench.long(length)) for length in lengths
            ]
        elif part in ("profile", "profile_fp8"):
            batch, length = shapes[0]
            run = functools.partial(bench.profile, part, batch, length)
            todo.append((f"{part} {batch}x{length}", part, run))
        elif part in SIDES:
            for batch, length in shapes[:1] if part == "fp8" else shapes:
                run = functools.partial(bench.beside, part, batch, length, deadline)
                todo.append((f"{part} {batch}x{length}", part, run))
        else:
            raise SystemExit(f"--parts: got {part!r}, expected some of {', '.join(PART_S)}")
    return todo


def said(found: dict[str, Any]) -> str:
    if "lines" in found:
        return "\n  " + "\n  ".join(found["lines"])
    if "rows" not in found:
        return ", ".join(f"{key} {value}" for key, value in found.items() if key != "musts")
    lines = []
    for name, row in found["rows"].items():
        mfu = "" if row["mfu"] is None else f", {row['mfu']:.1%} MFU"
        peak = "" if row["peak_bytes"] is None else f", {row['peak_bytes'] / 2**30:.1f} GiB"
        ratio = f", ours is {found['ratios'][name]:.3f}x" if name in found["ratios"] else ""
        over = found.get("over_bf16", {}).get(name)
        ratio += f", {over:.3f}x bf16" if over else ""
        change = found.get("loss_change", {}).get(name)
        ratio += f", loss after {LOSSES} steps {change:+.4f}" if change else ""
        lines.append(f"\n  {name}: {row['tokens_per_s']:,.0f} tokens/s{mfu}{peak}{ratio}")
    for must in found["musts"]:
        verdict = "met" if must["got"] >= must["limit"] else "MISSED"
        by = f" by {must['by']}" if "by" in must else ""
        lines.append(f"\n  {must['got']:.3f}x {must['over']}{by}, must {must['limit']}x: {verdict}")
    return "".join(lines)
