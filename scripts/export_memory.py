"""Measure the host memory of exports of a random 1.06B student of multi-head latent attention.

    python scripts/export_memory.py FOLDER --tokenizer HF_FOLDER --out docs/benchmarks/export_memory.json

Writes its weights (4.2 GB in float32) into FOLDER once. Each export runs in a process of its own; its peak is the
largest resident set of that process, the interpreter and torch included.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

FILE = "model.safetensors"
CASES = (("gguf", None), ("deepseek", None), ("deepseek", "bf16"))
D_MODEL, DEPTH, N_TOKENS = 2048, 16, 49152


def write_student(file: Path) -> None:
    """Write the weights of a random student."""
    from caramba.config.model import ModelSpec
    from caramba.model import build_model, save_model

    attention = {
        "type": "AttentionLayer",
        "d_model": D_MODEL,
        "n_heads": 32,
        "n_kv_heads": 8,
        "head_dim": 64,
        "mode": "decoupled",
        "layout": "latent",
        "mla": True,
        "sem_dim": 128,
        "geo_dim": 64,
    }
    norm = {"type": "RMSNormLayer", "d_model": D_MODEL}
    feed_forward = {"type": "SwiGLULayer", "d_model": D_MODEL, "d_ff": 8192}
    block = [{"type": "ResidualTopology", "layers": [norm, layer]} for layer in (attention, feed_forward)]
    layers = [{"type": "NestedTopology", "repeat": DEPTH, "layers": block}, norm]
    spec = ModelSpec.model_validate(
        {
            "name": "random_1b",
            "embedder": {"vocab_size": N_TOKENS, "d_model": D_MODEL},
            "topology": {"type": "StackedTopology", "layers": layers},
            "head": {"tied": True},
        }
    )
    save_model(build_model(spec, seed=0), file, role="student", phase="pretrain", labels={})


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


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--case", type=int)
    args = parser.parse_args()
    if args.case is not None:
        print(json.dumps(measure(args.folder, args.tokenizer, *CASES[args.case])))
        return
    args.folder.mkdir(parents=True, exist_ok=True)
    if not (args.folder / FILE).is_file():
        write_student(args.folder / FILE)
    rows = []
    for index in range(len(CASES)):
        words = [
            sys.executable,
            __file__,
            str(args.folder),
            "--tokenizer",
            args.tokenizer,
            "--case",
            str(index),
        ]
        done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(rows[-1])
    result = {"script": "scripts/export_memory.py", "parameters": 1_057_034_240, "rows": rows}
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
