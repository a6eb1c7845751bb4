"""Time and memory of calibration and surgery, on random weights of a preset: cost does not depend on them.

Usage: python scripts/bench/run.py surgery_cost [--model llama32_dba_384b] [--windows 128] [--block 2048] [--out FILE]
"""

from __future__ import annotations

import argparse
import time

import torch
from record import Record, machine_facts

from caramba.launch.freeze import freeze
from caramba.model import build_model
from caramba.runtime import choose_device, synchronize
from caramba.surgery import CalibrationText, calibrate, transplant

OUT = None
SMOKE_OPTIONS = ("--model", "tiny_dba", "--windows", "4", "--held-out", "1", "--block", "64")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="llama32_dba_384b")
    parser.add_argument("--windows", type=int, default=128)
    parser.add_argument("--held-out", type=int, default=16)
    parser.add_argument("--block", type=int, default=2048)
    parser.add_argument("--device", default="auto")


def run(args: argparse.Namespace, record: Record) -> int | None:
    device = choose_device(args.device)
    torch.backends.cuda.matmul.allow_tf32 = True
    config = freeze([f"model={args.model}", "train=pretrain"]).manifest.model
    assert config.teacher is not None
    assert config.teacher.manifest is not None
    assert config.surgery is not None
    teacher = build_model(config.teacher.manifest, seed=1).to(device).eval().requires_grad_(False)
    student = build_model(config, seed=2).to(device)
    generator = torch.Generator().manual_seed(0)
    shape = (args.windows + args.held_out, args.block)
    rows = torch.randint(config.embedder.vocab_size, shape, generator=generator)
    text = CalibrationText(rows[args.held_out :], rows[: args.held_out])
    synchronize(device)
    began = time.perf_counter()
    calibration = calibrate(teacher, text)
    synchronize(device)
    calibrated = time.perf_counter()
    transplant(teacher, student, config.surgery, calibration)
    synchronize(device)
    ended = time.perf_counter()
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    print(
        f"{args.model}: {calibration.n_tokens:,} tokens, calibration {calibrated - began:.1f} s, "
        f"surgery {ended - calibrated:.1f} s" + ("" if peak is None else f", peak memory {peak / 1e9:.1f} GB")
    )
    record.write(
        machine_facts(device),
        model=args.model,
        tokens=calibration.n_tokens,
        calibration_s=calibrated - began,
        surgery_s=ended - calibrated,
        peak_memory_bytes=peak,
    )
    return 0
