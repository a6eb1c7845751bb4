"""Item by item, lm-evaluation-harness with its own model against caramba on the same local tasks. Writes JSON.

Usage: python scripts/harness_items.py FOLDER TASKS [--names A,B] [--limit N] [--out FILE]

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

from caramba.cli import main as caramba
from caramba.runs.files import write_json

NAMES = "arc_easy,arc_challenge,hellaswag,openbook_qa,piqa"
METRICS = ("acc", "acc_norm")
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("tasks", type=Path)
    parser.add_argument("--names", default=NAMES)
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    names = args.names.split(",")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        os.environ["HF_DATASETS_CACHE"] = str(folder / "cache")
        write_tasks(args.tasks, folder, names, args.limit)
        theirs = by_harness(args.model, folder, names)
        inside = by_caramba(args.model, folder, names, "include-path")["items"]
        own = by_caramba(args.model, folder, names, "eval-data")["tasks"]
        for name in names:
            samples, items = theirs[name], own[name]["items"]
            assert len(samples) == len(items)
            logprobs = [[float(answer[0]) for answer in sample["filtered_resps"]] for sample in samples]
            row: dict[str, Any] = {"task": name, "items": len(items)}
            for metric in METRICS:
                scores = [float(sample[metric]) for sample in samples]
                harness = [float(item[metric]) for item in inside[name][f"{metric},none"]]
                files = [float(item[metric]) for item in items]
                row[f"{metric}_differ_harness_tasks"] = sum(
                    a != b for a, b in zip(scores, harness, strict=True)
                )
                row[f"{metric}_differ_local_files"] = sum(a != b for a, b in zip(scores, files, strict=True))
                row[metric] = sum(scores) / len(scores)
            row["largest_logprob_difference"] = max(
                abs(a - b)
                for ours, other in zip(items, logprobs, strict=True)
                for a, b in zip(ours["logprobs"], other, strict=True)
            )
            rows.append(row)
            print(row, flush=True)
    if args.out is not None:
        made = {"script": "scripts/harness_items.py", "lm_eval": version("lm_eval"), "limit": args.limit}
        write_json(args.out, made | {"model": Path(args.model).name, "rows": rows})


if __name__ == "__main__":
    main()
