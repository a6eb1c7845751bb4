"""What a blockwise step costs against one headless teacher forward, concurrent against sequential.

Random weights of a preset serve, as cost does not depend on them. Variants take turns, so drift of the machine hits
all.
`naive` is one block a step with full teacher and student forwards, heads included.
Prints a table; with --out also writes JSON.

Usage: python scripts/bench/blockwise_cost.py [--model tiny_dba] [--batch 8] [--block 128] [--repeats 10] [--amp]
    [--compile] [--out FILE] [OVERRIDE ...]
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from caramba.distill import BlockSchedule, BlockwiseObjective, relative_l1, tap_attention
from caramba.launch.freeze import freeze
from caramba.layer import attention_backends
from caramba.model import Trace, build_model
from caramba.runs.files import write_json
from caramba.runtime import choose_device, synchronize
from caramba.upcycle import pair_attention


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny_dba")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--block", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--amp", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    parser.add_argument("overrides", nargs="*", help="of the composition, as for a launch")
    args = parser.parse_args()
    device = choose_device(args.device)
    manifest = freeze([f"model={args.model}", "train=pretrain", *args.overrides]).manifest
    described = manifest.model.teacher
    assert described is not None
    assert described.manifest is not None
    teacher = build_model(described.manifest, seed=1).to(device).eval().requires_grad_(False)
    student = build_model(manifest.model, seed=2).to(device)
    if args.amp:
        teacher = copy.deepcopy(teacher).to(torch.bfloat16)
    pairs = pair_attention(teacher, student)
    names = [name for name, _, _ in pairs]
    vocab = manifest.model.embedder.vocab_size
    tokens = torch.randint(vocab, (args.batch, args.block), device=device)

    objectives = {
        "concurrent": BlockwiseObjective(student, teacher, pairs),
        "drift": BlockwiseObjective(student, teacher, pairs, on_student=True),
    }
    sequential = [_only(student, teacher, pairs, place) for place in range(len(names))]
    if args.compile:
        for module in objectives["concurrent"].compilable():
            module.forward = torch.compile(module.forward)
    optimizer = torch.optim.AdamW([p for _, p in objectives["concurrent"].trainable()], lr=1e-4, fused=True)

    def stepped(objective: BlockwiseObjective) -> None:
        objective.step((tokens, tokens), lambda loss: loss.backward())
        for group in objective.clip_groups():
            torch.nn.utils.clip_grad_norm_(group, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def naive(place: int) -> None:
        _, source, target = pairs[place]
        student.requires_grad_(False)
        target.requires_grad_(True)
        with torch.no_grad(), Trace(teacher, lambda _n, module: module is source) as theirs:
            teacher(tokens)
        with Trace(student, lambda _n, module: module is target, detach=False) as ours:
            student(tokens)
        relative_l1(ours.outputs[0], theirs.outputs[0]).backward()
        torch.nn.utils.clip_grad_norm_(target.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        student.requires_grad_(True)

    @torch.no_grad()
    def headless() -> None:
        teacher.hidden(tokens)

    variants: dict[str, Callable[[], object]] = {
        "headless teacher forward": headless,
        "truncated teacher forward": lambda: tap_attention(
            teacher, [(name, source) for name, source, _ in pairs], tokens, lambda *_: None
        ),
        "concurrent, all blocks": lambda: stepped(objectives["concurrent"]),
        "drift, all blocks": lambda: stepped(objectives["drift"]),
        "sequential, a step of each block": lambda: [stepped(item) for item in sequential],
        "naive, a step of each block": lambda: [naive(place) for place in range(len(names))],
    }
    times: dict[str, list[float]] = {name: [] for name in variants}
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=args.amp), attention_backends(device):
        for repeat in range(args.repeats + 2):  # the first two warm up
            for name, run in variants.items():
                synchronize(device)
                began = time.perf_counter()
                run()
                synchronize(device)
                if repeat > 1:
                    times[name].append(1000 * (time.perf_counter() - began))
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, value in medians.items():
        print(
            f"{name:34s} {value:9.2f} ms  {value / medians['headless teacher forward']:6.2f} x headless forward"
            f"  {value / medians['concurrent, all blocks']:6.2f} x concurrent"
        )
    if device.type == "cuda":
        print(f"peak memory {torch.cuda.max_memory_allocated() / 1e9:.2f} GB")
    if args.out:
        name = (
            torch.cuda.get_device_name()
            if device.type == "cuda"
            else f"{torch.get_num_threads()} CPU threads"
        )
        write_json(
            args.out,
            {
                "benchmark": "blockwise_cost",
                "made_by": " ".join(["python scripts/bench/blockwise_cost.py", *sys.argv[1:]]),
                "machine": {"device": name, "torch": torch.__version__},
                "model": args.model,
                "batch": args.batch,
                "block": args.block,
                "amp": args.amp,
                "compiled": args.compile,
                "peak_memory_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
                "ms": times,
            },
        )
        print(json.dumps({"written": str(args.out)}))


def _only(student, teacher, pairs, place: int) -> BlockwiseObjective:  # type: ignore[no-untyped-def]
    """Return the objective of a sequential phase at its block number `place`."""
    schedule = BlockSchedule([pairs[place][0]], steps=10**9, is_sequential=True)
    return BlockwiseObjective(student, teacher, pairs, schedule=schedule)


if __name__ == "__main__":
    main()
