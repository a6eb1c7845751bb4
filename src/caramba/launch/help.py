"""`--help`: usage, commands, groups and their options, from the standard library alone so that it is instant."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
from pathlib import Path

from caramba.launch.flags import FLAGS_OF
from caramba.launch.groups import description, groups

USAGE = """\
caramba: compose an experiment, train it, verify it, measure it, and get the tables and figures.

usage: caramba launch [GROUP=OPTION | KEY=VALUE]... [flags]      (or: python -m caramba.launch …)
       caramba COMMAND …

Without arguments: model=tiny_dba train=upcycle data=stdlib benchmark=quick"""

BRIEF = 240  # characters

COMMANDS: dict[str, tuple[str, str]] = {
    "launch": ("[overrides]", "compose, validate, freeze and run an experiment"),
    "run": ("FILE [--group NAME] [overrides]", "run a single-file manifest"),
    "compile": (
        "[overrides | FILE] [--print-plan] [--json]",
        "print the plan: shapes, parameters, bytes, stages; no torch; --json prints JSON, and with --print-plan the "
        "plan to stderr too",
    ),
    "resume": (
        "RUN | SWEEP",
        "go on with an interrupted run (a run directory, runs/NAME, or latest), or sweep",
    ),
    "rerun": ("RUN | FILE", "run a run's manifest.json again from its start, in a directory of its own"),
    "status": ("[DIR] [--json]", "where every run and sweep stands: phase, step, age, state"),
    "collect": (
        "SWEEP|DIR [--metric KEY]... [--by KEY,KEY] [--best min|max] [--csv] [--tex] [--plot] [--out DIR]",
        "mean, standard deviation and n over seeds of a sweep's runs, as a table, CSV, LaTeX and a plot",
    ),
    "compare": (
        "RUN_A RUN_B [--metric TEXT]... [--models MODEL_A,MODEL_B] [--out FILE]",
        "two runs, or files of caramba eval: what differs in their manifests, their metrics with intervals, paired "
        "tests on the items that both have, and their curves in one figure",
    ),
    "export": (
        "RUN|DIR --out DIR [--format hf|deepseek|gguf|safetensors|ckpt|dcp] [--dtype float32|bf16|fp16] "
        "[--weights f16|q8_0|q4_0] [--engine transformers|vllm] [--check] [--which teacher|student] [--force]",
        "write a trained model for other programs; hf loads with transformers, gguf with llama.cpp",
    ),
    "eval": (
        "RUN|DIR --tasks A,B [--eval-data DIR] [--limit N] [--num-fewshot N] [--include-path DIR] "
        "[--which teacher|student] [--smallest-difference POINTS] [--tokenizer PATH] [--out FILE]",
        "evaluate a run, an export or a Hugging Face folder on tasks of lm-evaluation-harness, or of a local folder",
    ),
    "generate": (
        "RUN|DIR --prompt TEXT... | --prompt-file FILE [--max-new-tokens N] [--temperature T] [--top-k K] "
        "[--top-p P] [--min-p P] [--repetition-penalty R] [--stop TEXT] [--seed N] [--max-seq-len N] "
        "[--prefill-chunk N] [--cache-kind KIND|auto] [--cache-budget-mb MB] [--cache-quality-text FILE] "
        "[--cache-quality-max-delta-nll X] [--cache-quality-max-ppl-ratio X] [--cache-quality-max-mean-kl X] "
        "[--cache-quality-max-tokens N] [--cache-auto-benchmark true|false] [--cache-auto-bench-steps N] "
        "[--cache-plan reuse|refresh] [--cache-plan-path FILE] [--cache-plan-probe true|false] "
        "[--cache-plan-probe-interval-sec S] [--decode-plan PLAN] [--decode-q-chunk N] [--decode-local-window N] "
        "[--dtype float32|bf16|fp16] [--spec-method lookup | early_exit | draft --draft RUN|DIR] [--spec-k N] "
        "[--spec-k-adaptive true|false] [--spec-extra-token true|false] [--spec-disable-below-accept X] "
        "[--hysteresis X] [--window N] [--retry-after N] [--max-ngram N] [--spec-compare] [--spec-draft-layers N] "
        "[--weights int8|int4|int8_dynamic [--weights-head] [--weights-text FILE]] "
        "[--compiled auto|graph|true|false] [--which teacher|student] [--tokenizer PATH] [--device D] [--json]",
        "continue prompts with a run, an export or a Hugging Face folder",
    ),
    "chat": (
        "RUN|DIR [--system TEXT] [--plain] [the options of generate]",
        "converse with a model, on a terminal or line by line from a pipe",
    ),
    "serve": (
        "RUN|DIR [--host H] [--port N] [--max-batch N] [--prompts-ahead N] [--max-len N] [--cache-kind KIND] "
        "[--max-tokens N] [--max-queue N] [--batch-timeout S] [--max-request-bytes N] [--timeout S] "
        "[--max-connections N] [--drain S] [--api-key-env NAME] [--prefix-cache-mb MB] [--prefill-chunk N] "
        "[--compiled graph|auto|true|false] [--plain] "
        "[--weights int8|int4|int8_dynamic [--weights-head] [--weights-text FILE]] "
        "[--which teacher|student] [--tokenizer PATH] [--device D] [--dtype float32|bf16|fp16]",
        "answer OpenAI-compatible requests over HTTP, many at a time, with a run, an export or a Hugging Face folder",
    ),
    "doctor": ("", "check this machine: packages, devices, memory, folders"),
    "prepare": (
        "text PATH... | fineweb | stdlib --output DIR",
        "turn text into tokens that data=tokens reads (caramba prepare --help)",
    ),
    "tune": (
        "[--seconds N] [--device auto|cpu|cuda] [--out FILE] [--show]",
        "measure which attention backends and decode programs are fastest here, for the runs to come",
    ),
    "paper": (
        "RUN [--output-dir DIR] [--update] [--group NAME] [--config FILE] [--title TEXT] [--author NAME]... "
        "[--model NAME] [--base-url URL] [--api-key-env NAME] [--bib FILE] [--max-iterations N] [--max-tokens N] "
        "[--max-cost USD]",
        "draft a LaTeX paper from a finished run: numbers by key, citations from records, versions that compile "
        "(extra paper); --update goes on from the last version, what a person edited and what was interrupted",
    ),
    "schema": (
        "[--json] [plugins=[MODULE,...]]",
        "the keys of a manifest, for people or as JSON Schema for editors and agents; with layers of your own",
    ),
}

LATER = {"review": "the review work", "research": "the research loop"}

FLAGS = (
    (
        "-m, --multirun",
        "run every combination of values (a=1,2, choice, range, glob), each its own run; again to go on",
    ),
    ("--config-dir DIR", "add a folder of your own groups"),
    ("--cfg job [--resolve]", "print the composed configuration and stop"),
    ("--quiet", "print results and errors only"),
    ("--debug", "show tracebacks"),
    ("--info [WHAT], --hydra-help", "Hydra's own views: defaults, defaults-tree, searchpath, plugins"),
    (
        "--shell-completion install=bash",
        'completion: eval "$(caramba --shell-completion install=bash)" (also zsh, fish)',
    ),
)


def help_text(config_dirs: Iterable[Path] = ()) -> str:
    """Return the help, with every group on the search path."""
    lines = [USAGE, "", "commands:"]
    lines += [_row(_brief(name, arguments), text, 44) for name, (arguments, text) in COMMANDS.items()]
    lines += ["", "flags:", *(_row(flag, text, 33) for flag, text in FLAGS), "", "groups and options:"]
    for group, options in sorted(groups(config_dirs).items()):
        lines.append(f"  {group}")
        lines += [
            f"    {_row(option, description(file), 20).lstrip()}" for option, file in sorted(options.items())
        ]
    lines += [
        "",
        "keys: any key of the composition, e.g. train.steps=100 train.phases.blockwise.lr=1e-3 seed=1 group=NAME",
        "      resume=auto|never|RUN   manifest=FILE   (all keys: caramba schema)",
        "      plugins=[my_pkg.layers]   modules of your own with layers to use by `type` (docs/layers.md)",
    ]
    return "\n".join(lines)


def command_help(command: str) -> str:
    """Return the help of one command: usage, what it does, and a sentence for every flag."""
    arguments, text = COMMANDS[command]
    usage = f"usage: caramba {command} {arguments}".rstrip()
    rows = [_row(flag, sentence, 33) for flag, sentence in FLAGS_OF[command].items()]
    return "\n".join([_wrapped(usage, " " * 7), "", *textwrap.wrap(text, 102), "", "flags:", *rows])


def _brief(name: str, arguments: str) -> str:
    """Return a command with its first options: the page is of all commands."""
    shown = f"{name} {arguments}".strip()
    if len(shown) <= BRIEF:
        return shown
    return f"{shown[:BRIEF].rpartition(' [')[0]} … (all: caramba {name} --help)"


def _wrapped(words: str, indent: str) -> str:
    """Break a line of options between them, under one another."""
    whole = re.sub(r"\[[^][]*\]", lambda option: option[0].replace(" ", "\0"), words)
    lines = textwrap.fill(
        whole, 102, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return lines.replace("\0", " ")


def _row(name: str, text: str, width: int) -> str:
    shown = _wrapped(f"  {name}", " " * 6)
    head = f"  {name:<{width}}" if len(name) < width else f"{shown}\n{'':{width + 2}}"
    return head + ("\n" + " " * (width + 2)).join(
        textwrap.wrap(text, 100 - width, break_on_hyphens=False) or [""]
    )
