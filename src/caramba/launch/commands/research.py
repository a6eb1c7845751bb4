"""`caramba research RUN`: the loop of drafts, reviews and experiments; `compare` and `verify`: its test alone."""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import Any

from caramba.config.paper import GateConfig, PaperConfig, ResearchLoopConfig, ReviewConfig
from caramba.config.parse import parse_as
from caramba.console import logger
from caramba.launch.commands.arguments import CommandArguments
from caramba.paper import ResearchLoop
from caramba.paper.research.experiment import Comparison
from caramba.paper.research.proposal import read_proposal
from caramba.paper.research.verify import verify_ledger
from caramba.runs import lock, read_manifest, resolve_run


def main(argv: list[str]) -> int:
    """Run `caramba research RUN|compare|verify` and return the exit status.

    Raises:
        ConfigError: an option, the run, the proposal, or a ledger that does not hold.
    """
    parser = CommandArguments("research")
    parser.add_argument("words", nargs="+")
    for flag, _, kind in _KEYS:
        parser.add_argument(flag, type=kind)
    for name in _GATE:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int if name == "candidates" else str)
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--proposal")
    parser.add_argument("--auto-run", action="store_true")
    parser.add_argument("--confirm", action="append", default=[])
    parser.add_argument("--replay")
    parser.add_argument("--output-dir")
    args = parser.parse_args(argv)
    is_whole = args.words[0] not in ("compare", "verify")
    if len(args.words) != (1 if is_whole else 2):
        parser.error("expected one run, or compare RUN, or verify DIR")
    args.target = args.words[-1]
    logger.quiet = args.quiet
    if is_whole:
        return _loop(args)
    if args.words[0] == "verify":
        counts = verify_ledger(Path(args.target).expanduser())
        print("verified: " + ", ".join(f"{count} {name}" for name, count in counts.items()))
        return 0
    missing = [flag for flag in ("proposal", "metric", "direction") if getattr(args, flag) is None]
    if missing:
        parser.error(f"compare expects {', '.join('--' + flag for flag in missing)}")
    plain: dict[str, Any] = {"metric": args.metric, "direction": args.direction}
    if args.seeds is not None:
        plain["seeds"] = list(range(1, args.seeds + 1))
    for key in ("candidates", "budget"):
        if getattr(args, key) is not None:
            plain[key] = getattr(args, key)
    gate = parse_as(GateConfig, plain)
    run = resolve_run(args.target)
    proposal = read_proposal(Path(args.proposal).expanduser())
    folder = Path(args.output_dir).expanduser() if args.output_dir else run / "research"
    folder = folder.absolute()
    comparison = Comparison(folder, run, gate, timeout_s=args.timeout)
    folder.mkdir(parents=True, exist_ok=True)
    with lock(folder, "research"):
        seen = comparison.run(proposal)
    state = "not decided" if seen.state == "continue" else seen.state
    print(f"{proposal.name}: {state} after {seen.n_seeds} seeds, e-value {seen.e_value:.4g} of {gate.threshold:g}")
    print(f"ledger: {comparison.ledger.file}")
    return 0


# Flag, the keys that it sets of paper, review and research, how its text is read.
_KEYS: tuple[tuple[str, tuple[str, ...], type], ...] = (
    ("--model", ("paper.model", "review.model"), str),
    ("--base-url", ("paper.api.base_url", "review.api.base_url"), str),
    ("--api-key-env", ("paper.api.key_env", "review.api.key_env"), str),
    ("--tools", ("paper.api.tools", "review.api.tools"), str),
    ("--max-iterations", ("research.max_iterations",), int),
    ("--max-cost", ("research.budget.max_cost_usd",), float),
    ("--max-tokens", ("research.budget.max_tokens",), int),
    ("--timeout", ("research.experiment_timeout_s",), float),
)
_GATE = ("metric", "direction", "candidates", "budget", "held_out")


def _loop(args: argparse.Namespace) -> int:
    run = resolve_run(args.target)
    manifest = read_manifest(run)
    given = {"paper": manifest.paper or PaperConfig(), "review": manifest.review or ReviewConfig(),
             "research": manifest.research or ResearchLoopConfig()}  # fmt: skip
    plain: dict[str, Any] = {name: config.model_dump(mode="json") for name, config in given.items()}
    for flag, paths, _ in _KEYS:
        value = getattr(args, flag.removeprefix("--").replace("-", "_"))
        for path in paths if value is not None else ():
            *parents, key = path.split(".")
            functools.reduce(lambda tree, name: tree[name], parents, plain)[key] = value
    gate = {name: getattr(args, name) for name in _GATE if getattr(args, name) is not None}
    if args.seeds is not None:
        gate["seeds"] = list(range(1, args.seeds + 1))
    if gate:
        plain["research"]["gate"] = {**(plain["research"]["gate"] or {}), **gate}
        most = parse_as(GateConfig, plain["research"]["gate"]).candidates
        plain["research"]["max_total_experiments"] = min(plain["research"]["max_total_experiments"], most)
    plain["research"]["auto_run_experiments"] |= args.auto_run
    loop = ResearchLoop(
        parse_as(PaperConfig, plain["paper"]),
        parse_as(ReviewConfig, plain["review"]),
        parse_as(ResearchLoopConfig, plain["research"]),
        output_dir=None if args.output_dir is None else Path(args.output_dir).expanduser().absolute(),
        confirm=lambda proposal: proposal.name in args.confirm,
        replay=None if args.replay is None else Path(args.replay).expanduser(),
    )
    result = loop.run_sync(run)
    spent = result.spent
    print(f"research: {result.reason}: {result.message}")
    print(f"{len(result.rounds)} rounds, {spent['calls']:g} calls, {spent['tokens']:,} tokens\nresult: {result.file}")
    return 0
