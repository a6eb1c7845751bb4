"""Greedy decoding of a tiny preset with its cache, against the same without one. Writes JSON.

Usage: python scripts/bench/cached_steps.py [--models tiny,tiny_dba] [--new 512] [--repeats 5] [--out FILE]

Without a cache every token costs a forward over all before it, so the text of both must be the same. Sides take
turns, one thread; what is printed is the median over the repeats.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from caramba import kernels
from caramba.config.model import ModelSpec
from caramba.infer import Generator
from caramba.launch.compose import compose
from caramba.model import Model, build_model
from caramba.runs.files import write_json

MUST = 10.0


def model_of(preset: str, device: torch.device) -> Model:
    """Return a preset's network with random weights: speed does not depend on what it says."""
    tree = compose([f"model={preset}", "train=none", "benchmark=none", "verify=none"]).tree["model"]
    spec = ModelSpec.model_validate({key: tree[key] for key in ("embedder", "topology", "head")})
    return build_model(spec, seed=0, device=device).eval()


@torch.inference_mode()
def uncached(model: Model, tokens: Tensor, new: int) -> Tensor:
    """Extend a text by its likeliest tokens, each from a forward over all before it; only its last logits are made."""
    for _ in range(new):
        last = model.logits(model.hidden(tokens)[:, -1:])
        tokens = torch.cat((tokens, last.argmax(-1)), dim=1)
    return tokens


def measured(preset: str, new: int, prompt: int, repeats: int, device: torch.device) -> dict[str, Any]:
    """Return seconds of both sides, and how many times as fast the cached one is."""
    model = model_of(preset, device)
    source = torch.Generator().manual_seed(0)
    given = torch.randint(model.spec.embedder.vocab_size, (1, prompt), generator=source)
    generator = Generator(model, None, max_new_tokens=new, temperature=0.0)
    generator.generate(given, mask=torch.ones_like(given))
    times: dict[str, list[float]] = {"cached": [], "uncached": []}
    for _ in range(repeats):
        began = time.perf_counter()
        (cached,) = generator.generate(given, mask=torch.ones_like(given))
        times["cached"].append(time.perf_counter() - began)
        began = time.perf_counter()
        plain = uncached(model, given.to(device), new)
        times["uncached"].append(time.perf_counter() - began)
    is_same = list(cached.tokens) == plain[0, prompt:].tolist()
    cached_s, uncached_s = (statistics.median(found) for found in times.values())
    return {
        "model": preset,
        "new_tokens": new,
        "prompt": prompt,
        "cached_tok_s": new / cached_s,
        "uncached_tok_s": new / uncached_s,
        "speedup": uncached_s / cached_s,
        "text_is_the_same": is_same,
        "seconds": times,
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default="tiny,tiny_dba")
    parser.add_argument("--new", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks/cached_steps.json"))
    words = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device("cpu")
    kernels.load(device)
    rows = []
    for preset in words.models.split(","):
        rows.append(measured(preset, words.new, words.prompt, words.repeats, device))
        row = rows[-1]
        print(
            f"{preset}: {row['cached_tok_s']:.0f} tokens/s cached, {row['uncached_tok_s']:.0f} without a cache: "
            f"{row['speedup']:.1f}x, same text: {row['text_is_the_same']}",
            flush=True,
        )
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    machine = {"device": platform.machine(), "torch": torch.__version__, "threads": 1, "commit": commit[:12]}
    data = {"benchmark": "cached_steps", "made_by": "scripts/bench/cached_steps.py", "machine": machine}
    write_json(words.out, data | {"rows": rows, "must": MUST})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
