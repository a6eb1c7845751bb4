"""Hints for keys, flags and habits of other tools: each names what does the same here."""

from __future__ import annotations

import pytest

from caramba.cli import main

WORDS = ("launch", "model=tiny", "train=pretrain")


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main([*WORDS, *words]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("learning_rate=3", "'train.lr'"),
        ("lr=3", "'train.lr'"),
        ("batch_size=3", "'train.batch_size'"),
        ("train.learning_rate=3", "did you mean 'lr'"),
        ("train.max_iters=3", "did you mean 'steps'"),
        ("train.grad_clip=1", "did you mean 'max_grad_norm'"),
        ("settings.eval_every=3", "did you mean 'train.eval_every', a key of phases?"),
        ("settings.learning_rate=3", "did you mean 'train.lr', a key of phases?"),
        ("settings.save_evry=3", "did you mean 'save_every'?"),
        ("model.embedder.hidden_size=64", "did you mean 'd_model'"),
        ("max_time=3", "'trainer.max_time'"),
        ("--lr=3", "a key has no dashes: train.lr=3"),
        ("--model=tiny", "a key has no dashes: model=tiny"),
        ("--dataset=tokens", "a key has no dashes: data=tokens"),
        ("--config-name=x", "caramba run FILE"),
        ("--config-path=x", "--config-dir DIR"),
        ("--experimental-rerun=x", "caramba rerun RUN"),
        ("--package=train", "--cfg job --package train"),
        ("hydra.run.dir=x", "name=NAME sets the folder"),
        ("hydra.sweep.dir=x", "runs/NAME/sweeps/ID"),
        ("hydra.job.chdir=true", "never leaves the folder"),
        ("hydra.output_subdir=x", "overrides.txt and manifest.json"),
        ("hydra.searchpath=[x]", "--config-dir DIR"),
        ("hydra/launcher=joblib", "launcher=process"),
        ("hydra/launcher=submitit_slurm", "launcher=slurm"),
        ("hydra/launcher=submitit_local", "launcher=process"),
        ("hydra.launcher.n_jobs=2", "launcher.n_jobs=N"),
        ("hydra/job_logging=default", "settings.instrument=plain"),
        ("hydra.job_logging.root.level=DEBUG", "settings.instrument=plain"),
        ("hydra.hydra_logging.root.level=DEBUG", "--quiet and --debug"),
        ("hydra.job.env_set.A=1", "NAME=VALUE caramba"),
        ("hydra.verbose=true", "--debug shows tracebacks"),
        ("hydra.callbacks.x.y=1", "callbacks=[{type: NAME}]"),
        ("hydra.mode=MULTIRUN", "-m runs every point"),
        ("hydra.sweep.subdir=x", "runs/NAME/sweeps/ID"),
        ("hydra/sweeper=optuna", "caramba -m hydra/sweeper=optuna"),
        ("hydra.runtime.cwd=x", "remove it"),
        ("name=${oc.env:USER}", 'KEY="$USER"'),
        ("name=${now:%Y}", "has its date and time"),
    ],
)
def test_a_habit_gets_its_equivalent(capsys: pytest.CaptureFixture[str], word: str, hint: str) -> None:
    assert hint in said(capsys, word)


def test_a_part_of_the_composed_tree_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, "--cfg", "job", "--package", "model.embedder", "model.embedder.vocab_size=999"]) == 0
    assert capsys.readouterr().out.splitlines() == ["vocab_size: 999", "d_model: 128"]
    assert main([*WORDS, "--cfg", "job", "--package", "modle"]) == 2
    assert "did you mean 'model'" in capsys.readouterr().err
