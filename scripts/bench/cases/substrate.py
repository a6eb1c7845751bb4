"""What the model substrate costs: loading a checkpoint, planning, and a step against transformers. Writes JSON.

Parts: `load` reads a Llama 3.2 1B checkpoint (2.5 GB, written by transformers) against reading its bytes, and its peak
host memory; `logits` launches it from the command line and compares with transformers in float32; `compile` times
`caramba compile` of an 8B preset; `gpu` runs forward and training step against transformers' LlamaForCausalLM.

Usage: python scripts/bench/run.py substrate [--parts load,logits,compile,gpu] [--folder DIR] [--out FILE]
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from record import Record
from registry import UsageError

COMPILE = ["-m", "caramba", "compile", "model=llama31_8b", "train=pretrain", "--print-plan"]
LOAD_LIMIT, MEMORY_LIMIT, COMPILE_LIMIT_S, LOGITS_LIMIT = 1.5, 1.2, 2.0, 1e-4

# VmHWM and not ru_maxrss, which a process inherits from the one that started it.
MEMORY = """
import sys
from pathlib import Path
import torch
from caramba.model import load_hf_folder
def status(key):
    fields = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
    return int(fields[key].split()[0]) * 1024
start = status("VmRSS")
model = load_hf_folder(Path(sys.argv[1]), dtype=torch.bfloat16)
print((status("VmHWM") - start) / sum(p.nbytes for p in model.parameters()))
"""


def write_checkpoint(folder: Path) -> None:
    """Write a Llama 3.2 1B with random bf16 weights through transformers."""
    import transformers

    from caramba.export.llama import llama_config
    from caramba.launch.freeze import freeze

    spec = freeze(["model=llama32_1b", "train=pretrain"]).manifest.model
    keys = llama_config(spec, max_positions=131072, eos_id=None, dtype="bfloat16")
    keys = {key: value for key, value in keys.items() if key not in ("architectures", "model_type", "dtype")}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**keys)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)


def read_bytes(file: Path, buffer: torch.Tensor) -> float:
    """Return the seconds of reading a file into memory."""
    view = memoryview(buffer.numpy())
    began = time.perf_counter()
    with open(file, "rb", buffering=0) as stream:
        while view.nbytes:
            view = view[stream.readinto(view) :]
    return time.perf_counter() - began


def load(folder: Path, repeats: int) -> dict[str, Any]:
    """Loading against reading the same bytes, in turns: into memory of their own, as a load needs, and into touched."""
    from caramba.model import load_hf_folder

    (file,) = folder.glob("*.safetensors")
    touched = torch.zeros(file.stat().st_size, dtype=torch.uint8)
    seconds: dict[str, list[float]] = {"read_fresh": [], "read_touched": [], "load_bf16": [], "load_fp32": []}
    for turn in range(repeats + 1):
        taken = {
            "read_fresh": read_bytes(file, torch.empty_like(touched)),
            "read_touched": read_bytes(file, touched),
        }
        for dtype in (torch.bfloat16, torch.float32):
            began = time.perf_counter()
            load_hf_folder(folder, dtype=dtype)
            taken[f"load_{'bf16' if dtype == torch.bfloat16 else 'fp32'}"] = time.perf_counter() - began
        for name, value in taken.items():
            seconds[name] += [value] if turn else []  # the first turn warms the page cache
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    peak = subprocess.run(
        [sys.executable, "-c", MEMORY, str(folder)], check=True, capture_output=True, text=True
    )
    return {
        "file_bytes": file.stat().st_size,
        "seconds": {name: {"median": medians[name], "all": values} for name, values in seconds.items()},
        "load_over_read": {
            "fresh": medians["load_bf16"] / medians["read_fresh"],
            "touched": medians["load_bf16"] / medians["read_touched"],
            "limit": LOAD_LIMIT,
        },
        "peak_host_memory": {"over_model": float(peak.stdout), "limit": MEMORY_LIMIT},
    }


def logits(folder: Path) -> dict[str, Any]:
    """Launch the folder as a model that is only loaded, open that run, and compare with transformers in float32."""
    import transformers

    from caramba.infer.model_bundle import load_model

    tokens = torch.randint(128256, (2, 64), generator=torch.Generator().manual_seed(0))
    words = ["model=hf", f"model.path={folder}", "train=none", "benchmark=none", "device=cpu"]
    with tempfile.TemporaryDirectory() as name, torch.no_grad():
        began = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "caramba", "launch", *words], cwd=name, check=True, capture_output=True
        )
        wall = time.perf_counter() - began
        (run,) = Path(name).glob("runs/*/*")
        ours = load_model(str(run), with_tokenizer=False).model(tokens)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens).logits
    return {
        "command": f"caramba launch {' '.join(words)}".replace(str(folder), "DIR"),
        "launch_s": wall,
        "largest_difference": float((ours - theirs).abs().max()),
        "logits_std": float(theirs.std()),
        "limit": LOGITS_LIMIT,
    }


def compile_times(repeats: int) -> dict[str, Any]:
    """Seconds of planning an 8B model in a fresh process."""
    seconds = []
    with tempfile.TemporaryDirectory() as name:
        for turn in range(repeats + 1):
            began = time.perf_counter()
            subprocess.run([sys.executable, *COMPILE], cwd=name, check=True, capture_output=True)
            seconds += [time.perf_counter() - began] if turn else []
    command = f"caramba {' '.join(COMPILE[2:])}"
    return {
        "command": command,
        "median_s": statistics.median(seconds),
        "all_s": seconds,
        "limit_s": COMPILE_LIMIT_S,
    }


def table(result: dict[str, Any]) -> list[str]:
    """Return what was measured, a line each."""
    lines = []
    if part := result.get("load"):
        ratio, seconds = part["load_over_read"], part["seconds"]
        lines += [
            f"load bf16 {seconds['load_bf16']['median']:.2f} s; reading {seconds['read_fresh']['median']:.2f} s into "
            f"fresh memory ({ratio['fresh']:.2f}x), {seconds['read_touched']['median']:.2f} s into touched "
            f"({ratio['touched']:.2f}x); must {LOAD_LIMIT}x",
            f"load fp32 {seconds['load_fp32']['median']:.2f} s",
            f"peak host memory {part['peak_host_memory']['over_model']:.3f} of the model; must {MEMORY_LIMIT}",
        ]
    if part := result.get("logits"):
        lines.append(
            f"logits differ by {part['largest_difference']:.2g} (std {part['logits_std']:.2g}); must 1e-4"
        )
    if part := result.get("compile"):
        lines.append(f"{part['command']}: {part['median_s']:.2f} s; must {COMPILE_LIMIT_S} s")
    for what in ("forward", "training_step"):
        if part := result.get("beside_transformers", {}).get(what):
            sides = ", ".join(
                f"{name} {part[name]['median_ms']:.2f} ms ({part[name]['p20_ms']:.2f} to {part[name]['p80_ms']:.2f})"
                for name in ("caramba", "transformers")
            )
            lines.append(f"{what}: {sides}; ratio {part['caramba_over_transformers']:.3f}, must 1.0")
    return lines


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", default="load,logits,compile,gpu")
    parser.add_argument(
        "--folder", type=Path, help="a Llama 3.2 1B folder of transformers; written when left out"
    )
    parser.add_argument("--repeats", type=int, default=5, help="of load and compile")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="of the part gpu")
    parser.add_argument("--model", default="llama32_1b", help="of the part gpu: a plain Llama preset")
    parser.add_argument("--precision", default="bf16", choices=("bf16", "autocast", "fp32"))
    parser.add_argument("--sdpa", default="flash", choices=("flash", "cudnn", "efficient", "auto"))
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--turns", type=int, default=20, help="measurements of each side in the part gpu")
    parser.add_argument("--eager", action="store_true", help="leave out torch.compile, on both sides")


def run(options: argparse.Namespace, record: Record) -> int | None:
    parts = options.parts.split(",")
    if unknown := set(parts) - {"load", "logits", "compile", "gpu"}:
        raise UsageError(
            f"--parts: {', '.join(sorted(unknown))} unknown; expected load, logits, compile, gpu"
        )
    # Parts that were measured in another call stay in the file.
    result: dict[str, Any] = record.read()
    machine: dict[str, Any] = {
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
    }
    if torch.cuda.is_available():
        machine["gpu"] = torch.cuda.get_device_name()
    result |= {
        **record.head(machine),
    }
    with tempfile.TemporaryDirectory() as name:
        folder = options.folder or Path(name)
        if {"load", "logits"} & set(parts) and not (folder / "config.json").is_file():
            write_checkpoint(folder)
        if "load" in parts:
            result["load"] = {"machine": machine, **load(folder.absolute(), options.repeats)}
        if "logits" in parts:
            result["logits"] = {"machine": machine, **logits(folder.absolute())}
    if "compile" in parts:
        result["compile"] = {"machine": machine, **compile_times(options.repeats)}
    if "gpu" in parts:
        from cases.beside_transformers import measure

        measured = measure(
            model=options.model,
            device=options.device,
            precision=options.precision,
            sdpa=options.sdpa if options.device == "cuda" else "auto",
            batch=options.batch,
            length=options.tokens,
            repeats=options.turns,
            compiled=not options.eager,
        )
        result["beside_transformers"] = {"machine": machine, **measured}
    record.write_data(result)
    print("\n".join(table(result)))
