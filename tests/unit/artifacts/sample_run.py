"""A run with everything in it, built by hand: the numbers have the shape of a small upcycle on a laptop."""

from __future__ import annotations

import dataclasses
from typing import Any

from caramba.result import (
    BenchmarkResult,
    Check,
    Metric,
    PhaseResult,
    RunResult,
    TransplantedLayer,
    TransplantReport,
    Verdict,
)

STAGE_NLL = {
    "teacher": 2.301,
    "teacher_continued": 2.214,
    "student_transplant": 4.912,
    "student_blockwise": 2.467,
    "student_global": 2.342,
    "student": 2.342,
}


def perplexity_benchmark() -> BenchmarkResult:
    metrics: list[Metric] = []
    rows: list[dict[str, Any]] = []
    for model, nll in STAGE_NLL.items():
        value = 2.718281828**nll
        metrics += [
            Metric(f"perplexity.{model}.nll", nll, "nats/token", 256, None, "ppl", 0.021),
            Metric(f"perplexity.{model}.perplexity", value, "", 256, None, "ppl", 0.021 * value),
            Metric(f"perplexity.{model}.unique_tokens", 65536.0, "tokens", 256, None, "ppl"),
            Metric(f"perplexity.{model}.bits_per_byte", nll / 0.6931 * 0.71, "bits/byte", 256, None, "ppl", 0.021),
        ]
        rows.append({"repeat": 0, "model": model, "nll": nll, "perplexity": value, "windows": 256, "text_bytes": None})
    return BenchmarkResult("ppl", "perplexity", tuple(metrics), tuple(rows), seconds=41.0)


def latency_benchmark() -> BenchmarkResult:
    metrics: list[Metric] = []
    rows: list[dict[str, Any]] = []
    for prompt in (64, 128, 256, 512, 1024):
        for model, scale in (("teacher", 1.0), ("student", 0.82)):
            prefill, itl = scale * (4 + prompt**1.15 / 22), scale * (2.1 + prompt / 900)
            values = {
                "prefill_ms": prefill,
                "decode_ms": 32 * itl,
                "ttft_ms": prefill + itl,
                "itl_ms": itl,
                "tok_s": 1000 / itl,
            }
            row: dict[str, Any] = {
                "repeat": 0,
                "model": model,
                "prompt": prompt,
                "gen": 32,
                "batch": 1,
                "runs": 5,
            }
            for field, value in values.items():
                unit = "tokens/s" if field == "tok_s" else "ms"
                key = f"latency.{model}.{field}@prompt={prompt},gen=32,batch=1"
                metrics.append(Metric(key, value, unit, 5, 0.06 * value, "lat"))
                row |= {field: value, f"{field}_p20": 0.93 * value, f"{field}_p80": 1.09 * value}
            rows.append(row)
    return BenchmarkResult("lat", "latency", tuple(metrics), tuple(rows), seconds=12.0)


def memory_benchmark() -> BenchmarkResult:
    metrics: list[Metric] = []
    rows: list[dict[str, Any]] = []
    widths = {"fp16": 2.0, "q8_0": 1.0625, "q4_0": 0.5625}
    for seq in (256, 1024, 4096):
        for kind, width in widths.items():
            for model, elements, weights in (("teacher", 1024, 4_251_648.0), ("student", 384, 3_899_392.0)):
                tail = f"@seq={seq},kind={kind}"
                per_token = elements * width
                metrics += [
                    Metric(f"memory.{model}.kv_bytes_per_token{tail}", per_token, "bytes", 1, None, "mem"),
                    Metric(
                        f"memory.{model}.kv_bytes_per_token_layer{tail}",
                        per_token / 4,
                        "bytes",
                        1,
                        None,
                        "mem",
                    ),
                    Metric(f"memory.{model}.model_bytes{tail}", weights, "bytes", 1, None, "mem"),
                    Metric(
                        f"memory.{model}.peak_bytes{tail}",
                        weights + 3 * seq * per_token,
                        "bytes",
                        1,
                        None,
                        "mem",
                    ),
                ]
                rows.append({"repeat": 0, "model": model, "seq": seq, "kind": kind, "cache_bytes": seq * per_token})
    return BenchmarkResult("mem", "memory", tuple(metrics), tuple(rows), seconds=3.0)


def make_result() -> RunResult:
    compare = Verdict(
        "compare",
        "global_0",
        (
            Check("attention_mean_l1", 0.0312, 0.05),
            Check("attention_max_l1", 1.41, 2.0),
            Check("logits_mean_l1", 0.613, 0.5),
            Check("attention_mean_l1_layer0", 0.0312, None),
            Check("logits_max_l1", 8.2, None),
        ),
    )
    fidelity = Verdict(
        "fidelity",
        "global_0",
        (Check("delta_nll", 0.041, 0.1, "nats"), Check("ppl_ratio", 1.042, 1.1, "ratio")),
        True,
    )
    phases = (
        PhaseResult(
            "pretrain_0",
            "pretrain",
            "teacher",
            300,
            1_228_800,
            74.2,
            "checkpoints/pretrain_0.safetensors",
            2.41,
        ),
        PhaseResult("global_0", "global", "student", 100, 409_600, 31.0, "checkpoints/global_0.safetensors", 2.35),
    )
    return RunResult(
        name="tiny_dba_50%_&_more",
        run_id="20260101T000000Z-0123abcd",
        manifest_sha256="ab" * 32,
        git_commit="cd" * 20,
        environment={"python": "3.11.2", "devices": [{"kind": "cpu", "cores": 2}]},
        plan={"dtype": "float32", "compile": False},
        phases=phases,
        verdicts=(compare, fidelity),
        benchmarks=(perplexity_benchmark(), latency_benchmark(), memory_benchmark()),
        transplant=TransplantReport(
            "weight_svd",
            ("a.weight",),
            ("b.gate",),
            (),
            (0.1, 0.2),
            (0.97, 0.95),
            transplanted_layers(),
            32768,
        ),
    )


def transplanted_layers() -> tuple[TransplantedLayer, ...]:
    """Return one latent layer whose error was measured, and one pooled layer of which only the widths are known."""
    return (
        TransplantedLayer("topology.a", "latent", 24, 8, 0, 32, 128, 0.97, 0.281, 0.5, 4),
        TransplantedLayer("topology.b", "gqa", 0, 32, 32, 64, 128),
    )


def without(result: RunResult, kind: str, error: str | None = None) -> RunResult:
    """Drop the benchmarks of a type, or let them fail."""
    kept = tuple(bench for bench in result.benchmarks if bench.type != kind)
    failed = () if error is None else (BenchmarkResult(f"bad_{kind}", kind, error=error),)
    return dataclasses.replace(result, benchmarks=(*kept, *failed))
