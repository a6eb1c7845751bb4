"""Measure false wins of research loops by real training: both arms of every pair differ in their seeds alone.

python scripts/research_aa.py --loops 100 --out docs/benchmarks/research_aa.json

Every run trains the preset `tiny` on the standard library's source, byte by byte, and measures its NLL on
windows that no run trains on. A loop has five candidates, each with as many seeds as its test asks for.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path
from typing import Any

import torch
from scipy.stats import beta

from caramba.config.research import GateConfig
from caramba.launch.freeze import freeze
from caramba.model import build_model
from caramba.optim.build import build_optimizer
from caramba.paper.research.gate import Pair, look
from caramba.runs.files import write_json

GATE = GateConfig(metric="perplexity.student.nll", direction="less")
STEPS, BATCH, WINDOW = 12, 4, 32
WORDS = ("model=tiny", "train=pretrain", "data.vocab_size=512", "model.embedder.vocab_size=512")


def main() -> None:
    parser = argparse.ArgumentParser(description="A/A loops of tiny real runs through the registered test.")
    parser.add_argument("--loops", type=int, default=100)
    parser.add_argument("--out", type=Path, help="JSON file; default: print only")
    words = parser.parse_args()
    record = measure(words.loops)
    print({key: value for key, value in record.items() if key != "losses"})
    if words.out is not None:
        write_json(words.out, record)


def measure(loops: int) -> dict[str, Any]:
    """Return how many loops accepted a candidate, with the 95% bound (Clopper-Pearson, one-sided)."""
    torch.set_num_threads(1)
    trainer = Trainer()
    seed = wins = runs = 0
    losses: list[float] = []
    for _ in range(loops):
        is_won = False
        for _ in range(GATE.candidates):
            pairs: list[Pair] = []
            state = "continue"
            while state == "continue" and len(pairs) < len(GATE.seeds):
                arms = [trainer.train(seed), trainer.train(seed + 1)]
                seed, runs = seed + 2, runs + 2
                losses += arms
                pairs.append(Pair(GATE.seeds[len(pairs)], *arms))
                state = look(pairs, GATE).state
            is_won |= state == "accepted"
        wins += is_won
    upper = float(beta.ppf(0.95, wins + 1, loops - wins)) if wins < loops else 1.0
    spread = torch.tensor(losses).std().item()
    return {
        "script": "scripts/research_aa.py", "loops": loops, "candidates": GATE.candidates, "runs": runs,
        "steps": STEPS, "loops_with_a_win": wins, "upper_95": upper, "loss_std": spread, "untrained": trainer.untrained,
        "mean_loss": sum(losses) / len(losses),
    }  # fmt: skip


class Trainer:
    """Trains one configuration from a seed: its weights and the order of its data."""

    def __init__(self) -> None:
        manifest = freeze([*WORDS]).manifest
        run = manifest.groups_to_run()[0].runs[0]
        assert run.train is not None
        self.spec, self.phase = manifest.model, run.train
        folder = Path(sysconfig.get_paths()["stdlib"])
        text = b"".join(file.read_bytes() for file in sorted(folder.glob("[a-d]*.py")))
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.held_out, self.tokens = tokens[: 8 * (WINDOW + 1)].view(8, -1), tokens[8 * (WINDOW + 1) :]
        self.untrained = self._loss(build_model(self.spec, seed=0), self.held_out).item()

    def train(self, seed: int) -> float:
        """Return the held-out NLL in nats per byte."""
        model = build_model(self.spec, seed=seed)
        optimizer = build_optimizer(model.named_parameters(), self.phase)
        generator = torch.Generator().manual_seed(seed)
        for _ in range(STEPS):
            starts = torch.randint(len(self.tokens) - WINDOW, (BATCH, 1), generator=generator)
            optimizer.zero_grad()
            self._loss(model, self.tokens[starts + torch.arange(WINDOW + 1)]).backward()
            optimizer.step()
        with torch.no_grad():
            return self._loss(model, self.held_out).item()

    def _loss(self, model: torch.nn.Module, windows: torch.Tensor) -> torch.Tensor:
        logits = model(windows[:, :-1])
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


if __name__ == "__main__":
    main()
