"""Host memory of exports of a random 1.06B student of multi-head latent attention. Writes JSON.

Usage: python scripts/bench/run.py export_memory FOLDER --tokenizer HF_FOLDER

Writes its weights (4.2 GB in float32) into FOLDER once. Each export runs in a process of its own; its peak is the
largest resident set of that process, the interpreter and torch included.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import resource
import shutil
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from record import Record, machine_facts

FILE = "model.safetensors"
CASES = (("gguf", None), ("deepseek", None), ("deepseek", "bf16"))
D_MODEL, DEPTH, N_TOKENS = 2048, 16, 49152
OPTIONS = "folder --tokenizer="


def write_student(file: Path) -> None:
    """Write the weights of a random student."""
    from caramba.config.model import ModelSpec
    from caramba.model import build_model, save_model

    latent = {"mode": "decoupled", "layout": "latent", "mla": True, "sem_dim": 128, "geo_dim": 64}
    heads = {"n_heads": 32, "n_kv_heads": 8, "head_dim": 64}
    attention = {"type": "AttentionLayer", "d_model": D_MODEL, **heads, **latent}
    norm = {"type": "RMSNormLayer", "d_model": D_MODEL}
    feed_forward = {"type": "SwiGLULayer", "d_model": D_MODEL, "d_ff": 8192}
    block = [{"type": "ResidualTopology", "layers": [norm, layer]} for layer in (attention, feed_forward)]
    layers = [{"type": "NestedTopology", "repeat": DEPTH, "layers": block}, norm]
    embedder, topology = (
        {"vocab_size": N_TOKENS, "d_model": D_MODEL},
        {"type": "StackedTopology", "layers": layers},
    )
    spec = {"name": "random_1b", "embedder": embedder, "topology": topology, "head": {"tied": True}}
    model = build_model(ModelSpec.model_validate(spec), seed=0)
    save_model(model, file, role="student", phase="pretrain", labels={})


def measure(folder: Path, tokenizer: str, format: str, dtype: str | None) -> dict[str, object]:
    """Export once and return the size of what was written and the peak of this process."""
    from caramba.data import load_tokenizer
    from caramba.export.precision import check_dtype
    from caramba.export.write import export_model
    from caramba.infer.model_bundle import load_model

    opened = load_model(str(folder / FILE), device="meta")
    opened = dataclasses.replace(opened, tokenizer=load_tokenizer(tokenizer))
    out, start = folder / "export", time.monotonic()
    chosen = None if dtype is None else check_dtype(dtype)
    done = export_model(opened, out, format=format, role="student", force=True, dtype=chosen)
    size = sum((out / name).stat().st_size for name in done.files)
    shutil.rmtree(out)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    weights = "f16" if format == "gguf" else dtype or "float32"
    found: dict[str, object] = {"format": format, "weights": weights, "file_bytes": size, "peak_bytes": peak}
    return found | {"peak_over_file": round(peak / size, 3), "seconds": round(time.monotonic() - start, 1)}


def run(options: argparse.Namespace, record: Record) -> None:
    folder = Path(options.folder)
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / FILE).is_file():
        write_student(folder / FILE)
    record.start(machine_facts(), parameters=1_057_034_240)
    for case in CASES:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
            record.add(process.submit(measure, folder, options.tokenizer, *case).result())
