"""Make docs/benchmarks.md from the JSON files that the other scripts of this folder wrote.

Usage: python scripts/bench/report.py [--check]   (--check exits 1 when the page is not what the JSON gives)
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from sections import batching as sections_batching
from sections import decode as sections_decode
from sections import inference as sections_inference
from sections import kernels as sections_kernels
from sections import loss as sections_loss
from sections import prefill as sections_prefill
from sections import scaling as sections_scaling
from sections import step as sections_step
from sections import study as sections_study
from sections import summary as sections_summary
from sections import sweeps as sections_sweeps
from sections import training as sections_training
from sections import upcycle as sections_upcycle

from caramba.runs.files import write_whole

FOLDER = Path("docs/benchmarks")
PAGE = Path("docs/benchmarks.md")


def lightning_overhead(data: dict[str, Any]) -> list[str]:
    """Step time of a bare loop and of the same work through Lightning with every callback of a run."""
    rows = [
        f"| {name} | {values['median']:.2f} | {min(values['all']):.2f} to {max(values['all']):.2f} |"
        for name, values in data["step_ms"].items()
    ]
    spread = data["overhead"]["all"]
    return [
        f"## What Lightning and the callbacks add ({data['model']}, {data['tokens_per_step']} tokens a step)",
        "",
        "| loop | step, ms (median of repeats) | range |",
        "|---|---|---|",
        *rows,
        "",
        f"Overhead: **{100 * data['overhead']['median']:.2f}%** (paired by repeat: {100 * min(spread):.2f}% to"
        f" {100 * max(spread):.2f}%). Both loops end with the same loss, {data['last_loss']['bare']:.6f}.",
    ]


def launch_times(data: dict[str, Any]) -> list[str]:
    """Seconds from a command to its effect."""
    rows = [
        f"| `{item['command']}` | {item['what']} | {item['median_s']:.2f} | {min(item['all_s']):.2f} to"
        f" {max(item['all_s']):.2f} | {_seconds(item.get('median_cpu_s'))} | {item['limit_s']} |"
        for item in data["commands"]
    ]
    return [
        "## How long commands take",
        "",
        "| command | until | seconds (median) | range | CPU seconds of the command | must |",
        "|---|---|---|---|---|---|",
        *rows,
    ]


def _seconds(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.2f}"


def first_light(data: dict[str, Any]) -> list[str]:
    """The default run: quality by stage, bytes and speed, all of a proxy teacher."""
    metrics = data["metrics"]

    def value(key: str) -> str:
        item = metrics.get(key)
        if item is None:
            return ""
        error = item["std"] if item.get("standard_error") is None else item["standard_error"]
        spread = "" if error is None else f" ± {error:.3g}"
        return f"{item['value']:.4g}{spread}"

    models = dict.fromkeys(key.split(".")[1] for key in metrics if key.startswith("perplexity."))
    rows = [
        f"| {name} | {value(f'perplexity.{name}.perplexity')} | {value(f'perplexity.{name}.bits_per_byte')} |"
        for name in models
    ]
    speeds = [
        key for key in metrics if key.startswith(("latency.teacher.tok_s", "latency.teacher.prefill_ms"))
    ]
    latency = [
        f"| {key.split('.')[2]} | {value(key)} | {value(key.replace('teacher', 'student'))} |"
        for key in sorted(speeds)
    ]
    return [
        f"## The default run on {data['device']} (proxy teacher: {data['labels'].get('proxy', 'given')})",
        "",
        f"`{data['command']}`: {data['wall_s']:.0f} s. Phases: "
        + ", ".join(f"{phase['id']} {phase['seconds']:.0f} s" for phase in data["phases"])
        + ".",
        "",
        "| model | held-out perplexity | bits per byte |",
        "|---|---|---|",
        *rows,
        "",
        f"KV bytes per token (fp16, counted from tensors): teacher {value(data['kv_key'].format('teacher'))},"
        f" student {value(data['kv_key'].format('student'))}.",
        "",
        "| latency | teacher | student |",
        "|---|---|---|",
        *latency,
    ]


def substrate(data: dict[str, Any]) -> list[str]:
    """Loading, planning, and a step against transformers."""
    rows = []
    if part := data.get("load"):
        ratio, memory = part["load_over_read"], part["peak_host_memory"]
        words = f"load of a 1B bf16 checkpoint, {part['file_bytes'] / 1e9:.2f} GB"
        rows += [
            f"| {words}, over reading it into fresh memory | {ratio['fresh']:.2f}x | {ratio['limit']}x |",
            f"| {words}, over reading it into touched memory | {ratio['touched']:.2f}x | {ratio['limit']}x |",
            f"| its peak host memory, of the model | {memory['over_model']:.3f}x | {memory['limit']}x |",
        ]
    if part := data.get("logits"):
        words = f"largest difference of its fp32 logits from transformers' (their deviation: {part['logits_std']:.2g})"
        rows.append(f"| {words} | {part['largest_difference']:.1e} | {part['limit']:.0e} |")
    if part := data.get("compile"):
        rows.append(f"| `{part['command']}` | {part['median_s']:.2f} s | {part['limit_s']} s |")
    lines = ["## Model substrate", "", "| what | measured | must |", "|---|---|---|", *rows]
    part = data.get("beside_transformers")
    if part is None:
        return lines
    lines += [
        "",
        f"{part['model']}, {part['batch']} x {part['tokens']} tokens, {part['precision']}, SDPA {part['sdpa']},"
        f" {'compiled' if part['compiled'] else 'eager'}; transformers {part['transformers']}, torch"
        f" {part['machine']['torch']}, {part['machine'].get('gpu', 'CPU')}; median (20% to 80%) of measurements in"
        " turns. Both attend without a mask (`is_causal`):",
        "",
        "| | caramba, ms | LlamaForCausalLM, ms | ratio (must 1.0) |",
        "|---|---|---|---|",
    ]
    for name in ("forward", "training_step"):
        cells = [
            f"{part[name][side]['median_ms']:.2f} ({part[name][side]['p20_ms']:.2f} to"
            f" {part[name][side]['p80_ms']:.2f})"
            for side in ("caramba", "transformers")
        ]
        ratio = part[name]["caramba_over_transformers"]
        lines.append(f"| {name.replace('_', ' ')} | {cells[0]} | {cells[1]} | **{ratio:.3f}** |")
    return lines


def prepare(data: dict[str, Any]) -> list[str]:
    """Speed of tokenising on one core, and peak memory over the amount of text."""
    rows = [
        f"| {run['text_mb']:,.0f} | {run['documents']:,} | {run['tokens']:,} | {run['wall_s']:.1f} |"
        f" {run['cpu_s']:.1f} | {run['peak_mib']:.0f} |"
        for run in data["runs"]
    ]
    return [
        f"## Tokenising text on one core ({data['tokenizer']}; {data['text']})",
        "",
        "| text, MB | documents | tokens | wall, s | CPU, s | peak memory, MiB |",
        "|---|---|---|---|---|---|",
        *rows,
        "",
        f"**{data['mb_per_cpu_second']:.1f} MB a CPU second** (must: {data['must_mb_per_s']:g}), from the difference of"
        " the two runs: start-up and training the BPE do not count, reading, splitting and writing do. Peak memory of"
        f" the larger run over the smaller: {data['peak_ratio']:.2f}. Load average at the end:"
        f" {data['load_average']:.1f}.",
    ]


SECTIONS = {
    "cached_steps": sections_inference.cached_steps,
    "speculation": sections_inference.speculation,
    "substrate": substrate,
    "lightning_overhead": lightning_overhead,
    "launch_times": launch_times,
    "first_light": first_light,
    "prepare": prepare,
    "kernels": sections_kernels.kernels,
    "host_cost": sections_kernels.host_cost,
    "step_kernels": sections_step.step_kernels,
    "optimizer_steps": sections_step.optimizer_steps,
    "row_linear": sections_step.row_linear,
    "batching": sections_batching.batching,
    "decode": sections_decode.decode,
    "inference": sections_inference.inference,
    "prefill": sections_prefill.prefill,
    "attention_backends": sections_upcycle.attention_backends,
    "documents": sections_upcycle.documents,
    "linear_cross_entropy": sections_loss.linear_cross_entropy,
    "surgery_cost": sections_upcycle.surgery_cost,
    "blockwise_cost": sections_upcycle.blockwise_cost,
    "sweep_overhead": sections_sweeps.sweep_overhead,
    "collect_runs": sections_sweeps.collect_runs,
    "studio": sections_sweeps.studio,
    "scaling": sections_scaling.scaling,
    "tensor_parallel_step": sections_scaling.tensor_parallel_step,
    "training": sections_training.training,
    "step_profile": sections_training.step_profile,
    "ladder": sections_training.ladder,
    "planned": sections_training.planned,
    "upcycle_proxy": sections_study.upcycle_proxy,
}


GROUPS = {
    "Quality": ("first_light", "upcycle_proxy"),
    "Training": (
        *("training", "step_profile", "ladder", "planned", "scaling", "tensor_parallel_step"),
        *("lightning_overhead", "blockwise_cost", "surgery_cost"),
    ),
    "Inference": ("inference", "prefill", "batching", "speculation", "cached_steps"),
    "Kernels": (
        *("attention_backends", "decode", "documents", "host_cost", "kernels", "linear_cross_entropy"),
        *("optimizer_steps", "row_linear", "step_kernels"),
    ),
    "Commands and data": ("launch_times", "substrate", "prepare", "collect_runs", "studio", "sweep_overhead"),
}
ELSEWHERE = (
    "smollm2",
    "paired_tests",
    "export_memory",
    "engines",
)  # docs/results.md, evidence.md, export.md show them


def render() -> str:
    """Return the page: a summary, then sections by group."""
    files = {
        file: json.loads(file.read_text())
        for file in sorted(FOLDER.glob("*.json"))
        if file.stem not in ELSEWHERE
    }
    lines = [
        "# Benchmarks",
        "",
        "Made by `python scripts/bench/report.py` from the JSON in `docs/benchmarks/`; not edited by hand.",
        "",
        *sections_summary.summary(FOLDER),
        "",
        "Measurements on a pretrained teacher are in [results](results.md).",
    ]
    for group, names in GROUPS.items():
        lines += ["", f"## {group}"]
        for name in names:
            for file, data in files.items():
                if data["benchmark"] == name:
                    lines += ["", *_section(file, data)]
    return "\n".join(lines) + "\n"


def _section(file: Path, data: dict[str, Any]) -> list[str]:
    machine = ", ".join(f"{key} {value}" for key, value in data["machine"].items())
    body = [f"#{line}" if line.startswith("#") else line for line in SECTIONS[data["benchmark"]](data)]
    return [*body, "", f"Source: `{file}`, by `{data['made_by']}`, on {machine}."]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    page = render()
    if parser.parse_args().check:
        return 0 if PAGE.is_file() and PAGE.read_text() == page else 1
    write_whole(PAGE, page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
