"""What the stages of the proxy study share: sizes, specs, the folder of results, surgery, and what is measured."""

from __future__ import annotations

import json
import math
import time
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from cases.proxy_corpus import ProxyCorpus, build, training_batch, windows
from cases.proxy_measure import held_out, recall_by_depth

from caramba.config.kvcache import KVCacheKind
from caramba.config.model import ModelSpec, SurgeryConfig
from caramba.layer import attention_backends
from caramba.metrics import agreement
from caramba.model import Model, build_model, init_weights
from caramba.runs.files import write_json
from caramba.surgery import Calibration, CalibrationText, calibrate, fit_widths, transplant


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
