"""Evaluation tasks from local files, scored by log-likelihood without lm-evaluation-harness or a network.

A folder holds one file a task, `NAME.jsonl` or `NAME.txt`, also compressed with bzip2 or gzip. Each line of a JSONL
file is one item, and the keys of the first line name the format:

    multiple choice      context, choices, gold             argmax of log p(choice | context)
    partial context      contexts, continuation, gold       argmax of log p(continuation | context), with the whole
                                                            sentences as choices too where the item has them
    cloze                context, target                    whether greedy decoding gives the target
    minimal pair         good, bad                          whether the good sentence is more likely

A text file is scored as perplexity over disjoint windows. Other keys of an item are ignored.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from caramba.data import Tokenizer
from caramba.errors import ConfigError, DataError, nearest
from caramba.infer import score_continuations
from caramba.model import Model

OPENERS: dict[str, Callable[..., Any]] = {"": open, ".bz2": bz2.open, ".gz": gzip.open}
POSITION_EDGES = (0, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
GROUPS = {
    # The six tasks of MHA2MLA (arXiv 2502.14837, Table 1); ARC counts once, as the mean of its two halves.
    "mha2mla": ("arc_easy+arc_challenge", "hellaswag", "mmlu", "openbook_qa", "piqa", "winogrande")
}
PASSAGE = 200  # characters
UNDIVIDED = frozenset({"boolq"})  # yes and no differ in length, and lighteval does not divide by it

Pair = tuple[list[int], list[int]]
Item = dict[str, Any]


@dataclass(frozen=True)
class LocalTask:
    """One task of a folder: its items, or its text. `limit` keeps evenly spaced items, or 512 tokens for each."""

    name: str
    path: Path
    kind: str
    items: tuple[Item, ...] = ()
    text: str | None = None


@dataclass(frozen=True)
class TaskScores:
    """Scores of one model on one task.

    `scores` maps a metric to (value, standard error or None); `main` is the metric that represents the task in a mean.
    `items` holds one record for each item or window, in the order of the file. `change` names how prompts were changed.
    """

    task: str
    kind: str
    main: str
    n: int
    scores: dict[str, tuple[float, float | None]]
    items: list[Item]
    change: str = ""


def open_tasks(folder: str | Path, names: Sequence[str], *, limit: int | None, where: str) -> list[LocalTask]:
    """Read the tasks `names` of a folder: names of its files, groups of GROUPS, or `all`.

    Raises:
        ConfigError: no such folder or task; the error names the nearest task.
        DataError: a file that cannot be read, or an item that does not fit its format, with the line.
    """
    root = Path(folder).expanduser()
    if not root.is_dir():
        raise ConfigError(
            f"{where}: eval data {str(folder)!r} is not a folder; give one with NAME.jsonl or NAME.txt files"
        )
    files = _files_of(root)
    if not files:
        raise ConfigError(f"{where}: {root} has no NAME.jsonl or NAME.txt file; give a folder with tasks")
    wanted: list[str] = []
    for name in names:
        members = [part for member in GROUPS[name] for part in member.split("+")] if name in GROUPS else [name]
        wanted += sorted(files) if name == "all" else members
    for name in wanted:
        if name not in files:
            raise ConfigError(
                f"{where}: {root} has no task {name!r}{nearest(name, files) or ';'} tasks: {', '.join(sorted(files))}"
            )
    return [_read_task(name, files[name], limit) for name in dict.fromkeys(wanted)]


def score_task(
    task: LocalTask,
    model: Model,
    tokenizer: Tokenizer,
    *,
    max_length: int,
    batch_size: int,
    limit: int | None = None,
) -> TaskScores:
    """Score one model on one task; log-likelihoods in nats.

    A continuation starts where the tokens of its context alone end, as in lighteval. Sequences keep their last
    `max_length` tokens. Minimal pairs follow the start token, or the end token where there is none.
    """
    if task.text is not None:
        return _score_text(task, model, tokenizer, max_length, batch_size, limit)
    by_item = _encode_pairs([_texts_of(task.kind, item) for item in task.items], tokenizer)
    pairs = [pair for item in by_item for pair in item]
    scored = iter(score_continuations(model, pairs, max_length=max_length - 1, batch_size=batch_size))
    records: list[Item] = []
    for number, (item, options) in enumerate(zip(task.items, by_item, strict=True)):
        found = [next(scored) for _ in options]
        logprobs = [one.logprob for one in found]
        hits = {"acc": found[0].is_greedy} if task.kind == "cloze" else _hits(task.kind, item, logprobs)
        known = {"id": str(item.get("id", number)), "text_sha256": _digest(item), "cluster": _cluster(item)}
        records.append({**known, "logprobs": logprobs, **hits})
    scores = {
        metric: _share([record[metric] for record in records]) for metric in ("acc", "acc_norm") if metric in records[0]
    }
    if task.kind == "cloze":
        scores["perplexity"] = (
            math.exp(-statistics.fmean(record["logprobs"][0] for record in records)),
            None,
        )
    main = "acc" if task.name in UNDIVIDED or "acc_norm" not in scores else "acc_norm"
    return TaskScores(task.name, task.kind, main, len(records), scores, records)


def group_means(results: Sequence[TaskScores]) -> dict[str, float]:
    """Return the mean of each group of GROUPS whose tasks are all among `results`."""
    by_name = {result.task: result.scores[result.main][0] for result in results}
    means: dict[str, float] = {}
    for group, members in GROUPS.items():
        parts = [member.split("+") for member in members]
        if all(name in by_name for part in parts for name in part):
            means[group] = statistics.fmean(statistics.fmean(by_name[name] for name in part) for part in parts)
    return means


def _files_of(root: Path) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for path in sorted(root.iterdir()):
        name = path.name.removesuffix(path.suffix) if path.suffix in OPENERS and path.suffix else path.name
        stem, dot, kind = name.rpartition(".")
        if dot and stem and kind in ("jsonl", "txt") and path.is_file():
            found.setdefault(stem, path)
    return found


def _read_task(name: str, path: Path, limit: int | None) -> LocalTask:
    suffix = path.suffix if path.suffix in OPENERS else ""
    try:
        with OPENERS[suffix](path, "rt", encoding="utf-8") as file:
            text = file.read()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as UTF-8 text: {error}; replace the file") from error
    if path.name.removesuffix(suffix).endswith(".txt"):
        return LocalTask(name, path, "text", text=text)
    lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not lines:
        raise DataError(f"{path}: has no items; expected one JSON object a line")
    items: list[Item] = []
    kind: str | None = None
    for number, line in lines:
        item = _parse(path, number, line)
        kind = kind or _kind_of(item, path)
        problem = _problem(kind, item)
        if problem:
            raise DataError(f"{path}:{number}: {problem}")
        items.append(item)
    assert kind is not None
    return LocalTask(name, path, kind, tuple(_limited(items, kind, limit)))


def _parse(path: Path, number: int, line: str) -> Item:
    try:
        item = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}:{number}: is not JSON ({error}); expected one object a line") from error
    if not isinstance(item, dict):
        raise DataError(f"{path}:{number}: is a {type(item).__name__}; expected one JSON object a line")
    return item


def _kind_of(item: Item, path: Path) -> str:
    if "continuation" in item and "contexts" in item:
        return "partial"
    for kind, keys in (
        ("choice", ("context", "choices")),
        ("cloze", ("context", "target")),
        ("pair", ("good", "bad")),
    ):
        if all(key in item for key in keys):
            return kind
    raise DataError(
        f"{path}:1: unknown format with keys {', '.join(sorted(item))[:200]}; expected context+choices+gold, "
        "contexts+continuation+gold, context+target, or good+bad"
    )


def _problem(kind: str, item: Item) -> str | None:
    """Return what is wrong with an item; None when it fits its format."""
    texts = {
        "choice": ("context",),
        "partial": ("continuation",),
        "cloze": ("context", "target"),
        "pair": ("good", "bad"),
    }
    for key in texts[kind]:
        value = item.get(key)
        if not isinstance(value, str) or not value:
            return f"{key}={str(value)[:60]!r}; expected a text that is not empty"
    if kind in ("cloze", "pair"):
        return None
    if "choices" in item and not (isinstance(item.get("context"), str) and item["context"]):
        return "choices without a context; expected a text that is not empty"
    counts = set()
    for key in ("contexts", "choices"):
        options = item.get(key)
        if key not in item:
            continue
        if not isinstance(options, list) or len(options) < 2 or not all(isinstance(t, str) and t for t in options):
            return f"{key}={str(options)[:60]!r}; expected a list of at least two texts"
        counts.add(len(options))
    if len(counts) != 1:
        return "contexts and choices differ in number; expected one context for each choice"
    gold, n_options = item.get("gold"), counts.pop()
    if not isinstance(gold, int) or isinstance(gold, bool) or not 0 <= gold < n_options:
        return f"gold={str(gold)[:60]!r}; expected an index from 0 to {n_options - 1}"
    return None


def _limited(items: Sequence[Item], kind: str, limit: int | None) -> Iterator[Item]:
    """Keep `limit` evenly spaced items; of minimal pairs the first `limit` of each UID."""
    if limit is None:
        yield from items
    elif kind == "pair":
        seen: dict[Any, int] = defaultdict(int)
        for item in items:
            seen[item.get("UID")] += 1
            if seen[item.get("UID")] <= limit:
                yield item
    else:
        n = min(limit, len(items))
        yield from (items[index * len(items) // n] for index in range(n))


def _texts_of(kind: str, item: Item) -> list[tuple[str | None, str]]:
    """Return each context, None for the start token alone, with its continuation."""
    if kind == "pair":
        return [(None, item[side]) for side in ("good", "bad")]
    if kind == "cloze":
        return [(item["context"], item["target"])]
    partial = [(context, item["continuation"]) for context in item.get("contexts", ())]
    return [*partial, *((item["context"], choice) for choice in item.get("choices", ()))]


def _encode_pairs(items: list[list[tuple[str | None, str]]], tokenizer: Tokenizer) -> list[list[Pair]]:
    """Encode the texts of all items at once: choices share a context."""
    pairs = [pair for item in items for pair in item]
    texts = list(dict.fromkeys(text for context, rest in pairs for text in (context or "", (context or "") + rest)))
    ids = dict(zip(texts, (found[:-1].tolist() for found in tokenizer.encode_documents(texts)), strict=True))
    start = [tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id]

    def pair_of(context: str | None, rest: str) -> Pair:
        if context is None:
            return start, ids[rest]
        both, cut = ids[context + rest], len(ids[context])
        return both[:cut], both[cut:]

    return [[pair_of(*pair) for pair in item] for item in items]


def _hits(kind: str, item: Item, logprobs: Sequence[float]) -> dict[str, bool]:
    if kind == "pair":
        return {"acc": logprobs[0] > logprobs[1]}
    hits: dict[str, bool] = {}
    n_partial = len(item.get("contexts", ()))
    choices, whole = item.get("choices", ()), logprobs[n_partial:]
    if choices:
        # Characters without the leading space: loglikelihood_acc_norm_nospace of lighteval.
        lengths = [max(len(choice.removeprefix(" ")), 1) for choice in choices]
        per_character = [value / length for value, length in zip(whole, lengths, strict=True)]
        hits = {"acc": _argmax(whole) == item["gold"], "acc_norm": _argmax(per_character) == item["gold"]}
    if n_partial:
        hits["acc"] = _argmax(logprobs[:n_partial]) == item["gold"]
    return hits


def _digest(item: Item) -> str:
    """Return the sum of an item, so that models are paired on equal items only, whatever these are called."""
    return hashlib.sha256(json.dumps(item, sort_keys=True).encode()).hexdigest()[:16]


def _cluster(item: Item) -> str:
    """Return what names the text that items share: `cluster`, else a passage in their contexts, else the context.

    A passage is the longest line of a context, from PASSAGE characters on. Minimal pairs share none.
    """
    if "cluster" in item:
        return str(item["cluster"])
    context = str(item.get("context") or item.get("good"))
    longest = max(context.split("\n"), key=len)
    shared = longest if len(longest) >= PASSAGE else context
    return hashlib.sha256(shared.encode()).hexdigest()[:16]


def _argmax(values: Sequence[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)


def _share(hits: Sequence[bool]) -> tuple[float, float | None]:
    share, n = statistics.fmean(hits), len(hits)
    return share, math.sqrt(share * (1 - share) / (n - 1)) if n > 1 else None


@torch.inference_mode()
def _score_text(
    task: LocalTask, model: Model, tokenizer: Tokenizer, width: int, batch_size: int, limit: int | None
) -> TaskScores:
    """Score a text in disjoint windows of `width` predictions, without a start token; also by position."""
    assert task.text is not None
    tokens = tokenizer.encode(task.text)
    if limit is not None:
        tokens = tokens[: max(width, 512 * limit) + 1]
    n_windows = (len(tokens) - 1) // width
    if n_windows < 1:
        raise DataError(
            f"{task.path}: has {len(tokens)} tokens, expected at least {width + 1}; use a longer text or --max-length"
        )
    device = model.embedder.token.weight.device
    rows = torch.tensor(tokens[: n_windows * width + 1], dtype=torch.int64)
    losses = torch.empty(n_windows, width, dtype=torch.float64)
    for first in range(0, n_windows, batch_size):
        chosen = range(first, min(first + batch_size, n_windows))
        batch = torch.stack([rows[at * width : (at + 1) * width + 1] for at in chosen]).to(device)
        hidden = model.hidden(batch[:, :-1])
        for index, row, targets in zip(chosen, hidden, batch[:, 1:], strict=True):
            losses[index] = F.cross_entropy(model.logits(row).float(), targets, reduction="none").cpu().double()
    means = losses.mean(dim=1)
    error = float(means.std() / math.sqrt(n_windows)) if n_windows > 1 else None
    perplexity = math.exp(float(losses.mean()))
    scores: dict[str, tuple[float, float | None]] = {
        "nll": (float(losses.mean()), error),
        "perplexity": (perplexity, None if error is None else error * perplexity),
    }
    for low, high in pairwise(POSITION_EDGES):
        if low < width:
            part = losses[:, low : min(high, width)]
            scores[f"perplexity_at_{low}_{min(high, width) - 1}"] = (math.exp(float(part.mean())), None)
    scores["tokens"] = (float(losses.numel()), None)
    items = [
        {
            "id": str(index),
            "text_sha256": hashlib.sha256(rows[index * width : (index + 1) * width + 1].numpy().tobytes()).hexdigest()[
                :16
            ],
            "cluster": str(index),
            "nll": float(value),
        }
        for index, value in enumerate(means)
    ]
    return TaskScores(task.name, "text", "perplexity", n_windows, scores, items)
