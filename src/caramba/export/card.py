"""README.md of an export: a model card with what the run's files say of the model, in the form of Hugging Face's."""

import json
from pathlib import Path
from typing import Any

from caramba.artifacts.header import facts_of
from caramba.errors import visible
from caramba.infer.model_bundle import ModelBundle

LIBRARY = {"hf": "transformers", "deepseek": "transformers", "gguf": "gguf"}
MEASURED = ("nll", "perplexity", "bits_per_byte", "acc", "accuracy")
"""Fields of the student's metrics that a card lists."""


def model_card(opened: ModelBundle, role: str, format: str, notes: tuple[str, ...]) -> str:
    """Return the card of a model; one that comes from no run has no facts of its training."""
    name = opened.model.spec.name or "model"
    report = _report(opened.run_dir)
    lines = [
        "---",
        f"library_name: {LIBRARY.get(format, 'caramba')}",
        f"tags: [caramba, {role}]",
        "pipeline_tag: text-generation",
        "---",
        "",
        f"# {_cell(name)}",
        "",
        f"The {role} of {'a run' if report else 'a file'} of caramba, "
        f"{sum(tensor.numel() for tensor in opened.model.parameters()):,} parameters.",
        "",
    ]
    if opened.run_dir is not None and report:
        facts = facts_of(
            opened.run_dir, report["labels"], report.get("environment") or {}, report.get("git_commit")
        )
        lines += ["## Training", "", "| | |", "|---|---|"]
        lines += [f"| {fact.name} | {_cell(fact.text)} |" for fact in facts]
        lines += [
            f"| {_cell(key)} | {_cell(text)} |" for key, text in opened.labels.items() if key == "proxy"
        ]
        lines += ["", *_measured(report, role)]
    lines += ["## Use", "", *_use(format, notes)]
    return "\n".join(lines) + "\n"


def _measured(report: dict[str, Any], role: str) -> list[str]:
    found = [
        (key, metric)
        for key, metric in report["metrics"].items()
        if f".{role}." in key and key.partition("@")[0].rpartition(".")[2] in MEASURED
    ]
    rows = [f"| `{_cell(key)}` | {metric['value']:.6g} | {_cell(metric['unit'])} |" for key, metric in found]
    losses = [
        f"| held-out loss of {_cell(phase['id'])} | {phase['val_loss']:.6g} | |"
        for phase in report["phases"]
        if phase.get("val_loss") is not None and phase["trains"] == role
    ]
    if not rows and not losses:
        return []
    return ["## Measured", "", "| metric | value | unit |", "|---|---|---|", *rows, *losses, ""]


def _use(format: str, notes: tuple[str, ...]) -> list[str]:
    if format in ("hf", "deepseek"):
        own = ", trust_remote_code=True" if any("trust_remote_code" in note for note in notes) else ""
        return [
            "```python",
            "from transformers import AutoModelForCausalLM",
            "",
            f'model = AutoModelForCausalLM.from_pretrained("FOLDER"{own})',
            "```",
        ]
    return ["    caramba generate FOLDER --prompt TEXT"]


def _report(run_dir: Path | None) -> dict[str, Any]:
    if run_dir is None or not (file := run_dir / "artifacts" / "report.json").is_file():
        return {}
    return json.loads(file.read_text(encoding="utf-8"))


def _cell(text: object) -> str:
    """Return a text that ends neither a cell nor the table."""
    return visible(str(text)).replace("|", "\\|").replace("<", "&lt;")
