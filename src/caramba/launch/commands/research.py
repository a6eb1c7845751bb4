"""`caramba research`: compare a proposed change with a run under a registered test, and verify such a comparison."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from caramba.config.parse import parse_as
from caramba.config.research import GateConfig
from caramba.console import logger
from caramba.launch.commands.arguments import CommandArguments
from caramba.paper.research.experiment import Comparison
from caramba.paper.research.proposal import read_proposal
from caramba.paper.research.verify import verify_ledger
from caramba.runs import lock, resolve_run


def main(argv: list[str]) -> int:
    """Run `caramba research compare|verify` and return the exit status.

    Raises:
        ConfigError: an option, the run, the proposal, or a ledger that does not hold.
    """
    parser = CommandArguments("research")
    parser.add_argument("action", choices=("compare", "verify"))
    parser.add_argument("target")
    parser.add_argument("--proposal")
    parser.add_argument("--metric")
    parser.add_argument("--direction")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--candidates", type=int)
    parser.add_argument("--budget")
    parser.add_argument("--timeout", type=float)
    parser.add_argument("--output-dir")
    args = parser.parse_args(argv)
    logger.quiet = args.quiet
    if args.action == "verify":
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
    print(
        f"{proposal.name}: {state} after {seen.n_seeds} seeds, e-value {seen.e_value:.4g} of {gate.threshold:g}"
    )
    print(f"ledger: {comparison.ledger.file}")
    return 0
