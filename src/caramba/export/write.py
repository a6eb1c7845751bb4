"""Writes an opened model into a folder, in one of the formats that other programs read, with a model card."""

import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from caramba.artifacts.header import facts_of
from caramba.config.hf import is_hf_folder
from caramba.data.checkpoint import save_tensors
from caramba.data.checkpoint.formats import write_model_file
from caramba.data.checkpoint.network import spec_of
from caramba.errors import ConfigError, nearest, visible
from caramba.export.deepseek import (
    deepseek_config,
    deepseek_tensors,
    gguf_deepseek,
    has_mla,
    mla_blocks,
    vllm_note,
)
from caramba.export.gguf import gguf_llama, write_gguf
from caramba.export.llama import llama_config, llama_tensors, why_not_llama
from caramba.export.precision import in_dtype
from caramba.export.remote import remote_code, remote_config, remote_tensors
from caramba.export.tokenizer import find_template, write_tokenizer
from caramba.infer.model_bundle import ModelBundle
from caramba.runs.files import part_of, write_json, write_whole

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
        facts = facts_of(opened.run_dir, report["labels"], report.get("environment") or {}, report.get("git_commit"))
        lines += ["## Training", "", "| | |", "|---|---|"]
        lines += [f"| {fact.name} | {_cell(fact.text)} |" for fact in facts]
        lines += [f"| {_cell(key)} | {_cell(text)} |" for key, text in opened.labels.items() if key == "proxy"]
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
    return visible(str(text)).replace("|", "\\|").replace("<", "&lt;")


CARD = "README.md"
FORMATS = ("hf", "deepseek", "gguf", "safetensors", "ckpt", "dcp")
STREAMED = ("deepseek", "gguf")
"""Formats that read the weights one at a time, so the model may be on `meta`."""
# What a Hugging Face folder holds besides weights; a model that came from one takes it along.
_COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "generation_config.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
)


@dataclass(frozen=True)
class Exported:
    """What was written: the folder, its files, the class that transformers builds, and what a reader should know."""

    folder: Path
    files: tuple[str, ...]
    architecture: str
    notes: tuple[str, ...] = ()


def check_format(name: str) -> str:
    """Return a known format's name.

    Raises:
        ConfigError: unknown, with the nearest name.
    """
    if name not in FORMATS:
        raise ConfigError(
            f"export: --format {name!r} is unknown{nearest(name, FORMATS) or ';'} formats: {', '.join(FORMATS)}"
        )
    return name


def check_out(folder: Path, *, force: bool) -> None:
    """Refuse a place that holds something, or that cannot be written.

    Raises:
        ConfigError: a file, a folder with files in it and no `force`, or a place that the system refuses.
    """
    if folder.is_file():
        raise ConfigError(f"export: --out {folder} is a file; name a folder")
    if folder.is_dir() and any(folder.iterdir()) and not force:
        raise ConfigError(
            f"export: --out {folder} is not empty; name another, or add --force to replace files of its names"
        )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent):
            pass
    except OSError as error:
        raise ConfigError(
            f"export: --out {folder} cannot be written ({error.strerror}); name a folder where you may write"
        ) from None


def export_model(
    opened: ModelBundle,
    folder: Path,
    *,
    format: str,
    role: str,
    force: bool = False,
    dtype: torch.dtype | None = None,
    weights: str = "f16",
    engine: str = "transformers",
) -> Exported:
    """Write a model into `folder`, which appears complete or not at all.

    Args:
        dtype: of the weights that are written; None keeps that of the model in memory.
        weights: the type of a GGUF file's matrices: f16, q8_0 or q4_0.
        engine: that a DeepSeek folder is for: transformers or vllm.

    Raises:
        ConfigError: an unknown format, a folder that is not empty without `force`, or a weight that `dtype` cannot
            hold.
    """
    check_format(format)
    folder = folder.expanduser().absolute()
    check_out(folder, force=force)
    with part_of(folder) as part:
        if format == "hf":
            architecture, notes = _write_hf(opened, part, role, dtype)
        elif format == "deepseek":
            architecture, notes = _write_deepseek(opened, part, role, dtype, engine)
        elif format == "gguf":
            described = gguf_deepseek(opened) if has_mla(opened.model.spec) else gguf_llama(opened)
            architecture, notes = write_gguf(opened, part, weights, *described), []
        else:
            architecture, notes = _write_own(opened, part, format, role, dtype)
        write_whole(part / CARD, model_card(opened, role, format, tuple(notes)))
        files = tuple(sorted(file.name for file in part.iterdir()))
        folder.mkdir(exist_ok=True)
        for name in files:
            os.replace(part / name, folder / name)
    return Exported(folder, files, architecture, tuple(notes))


