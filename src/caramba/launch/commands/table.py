"""The table of commands: usage, summary, and a help sentence with the default for every flag.

From the standard library alone, so that `--help` is instant. `module` is a file of this folder, whose `main` runs the
command.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

COMMON = {"--quiet": "Print results and errors only.", "--debug": "Show the traceback of an error."}
MODEL = {
    "--which": "Model of the run: teacher or student; default student.",
    "--tokenizer": "Tokenizer to use: byte, a folder, or a tokenizer file; default the one stored with the model.",
    "--device": "Device: auto, cpu, cuda or mps; default auto, the fastest one available.",
    "--dtype": "Precision of the weights: float32, bf16 or fp16; default the stored precision.",
    "--weights": "Quantise the weights: int8, int4 or int8_dynamic; default no quantisation.",
    "--weights-head": "Quantise the output head too.",
    "--weights-text": "Text for the activation ranges of int8_dynamic; default the training text of the run.",
    "--weights-calibration-method": "Range of an activation channel: max or percentile; default max.",
    "--weights-calibration-percentile": "Percentile of the magnitudes, from 90 to below 100; default 99.9.",
    "--weights-calibration-tokens": "Number of tokens that the activation ranges come from; default 2048.",
}

SAMPLING = {
    "--max-new-tokens": "Most new tokens of one text; default 128, or half of a shorter context.",
    "--temperature": "Softmax temperature; 0 takes the most likely token; default 1.0.",
    "--top-k": "Keep this many of the most likely tokens; default all.",
    "--top-p": "Keep the fewest tokens whose probabilities reach this sum; default 1.0.",
    "--min-p": "Keep tokens with at least this share of the highest probability; default 0.0.",
    "--repetition-penalty": "Divide the logits of earlier tokens by this; above 1 repeats less; default 1.0.",
    "--stop": "Text that ends the output and is cut off; may be repeated.",
    "--seed": "Seed of the first row, one more for each further row; default the seed of the run, else 1337.",
    "--max-seq-len": "Most tokens of prompt and new text together; default the context of the model.",
    "--prefill-chunk": "Prompt tokens in one forward pass; default the whole prompt.",
    "--compiled": "Decode steps: graph (CUDA graph), true (compiled too), false (eager) or auto; default auto.",
}
CACHE = {
    "--cache-kind": "Format of the KV cache, such as fp16, q8_0, q4_0 or auto; default the precision of the model.",
    "--cache-budget-mb": "For auto: most megabytes (1e6 bytes) of the whole cache; default no limit.",
    "--cache-quality-max-delta-nll": "For auto: highest rise of the loss, in nats per token; default 0.05.",
    "--cache-quality-max-ppl-ratio": "For auto: highest ratio of perplexities; default 1.05.",
    "--cache-quality-max-mean-kl": "For auto: highest mean KL divergence, in nats per token; default 0.05.",
    "--cache-quality-max-tokens": "For auto: longest text that quality is measured on, in tokens; default 2048.",
    "--cache-quality-text": "For auto: text or tokens to measure on; default the held-out split of the run.",
    "--cache-auto-benchmark": "For auto: time every format that passes; false takes the smallest; default true.",
    "--cache-auto-bench-steps": "For auto: decode steps in one timing; default 16.",
    "--cache-plan": "For auto: reuse stored measurements, or refresh them; default reuse.",
    "--cache-plan-path": "For auto: file of the measurements; default one per model and machine.",
    "--cache-plan-probe": "For auto: compare with 16 bits during generation; true or false; default false.",
    "--cache-plan-probe-interval-sec": "For auto: seconds between two comparisons; default 60.0.",
    "--decode-plan": "Query chunks of attention: auto (by length), fixed or none; default auto.",
    "--decode-q-chunk": "For fixed: queries that attend in one step; the result is equal; default by length.",
    "--decode-local-window": "Attend to this many last tokens only, which changes the result; default all tokens.",
}
SPECULATION = {
    "--spec-method": "Speculative decoding: lookup, early_exit or draft; default no speculation.",
    "--draft": "Smaller model for draft: a run or folder with the same tokenizer; default none.",
    "--spec-k": "Tokens drafted in one round, from 1 to 16; default 4.",
    "--spec-k-adaptive": "Change the number of drafts by their acceptance; true or false; default true.",
    "--spec-extra-token": "Take one more token when all drafts are accepted; true or false; default true.",
    "--spec-disable-below-accept": "Stop drafting below this share of accepted drafts; default 0.1.",
    "--hysteresis": "Share above that floor which drafting must reach to continue; default 0.05.",
    "--window": "Number of last drafts that the share is computed over; default 32.",
    "--retry-after": "Tokens until drafting is tried again; default 64.",
    "--spec-draft-layers": "For early_exit: blocks that draft; default a quarter of the blocks.",
    "--max-ngram": "For lookup: longest run of tokens to match; default 4.",
}

OVERRIDES = {"--group": "Run this group of the manifest only; default all groups."}
PREPARE = {
    "--output": "Token folder to make, or FILE.npy for one flat array; required.",
    "--train-bpe": "Train a byte-level BPE with this many entries on the text; default no training.",
    "--val-frac": "Share of documents held out for validation; default 0.05, none for .npy.",
    "--tokens": "Stop after this many tokens, such as 500000 or 100M; required for sample, default all text.",
    "--tokenizer": "Tokenizer: byte, a folder or a tokenizer file; stdlib takes byte or bpe; default byte.",
    "--shard-tokens": "Tokens in one shard; default 100000000.",
    "--suffix": "For text: suffixes of the files to take from folders; default .txt,.md,.py.",
    "--separator": "For text: text between the documents of a file; default one document a file.",
    "--dataset": "For fineweb: repository on the Hugging Face hub; default HuggingFaceFW/fineweb.",
    "--config": "For fineweb: configuration of the data set, '' for none; default sample-10BT.",
    "--revision": "For fineweb: branch, tag or commit; default the newest commit, which is recorded.",
    "--field": "For fineweb: column of the text; default text.",
    "--from": "For fineweb: local parquet or .jsonl files to read; default the hub.",
    "--start": "For sample: first token of every row, name or id; default the start mark, else the end mark.",
    "--temperature": "For sample: temperatures, each for an equal share of tokens; default [0.7, 0.85, 1.0].",
    "--batch": "For sample: rows sampled at once; default 512.",
    "--length": "For sample: tokens of a row; default 1024, or the model's context where that is shorter.",
    "--seed": "For sample: seed of the first row, one more for each further; default 1337.",
    "--which": "For sample: model of a run, teacher or student; default student.",
    "--device": "For sample: auto, cpu, cuda or mps; default auto, the fastest one available.",
    "--dtype": "For sample: precision of the weights; default the stored precision.",
}


@dataclass(frozen=True)
class Command:
    """One command. `module` is its file where that has another name than the command."""

    usage: str
    summary: str
    flags: Mapping[str, str]
    module: str | None = None
    loads_torch: bool = False


COMMANDS: dict[str, Command] = {
    "launch": Command("[overrides]", "compose, validate, freeze and run an experiment", {}),
    "init": Command("DIR", "write a commented project: configuration, layer, test, and a manifest in one file", COMMON),
    "run": Command("FILE [--group NAME] [overrides]", "run a single-file manifest", {**OVERRIDES, **COMMON}),
    "compile": Command(
        "[overrides | FILE] [--print-plan] [--json]",
        (
            "print the plan: shapes, parameters, bytes, stages; no torch; --json prints JSON, and with "
            "--print-plan the plan to stderr too"
        ),
        {
            **OVERRIDES,
            "--print-plan": "Print the plan for people, to stderr if --json is set.",
            "--json": "Print the plan as JSON.",
            **COMMON,
        },
    ),
    "resume": Command(
        "RUN | SWEEP", "resume an interrupted run (a run directory, runs/NAME, or latest), or sweep", COMMON
    ),
    "rerun": Command("RUN | FILE", "run a run's manifest.json again from its start, in a directory of its own", COMMON),
    "status": Command(
        "[DIR] [--json]",
        "state of every run and sweep: phase, step, age, state",
        {"--json": "Print the states as JSON.", **COMMON},
    ),
    "collect": Command(
        "SWEEP|DIR [options]",
        "mean, standard deviation and n over seeds of a sweep's runs, as a table, CSV, LaTeX and a plot",
        {
            "--metric": "Metric key to report; may be repeated; default the main metrics.",
            "--by": "Keys to group by, also of manifests; default every key that differs, except the seed.",
            "--best": "Whether the min or the max of a metric is best; default by the name of the metric.",
            "--csv": "Write runs.csv and summary.csv.",
            "--tex": "Write table.tex.",
            "--plot": "Write plot.png.",
            "--out": "Folder for these files; default collected/ in the folder of the sweep.",
            **COMMON,
        },
    ),
    "compare": Command(
        "RUN_A RUN_B... [options]",
        (
            "two or more runs, or two files of caramba eval: what differs in their manifests, their metrics, paired "
            "tests on the items that both have, and their curves in one figure"
        ),
        {
            "--metric": "Report metrics whose key contains this text; may be repeated; default all.",
            "--models": "Models whose items are paired; default student,student.",
            "--out": "File of the figure; default compare-A-B.png in the current folder.",
            **COMMON,
        },
    ),
    "studio": Command(
        "[FOLDER] [options]",
        "one page for all runs and sweeps of a folder: table, curves, differences, swept keys, frontiers",
        {
            "--out": "File to write; default studio.html in the folder.",
            "--serve": "Serve the page on this machine, with new data while runs train.",
            "--port": "TCP port of --serve; 0 takes a free one; default 8765.",
            **COMMON,
        },
    ),
    "tag": Command(
        "RUN [NAME]... [--remove]",
        "give a run tags, or print those that it has; caramba studio shows them and filters by them",
        {"--remove": "Remove these tags instead.", **COMMON},
    ),
    "note": Command("RUN [TEXT]", "write a note to a run, or print it; caramba studio shows it; '' removes it", COMMON),
    "rm": Command(
        "RUN... | --list | --undo [RUN...] | --purge RUN...|all [--folder DIR]",
        "move runs to the archive, from which --undo brings them back whole",
        {
            "--list": "List the archive with sizes.",
            "--undo": "Bring back the named runs; default those of the last rm.",
            "--purge": "Delete the named runs of the archive for good; all takes every one.",
            "--folder": "Folder of the runs for --list, --undo and --purge; default runs.",
            **COMMON,
        },
    ),
    "export": Command(
        "RUN|DIR --out DIR [options]",
        "write a trained model for other programs; hf loads with transformers, gguf with llama.cpp",
        {
            "--format": "Format: hf, safetensors, ckpt, dcp, gguf or deepseek; default hf.",
            "--weights": "Weights of a GGUF file: f16, q8_0 or q4_0; default f16.",
            "--engine": "Engine that reads a deepseek folder: transformers or vllm; default transformers.",
            "--check": "Load the result in its engine and compare logits, text and cache; default off.",
            "--out": "Folder to write; required.",
            "--dtype": "Precision of the weights: float32, bf16 or fp16; default the stored precision.",
            "--which": MODEL["--which"],
            "--force": "Replace the files of an earlier export in the folder.",
            **COMMON,
        },
        loads_torch=True,
    ),
    "eval": Command(
        "RUN|DIR --tasks A,B [options]",
        (
            "evaluate a run, an export or a Hugging Face folder on tasks of lm-evaluation-harness, of a local folder, "
            "or on a suite of your own"
        ),
        {
            "--tasks": "Tasks, or paths of suites (.yaml, .jsonl), separated by commas; required.",
            "--eval-data": "Folder of local tasks; default the tasks of lm-evaluation-harness.",
            "--allow-code": "Run Python that the model wrote, in a sandbox; default off.",
            "--limit": "Items of each task; default all.",
            "--num-fewshot": "Examples in front of each item; default the number of the task.",
            "--include-path": "Folder of your own task files for lm-evaluation-harness; default none.",
            "--batch-size": "Sequences in one forward pass; default 8.",
            "--max-length": "Longest sequence, in tokens; default the context of the model.",
            "--smallest-difference": (
                "Points of accuracy that matter; warns where the items cannot see them; default none."
            ),
            "--which": MODEL["--which"],
            "--tokenizer": MODEL["--tokenizer"],
            "--device": MODEL["--device"],
            "--out": "JSON file of the results; default evals/ in the folder of the run.",
            **COMMON,
        },
        module="evaluate",
        loads_torch=True,
    ),
    "generate": Command(
        "RUN|DIR --prompt TEXT... | --prompt-file FILE [options]",
        "continue prompts with a run, an export or a Hugging Face folder",
        {
            "--prompt": "Prompt; may be repeated for a batch.",
            "--prompt-file": "UTF-8 text file with one more prompt; default none.",
            "--json": "Print texts, configuration and statistics as JSON.",
            **SAMPLING,
            **MODEL,
            **CACHE,
            **SPECULATION,
            "--spec-compare": "Time speculative decoding against plain decoding.",
            **COMMON,
        },
        loads_torch=True,
    ),
    "chat": Command(
        "RUN|DIR [options]",
        "converse with a model, on a terminal or line by line from a pipe",
        {
            "--system": "System message; default none.",
            "--resume": "File of a conversation that /save wrote, which continues; default a new conversation.",
            "--plain": "Use lines of User: and Assistant: although the tokenizer has a chat template.",
            **SAMPLING,
            **MODEL,
            **CACHE,
            **SPECULATION,
            **COMMON,
        },
        loads_torch=True,
    ),
    "serve": Command(
        "RUN|DIR [options]",
        "answer OpenAI-compatible requests over HTTP, many at a time, with a run, an export or a Hugging Face folder",
        {
            "--host": "Address to listen on; others than the local machine need --api-key-env; default 127.0.0.1.",
            "--port": "TCP port; 0 takes a free one; default 8000.",
            "--max-batch": "Requests that decode together; default 16.",
            "--prompts-ahead": "Requests whose prompts run before a slot is free, on CUDA; default 0.",
            "--max-len": "Most tokens of prompt and new text together; default the context, at most 8192.",
            "--cache-kind": "Format of the KV cache, such as fp16 or q8_0; default the precision of the model.",
            "--max-tokens": "Most new tokens of a request; default all that --max-len leaves.",
            "--max-queue": "Requests that wait for a slot; one more is refused; default 256.",
            "--batch-timeout": "Seconds that an idle engine waits for more requests; default 0.0.",
            "--max-request-bytes": "Largest request body, in bytes; default 1048576.",
            "--timeout": "Seconds until a request is cut off; default 300.0.",
            "--max-connections": "Open connections; one more is refused; default 1024.",
            "--drain": "Seconds to finish open requests after a stop signal; default 10.",
            "--api-key-env": "Environment variable that stores the API key; default no key.",
            "--prefix-cache-mb": "Megabytes (1e6 bytes) for keys and values of equal beginnings; default 0.0.",
            "--memory-cache-mb": "Megabytes (1e6 bytes) for states of memory slots after earlier texts; default 0.0.",
            "--prefill-chunk": "Prompt tokens in one step; default 512.",
            "--compiled": "Decode steps: graph (CUDA graph), auto, true (compiled too) or false; default graph.",
            "--plain": "Use lines of User: and Assistant: although the tokenizer has a chat template.",
            **MODEL,
            **COMMON,
        },
        loads_torch=True,
    ),
    "doctor": Command("", "check this machine: packages, devices, memory, folders", COMMON),
    "prepare": Command(
        "text PATH... | fineweb | stdlib | sample MODEL --tokens N --output DIR",
        "turn text into tokens that data=tokens reads (caramba prepare --help)",
        {**PREPARE, **COMMON},
    ),
    "tune": Command(
        "[options]",
        "measure which attention backends and decode programs are fastest here, for the runs to come",
        {
            "--seconds": "Time limit of the measurement, in seconds; default 300.0.",
            "--device": MODEL["--device"],
            "--out": "File of the table; default .caramba/ of the current folder, where runs read it.",
            "--show": "Print the table in use, and measure nothing.",
            **COMMON,
        },
    ),
    "paper": Command(
        "RUN [options]",
        (
            "draft a LaTeX paper from a finished run: numbers by key, citations from records, versions that compile "
            "(extra paper); --update continues the last version, with edits by hand and interrupted drafts"
        ),
        {
            "--output-dir": "Folder of the paper; default paper/ in the folder of the run.",
            "--update": "Continue from the last version, with the edits of its authors.",
            "--group": "Group of the run that the paper describes; default the only one.",
            "--config": "YAML file with the keys of a paper section; default the section of the manifest.",
            "--author": "Name of an author; may be repeated.",
            "--title": "Title; default the name of the experiment.",
            "--model": "Language model, by the name that litellm uses; default gpt-4o, or as in the manifest.",
            "--base-url": "Address of an OpenAI-compatible server; default the one of the provider.",
            "--api-key-env": "Environment variable that stores the API key; default the one of the provider.",
            "--bib": "BibTeX file of the references that may be cited; default none.",
            "--max-iterations": "Most requests to the language model; default 40, or as in the manifest.",
            "--max-tokens": "Most prompt and reply tokens of all requests; default 1000000, or as in the manifest.",
            "--max-cost": "Most US dollars; default no limit.",
            **COMMON,
        },
    ),
    "review": Command(
        (
            "RUN [--group NAME] [--paper-dir DIR] [--model NAME] [--base-url URL] [--api-key-env NAME] "
            "[--tools auto|native|text] [--persona NAME] [--strictness NAME]"
        ),
        (
            "check a run's paper by rule: baselines, seeds, directions, proxies, citations, figures, intervals; with "
            "--model or a review section, a language model reviews it too"
        ),
        {
            "--group": "Group of the run that the paper describes; default the run.",
            "--paper-dir": "Folder of the paper; default paper/ in the folder of the run.",
            "--model": "Language model that reviews; default as in the manifest, else none.",
            "--base-url": "An OpenAI-compatible server; default as in the manifest.",
            "--api-key-env": "Environment variable that holds the key; default the provider's own.",
            "--tools": "How tools are called: auto, native or text; default auto.",
            "--persona": "Reviewer: senior_researcher, methodology_expert or practitioner; default senior_researcher.",
            "--strictness": "Bar: workshop, conference, journal or top_venue; default conference.",
            **COMMON,
        },
    ),
    "research": Command(
        (
            "RUN [--max-iterations N] [--metric KEY --direction less|more --held-out PATH] [--auto-run|--confirm NAME] "
            "[--model NAME] [--base-url URL] [--tools auto|native|text] [--replay FILE] | compare RUN --proposal FILE "
            "--metric KEY --direction less|more ... | verify DIR"
        ),
        (
            "draft, review, run proposed experiments under a test registered before the first run, and redraft until a "
            "typed reason stops; compare runs one proposal; verify recomputes every decision from the artifacts"
        ),
        {
            "--max-iterations": "Most rounds of draft, review and experiments; default 5, or as in the manifest.",
            "--model": "Language model of writer and reviewer; default as in the manifest.",
            "--base-url": "An OpenAI-compatible server; default as in the manifest.",
            "--api-key-env": "Environment variable that holds the key; default the provider's own.",
            "--tools": "How tools are called: auto, native or text; default auto.",
            "--max-cost": "Most US dollars of the loop; default no limit.",
            "--max-tokens": "Most tokens of the loop; default 3000000.",
            "--held-out": "Tokens that no search run reads, opened once for the winner; no default.",
            "--auto-run": "Run proposed experiments without confirmation.",
            "--confirm": "Name of a proposed experiment that may run; may be repeated.",
            "--replay": "File calls.jsonl of an earlier loop whose replies are replayed; default none.",
            "--proposal": "YAML file: base_sha256, patches, rationale, hypothesis, smallest_effect; no default.",
            "--metric": "Key of report.json that decides; no default.",
            "--direction": "Better values of the metric: less or more; no default.",
            "--seeds": "Most seeds, each run in both arms; default 10.",
            "--candidates": "Most candidates of the folder, which share the level 0.05; default 5.",
            "--budget": "What both arms spend equally: tokens or wall; default tokens.",
            "--timeout": "Seconds after which a run counts as failed; default 3600 in a loop, else no limit.",
            "--output-dir": "Folder of the paper, or of a comparison; default paper/ and research/ in the run.",
            **COMMON,
        },
    ),
    "schema": Command(
        "[--json] [plugins=[MODULE,...]]",
        "the keys of a manifest, for people or as JSON Schema for editors and agents; with layers of your own",
        {"--json": "Print the JSON Schema.", **COMMON},
    ),
}

_SAME = {
    "launch": "train fit pretrain finetune distill upcycle sweep start experiment benchmark",
    "init": "new create scaffold template",
    "compile": "plan validate check show config dry_run",
    "resume": "continue restart",
    "status": "ls list ps runs jobs",
    "collect": "table plot aggregate summarize",
    "compare": "diff",
    "studio": "ui web view dashboard report",
    "rm": "delete remove archive",
    "export": "convert save push",
    "eval": "evaluate test lm_eval",
    "generate": "infer inference predict sample complete",
    "prepare": "tokenize tokenise preprocess download data",
    "tune": "autotune",
    "doctor": "info env check_env",
}
OTHER_NAMES = {other: name for name, others in _SAME.items() for other in others.split()}
"""Names that other tools give their commands, and what they are called here."""
