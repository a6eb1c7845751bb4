"""Every option of every config group, composed, validated and costed."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from caramba.config.estimate import plan
from caramba.launch.config_files import conf_root
from caramba.launch.freeze import freeze


def test_every_option_composes_and_validates_and_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each YAML of conf/ is the option of one composition here; none is left out."""
    monkeypatch.chdir(tmp_path)
    found = sorted(path.relative_to(conf_root()) for path in conf_root().rglob("*.yaml"))
    folder = Path("tiny_llama")
    folder.mkdir()
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 2048, **sizes}))
    extra = {
        ("model", "hf"): [f"model.path={folder}"],
        ("model", "hf_dba"): [f"model.teacher.checkpoint={folder}"],
        ("model", "hf_memory"): [f"model.teacher.checkpoint={folder}"],
        ("model", "smollm2_dba"): [
            f"model.teacher.checkpoint={folder}",
            "model.surgery.sem_dim=4",
            "model.surgery.geo_dim=2",
        ],
        ("experiment", "smollm2_dba"): [
            f"model.teacher.checkpoint={folder}",
            "model.surgery.sem_dim=4",
            "model.surgery.geo_dim=2",
        ],
        ("experiment", "smollm2_memory"): [f"model.teacher.checkpoint={folder}"],
        ("data", "tokens"): ["data.path=x.npy"],
        ("trainer", "best"): ["settings.eval_iters=1"],
        ("train", "finetune"): ["model=tiny"],
        ("train", "blockwise"): ["model.teacher.checkpoint=RUN"],
        ("train", "distill_memory"): ["model.teacher.checkpoint=RUN"],
        ("train", "distill_135m"): ["model.teacher.checkpoint=RUN"],
        ("parallel", "fsdp2_tp"): ["train=pretrain"],  # blocks are not split
        ("parallel", "pipeline"): ["train=pretrain", "model=tiny"],  # nor is a teacher
    }
    checked = {Path("config.yaml")}  # the composition itself
    options = [path for path in found if len(path.parts) > 1]
    own = ("model", "train", "data", "experiment", "parallel")
    alone = [[path] for path in options if path.parent.name in own]
    others = itertools.groupby((path for path in options if [path] not in alone), lambda path: path.parent)
    together = itertools.zip_longest(*(list(paths) for _, paths in others))  # groups that do not touch each other
    for paths in (*alone, *([path for path in row if path] for row in together)):
        words = []
        for path in paths:
            key = (path.parent.as_posix(), path.stem)
            words += [f"{key[0]}={key[1]}", *extra.get(key, [])]
            words += ["train=pretrain"] if key[0] == "model" else []
        manifest = freeze(words).manifest
        assert plan(manifest, command="x").name == manifest.name
        checked |= set(paths)
    assert len(checked) == len(found)
    assert found == sorted(checked)