def _write_hf(opened: ModelBundle, part: Path, role: str, dtype: torch.dtype | None) -> tuple[str, list[str]]:
    model = opened.model
    reason = why_not_llama(model.spec)
    eos_id = opened.tokenizer.eos_id if opened.tokenizer is not None else None
    facts: dict[str, Any] = {
        "max_positions": opened.max_positions,
        "eos_id": eos_id,
        "dtype": str(dtype or _dtype(model.state_dict())).removeprefix("torch."),
    }
    notes: list[str] = []
    if reason is None:
        config, tensors = llama_config(model.spec, **facts), llama_tensors(model)
    else:
        notes.append(f"own modelling code, load with trust_remote_code=True ({reason})")
        config, tensors = remote_config(model, **facts), remote_tensors(model)
        for name, text in remote_code(model.spec).items():
            write_whole(part / name, text)
    # What transformers reads in addition holds derived widths too.
    more = {} if reason is None else {"spec": spec_of(model.spec).model_dump(mode="json")}
    return _write_folder(opened, part, role, config, in_dtype(tensors, dtype), notes, more)


def _write_deepseek(
    opened: ModelBundle, part: Path, role: str, dtype: torch.dtype | None, engine: str
) -> tuple[str, list[str]]:
    model = opened.model
    mla_blocks(model.spec, "export --format deepseek")  # refused before any weight is computed
    config = deepseek_config(
        model.spec,
        max_positions=opened.max_positions,
        eos_id=opened.tokenizer.eos_id if opened.tokenizer is not None else None,
        dtype=str(dtype or _dtype(model.state_dict())).removeprefix("torch."),
        engine=engine,
    )
    notes = [f"for {engine}: the latent's norm is scaled to its epsilon"]
    note = vllm_note(model.spec) if engine == "vllm" else None
    if note is not None:
        notes.append(note)
    tensors = deepseek_tensors(model.spec, opened.weights, engine, dtype)
    return _write_folder(opened, part, role, config, tensors, notes, {"engine": engine})


def _write_folder(
    opened: ModelBundle,
    part: Path,
    role: str,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    notes: list[str],
    more: dict[str, Any],
) -> tuple[str, list[str]]:
    """Write a Hugging Face folder of its config, to which `more` of caramba's own is added, and weights."""
    config["caramba"] = {"role": role, "name": opened.model.spec.name, "labels": opened.labels, **more}
    config["torch_dtype"] = config["dtype"]  # the name of the key before transformers 5
    save_tensors(part / "model.safetensors", tensors, {"format": "pt"})
    _write_companions(opened, part, config, notes)
    write_json(part / "config.json", config)
    return config["architectures"][0], notes


def _write_companions(opened: ModelBundle, part: Path, config: dict[str, Any], notes: list[str]) -> None:
    source = opened.path if is_hf_folder(opened.path) else None
    if source is not None:
        for name in _COMPANIONS:
            if (source / name).is_file():
                shutil.copyfile(source / name, part / name)
        theirs = json.loads((source / "config.json").read_text(encoding="utf-8"))
        for key in ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings"):
            if theirs.get(key) is not None:
                config[key] = theirs[key]
    elif opened.tokenizer is not None:
        write_tokenizer(part, opened.tokenizer, max_positions=opened.max_positions)
        template = find_template(opened)
        if template is not None:
            write_whole(part / "chat_template.jinja", template)
        end = opened.tokenizer.eos_id
        write_json(part / "generation_config.json", {"eos_token_id": end, "pad_token_id": end})
    if not (part / "tokenizer_config.json").is_file():
        notes.append("no tokenizer: the data does not say which one made its tokens")


def _write_own(
    opened: ModelBundle, part: Path, format: str, role: str, dtype: torch.dtype | None
) -> tuple[str, list[str]]:
    spec = spec_of(opened.model.spec)
    metadata = {
        "format": "caramba-1",
        "spec": spec.model_dump_json(),
        "role": role,
        "phase": "export",
        "labels": json.dumps(opened.labels),
        "tokenizer_hash": opened.tokenizer.hash if opened.tokenizer is not None else "",
        "max_positions": str(opened.max_positions),
    }
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in opened.model.state_dict().items()}
    target = {"safetensors": part / "model.safetensors", "ckpt": part / "model.ckpt", "dcp": part}[format]
    write_model_file(target, in_dtype(tensors, dtype), metadata)
    if format != "dcp":
        write_json(part / "spec.json", spec.model_dump(mode="json"))
    return "caramba", []


def _dtype(state: dict[str, Tensor]) -> torch.dtype:
    return next(tensor.dtype for tensor in state.values() if tensor.is_floating_point())
