"""The section of the benchmarks page about the proxy study of upcycling."""

from __future__ import annotations

import math
from typing import Any

# What issue and specification ask of the study: budget, least and most tokens of the distillation, perplexity ratio.
MUST = (
    ("5.33x", 20e6, 70e6, 1.02),
    ("5.33x", 0.0, 20e6, 1.05),
    ("6.4x", 20e6, 70e6, 1.03),
    ("10.7x", 20e6, 70e6, 1.08),
)
MUST_UNTRAINED = {"1.78x": 1.04, "2.67x": 1.12}


def upcycle_proxy(data: dict[str, Any]) -> list[str]:
    """The proxy study: untrained students by method and budget, and what distillation makes of them."""
    teacher, corpus = data["teacher"], data["corpus"]
    fresh = corpus.get("fresh_tokens")
    lines = [
        "## Upcycling study (proxy)",
        "",
        f"{data['label']}. Teacher: {teacher['parameters'] / 1e6:.0f}M parameters, {teacher['tokens'] / 1e6:.0f}M"
        f" training tokens ({teacher['epochs']:.1f} epochs), held-out perplexity {teacher['perplexity']:.3f}"
        f" ({teacher['bits_per_byte']:.3f} bits per byte), recall {teacher['recall']:.3f}."
        + (f" Students learn from {fresh / 1e6:.0f}M tokens of files that it never saw." if fresh else "")
        + " Ratios are student to"
        f" teacher over the same disjoint held-out windows, with {data.get('intervals', 'bootstrap')} 95% intervals"
        " over windows; bytes are"
        " counted from cache tensors.",
        "",
        "![Perplexity ratio against KV ratio](benchmarks/upcycle_proxy.png)",
        "",
        "| untrained: KV ratio | method | PPL ratio (95%) | KL, nats | top-1 agreement | recall of the teacher's |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['kv_ratio']:.2f}x | {row['method']}{_spread(row)} | {_ratio(row)} | {row['kl']:.4f} |"
        f" {row['top1_agreement']:.3f} | {row['recall_share']:.3f} |"
        for row in data["untrained"]
    ]
    lines += [
        "",
        "| distilled: KV ratio | from | widths | seed | tokens | GPU s | blockwise | drift | at the end (95%) | KL |"
        " recall |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for run in data["distilled"]:
        after = {name: span["after"] for name, span in run["phases"].items()}
        last = after["global"]
        before = " | ".join(
            f"{after[name]['ppl_ratio']:.4f}" if name in after else "-" for name in ("blockwise", "drift")
        )
        lines.append(
            f"| {last['kv_ratio']:.2f}x | {run['method']} | {_widths(run, data)} | {run['seed']} |"
            f" {run['tokens'] / 1e6:.1f}M |"
            f" {run['seconds']:.0f} | {before} |"
            f" **{_ratio(last)}** | {last['kl']:.4f} | {last['recall_share']:.3f} |"
        )
    return [*lines, *_targets(data), *_recipes(data)]


def _targets(data: dict[str, Any]) -> list[str]:
    """The musts of the study and its results."""
    rows = [
        (f"{row['budget']}, untrained", _ratio(row), f"{MUST_UNTRAINED[row['budget']]:.2f}")
        for row in data["untrained"]
        if row["method"] == "dba" and row["budget"] in MUST_UNTRAINED
    ]
    untrained = {(row["budget"], row["method"]): row for row in data["untrained"]}
    for budget in MUST_UNTRAINED:
        ours, theirs = (untrained.get((budget, method)) for method in ("dba", "weight_svd"))
        if ours and theirs:
            share = math.log(ours["ppl_ratio"]) / math.log(theirs["ppl_ratio"])
            rows.append((f"{budget}, untrained: NLL gap over weight SVD's", f"{share:.3f}", "0.5"))
    recalls = []
    for budget, least, most, must in MUST:
        runs = [
            run["phases"]["global"]["after"]
            for run in data["distilled"]
            if run["method"] == "dba" and run["budget"] == budget and least < run["tokens"] <= most
        ]
        if not runs:
            continue
        tokens = f"at most {most / 1e6:.0f}M tokens"
        seeds = f", {len(runs)} seeds" if len(runs) > 1 else ""
        rows.append(
            (f"{budget}, {tokens}{seeds}", ", ".join(f"{run['ppl_ratio']:.4f}" for run in runs), f"{must}")
        )
        if budget == "5.33x":
            recalls += [run["recall_share"] for run in runs]
    if recalls:
        rows.append(("recall at 5.33x, share of the teacher's, the lowest", f"{min(recalls):.3f}", "0.95"))
    return [
        "",
        "| asked: PPL ratio | measured | must |",
        "|---|---|---|",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def _recipes(data: dict[str, Any]) -> list[str]:
    """The recipe of the distillations, and the short trials on other windows that led to it."""
    recipes: dict[str, list[str]] = {}
    for run in data["distilled"]:
        known = recipes.setdefault(_words(run["recipe"]), [])
        if run["method"] == "dba" and run["budget"] not in known:
            known.append(run["budget"])
    trials = sorted(
        (data["search"] or {"trials": []})["trials"],
        key=lambda trial: (trial["budget"], trial["phases"]["global"]["after"]["ppl_ratio"]),
    )
    lines = [
        "",
        "`teacher` is the control: the teacher itself trained further by cross-entropy on the students' text. Widths"
        " are latent + geometric elements. Recipes: "
        + "; ".join(f"{', '.join(budgets)}: {words}" for words, budgets in recipes.items() if budgets)
        + ".",
    ]
    if not trials:
        return lines
    lines += [
        "",
        f"Trials of {trials[0]['tokens'] / 1e6:.1f}M tokens, one seed, measured on other validation windows:",
        "",
        "| from | latent + geometric | recipe | PPL ratio | KL | recall |",
        "|---|---|---|---|---|---|",
    ]
    for trial in trials:
        last = trial["phases"]["global"]["after"]
        lines.append(
            f"| {trial['method']} | {_widths(trial, data)} | {_words(trial['recipe'])} | {last['ppl_ratio']:.4f} |"
            f" {last['kl']:.4f} | {last['recall_share']:.3f} |"
        )
    return lines


def _widths(run: dict[str, Any], data: dict[str, Any]) -> str:
    widths = run.get("widths") or data["budgets"].get(run["budget"])
    return f"{widths[0]} + {widths[1]}" if widths else "-"


def _spread(row: dict[str, Any]) -> str:
    return f", rotations under {row['spread']:.0%} uniform attention" if row.get("spread") else ""


def _words(recipe: dict[str, Any]) -> str:
    shown = {
        name: value
        for name, value in recipe.items()
        if value not in (0.0, False) and (name, value) != ("map_lr", 1.0)
    }
    return ", ".join(f"{name} {value:g}" if value is not True else name for name, value in shown.items())


def _ratio(row: dict[str, Any]) -> str:
    return f"{row['ppl_ratio']:.4f} ({row['ppl_ratio_low']:.4f} to {row['ppl_ratio_high']:.4f})"
