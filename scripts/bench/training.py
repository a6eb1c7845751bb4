"""Training steps through caramba's module and Trainer beside three bare loops, in turns in one process. Writes JSON.

Parts: `bf16` weights and states in bfloat16, `masters` with float32 masters, `fp8` products in float8 beside our own
bfloat16, each at every shape; `long` is the peak memory of one sequence under full checkpointing. Peers take their
turns within a callback of our Trainer, which stands still meanwhile: LlamaForCausalLM compiled, a bare loop with joined
products, and our own compiled model without Lightning, callbacks and monitors (the overhead is the ratio to that one).
Peers read the same batch again and again from the device; our side reads its own data. Nobody clips unless --clip.

Usage on a GPU: python scripts/bench/training.py [--parts bf16,masters,fp8,long] [--shapes 8x2048,2x8192]
    [--seconds 580] [--profile FILE] [--out docs/benchmarks/training.json]
`--size tiny --steps 2 --turns 2` shows on a CPU that the script works. Parts of another call stay in the file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from training_sides import Side, bare_side, ours_bare, transformers_side

from caramba import kernels
from caramba.config.surgery import attention_configs
from caramba.config.train import PhaseConfig
from caramba.cost import estimate_phase, model_cost
from caramba.distill import LanguageModelObjective
from caramba.errors import CarambaError, OutOfMemory
from caramba.launch.freeze import freeze
from caramba.layer import attention_backends
from caramba.model import build_stand_in
from caramba.monitor import device_peak
from caramba.monitor.profile import as_text, op_times
from caramba.planning.trial import RandomWindows
from caramba.runs.files import write_json, write_whole
from caramba.runtime import choose_attention, device_facts, families_of, plan, release_memory, synchronize
from caramba.train import PhaseData, fit

SIZES = {"1b": "llama32_1b", "tiny": "tiny"}
SHAPES = {"1b": "8x2048,2x8192", "tiny": "1x16,1x32"}
LONG = {"1b": 65536, "tiny": 64}
PART_S = 75.0  # what a part takes at least, compilation included: later ones are not begun with less left
WARM_UP = 5
KEYS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "masters": {"master_weights": True},
    "fp8": {"float8": "rowwise"},
}
BEST = ("transformers", "bare loop", "our model bare")


class Turns(pl.Callback):
    """Times blocks of our steps, and between two of them a block of every other side. Ends training after `turns`."""

    def __init__(self, sides: dict[str, Side], words: Any, device: torch.device, deadline: float) -> None:
        self.sides, self.device, self.deadline = sides, device, deadline
        self.steps, self.turns, self.profile = words.steps, words.turns, words.profile
        self.seconds: dict[str, list[float]] = {name: [] for name in ("caramba", *sides)}
        self.peaks: dict[str, int] = {}
        self.is_warm, self.taken, self.clock = False, 0, 0.0

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.taken += 1
        if self.taken < (self.steps if self.is_warm else WARM_UP):
            return
        synchronize(self.device)
        if self.is_warm:
            self.seconds["caramba"].append((time.perf_counter() - self.clock) / self.taken)
            self._note_peak("caramba", self._held_by_others())
        self._run_others(trainer)
        done = len(self.seconds["caramba"])
        if done >= self.turns or (done >= 2 and time.monotonic() > self.deadline):
            trainer.should_stop = True
        self.taken = 0
        self._reset_peak()
        synchronize(self.device)
        self.clock = time.perf_counter()

    def _run_others(self, trainer: pl.Trainer) -> None:
        for parameter in trainer.lightning_module.parameters():
            assert parameter.grad is None  # what a peer's peak would hold
        with torch.enable_grad():
            for name, side in self.sides.items():
                for _ in range(0 if self.is_warm else WARM_UP):
                    side.step()
                if not self.is_warm:
                    continue
                self._reset_peak()
                synchronize(self.device)
                before, began = self._allocated(), time.perf_counter()
                for _ in range(self.steps):
                    side.step()
                synchronize(self.device)
                self.seconds[name].append((time.perf_counter() - began) / self.steps)
                self._note_peak(name, before - side.held_bytes())
        self.is_warm = True

    def _held_by_others(self) -> int:
        return sum(side.held_bytes() for side in self.sides.values())

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated() if self.device.type == "cuda" else 0

    def _reset_peak(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def _note_peak(self, name: str, others: int) -> None:
        if self.device.type == "cuda":
            self.peaks[name] = max(self.peaks.get(name, 0), torch.cuda.max_memory_allocated() - others)


class Profiled(pl.Callback):
    """Profiles the kernels of three steps of ours and writes their table."""

    def __init__(self, path: Path, device: torch.device, name: str) -> None:
        kind = "CUDA" if device.type == "cuda" else "CPU"
        self.profiler = torch.profiler.profile(activities=[getattr(torch.profiler.ProfilerActivity, kind)])
        self.path, self.device, self.name, self.step = path, device, name, 0

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.step += 1
        if self.step == WARM_UP:
            synchronize(self.device)
            self.profiler.start()
        if self.step == WARM_UP + 3:
            synchronize(self.device)
            self.profiler.stop()
            by_device = self.device.type == "cuda"
            rows = op_times(self.profiler.key_averages(), by_device=by_device)
            write_whole(self.path, as_text(rows[:60], self.name, 3, by_device=by_device))
            trainer.should_stop = True


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

    def phase(self, batch: int, length: int, **keys: Any) -> PhaseConfig:
        """A phase with weights in bfloat16 that no bench comes to the end of."""
        given = {"batch_size": batch, "block_size": length, "compile_model": self.compiled, **keys}
        base = {"phase": "pretrain", "trains": "student", "steps": 100_000, "lr": 1e-5, "scheduler": "none"}
        clip = {"max_grad_norm": self.words.clip}
        return PhaseConfig.model_validate(base | clip | {"dtype": "bfloat16", "use_amp": False} | given)

    def train(self, phase: PhaseConfig, callback: pl.Callback) -> Any:
        """Train a fresh model until the callback ends it."""
        made = plan(phase, device="auto", kernels="auto", ops=self.ops, name="bench", attention=self.choice)
        windows = RandomWindows(
            64 * int(phase.batch_size), phase.block_size, self.spec.embedder.vocab_size, False
        )
        flops = estimate_phase(phase, model_cost(self.spec), None).flops_per_token
        with tempfile.TemporaryDirectory() as folder:
            return fit(
                LanguageModelObjective(build_stand_in(self.spec, self.device).train()),
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
        """What a part is measured beside; float8 only beside our own model in bfloat16."""
        drawn = torch.randint(self.spec.embedder.vocab_size, (batch, length + 1), device=self.device)
        x, y = drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
        options: dict[str, Any] = {"has_masters": part == "masters", "clip": self.words.clip}
        made: dict[str, Callable[[], Side]] = {
            "transformers": lambda: transformers_side(self.spec, x, self.compiled, **options),
            "bare loop": lambda: bare_side(self.spec, x, y, self.compiled, **options),
            "our model bare": lambda: ours_bare(self.spec, x, y, self.compiled, **options),
        }
        names = ["our model bare"] if part == "fp8" else self.words.sides.split(",")
        if (
            part == "masters"
        ):  # whose target is a bare loop with masters; four sides with masters fill the device
            names = [name for name in names if name != "transformers"]
        return {name: made[name]() for name in names if name}

    def beside(self, part: str, batch: int, length: int, deadline: float) -> dict[str, Any]:
        """Measure our step and its peers at one shape."""
        torch.compiler.reset()
        turns = Turns(self.sides(part, batch, length), self.words, self.device, deadline)
        with attention_backends(self.device, self.choice):
            self.train(self.phase(batch, length, **KEYS[part]), turns)
        params = model_cost(self.spec).params
        layers = len(attention_configs(self.spec.topology))
        flops = 6 * params + 6 * layers * self.spec.embedder.d_model * length
        peak = device_peak(self.device, "bfloat16", None)
        rows = {}
        for name, seconds in turns.seconds.items():
            rates = sorted(batch * length / value for value in seconds)
            rate = statistics.median(rates)
            rows[name] = {
                "tokens_per_s": rate,
                "p20": rates[len(rates) // 5],
                "p80": rates[-1 - len(rates) // 5],
                "all": rates,
                "step_ms": 1e3 * statistics.median(seconds),
                "mfu": peak and rate * flops / peak,
                "peak_bytes": turns.peaks.get(name),
            }
        ratios = {
            name: statistics.median(b / a for a, b in zip(turns.seconds["caramba"], theirs, strict=False))
            for name, theirs in turns.seconds.items()
            if name != "caramba"
        }
        return {
            "part": part,
            "batch": batch,
            "tokens": length,
            "steps_a_turn": self.words.steps,
            "rows": rows,
            "ratios": ratios,
        }

    def long(self, length: int) -> dict[str, Any]:
        """Peak memory of a step on one long sequence, with all of a block computed again in backward."""
        torch.compiler.reset()
        stop = Turns({}, argparse.Namespace(steps=2, turns=1, profile=None), self.device, 0.0)
        with attention_backends(self.device, self.choice):
            outcome = self.train(self.phase(1, length, activation_checkpointing="full"), stop)
        found = {key: value for key, value in outcome.measured.items() if key.startswith("peak_")}
        total = torch.cuda.get_device_properties(0).total_memory if self.device.type == "cuda" else None
        reserved = found.get("peak_reserved_bytes")
        spare = 1 - reserved / total if total and reserved else None
        return {
            "part": "long",
            "batch": 1,
            "tokens": length,
            "spare": spare,
            "step_s": stop.seconds["caramba"],
            **found,
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", default="1b", choices=tuple(SIZES))
    parser.add_argument("--parts", default="bf16,masters,fp8,long")
    parser.add_argument("--shapes", help="BATCHxTOKENS, several with commas")
    parser.add_argument("--sides", default=",".join(BEST), help="peers of bf16 and masters")
    parser.add_argument("--steps", type=int, default=10, help="of a side's turn")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--clip", type=float, help="clip all sides by this norm")
    parser.add_argument("--long-tokens", type=int)
    parser.add_argument("--seconds", type=float, default=580.0, help="after which no further part is begun")
    parser.add_argument("--profile", type=Path, help="write the kernels of our step at the first shape here")
    parser.add_argument("--compile", action="store_true", help="compile on a CPU too")
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks/training.json"))
    words = parser.parse_args()
    deadline = time.monotonic() + words.seconds
    bench = Bench(words)
    shapes = [tuple(map(int, text.split("x"))) for text in (words.shapes or SHAPES[words.size]).split(",")]
    result: dict[str, Any] = json.loads(words.out.read_text()) if words.out.is_file() else {"parts": {}}
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    result |= {
        "benchmark": "training",
        "made_by": "python scripts/bench/training.py",
        "machine": device_facts(bench.device),
        "model": SIZES[words.size],
        "commit": commit,
    }
    todo: list[tuple[str, Callable[[], dict[str, Any]]]] = []
    for part in words.parts.split(","):
        for batch, length in [] if part == "long" else shapes[:1] if part == "fp8" else shapes:
            todo.append(
                (f"{part} {batch}x{length}", lambda a=(part, batch, length): bench.beside(*a, deadline))
            )
        if part == "long":
            length = words.long_tokens or LONG[words.size]
            todo.append((f"long 1x{length}", lambda length=length: bench.long(length)))
    if words.profile is not None:
        batch, length = shapes[0]
        profiled = Profiled(words.profile, bench.device, f"training step of {batch} x {length}")

        def profile() -> dict[str, Any]:
            torch.compiler.reset()
            with attention_backends(bench.device, bench.choice):
                bench.train(bench.phase(batch, length), profiled)
            return {"part": "profile", "file": str(words.profile)}

        todo.insert(0, ("profile", profile))
    for name, run in todo:
        left = deadline - time.monotonic()
        if left < (PART_S if words.size != "tiny" else 0.0):
            print(f"{name}: not begun, {left:.0f} s are left", flush=True)
            continue
        began = time.monotonic()
        try:
            found: dict[str, Any] = run()
        except (OutOfMemory, CarambaError) as error:
            found = {"skipped": str(error)}
        found["seconds"] = time.monotonic() - began
        if name != "profile":
            result["parts"][name] = found | {"attention": bench.choice.order, "clip": words.clip}
            write_json(words.out, result)
        release_memory()
        print(f"{name} ({found['seconds']:.0f} s): {said(found)}", flush=True)
    return 0


def said(found: dict[str, Any]) -> str:
    if "rows" not in found:
        return ", ".join(f"{key} {value}" for key, value in found.items() if key != "seconds")
    lines = []
    for name, row in found["rows"].items():
        mfu = "" if row["mfu"] is None else f", {row['mfu']:.1%} MFU"
        peak = "" if row["peak_bytes"] is None else f", {row['peak_bytes'] / 2**30:.1f} GiB"
        ratio = f", ours is {found['ratios'][name]:.3f}x" if name in found["ratios"] else ""
        lines.append(f"\n  {name}: {row['tokens_per_s']:,.0f} tokens/s{mfu}{peak}{ratio}")
    return "".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
