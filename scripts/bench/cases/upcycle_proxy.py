"""The proxy study: a GQA teacher trained from scratch on local source code, and DBA students of it. Writes JSON.

    torchrun --nproc-per-node 4 scripts/bench/run.py upcycle_proxy teacher --state DIR --seconds 560
    python scripts/bench/run.py upcycle_proxy surgery search --state DIR --devices 4 --seconds 300
    python scripts/bench/run.py upcycle_proxy distil --state DIR --devices 4 --seconds 560
    python scripts/bench/run.py upcycle_proxy collect --state DIR --out docs/benchmarks/upcycle_proxy.json

`surgery` makes the untrained students, `search` chooses the recipe on other validation windows than those that are
reported. Every stage adds whole files to DIR and does what is missing there, so that a call that is cut short loses
the running jobs at most; on one device run the teacher by `python`. `--size tiny` tries the same on a CPU. All
results are of a proxy: they support no claim about Llama.

The text is what the machine's Python installation and C libraries carry (Python, C, C++, CUDA and their notes), each
distinct file once. Students are calibrated and distilled on files that their teacher was not trained on, as with a
model from a hub, whose training text nobody has at hand; a teacher is surer of text it has seen several times.
Recall samples are made from token ids: a window of real text in which `key = value` needles are at even depths, and
whose end asks for every key again in random order. Keys and values are random pairs of ids, so nothing but attention
to the needle can answer.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import multiprocessing
import os
import platform
import site
import sysconfig
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from plots import draw_study
from record import Record
from tokenizers import Tokenizer
from torch import Tensor, distributed, nn
from torch.nn import functional as F

from caramba.config.kvcache import KVCacheKind
from caramba.config.model import ModelSpec, SurgeryConfig
from caramba.data.library import train_bpe
from caramba.distill import BlockwiseObjective, Objective, TeacherLogitsObjective
from caramba.layer import RMSNormLayer, SwiGLULayer, attention_backends
from caramba.metrics import agreement, windowed_nll
from caramba.model import Model, build_model, init_weights
from caramba.optim import clip_gradients
from caramba.runs.files import write_json
from caramba.surgery import Calibration, CalibrationText, calibrate, fit_widths, pair_attention, transplant

CODE = (
    ".py",
    ".pyi",
    ".pyx",
    ".pxd",
    ".h",
    ".hpp",
    ".hh",
    ".hxx",
    ".cuh",
    ".inl",
    ".c",
    ".cc",
    ".cpp",
    ".cxx",
    ".cu",
)
SUFFIXES = (*CODE, ".rst", ".md")
SYSTEM = ("/usr/include", "/usr/local/cuda/targets", "/usr/src", "/opt")
FRESH_SHARE, FRESH_TOKENS = 0.35, 76_000_000  # the least of both
SHORTEST, LONGEST = 200, 400_000
NEEDLES, NEEDLE_WIDTH = 8, 6


@dataclass(frozen=True)
class ProxyCorpus:
    """Token ids of the three splits on the device: the teacher's, the students' (`fresh`) and the held-out one."""

    train: Tensor
    fresh: Tensor
    val: Tensor
    val_bytes: int
    n_files: int
    vocab_size: int
    newline: int
    equals: int

    @property
    def bits_per_nat_token(self) -> float:
        """Factor from nats per token to bits per byte on the validation split."""
        return self.val.numel() / self.val_bytes / float(np.log(2.0))


def read_texts(folders: list[Path], most_bytes: int) -> list[str]:
    """Return each distinct text once, in an order that depends on contents alone."""
    found: dict[bytes, str] = {}
    total = 0
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.suffix not in SUFFIXES or not path.is_file() or total >= most_bytes:
                continue
            content = path.read_bytes()
            if not SHORTEST < len(content) < LONGEST:
                continue
            digest = hashlib.sha256(content).digest()
            if digest in found:
                continue
            try:
                found[digest] = content.decode("utf-8")
            except UnicodeDecodeError:  # not a text of this study
                continue
            total += len(content)
    return [found[digest] for digest in sorted(found)]


def build(vocab_size: int, most_bytes: int, val_share: float, device: torch.device) -> ProxyCorpus:
    """Read the machine's source, train a BPE tokenizer on the training files, encode both splits."""
    began = time.perf_counter()
    paths = sysconfig.get_paths()
    places = {paths["purelib"], paths["platlib"], *site.getsitepackages()}
    sites = sorted(Path(place) for place in places if Path(place).is_dir())
    folders = [Path(paths["stdlib"]), *sites, *(Path(place) for place in SYSTEM if Path(place).is_dir())]
    texts = read_texts(folders, most_bytes)
    n_val = max(int(len(texts) * val_share), 8)
    val, train = texts[:n_val], texts[n_val:]
    tokenizer = train_bpe(train[:: max(len(train) // 4000, 1)], vocab_size)
    backend = Tokenizer.from_str(tokenizer.definition)  # its batches use every core

    def encode(documents: list[str]) -> Tensor:
        ids: list[np.ndarray] = []
        for start in range(0, len(documents), 1000):
            encoded = backend.encode_batch_fast(documents[start : start + 1000], add_special_tokens=False)
            ids += [np.array([*document.ids, tokenizer.eos_id], dtype=np.int32) for document in encoded]
        return torch.from_numpy(np.concatenate(ids)).to(device)

    newline, equals = (tokenizer.encode(text)[0] for text in ("\n", " ="))
    encoded = encode(train)
    ends = (encoded == tokenizer.eos_id).nonzero()
    n_fresh = min(int(encoded.numel() * FRESH_SHARE), FRESH_TOKENS)
    cut = int(ends[int(torch.searchsorted(ends.flatten(), n_fresh))]) + 1  # whole files
    made = ProxyCorpus(
        encoded[cut:],
        encoded[:cut].clone(),
        encode(val),
        sum(len(text.encode()) for text in val),
        len(texts),
        tokenizer.vocab_size,
        newline,
        equals,
    )
    print(
        f"corpus: {len(texts)} files, {made.train.numel() / 1e6:.1f}M training tokens, "
        f"{made.fresh.numel() / 1e6:.1f}M for students and {made.val.numel() / 1e6:.2f}M for validation, "
        f"{made.val_bytes / made.val.numel():.2f} bytes a token, {time.perf_counter() - began:.0f} s",
        flush=True,
    )
    return made


def windows(tokens: Tensor, batch_size: int, n_tokens: int, generator: torch.Generator) -> Tensor:
    """Return random windows [B, n_tokens] int64."""
    starts = torch.randint(
        0, tokens.numel() - n_tokens, (batch_size, 1), generator=generator, device=tokens.device
    )
    return tokens[starts + torch.arange(n_tokens, device=tokens.device)].long()


def plant_needles(
    rows: Tensor, corpus: ProxyCorpus, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Turn windows of text [B, T] into recall samples.

    Returns:
        The samples [B, T]; the place of each answer's first id in them [B, NEEDLES]; and its needle's place as a
        share of the part before the questions, 0 (start) to 1 [B, NEEDLES].
    """
    batch, width = rows.shape
    device = rows.device
    tail = NEEDLES * NEEDLE_WIDTH
    slot = (width - tail) // NEEDLES
    low, high = 256, min(corpus.vocab_size, 4096)
    pairs = torch.randint(low, high, (batch, NEEDLES, 4), generator=generator, device=device)
    needles = torch.empty(batch, NEEDLES, NEEDLE_WIDTH, dtype=rows.dtype, device=device)
    needles[..., 0] = corpus.newline
    needles[..., 1:3] = pairs[..., :2]
    needles[..., 3] = corpus.equals
    needles[..., 4:6] = pairs[..., 2:]
    shift = torch.randint(0, slot - NEEDLE_WIDTH, (batch, NEEDLES), generator=generator, device=device)
    places = torch.arange(NEEDLES, device=device) * slot + shift
    out = rows.clone()
    at = places[..., None] + torch.arange(NEEDLE_WIDTH, device=device)
    out.scatter_(1, at.flatten(1), needles.flatten(1))
    order = torch.rand(batch, NEEDLES, generator=generator, device=device).argsort(dim=1)
    out[:, width - tail :] = needles.gather(1, order[..., None].expand_as(needles)).flatten(1)
    answers = width - tail + torch.arange(NEEDLES, device=device) * NEEDLE_WIDTH + 4
    return out, answers.expand(batch, -1), places.gather(1, order).float() / (slot * NEEDLES)


def training_batch(
    corpus: ProxyCorpus,
    tokens: Tensor,
    batch_size: int,
    n_tokens: int,
    recall_share: float,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Return (x, y), each [B, n_tokens]: text of a split, with a share of recall samples."""
    rows = windows(tokens, batch_size, n_tokens + 1, generator)
    n_recall = round(batch_size * recall_share)
    if n_recall:
        rows[:n_recall] = plant_needles(rows[:n_recall], corpus, generator)[0]
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


Autocast = Callable[[], AbstractContextManager]


class Text:
    """Token rows [N, T + 1] as the windows (x [T], y [T]) that `caramba.metrics` reads."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int, /) -> tuple[Tensor, Tensor]:
        return self.rows[index, :-1], self.rows[index, 1:]


@dataclass(frozen=True)
class EvalWindows:
    """Disjoint validation windows and recall samples with their answers; the same for every model."""

    text: Text
    recall: Tensor
    answers: Tensor
    depths: Tensor


def held_out(
    corpus: ProxyCorpus, n_windows: int, n_recall: int, n_tokens: int, seed: int = 20, shift: int = 0
) -> EvalWindows:
    """Return disjoint windows spread over the validation split, and recall samples made of random ones.

    Another `shift`, below the number of windows of the split over `n_windows`, gives other windows.
    """
    width = n_tokens + 1
    available = corpus.val.numel() // width
    n_windows = min(n_windows, available)
    chosen = (torch.linspace(0, available - 1, n_windows).round().long() + shift) % available
    text = torch.stack([corpus.val[i * width : (i + 1) * width] for i in chosen.tolist()]).long()
    generator = torch.Generator(corpus.val.device).manual_seed(seed)
    rows = windows(corpus.val, n_recall, width, generator)
    return EvalWindows(Text(text), *plant_needles(rows, corpus, generator))


@torch.no_grad()
def recall_by_depth(
    model: nn.Module, data: EvalWindows, autocast: Autocast, batch: int, n_depths: int = 5
) -> list[float]:
    """Return the share of needles whose two value ids are both the most likely ones, from shallow to deep."""
    hits = []
    place = 0
    for rows, logits in _logits(model, data.recall, autocast, batch):
        best = logits.argmax(-1)
        answers = data.answers[place : place + len(rows)]
        # logits at t predict row[t + 1]
        both = [best.gather(1, answers - 1 + i) == rows.gather(1, answers + i) for i in (0, 1)]
        hits.append(both[0] & both[1])
        place += len(rows)
    hit = torch.cat(hits).float()
    bucket = (data.depths * n_depths).long().clamp_max(n_depths - 1)
    return [float(hit[bucket == i].mean()) for i in range(n_depths)]


def _logits(
    model: nn.Module, rows: Tensor, autocast: Autocast, batch: int
) -> Iterator[tuple[Tensor, Tensor]]:
    for part in rows.split(batch):
        with autocast():
            yield part, model(part[:, :-1])


BETAS = (0.9, 0.95)


@dataclass(frozen=True)
class Recipe:
    """What a distillation spends its tokens on, and at which rates; token counts are shares of the run's tokens.

    Attributes:
        blockwise: share of the tokens for teacher-forced blocks; `drift`, for blocks on the student's inputs; the
            global phase takes the rest.
        map_lr: learning rate of attention projections in the global phase, as a multiple of `global_lr`.
        kl_weight: 1 is KL to the teacher alone; the rest is cross-entropy on the text.
        attention_weight: of KL(A_t || A_s) on sampled queries, in the blockwise phases.
        corrupt: share of the input tokens in the global phase that are replaced by others of the batch.
        muon: matrices of the stack take Muon instead of AdamW in the global phase (the rest, AdamW).
        hidden_weight: of the distance to the teacher's residual stream after every block in the global phase; it
            falls to 0 over the phase, so that the end is KL alone.
    """

    blockwise: float = 0.05
    drift: float = 0.02
    batch: int = 16
    block_lr: float = 1e-3
    global_lr: float = 3e-4
    map_lr: float = 2.0
    kl_weight: float = 0.7
    attention_weight: float = 0.0
    corrupt: float = 0.0
    muon: bool = False
    hidden_weight: float = 15.0


@dataclass(frozen=True)
class Run:
    """One distillation: the student's cache (`widths` other than the budget's), its start, data seed and tokens."""

    budget: str
    method: str = "dba"
    seed: int = 0
    tokens: int = 0
    recipe: Recipe = field(default_factory=Recipe)
    widths: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        return f"distil_{self.budget}_{self.method}_{self.seed}_{round(self.tokens / 1e6, 1)}M"

    def with_changes(self, **changes: Any) -> Run:
        """Return the run with another `method`, other `widths` or other parts of the recipe."""
        own = {name: changes.pop(name) for name in ("method", "widths") if name in changes}
        return replace(self, **own, recipe=replace(self.recipe, **changes))


@contextmanager
def compiled(study: Study, modules: Sequence[nn.Module]) -> Iterator[None]:
    """Run compiled code for a while. Only `forward` is replaced: hooks stay outside, and equal modules share graphs."""
    if study.device.type != "cuda":
        yield
        return
    torch._dynamo.config.recompile_limit = 128
    for module in modules:
        module.forward = torch.compile(module.forward, dynamic=False)
    try:
        yield
    finally:
        for module in modules:
            module.__dict__.pop("forward", None)


def optimizers(
    study: Study, objective: Objective, lr: float, *, map_lr: float, muon: bool
) -> list[torch.optim.Optimizer]:
    """Return the optimisers of a phase; each group remembers its peak rate."""
    fused = study.device.type == "cuda"
    maps, matrices, rest = [], [], []
    for name, parameter in objective.trainable():
        if muon and parameter.ndim == 2 and not name.startswith("embedder"):
            matrices.append(parameter)
        elif ".projection." in name:
            maps.append(parameter)
        else:
            rest.append(parameter)
    groups = [
        {"params": part, "lr": peak, "peak": peak} for part, peak in ((rest, lr), (maps, lr * map_lr)) if part
    ]
    made: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(groups, lr=lr, betas=BETAS, weight_decay=0.0, fused=fused)
    ]
    if matrices:
        group = {"params": matrices, "lr": lr, "peak": lr}
        made.append(torch.optim.Muon([group], lr=lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"))
    return made


def corrupt(batch: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Replace a share of the tokens [B, T] by tokens of other places of the batch."""
    others = torch.randint(batch.numel(), batch.shape, generator=generator, device=batch.device)
    replaced = torch.rand(batch.shape, generator=generator, device=batch.device) < share
    return torch.where(replaced, batch.flatten()[others], batch)


def train(
    study: Study, objective: Objective, made: list[torch.optim.Optimizer], *, steps: int, run: Run, first: int
) -> dict[str, float]:
    """Run one phase of `steps` steps, from batch `first` of the run's stream, with a cosine of its own."""
    batch = run.recipe.batch
    chosen = {id(parameter) for _, parameter in objective.trainable()}
    for parameter in objective.model.parameters():
        parameter.requires_grad_(id(parameter) in chosen)
    objective.model.train()
    noise = torch.Generator(study.device).manual_seed(run.seed)
    began = time.monotonic()
    steady, steady_step = began, 0
    losses: dict[str, Tensor] = {}
    for step in range(steps):
        for optimizer in made:
            for group in optimizer.param_groups:
                group["lr"] = rate(step, steps, group["peak"], max(steps // 30, 1))
        x, y = study.batch(batch, 100 + run.seed, first + step, fresh=True)
        if run.recipe.corrupt and isinstance(objective, TeacherLogitsObjective):
            x = corrupt(x, run.recipe.corrupt, noise)
        objective.at(step, steps)
        with study.autocast():
            losses = objective.step((x, y), lambda loss: loss.backward())
        clip_gradients(objective.clip_groups(), 1.0)
        for optimizer in made:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if step % 20 == 4:
            losses["loss"].item()  # keeps the queue short
        if step == 4:
            steady, steady_step = time.monotonic(), 5
    loss = losses["loss"].item()
    ended = time.monotonic()
    objective.finish()
    objective.model.eval().requires_grad_(False)
    width = batch * study.size.n_tokens
    return {
        "steps": steps,
        "tokens": steps * width,
        "seconds": ended - began,
        "tokens_per_second": (steps - steady_step) * width / max(ended - steady, 1e-9),
        "loss": loss,
    }


def phases(study: Study, run: Run) -> list[tuple[str, int, float]]:
    """Return (name, steps, learning rate) of the phases; together they take at most the run's tokens."""
    recipe = run.recipe
    total = run.tokens // (recipe.batch * study.size.n_tokens)
    blockwise, drift = int(total * recipe.blockwise), int(total * recipe.drift)
    return [
        ("blockwise", blockwise, recipe.block_lr),
        ("drift", drift, recipe.block_lr / 4),
        ("global", total - blockwise - drift, recipe.global_lr),
    ]


def distil(study: Study, run: Run, *, selection: bool = False) -> dict[str, Any]:
    """Do one run and return its record. `selection` measures it on the windows for selection."""
    began = time.monotonic()
    teacher, recipe = study.frozen_teacher, run.recipe
    rest = [m for m in teacher.modules() if isinstance(m, RMSNormLayer | SwiGLULayer)]
    student: Model = study.student(run.budget, run.method, run.widths)
    surgery = transplant_into(study, student, run.method, run.seed)
    untrained = measure(study, teacher, student, selection=selection)
    pairs = pair_attention(teacher, student) if run.method != CONTINUED else []
    spans: dict[str, dict[str, Any]] = {}
    first = 0
    for name, steps, lr in phases(study, run):
        if not steps:
            continue
        objective: Objective = (
            TeacherLogitsObjective(
                student,
                teacher,
                chunk=8192,
                kl_weight=recipe.kl_weight,
                hidden_weight=recipe.hidden_weight,
            )
            if name == "global"
            else BlockwiseObjective(
                student,
                teacher,
                pairs,
                on_student=name == "drift",
                attention_weight=recipe.attention_weight,
                n_queries=32,
            )
        )
        is_global = name == "global"
        made = optimizers(
            study, objective, lr, map_lr=recipe.map_lr if is_global else 1.0, muon=recipe.muon and is_global
        )
        with compiled(study, objective.compilable() + ([] if is_global else rest)):
            spans[name] = train(study, objective, made, steps=steps, run=run, first=first)
        first += steps
        if is_global or not selection:  # a trial is measured at its end alone
            spans[name]["after"] = measure(study, teacher, student, selection=selection)
    last = spans["global"]["after"]
    print(
        f"{run.name} {'trial ' if selection else ''}{asdict(recipe)}: ratio {untrained['ppl_ratio']:.4f} -> "
        f"{last['ppl_ratio']:.4f} kl {last['kl']:.4f} recall {last['recall_share']:.3f} of the teacher's, "
        f"{spans['global']['tokens_per_second'] / 1e3:.0f}k tok/s, {time.monotonic() - began:.0f} s",
        flush=True,
    )
    return {
        **asdict(run),
        "surgery": surgery,
        "untrained": untrained,
        "phases": spans,
        "tokens": sum(span["tokens"] for span in spans.values()),
        "seconds": time.monotonic() - began,
    }


@dataclass(frozen=True)
class Size:
    """Everything that the tiny trial and the study differ in."""

    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_ff: int
    vocab_size: int
    n_tokens: int
    corpus_bytes: int
    teacher_tokens: int
    teacher_batch: int
    teacher_lr: float
    distil_tokens: int
    calibration_windows: int
    eval_windows: int
    recall_samples: int
    budgets: dict[str, tuple[int, int]]


SIZES = {
    "full": Size(
        768, 12, 12, 3, 2048, 16384, 1024, 900_000_000, 301_000_000, 64, 1.5e-3,
        69_500_000, 256, 256, 256,
        {"1.78x": (152, 64), "2.67x": (96, 48), "5.33x": (48, 24), "6.4x": (40, 20), "10.7x": (24, 12)},
    ),
    # The study's shapes with next to no training: whether it runs, and how fast.
    "trial": Size(
        768, 12, 12, 3, 2048, 16384, 1024, 120_000_000, 6_000_000, 64, 1.5e-3,
        3_000_000, 256, 256, 256, {"2.67x": (96, 48), "5.33x": (48, 24)},
    ),
    "tiny": Size(
        128, 3, 4, 1, 256, 1024, 256, 3_000_000, 400_000, 8, 3e-3,
        160_000, 8, 16, 16,
        {"1.78x": (48, 24), "5.33x": (16, 8)},
    ),
}  # fmt: skip
HEAD_DIM = 64
RECALL_SHARE = 0.05
EVAL_BATCH = 16
SHORT_SHARE = 0.285  # of distil_tokens: under 20M
METHODS = ("dba", "fitted", "weight_svd", "random")  # fitted is dba with widths by layer under the same bytes
CONTINUED = "teacher"  # no surgery: the teacher itself, trained on the students' tokens
POOLED = "copy"  # one key/value head: what mean-pooled heads can come nearest to the budgets


def spec(size: Size, attention: dict[str, Any], vocab_size: int) -> ModelSpec:
    """Return a Llama-shaped model with one kind of attention."""
    d = size.d_model
    norm = {"type": "RMSNormLayer", "d_model": d}
    block = [
        {"type": "ResidualTopology", "layers": [norm, {"type": "AttentionLayer", "d_model": d, **attention}]},
        {
            "type": "ResidualTopology",
            "layers": [norm, {"type": "SwiGLULayer", "d_model": d, "d_ff": size.d_ff}],
        },
    ]
    stack = {"type": "NestedTopology", "repeat": size.n_layers, "layers": block}
    return ModelSpec.model_validate(
        {
            "embedder": {"vocab_size": vocab_size, "d_model": d},
            "topology": {"type": "StackedTopology", "layers": [stack, norm]},
        }
    )


def teacher_spec(size: Size, vocab_size: int) -> ModelSpec:
    heads = {"n_heads": size.n_heads, "n_kv_heads": size.n_kv_heads, "head_dim": HEAD_DIM}
    return spec(size, {"mode": "gqa", **heads}, vocab_size)


def student_spec(size: Size, vocab_size: int, sem_dim: int, geo_dim: int) -> ModelSpec:
    heads = {"n_heads": size.n_heads, "n_kv_heads": size.n_kv_heads, "head_dim": HEAD_DIM}
    return spec(
        size,
        {"mode": "decoupled", "layout": "latent", "sem_dim": sem_dim, "geo_dim": geo_dim, **heads},
        vocab_size,
    )


class Clock:
    """The seconds left of a call."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    def left(self) -> float:
        return self.end - time.monotonic()


def rate(step: int, steps: int, peak: float, warmup: int, floor: float = 0.02) -> float:
    """Linear warm-up, then cosine to `floor` of the peak."""
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * (
        floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(steps - warmup, 1)))
    )


class Study:
    """One folder of results, the corpus and the held-out data of a study."""

    def __init__(self, state: Path, size_name: str) -> None:
        self.state, self.size_name, self.size = state, size_name, SIZES[size_name]
        state.mkdir(parents=True, exist_ok=True)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.backends.cuda.matmul.allow_tf32 = True
        self.corpus = self._corpus()
        size = self.size
        self.held_out = held_out(self.corpus, size.eval_windows, size.recall_samples, size.n_tokens)
        # Recipes are chosen on other windows than those that are reported.
        self.selection = held_out(
            self.corpus, size.eval_windows, size.recall_samples, size.n_tokens, seed=21, shift=1
        )

    def _corpus(self) -> ProxyCorpus:
        place = self.state / "corpus.pt"
        if place.is_file():
            return ProxyCorpus(**torch.load(place, map_location=self.device, weights_only=True))
        made = build(self.size.vocab_size, self.size.corpus_bytes, 0.01, self.device)
        torch.save(vars(made), place)
        return made

    def autocast(self) -> AbstractContextManager:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def attention(self) -> AbstractContextManager:
        return attention_backends(self.device)

    def compile_module(self, module: Any) -> Any:
        return torch.compile(module) if self.device.type == "cuda" else module

    def write(self, name: str, value: dict[str, Any]) -> None:
        write_json(self.state / f"{name}.json", value)

    def read(self, name: str) -> dict[str, Any] | None:
        place = self.state / f"{name}.json"
        return json.loads(place.read_text()) if place.is_file() else None

    def teacher(self) -> Model:
        """Return the finished teacher, frozen."""
        model = build_model(teacher_spec(self.size, self.corpus.vocab_size), seed=0).to(self.device)
        model.load_state_dict(
            torch.load(self.state / "teacher.pt", map_location=self.device, weights_only=True)["model"]
        )
        return model.eval().requires_grad_(False)

    def spec_of(self, budget: str, method: str, widths: tuple[int, int] | None = None) -> ModelSpec:
        """Return what a method builds at a budget: the widths of `fitted` follow from the calibration."""
        size, vocab_size = self.size, self.corpus.vocab_size
        if budget == CONTINUED:
            return teacher_spec(size, vocab_size)
        if budget == POOLED:
            heads = {"n_heads": size.n_heads, "n_kv_heads": 1, "head_dim": HEAD_DIM}
            return spec(size, {"mode": "gqa", **heads}, vocab_size)
        sem_dim, geo_dim = widths or size.budgets[budget]
        uniform = student_spec(size, vocab_size, sem_dim, geo_dim)
        if method != "fitted":
            return uniform
        made = self.spec_files / f"{budget}.json"
        if not made.is_file():
            budget_bytes = (sem_dim + geo_dim) * 2 * size.n_layers
            fitted = fit_widths(self.frozen_teacher, uniform, self.calibration, budget_bytes)
            write_json(made, fitted.model_dump(mode="json"))
        return ModelSpec.model_validate(json.loads(made.read_text()))

    def student(self, budget: str, method: str, widths: tuple[int, int] | None = None) -> Model:
        """Return a student at its random initialisation."""
        return build_model(self.spec_of(budget, method, widths), seed=0).to(self.device)

    @cached_property
    def frozen_teacher(self) -> Model:
        return self.teacher()

    @property
    def spec_files(self) -> Path:
        return self.state / "specs"

    @cached_property
    def calibration(self) -> Calibration:
        """What surgery knows of the teacher: statistics of the students' text, kept for the next call."""
        size = self.size
        generator = torch.Generator(self.device).manual_seed(7)
        rows = windows(self.corpus.fresh, size.calibration_windows + 32, size.n_tokens, generator)
        began = time.monotonic()
        text = CalibrationText(rows[32:], rows[:32])
        made = calibrate(self.frozen_teacher, text, cache=self.state / "calibration")
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.calibration_seconds = time.monotonic() - began
        return made

    def batch(
        self, batch_size: int, seed: int, step: int, *, fresh: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the batch of a step, the same for every run with this seed. `fresh` reads the teacher's text."""
        generator = torch.Generator(self.device).manual_seed(seed * 1_000_003 + step)
        tokens = self.corpus.fresh if fresh else self.corpus.train
        return training_batch(self.corpus, tokens, batch_size, self.size.n_tokens, RECALL_SHARE, generator)


def transplant_into(study: Study, student: Model, method: str, seed: int) -> dict[str, Any]:
    """Initialise a student by a method and return its report."""
    if method == "random":
        init_weights(student)
    if method == CONTINUED:
        student.load_state_dict(study.frozen_teacher.state_dict())
        student.eval()
        return {"method": method}
    calibration = study.calibration if method in ("dba", "fitted") else None
    began = time.monotonic()
    config = SurgeryConfig(method="dba" if method == "fitted" else method)  # type: ignore[arg-type]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        report = transplant(study.frozen_teacher, student, config, calibration)
    if study.device.type == "cuda":
        torch.cuda.synchronize()
    student.eval()
    return {
        "method": method,
        "seconds": time.monotonic() - began,
        "calibration_seconds": study.calibration_seconds if calibration else None,
        "calibration_tokens": report.calibration_tokens,
        "layers": [asdict(layer) for layer in report.layers],
    }


def measure(study: Study, teacher: Model, student: Model, *, selection: bool = False) -> dict[str, Any]:
    """Return everything that is reported of a student and its teacher; bytes are counted from cache tensors."""
    data = study.selection if selection else study.held_out
    with study.autocast():
        found = agreement(
            teacher, student, data.text, windows=len(data.text), batch_size=EVAL_BATCH, device=study.device
        )
    assert found.interval is not None  # there are windows enough
    depths = recall_by_depth(student, data, study.autocast, EVAL_BATCH)
    facts = study.read("teacher")
    assert facts is not None
    ours, full = (model.new_context(1, 64, KVCacheKind.BF16).bytes_per_token for model in (student, teacher))
    return {
        "ppl_ratio": found.ppl_ratio,
        "ppl_ratio_low": found.interval[0],
        "ppl_ratio_high": found.interval[1],
        "delta_nll": found.delta_nll,
        "kl": found.kl,
        "top1_agreement": found.top1,
        "recall_by_depth": depths,
        "recall": sum(depths) / len(depths),
        "recall_share": sum(depths) / len(depths) / max(facts["recall"], 1e-9),
        "bytes_per_token_layer": ours / study.size.n_layers,
        "kv_ratio": full / ours,
    }


def serve(device: int, state: Path, size: str, work: Callable[..., Any], jobs: Any, results: Any) -> None:
    """Do jobs until None comes; what a job raises goes back as text."""
    os.environ["CUDA_VISIBLE_DEVICES"] = str(device)

    study = Study(state, size)
    with study.attention():
        while (job := jobs.get()) is not None:
            index, arguments = job
            try:
                results.put((device, index, work(study, *arguments), None))
            except Exception:
                results.put((device, index, None, traceback.format_exc()))


class Pool:
    """Processes with one device each, which do one job at a time in the given order."""

    def __init__(self, n_devices: int, state: Path, size: str, work: Callable[..., Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self.results = context.Queue()
        self.queues = [context.Queue() for _ in range(n_devices)]
        self.processes = [
            context.Process(target=serve, args=(device, state, size, work, queue, self.results), daemon=True)
            for device, queue in enumerate(self.queues)
        ]
        for process in self.processes:
            process.start()

    def map(self, jobs: Sequence[tuple[Any, ...]], clock: Clock, seconds: Sequence[float]) -> list[Any]:
        """Return each job's result in order, None for those that failed (the reason is printed) or did not fit.

        A job starts only while its `seconds` are left on the clock; those behind it wait for none.
        """
        found: list[Any] = [None] * len(jobs)
        waiting, idle, busy = list(enumerate(jobs)), list(range(len(self.queues))), 0
        while waiting or busy:
            left = clock.left()
            for index, job in [each for each in waiting if left < seconds[each[0]]]:
                print(f"{left:.0f} s left, a job of {seconds[index]:.0f} s does not fit: {job}", flush=True)
                waiting.remove((index, job))
            while waiting and idle:
                self.queues[idle.pop(0)].put(waiting.pop(0))
                busy += 1
            if not busy:
                break
            device, index, value, failure = self.results.get()
            busy -= 1
            idle.append(device)
            found[index] = value
            if failure:
                print(f"{jobs[index]}: {failure}", flush=True)
        return found

    def close(self) -> None:
        for queue in self.queues:
            queue.put(None)
        end = time.monotonic() + 20
        for process in self.processes:
            process.join(max(end - time.monotonic(), 0.1))
            if process.is_alive():
                process.kill()


@contextmanager
def pool(n_devices: int, state: Path, size: str, work: Callable[..., Any]) -> Iterator[Pool]:
    """A pool that is closed whatever happens."""
    made = Pool(n_devices, state, size, work)
    try:
        yield made
    finally:
        made.close()


HEADLINE = "5.33x"
# Widths that students are distilled with: as many elements as the budget's own, fewer of them geometric.
WIDTHS = {"5.33x": (60, 12), "6.4x": (50, 10), "10.7x": (30, 6)}
# What a budget's recipe has otherwise than the one before it, before any trial.
OWN: dict[str, dict[str, Any]] = {"10.7x": {"global_lr": 1e-3, "map_lr": 1.0}}
# Single changes of the recipe, tried in this order on top of the best so far, the first ones in parallel.
CHANGES: dict[str, tuple[dict[str, Any], ...]] = {
    HEADLINE: ({}, {"kl_weight": 0.85}),
    "10.7x": ({}, {"global_lr": 1.5e-3}),
}
TRIAL_SHARE = 0.2  # of distil_tokens


def train_teacher(study: Study, clock: Clock) -> bool:
    """Train the teacher until it is done or the time is up; return whether it is done. Ranks share each batch."""
    size = study.size
    rank, world = (
        (distributed.get_rank(), distributed.get_world_size()) if distributed.is_initialized() else (0, 1)
    )
    if study.read("teacher"):
        return True
    model = build_model(teacher_spec(size, study.corpus.vocab_size), seed=0).to(study.device)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=size.teacher_lr,
        betas=(0.9, 0.95),
        weight_decay=0.1,
        fused=study.device.type == "cuda",
    )
    place, step, spent = study.state / "teacher.pt", 0, 0.0
    if place.is_file():
        saved = torch.load(place, map_location=study.device, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step, spent = saved["step"], saved["seconds"]
    per_step = size.teacher_batch * size.n_tokens
    steps = math.ceil(size.teacher_tokens / per_step)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x).flatten(0, 1).float(), y.flatten())

    compiled = study.compile_module(loss_of)
    began, first, shown = time.monotonic(), step, time.monotonic()
    while step < steps and (world > 1 or clock.left() > 12):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps, size.teacher_lr, min(300, steps // 10))
        x, y = (part.chunk(world)[rank] for part in study.batch(size.teacher_batch, 1, step, fresh=False))
        with study.autocast():
            loss = compiled(x, y)
        loss.backward()
        if world > 1:
            average_gradients(model, world)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % 50 == 0:
            loss.item()  # keeps the queue short, so that the clock is the device's
        if time.monotonic() - shown > 30 and rank == 0:
            shown = time.monotonic()
            print(f"teacher step {step}/{steps} loss {loss.item():.3f} "
                  f"{(step - first) * per_step / (shown - began) / 1e3:.0f}k tok/s", flush=True)  # fmt: skip
    spent += time.monotonic() - began
    if rank:
        return step == steps
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "seconds": spent},
        place,
    )
    if step < steps:
        print(f"teacher: {step} of {steps} steps; call again", flush=True)
        return False
    model.eval()
    text = study.held_out.text
    with study.autocast():
        nll = windowed_nll(model, text, windows=len(text), batch_size=EVAL_BATCH, device=study.device)
    depths = recall_by_depth(model, study.held_out, study.autocast, EVAL_BATCH)
    facts = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": steps,
        "tokens": steps * per_step,
        "epochs": steps * per_step / study.corpus.train.numel(),
        "seconds": spent,
        "devices": world,
        "nll": nll.mean,
        "perplexity": nll.perplexity,
        "bits_per_byte": nll.mean * study.corpus.bits_per_nat_token,
        "recall_by_depth": depths,
        "recall": sum(depths) / len(depths),
        "cache_elements": 2 * size.n_kv_heads * HEAD_DIM,
    }
    study.write("teacher", facts)
    print(
        "teacher:",
        {key: round(value, 4) if isinstance(value, float) else value for key, value in facts.items()},
    )
    return True


def average_gradients(model: nn.Module, world: int) -> None:
    """Replace every gradient by its mean over the ranks, in one reduction."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    distributed.all_reduce(flat)
    flat /= world
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def measure_untrained(study: Study, budget: str, method: str) -> dict[str, Any]:
    """Make and measure a student of a budget by a method, without training."""
    student = study.student(budget, method)
    surgery = transplant_into(study, student, method, 0)
    row = {"budget": budget, **surgery, **measure(study, study.frozen_teacher, student)}
    print(
        f"{budget} {method}: {row['kv_ratio']:.2f}x, untrained ratio {row['ppl_ratio']:.4f} "
        f"[{row['ppl_ratio_low']:.4f}, {row['ppl_ratio_high']:.4f}], recall {row['recall_share']:.3f}",
        flush=True,
    )
    return row


def work(study: Study, what: str, *arguments: Any) -> Any:
    """Do one job of the pool; module-level, for processes of their own."""
    if what == "calibrate":
        return len(study.calibration.layers)
    if what == "untrained":
        return measure_untrained(study, *arguments)
    (run,) = arguments
    if what == "trial":
        name = f"trial_{hashlib.sha256(repr(run).encode()).hexdigest()[:12]}"
        if not (found := study.read(name)):
            study.write(name, found := distil(study, run, selection=True))
        return found
    study.write(run.name, distil(study, run))
    return True


def surgery_rows(study: Study, jobs: Pool, clock: Clock) -> None:
    """Make and measure the untrained students of every budget by every method."""
    if study.read("surgery"):
        return
    jobs.map([("calibrate",)], clock, [0.0])
    cases = [(budget, method) for budget in study.size.budgets for method in METHODS]
    cases += [(POOLED, POOLED)]
    rows = jobs.map([("untrained", *case) for case in cases], clock, [0.0] * len(cases))
    study.write("surgery", {"rows": [row for row in rows if row]})


def search(study: Study, jobs: Pool, clock: Clock) -> None:
    """Change one thing at a time on short runs, budget by budget: what helps most stays."""
    tokens = int(study.size.distil_tokens * TRIAL_SHARE)
    chosen: dict[str, Any] = {}
    trials: list[dict[str, Any]] = []
    best = Run(HEADLINE, tokens=tokens)
    each = 0.0
    for budget, changes in CHANGES.items():
        if budget not in study.size.budgets:
            continue
        elements = sum(study.size.budgets[budget])
        waiting = [change for change in changes if sum(change.get("widths", (elements,))) == elements]
        best, lowest = beginning(study, best, budget), math.inf
        n_devices = len(jobs.queues)
        while waiting and clock.left() > each:
            tried, waiting = waiting[:n_devices], waiting[n_devices:]
            began = time.monotonic()
            runs = [best.with_changes(**change) for change in tried]
            found = jobs.map([("trial", run) for run in runs], clock, [each] * len(runs))
            each = max(each, (time.monotonic() - began) * 1.05)
            better = []
            for change, run, result in zip(tried, runs, found, strict=True):
                if result is None:
                    continue
                ratio = result["phases"]["global"]["after"]["ppl_ratio"]
                trials.append({"change": change, **result})
                if ratio < lowest:
                    better.append((ratio, change, run))
            if better:
                better.sort(key=lambda item: item[0])
                lowest, _, best = better[0]
            print(
                f"best: {lowest:.4f} {best.budget} {best.widths} {asdict(best.recipe)}; {clock.left():.0f} s left",
                flush=True,
            )
        if lowest < math.inf:
            chosen[budget] = asdict(best)
    study.write("search", {"best": chosen, "trials": trials})


def beginning(study: Study, before: Run, budget: str) -> Run:
    """Return what a budget begins with, after what was found for the one before it."""
    widths = WIDTHS.get(budget) if study.size_name == "full" else None
    return replace(before, budget=budget, widths=widths).with_changes(**OWN.get(budget, {}))


def plan_runs(study: Study) -> list[Run]:
    """Return the distillations of the study, by the recipe that the search chose."""
    found = study.read("search")
    chosen = found["best"] if found else {}
    full = study.size.distil_tokens

    def of(budget: str, before: Run) -> Run:
        if not (kept := chosen.get(budget)):
            return replace(beginning(study, before, budget), tokens=full)
        widths = tuple(kept["widths"]) if kept["widths"] else None
        return replace(Run(**kept), tokens=full, recipe=Recipe(**kept["recipe"]), widths=widths)

    base = of(HEADLINE, Run(HEADLINE))
    short = replace(base, tokens=int(full * SHORT_SHARE))
    recipe = base.recipe
    runs = [
        base,
        of("10.7x", base),
        of("6.4x", base),
        replace(base, seed=1),
        replace(base, seed=2),
        short,
        # What the method and the layout are worth, and the text alone, on as many tokens as the run before.
        replace(short, method="weight_svd"),
        Run(POOLED, POOLED, tokens=short.tokens, recipe=recipe),
        Run(
            CONTINUED,
            CONTINUED,
            tokens=short.tokens,
            recipe=replace(recipe, blockwise=0.0, drift=0.0, kl_weight=0.0, hidden_weight=0.0),
        ),
    ]
    known = (*study.size.budgets, POOLED, CONTINUED)
    return [run for run in runs if run.budget in known and not study.read(run.name)]


def distillations(study: Study, jobs: Pool, clock: Clock, seconds_each: float) -> None:
    """Do the distillations that are not done yet, while there is time."""
    runs = plan_runs(study)
    seconds = [seconds_each * (0.15 + 0.85 * run.tokens / study.size.distil_tokens) for run in runs]
    jobs.map([("distil", run) for run in runs], clock, seconds)


def collect(study: Study, out: Path) -> None:
    """Join the stages' files to the study's JSON."""
    size = study.size
    rows = study.read("surgery")
    places = sorted(study.state.glob("distil_*.json"))
    distilled = [found for place in places if (found := study.read(place.stem))]
    found = study.read("search")
    facts = {
        "platform": platform.platform(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if study.device.type == "cuda" else "cpu",
    }
    write_json(
        out,
        {
            "benchmark": "upcycle_proxy",
            "made_by": "python scripts/bench/run.py upcycle_proxy teacher|surgery|search|distil|collect",
            "label": "proxy: a teacher trained from scratch on local source code; no claim about Llama",
            "intervals": "normal",
            "machine": facts,
            "size": {key: value for key, value in asdict(size).items() if key != "budgets"},
            "budgets": size.budgets,
            "corpus": {
                "files": study.corpus.n_files,
                "train_tokens": study.corpus.train.numel(),
                "fresh_tokens": study.corpus.fresh.numel(),
                "val_tokens": study.corpus.val.numel(),
                "val_bytes": study.corpus.val_bytes,
                "vocab_size": study.corpus.vocab_size,
            },
            "teacher": study.read("teacher"),
            "untrained": rows["rows"] if rows else [],
            "search": found,
            "distilled": distilled,
        },
    )
    draw_study(json.loads(out.read_text()), out.with_suffix(".png"))
    print(f"wrote {out}: {len(distilled)} distillations, {len(plan_runs(study))} to go")


STAGES = ("teacher", "surgery", "search", "distil", "collect")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("stage", nargs="+", choices=STAGES)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--each", type=float, default=0.0, help="seconds that one distillation takes")


def run(options: argparse.Namespace, record: Record) -> int | None:
    clock = Clock(options.seconds)
    if "teacher" in options.stage and "RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        distributed.init_process_group("nccl")
        if distributed.get_rank() == 0:
            Study(options.state, options.size)  # makes the corpus for all
        distributed.barrier()
    study = Study(options.state, options.size)
    if "teacher" in options.stage:
        with study.attention():
            done = train_teacher(study, clock)
        if distributed.is_initialized():
            distributed.destroy_process_group()
        return 0 if done else 3
    if "collect" in options.stage:
        collect(study, options.out)
        return 0
    with pool(options.devices, options.state, options.size, work) as jobs:
        if "surgery" in options.stage:
            surgery_rows(study, jobs, clock)
        if "search" in options.stage:
            search(study, jobs, clock)
        if "distil" in options.stage:
            distillations(study, jobs, clock, options.each)
    return 0
