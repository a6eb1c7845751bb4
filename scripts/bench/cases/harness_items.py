"""Item by item, lm-evaluation-harness with its own model against caramba on the same local tasks. Writes JSON.

Usage: python scripts/bench/run.py harness_items FOLDER TASKS [--names A,B] [--limit N]

FOLDER is a Hugging Face model, TASKS a folder of `caramba eval --eval-data` with choices that begin with a space. The
harness reads the model by transformers. It is compared with its own tasks on caramba's model (`caramba eval
--include-path`), and with caramba's own scoring of the files (`caramba eval --eval-data`). Needs the extra `eval`.
"""

# pyright: reportMissingImports=false, reportArgumentType=false
# The harness is an optional extra, and its own annotations are loose.

from __future__ import annotations

import argparse
import bz2
import json
import os
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from record import Record

from caramba.cli import main as caramba

NAMES = "arc_easy,arc_challenge,hellaswag,openbook_qa,piqa"
TASK = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_target: "{{{{gold}}}}"
doc_to_choice: "{{{{bare}}}}"
target_delimiter: " "
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""


def write_tasks(source: Path, folder: Path, names: list[str], limit: int) -> None:
    """Write the first `limit` items of each task for both, and the task of the harness."""
    for name in names:
        packed = source / f"{name}.jsonl.bz2"
        text = (
            bz2.decompress(packed.read_bytes()).decode()
            if packed.exists()
            else (source / f"{name}.jsonl").read_text()
        )
        items = [json.loads(line) for line in text.splitlines()[:limit]]
        for item in items:
            item["bare"] = [choice.removeprefix(" ") for choice in item["choices"]]
            assert item["choices"] == [f" {choice}" for choice in item["bare"]], (
                f"{name}: a choice without space"
            )
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(item) + "\n" for item in items))
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, data=data))


def by_harness(model: str, folder: Path, names: list[str]) -> dict[str, list[dict[str, Any]]]:
    """Return the samples of each task by the harness's own model."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    found = simple_evaluate(
        model=HFLM(pretrained=model, dtype="float32", device="cpu", batch_size=8),
        tasks=names,
        task_manager=manager,
        log_samples=True,
        bootstrap_iters=0,
    )
    assert found is not None
    return {name: sorted(found["samples"][name], key=lambda sample: sample["doc_id"]) for name in names}


def by_caramba(model: str, folder: Path, names: list[str], option: str) -> dict[str, Any]:
    """Return what `caramba eval` writes, by the harness's tasks or by its own scoring."""
    out = folder / f"{option}.json"
    words = ["eval", model, "--tasks", ",".join(names), f"--{option}", str(folder), "--device", "cpu"]
    status = caramba([*words, "--out", str(out)])
    assert status == 0, f"caramba eval ended with {status}"
    return json.loads(out.read_text())


OPTIONS = f"model tasks --names={NAMES} --limit=100"


def run(args: argparse.Namespace, record: Record) -> None:
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    record.start(lm_eval=version("lm_eval"), limit=args.limit, model=Path(args.model).name)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        os.environ["HF_DATASETS_CACHE"] = str(folder / "cache")
        write_tasks(Path(args.tasks), folder, args.names, args.limit)
        theirs = by_harness(args.model, folder, args.names)
        inside = by_caramba(args.model, folder, args.names, "include-path")["items"]
        own = by_caramba(args.model, folder, args.names, "eval-data")["tasks"]
        for name in args.names:
            record.add(compare(name, theirs[name], inside[name], own[name]["items"]))


def compare(name: str, samples: list[Any], inside: dict[str, list[Any]], items: list[Any]) -> dict[str, Any]:
    """Return on how many items of a task the three sides differ."""
    row: dict[str, Any] = {"task": name, "items": len(items)}
    for metric in ("acc", "acc_norm"):
        scores = [float(sample[metric]) for sample in samples]
        sides = {
            "harness_tasks": [float(item[metric]) for item in inside[f"{metric},none"]],
            "local_files": [float(item[metric]) for item in items],
        }
        for side, found in sides.items():
            row[f"{metric}_differ_{side}"] = sum(a != b for a, b in zip(scores, found, strict=True))
        row[metric] = sum(scores) / len(scores)
    row["largest_logprob_difference"] = max(
        abs(a - float(b[0]))
        for item, sample in zip(items, samples, strict=True)
        for a, b in zip(item["logprobs"], sample["filtered_resps"], strict=True)
    )
    return row
