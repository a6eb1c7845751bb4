"""Training steps through caramba's module and Trainer against bare loops and transformers, in turns in one process.

Parts: `bf16` weights and states in bfloat16, `masters` with float32 masters, each at every shape; `fp8` products in
float8 against our own bfloat16 at the first shape: `--float8` through the Trainer, all of `--recipes` bare, with the
losses of their first steps (`rowwise/torchao` leaves the casts to torchao). Peers take their turns within a callback of
our Trainer, which is idle meanwhile:
LlamaForCausalLM compiled, as it comes and with the attention backend that caramba picks; a bare loop with joined
products; and our own compiled model without Lightning, callbacks and monitors (the overhead is the ratio to that one).
Peers read the same batch again and again from the device; our side reads its own data. Nobody clips unless --clip.

Usage on a GPU: python scripts/bench/run.py training [--parts bf16,masters,fp8]
    [--shapes 8x2048,2x8192] [--float8 rowwise] [--recipes rowwise,tensorwise] [--seconds 580]
    [--out docs/benchmarks/training.json]
The JSON is written after every part. Called again, it measures what is missing: parts of another commit or machine, or
that failed, are measured again.
`--size tiny --steps 2 --turns 2 --out FILE` shows on a CPU that the script works.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
from models import rotate
from plots import draw_training
from record import Record, shown
from registry import check_names
from timing import wall_seconds
from torch import Tensor, nn
from torch.nn import attention
from torch.nn import functional as F

from caramba import kernels
from caramba.config.estimate import estimate_phase, model_cost
from caramba.config.model import ModelSpec
from caramba.config.topology import attention_configs
from caramba.config.train import PhaseConfig
from caramba.distill import LanguageModelObjective
from caramba.errors import CarambaError
from caramba.experiment.planning.trial import RandomWindows
from caramba.export.llama import llama_config
from caramba.launch.freeze import freeze
from caramba.layer import attention_backends
from caramba.lower.float8 import Float8Linear, Float8Recipe
from caramba.lower.lowering import lower
from caramba.model import build_with_random_weights
from caramba.ops.backend import without_kernels
from caramba.optim import AdamW, MasterWeights, clip_gradients
from caramba.runtime import (
    choose_attention,
    choose_precision,
    families_of,
    plan,
    release_memory,
    synchronize,
)
from caramba.train import PhaseData, fit
from caramba.train.callbacks.model_changes import float8_layers
from caramba.train.throughput import device_peak


class BareBlock(nn.Module):
    """A Llama block as one would write it for speed: q, k and v in one product, gate and up in another."""

    def __init__(self, d_model: int, heads: int, kv_heads: int, d_ff: int, eps: float) -> None:
        super().__init__()
        width = d_model // heads
        self.widths, self.width, self.eps = (heads * width, kv_heads * width, kv_heads * width), width, eps
        self.norms = nn.ParameterList([nn.Parameter(torch.ones(d_model)) for _ in range(2)])
        self.qkv = nn.Linear(d_model, sum(self.widths), bias=False)
        self.out = nn.Linear(heads * width, d_model, bias=False)
        self.gate_up = nn.Linear(d_model, 2 * d_ff, bias=False)
        self.down = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = F.rms_norm(x, x.shape[-1:], self.norms[0], self.eps)
        q, k, v = (
            part.unflatten(-1, (-1, self.width)).transpose(1, 2) for part in self.qkv(h).split(self.widths, dim=-1)
        )
        is_grouped = q.shape[1] != k.shape[1]
        heads = F.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, enable_gqa=is_grouped
        )
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(F.rms_norm(x, x.shape[-1:], self.norms[1], self.eps)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class BareLlama(nn.Module):
    """The same shapes as the preset's; returns the mean cross-entropy, logits of the whole batch at once."""

    def __init__(self, spec: ModelSpec, keys: dict[str, Any], length: int) -> None:
        super().__init__()
        names = ("hidden_size", "num_attention_heads", "num_key_value_heads")
        d_model, heads, kv_heads = (keys[name] for name in names)
        self.eps = keys["rms_norm_eps"]
        self.embed = nn.Embedding(spec.embedder.vocab_size, d_model)
        self.blocks = nn.ModuleList(
            BareBlock(d_model, heads, kv_heads, keys["intermediate_size"], self.eps)
            for _ in range(keys["num_hidden_layers"])
        )
        self.norm = nn.Parameter(torch.ones(d_model))
        pairs = d_model // heads // 2
        angles = torch.arange(length)[:, None] * 5e5 ** (-torch.arange(pairs) / pairs)
        self.tables = (angles.cos(), angles.sin())

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        cos, sin = self.tables
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = F.linear(F.rms_norm(x, x.shape[-1:], self.norm, self.eps), self.embed.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class Masters:
    """AdamW in one kernel over float32 copies of bfloat16 weights: what masters cost at least in plain PyTorch."""

    def __init__(self, weights: list[nn.Parameter], lr: float) -> None:
        self.weights = weights
        self.masters = [nn.Parameter(weight.detach().float()) for weight in weights]
        for master in self.masters:
            master.grad = torch.empty_like(master)
        self.inner = torch.optim.AdamW(self.masters, lr=lr, fused=True)

    @torch.no_grad()
    def step(self) -> None:
        """Step the masters and round the weights from them."""
        torch._foreach_copy_([master.grad for master in self.masters], [w.grad for w in self.weights])  # type: ignore[attr-defined]
        self.inner.step()
        torch._foreach_copy_(self.weights, self.masters)  # type: ignore[attr-defined]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        for weight in self.weights:
            weight.grad = None


LOSSES = 20  # of as many first steps, kept


class Side:
    """A bare training loop: forward, backward, clipping where asked for, the optimiser, gradients set to None.

    Every step of it is taken within `surroundings()`. `optimizer` None is torch's own AdamW, of masters if asked.
    """

    def __init__(
        self,
        net: nn.Module,
        backward: Callable[[], None],
        *,
        has_masters: bool,
        clip: float | None,
        surroundings: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
        optimizer: torch.optim.Optimizer | None = None,
    ):
        self.net, self.run_backward, self.clip = net, backward, clip
        self.losses: list[Tensor] = []
        self.surroundings = surroundings
        weights = list(net.parameters())
        self.weights = weights
        self.optimizer: Any = optimizer
        if optimizer is None:
            self.optimizer = Masters(weights, 1e-5) if has_masters else torch.optim.AdamW(weights, lr=1e-5, fused=True)

    def step(self) -> None:
        """Take one step."""
        self.run_backward()
        if self.clip is not None:
            clip_gradients([self.weights], self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def held_bytes(self) -> int:
        """Bytes of what the side holds between steps: weights, states and masters."""
        inner = getattr(self.optimizer, "inner", self.optimizer)
        tensors: list[Tensor] = [*self.weights, *getattr(self.optimizer, "masters", [])]
        tensors += [wide.detach() for wide in getattr(self.optimizer, "wide", [])]
        tensors += [master.grad for master in getattr(self.optimizer, "masters", [])]
        tensors += [x for state in inner.state.values() for x in state.values() if isinstance(x, Tensor)]
        return sum(x.numel() * x.element_size() for x in tensors)


def torchs_own_backends(device: torch.device) -> list[attention.SDPBackend]:
    """Return the backends of scaled_dot_product_attention in the order in which torch tries them by itself.

    Call it before anything sets an order. Torch settles its own at the first call on a device.
    """
    x = torch.zeros(1, 1, 8, 64, device=device, dtype=torch.bfloat16)
    F.scaled_dot_product_attention(x, x, x, is_causal=True)
    return attention._cur_sdpa_kernel_backends(with_priority=True)


def without_masks() -> AbstractContextManager[Any]:
    """Let transformers make no causal mask, with which SDPA cannot take the flash or cuDNN kernel.

    Torch below 2.14 builds one while it compiles, padding or not. The same process measures transformers as it comes.
    """

    def make_none(*args: Any, **options: Any) -> None:
        return None

    return mock.patch("transformers.models.llama.modeling_llama.create_causal_mask", make_none)


def transformers_side(spec: ModelSpec, x: Tensor, compiled: bool, **options: Any) -> Side:
    """LlamaForCausalLM with its own loss, compiled whole."""
    import transformers

    keys = llama_config(spec, max_positions=131072, eos_id=None, dtype="bfloat16")
    keys = {key: value for key, value in keys.items() if key not in ("architectures", "model_type", "dtype")}
    with torch.device(x.device):
        net = transformers.AutoModelForCausalLM.from_config(
            transformers.LlamaConfig(**keys), dtype=torch.bfloat16, attn_implementation="sdpa"
        ).train()
    call = torch.compile(net, dynamic=False) if compiled else net
    return Side(net, lambda: call(input_ids=x, labels=x, use_cache=False).loss.backward(), **options)


def bare_side(spec: ModelSpec, x: Tensor, y: Tensor, compiled: bool, **options: Any) -> Side:
    """The bare model, compiled whole."""
    keys = llama_config(spec, max_positions=131072, eos_id=None, dtype="bfloat16")
    with torch.device(x.device):
        net = BareLlama(spec, keys, x.shape[1]).to(torch.bfloat16)
        for weight in net.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=0.02)
    call = torch.compile(net, dynamic=False) if compiled else net
    return Side(net, lambda: call(x, y).backward(), **options)


def ours_bare(
    spec: ModelSpec,
    x: Tensor,
    y: Tensor,
    compiled: bool,
    *,
    float8: Float8Recipe | None = None,
    least_width: int = 1024,
    **options: Any,
) -> Side:
    """Our own model with the objective and the compiled regions that a phase uses, without Lightning around it.

    With `float8`, products of the layers that a phase would choose are of such numbers. The losses of the first
    `LOSSES` steps are kept.
    """
    net = build_with_random_weights(spec, x.device).to(torch.bfloat16).train()
    if float8 is not None:
        for name, layer in float8_layers(net, least_width, is_compiled=compiled)[0].items():
            net.set_submodule(name, Float8Linear(layer, float8))
    objective = LanguageModelObjective(net)
    lower(net, x.device, "train", is_compiled=compiled)
    if compiled:
        for module in objective.compilable():
            module.forward = torch.compile(module.forward)
    losses: list[Tensor] = []

    def backward() -> None:
        found = objective.step((x, y), lambda loss: loss.backward())
        if len(losses) < LOSSES:
            losses.append(found["loss"].detach().clone())

    side = Side(net, backward, optimizer=our_optimizer(net, options["has_masters"]), **options)
    side.losses = losses
    return side


def our_optimizer(net: nn.Module, has_masters: bool) -> torch.optim.Optimizer:
    """AdamW as a phase steps it, so that the difference is Lightning, callbacks and monitors alone."""
    named = list(net.named_parameters())
    if not has_masters:
        return AdamW([weight for _, weight in named], lr=1e-5)
    return MasterWeights(named, lambda copies: AdamW([wide for _, wide in copies], lr=1e-5), keeps=True)


WARM_UP = 5
LEAST_TURNS = 2  # that are measured after the time is up, so that a part that was begun has a figure


class Turns(pl.Callback):
    """Times blocks of our steps, and between two of them a block of every other side. Ends training after `turns`.

    Attributes:
        seconds: side -> seconds a step of each turn. peaks: side -> peak bytes, without what the others hold.
    """

    def __init__(
        self,
        sides: dict[str, Side],
        device: torch.device,
        *,
        steps: int,
        turns: int,
        deadline: float,
        tokens: int = 0,
    ) -> None:
        self.sides, self.device, self.deadline = sides, device, deadline
        self.steps, self.turns, self.tokens = steps, turns, tokens
        self.seconds: dict[str, list[float]] = {name: [] for name in ("caramba", *sides)}
        self.peaks: dict[str, int] = {}
        self.is_warm, self.taken, self.clock = False, 0, 0.0

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.taken += 1
        if self.taken < (self.steps if self.is_warm else WARM_UP):
            return
        synchronize(self.device)
        if self.is_warm:
            self.seconds["caramba"].append((time.perf_counter() - self.clock) / self.taken)
            self._note_peak("caramba", self._held_by_others())
        self._run_others(trainer)
        self._say()
        done = len(self.seconds["caramba"])
        if done >= self.turns or (done >= LEAST_TURNS and time.monotonic() > self.deadline):
            trainer.should_stop = True
            return  # the phase's own monitor reads the peak of this turn after training
        self.taken = 0
        self._reset_peak()
        synchronize(self.device)
        self.clock = time.perf_counter()

    def _run_others(self, trainer: pl.Trainer) -> None:
        for parameter in trainer.lightning_module.parameters():
            assert parameter.grad is None  # what a peer's peak would hold
        with torch.enable_grad():
            for name, side in self.sides.items():
                with side.surroundings():
                    self._run(name, side)
        self.is_warm = True

    def _run(self, name: str, side: Side) -> None:
        n_steps = self.steps if self.is_warm else WARM_UP
        self._reset_peak()
        before = torch.cuda.memory_allocated() if self.device.type == "cuda" else 0
        seconds = wall_seconds(lambda: [side.step() for _ in range(n_steps)], self.device)
        if self.is_warm:
            self.seconds[name].append(seconds / n_steps)
            self._note_peak(name, before - side.held_bytes())
        else:
            print(f"  {name}: warm after {seconds:.0f} s", flush=True)

    def _say(self) -> None:
        done = len(self.seconds["caramba"])
        if done and self.tokens:
            rates = (f"{name} {self.tokens / taken[-1]:,.0f}" for name, taken in self.seconds.items())
            print(f"  turn {done} of {self.turns}, tokens/s: {', '.join(rates)}", flush=True)

    def _held_by_others(self) -> int:
        return sum(side.held_bytes() for side in self.sides.values())

    def _reset_peak(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def _note_peak(self, name: str, others: int) -> None:
        if self.device.type == "cuda":
            self.peaks[name] = max(self.peaks.get(name, 0), torch.cuda.max_memory_allocated() - others)


def rows_of(turns: Turns, flops: float, peak: float | None) -> dict[str, dict[str, Any]]:
    """Return side -> rates, step time, MFU by `flops` a token over `peak` FLOP/s, and peak memory."""
    rows = {}
    for name, seconds in turns.seconds.items():
        rates = sorted(turns.tokens / value for value in seconds)
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
    return rows


def speed_over(ours: list[float], theirs: list[float]) -> float:
    """Return how many times as fast ours is, the median of turns."""
    return statistics.median(b / a for a, b in zip(ours, theirs, strict=False))


RECIPES = ("rowwise", "tensorwise", "rowwise_with_gw_hp")
MUST_FP8 = 1.15
WITHOUT = {"": (), "/apart": ("float8_swiglu",), "/torchao": ("float8_cast",)}


def recipes_of(names: Sequence[str], device: torch.device) -> Iterator[tuple[str, Float8Recipe]]:
    """Yield name and recipe of each NAME.

    NAME/apart separates SwiGLU from its casts, and NAME/torchao casts by torchao.
    """
    check_names("--recipes", names, [f"{name}{casts}" for name in RECIPES for casts in WITHOUT])
    for asked in names:
        name, slash, casts = asked.partition("/")
        off = WITHOUT[slash + casts]
        with without_kernels(*off) if off else contextlib.nullcontext():
            recipe = Float8Recipe(name, device)  # pyright: ignore[reportArgumentType] - torchao refuses others
        yield f"float8 {name}, cast by {recipe.casts}", recipe


def float8_of(turns: Turns, sides: dict[str, Side], bf16: str, through_trainer: str) -> dict[str, Any]:
    """Return every side's speed over the side `bf16`, the Trainer's with its recipe compared with the must, and
    losses.

    `loss_change` is of the last step of those whose losses are kept, from the same weights on the same batch.
    """
    times = turns.seconds
    over = {name: speed_over(seconds, times[bf16]) for name, seconds in times.items() if name != bf16}
    losses = {name: [round(float(loss), 5) for loss in side.losses] for name, side in sides.items()}
    must = {"over": bf16, "limit": MUST_FP8, "got": over["caramba"]}
    return {
        "float8": through_trainer,
        "over_bf16": over,
        "losses": losses,
        "loss_change": {name: row[-1] - losses[bf16][-1] for name, row in losses.items() if row},
        "musts": [must | {"by": f"caramba with float8={through_trainer}"}],
    }


# Preset, shapes, and the narrowest layer that takes part in float8.
SIZES = {"1b": ("llama32_1b", ("8x2048", "2x8192"), 1024), "tiny": ("tiny", ("1x16", "1x32"), 16)}
PART_S = {"bf16": 100.0, "masters": 75.0, "fp8": 120.0}
"""What a part takes at least, compilation included: it is not begun with less left."""
KEYS: dict[str, dict[str, Any]] = {"bf16": {}, "masters": {"master_weights": True}}
THEIRS, THEIRS_OUR_WAY = "transformers", "transformers, our attention backend"
BARE, OURS_BARE = "bare loop", "our model bare"
SIDES = {
    "bf16": (THEIRS, THEIRS_OUR_WAY, BARE, OURS_BARE),
    "masters": (BARE, OURS_BARE),  # whose target is a bare loop with masters
    "fp8": (OURS_BARE,),  # and every recipe bare
}
FLOAT8_TURNS = 4
MUST = {BARE: 0.98, OURS_BARE: 0.98}
MUST_THEIRS = {2048: 1.15, 8192: 1.5}
OPTIONS = """--size=1b|tiny --parts=bf16,masters,fp8 --shapes= --steps=10 --turns=7 --float8=rowwise
    --recipes=rowwise,tensorwise,rowwise_with_gw_hp --clip= --seconds=580.0 --compile"""
NEEDS = ("transformers",)
SMOKE_OPTIONS = "--size tiny --parts bf16, --shapes 1x16 --steps 1 --turns 1 --device cpu"


class Bench:
    """One model on one device: runs phases of it through `fit`."""

    def __init__(self, words: argparse.Namespace, device: torch.device) -> None:
        self.words, self.device = words, device
        self.clip = None if words.clip is None else float(words.clip)
        preset, shapes, self.float8_width = SIZES[words.size]
        self.shapes = words.shapes.split(",") if words.shapes else shapes
        self.ops = kernels.load(device)
        self.manifest = freeze([f"model={preset}", "train=pretrain", "settings.instrument=none"]).manifest
        self.spec = self.manifest.model
        self.compiled = device.type == "cuda" or words.compile
        self.choice = choose_attention(device, families_of(attention_configs(self.spec.topology)))
        self.torchs_own = torchs_own_backends(device)

    def phase(self, batch: int, length: int, **keys: Any) -> PhaseConfig:
        """A phase with weights in bfloat16 that no bench comes to the end of."""
        given = {"batch_size": batch, "block_size": length, "compile_model": self.compiled, **keys}
        base = {"phase": "pretrain", "trains": "student", "steps": 100_000, "lr": 1e-5, "scheduler": "none"}
        more = {"max_grad_norm": self.clip, "float8_min_width": self.float8_width}
        return PhaseConfig.model_validate(base | more | {"dtype": "bfloat16", "use_amp": False} | given)

    def train(self, phase: PhaseConfig, callback: pl.Callback) -> Any:
        """Train a fresh model until the callback ends it."""
        made = plan(phase, device="auto", kernels="auto", ops=self.ops, name="bench", attention=self.choice)
        n_windows, vocabulary = 64 * int(phase.batch_size), self.spec.embedder.vocab_size
        windows = RandomWindows(n_windows, phase.block_size, vocabulary, False)
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
        options: dict[str, Any] = {"has_masters": part == "masters", "clip": self.clip}
        # Transformers as it comes has the backend that torch picks in a process of its own.
        own = functools.partial(attention.sdpa_kernel, self.torchs_own, set_priority=True)
        made: dict[str, Callable[[], Side]] = {
            THEIRS: lambda: transformers_side(self.spec, x, self.compiled, surroundings=own, **options),
            THEIRS_OUR_WAY: lambda: transformers_side(
                self.spec, x, self.compiled, surroundings=without_masks, **options
            ),
            BARE: lambda: bare_side(self.spec, x, y, self.compiled, **options),
            OURS_BARE: lambda: ours_bare(self.spec, x, y, self.compiled, **options),
        }
        sides = {name: made[name]() for name in SIDES[part]}
        options |= {"least_width": self.float8_width}
        for name, recipe in recipes_of(self.words.recipes, self.device) if part == "fp8" else ():
            sides[name] = ours_bare(self.spec, x, y, self.compiled, float8=recipe, **options)
        return sides

    def compare(self, part: str, batch: int, length: int, deadline: float) -> dict[str, Any]:
        """Measure our step and its peers at one shape."""
        is_float8 = part == "fp8"
        phase = self.phase(batch, length, **({"float8": self.words.float8} if is_float8 else KEYS[part]))
        choose_precision(phase, self.device)  # refused before anything is made
        sides = self.sides(part, batch, length)
        n_turns = min(self.words.turns, FLOAT8_TURNS) if is_float8 else self.words.turns
        sizes = {"steps": self.words.steps, "turns": n_turns, "tokens": batch * length}
        turns = Turns(sides, self.device, deadline=deadline, **sizes)
        with attention_backends(self.device, self.choice):
            self.train(phase, turns)
        times = turns.seconds
        ratios = {name: speed_over(times["caramba"], times[name]) for name in sides}
        return {
            "part": part,
            "batch": batch,
            "tokens": length,
            "steps_a_turn": self.words.steps,
            "rows": rows_of(turns, self.flops_per_token(length), device_peak(self.device, "bfloat16", None)),
            "ratios": ratios,
            "musts": musts_of(length, ratios),
            "transformers_attention": [backend.name for backend in self.torchs_own],
            "bare_optimizer": "ours",
            **(float8_of(turns, sides, OURS_BARE, self.words.float8) if is_float8 else {}),
        }

    def flops_per_token(self, length: int) -> float:
        """6 N + 6 L M S: causal attention counted once."""
        layers = len(attention_configs(self.spec.topology))
        return 6 * model_cost(self.spec).params + 6 * layers * self.spec.embedder.d_model * length

    def todo(self, deadline: float) -> Iterator[tuple[str, str, Callable[[], dict[str, Any]]]]:
        """Yield the name, part and measurement of everything that was asked for, in order."""
        check_names("--parts", self.words.parts, PART_S)
        for part in self.words.parts:
            for text in self.shapes[:1] if part == "fp8" else self.shapes:
                batch, length = map(int, text.split("x"))
                yield f"{part} {text}", part, functools.partial(self.compare, part, batch, length, deadline)


def musts_of(length: int, ratios: dict[str, float]) -> list[dict[str, Any]]:
    """Return what the ratios of a part are compared with; float8 has its own, over bfloat16."""
    limits = MUST | {THEIRS: MUST_THEIRS.get(length)}
    return [
        {"over": name, "limit": limit, "got": ratios[name]}
        for name, limit in limits.items()
        if limit is not None and name in ratios
    ]


def run(words: argparse.Namespace, record: Record) -> int:
    deadline = record.began + words.seconds
    bench = Bench(words, record.device)
    record.start(resume=("parts",), model=SIZES[words.size][0], clip=bench.clip)
    parts = record.data["parts"] = dict(record.data["parts"])
    failed = 0
    for name, part, measure in bench.todo(deadline):
        left = deadline - time.monotonic()
        if "skipped" not in parts.get(name, {"skipped": True}):
            print(f"{name}: measured already", flush=True)
            continue
        if left < (0.0 if words.size == "tiny" else PART_S[part]):
            print(f"{name}: not begun, {left:.0f} s are left", flush=True)
            continue
        print(f"{name}: begun with {left:.0f} s left", flush=True)
        try:
            found: dict[str, Any] = measure()
        except (CarambaError, RuntimeError) as error:  # memory, a peer, a compiler: the other parts continue
            found, failed = {"skipped": f"{type(error).__name__}: {error}"[:500]}, failed + 1
        seconds = left - (deadline - time.monotonic())
        parts[name] = found | {"clip": bench.clip, "seconds": seconds, "attention": bench.choice.order}
        if plot := record.write_plot(draw_training(record.data)):
            record.data["plot"] = plot
        record.save()
        torch.compiler.reset()  # whose graphs hold the sides
        release_memory()
        print(f"{name}: {shown(found)}", flush=True)
    return int(failed > 0)
