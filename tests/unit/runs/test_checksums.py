import json
import os
import random
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

from caramba.data.checkpoint import load_tensors, load_training_state, save_tensors, save_training_state
from caramba.data.folder import open_token_folder, write_token_folder
from caramba.data.prepare import PrepareOptions, prepare
from caramba.data.sources import TextSource
from caramba.data.token_file import open_token_file
from caramba.data.tokenizer import ByteTokenizer
from caramba.errors import CheckpointError, ConfigError, DataError
from caramba.experiment.session import StageLedger, StageRecord
from caramba.result import PhaseResult
from caramba.runs import files
from caramba.runs.stages import read_finished_stages

WEIGHTS = {"w": torch.arange(12.0).reshape(3, 4)}


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("CARAMBA_HOME", str(tmp_path / "home"))
    run = tmp_path / "run"
    run.mkdir()
    (run / "manifest.json").write_text("{}")
    save_tensors(run / "checkpoints" / "global.safetensors", WEIGHTS, {"role": "student"})
    save_training_state(run / "checkpoints" / "global.state.pt", {"w": torch.ones(5), "step": 3})
    StageLedger(run).add(StageRecord(PhaseResult("global", "global", "student", 1, 1, 1.0, "", None)))
    return run


@pytest.fixture
def tokens(tmp_path, monkeypatch):
    monkeypatch.setenv("CARAMBA_HOME", str(tmp_path / "home"))
    splits = {"train": ["some text", "more text"], "val": ["held out"]}
    write_token_folder(tmp_path / "tokens", splits, ByteTokenizer(), {"corpus": "test"})
    return tmp_path / "tokens"


def read_run(run):
    load_tensors(run / "checkpoints" / "global.safetensors")
    load_training_state(run / "checkpoints" / "global.state.pt")
    read_finished_stages(run)
    StageLedger(run)


def flip(file, rng):
    content = bytearray(file.read_bytes())
    bit = rng.randrange(8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


def artifacts(folder):
    return sorted(file for file in folder.rglob("*") if file.is_file() and file.name != "manifest.json")


def test_artifacts_of_a_run_with_any_bit_flipped_are_refused_by_name(run):
    rng = random.Random(0)
    read_run(run)
    for file in artifacts(run):
        intact = file.read_bytes()
        for _ in range(20):
            flip(file, rng)
            with pytest.raises(CheckpointError, match=file.name):
                read_run(run)
            file.write_bytes(intact)
        read_run(run)


def test_artifacts_of_a_token_folder_with_any_bit_flipped_are_refused_by_name(tokens):
    rng = random.Random(0)
    open_token_folder(tokens)
    for file in artifacts(tokens):
        intact = file.read_bytes()
        for _ in range(20):
            flip(file, rng)
            with pytest.raises(DataError, match=file.name):
                open_token_folder(tokens)
            file.write_bytes(intact)
        open_token_folder(tokens)


def test_token_folder_files_removed_cut_emptied_or_swapped_are_refused_by_name(tokens):
    other = (tokens / "train-00000.npy").read_bytes()
    for file in artifacts(tokens):
        intact = file.read_bytes()
        for content in (None, intact[:-1], b"", other + b"x"):
            file.unlink() if content is None else file.write_bytes(content)
            with pytest.raises(DataError, match=file.name):
                open_token_folder(tokens)
            file.write_bytes(intact)
    open_token_folder(tokens)


def test_swapped_checkpoints_are_refused(run):
    folder = run / "checkpoints"
    save_tensors(folder / "layer.safetensors", {"w": torch.zeros(3, 4)}, {"role": "student"})
    os.rename(folder / "layer.safetensors", folder / "x")
    os.rename(folder / "global.safetensors", folder / "layer.safetensors")
    os.rename(folder / "x", folder / "global.safetensors")
    for name in ("layer.safetensors", "global.safetensors"):
        with pytest.raises(CheckpointError, match=name):
            load_tensors(folder / name)


def test_a_flip_with_the_old_time_put_back_is_refused(run):
    file = run / "checkpoints" / "global.safetensors"
    load_tensors(file)
    facts = file.stat()
    flip(file, random.Random(1))
    os.utime(file, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    with pytest.raises(CheckpointError, match="SHA-256"):
        load_tensors(file)


def test_runs_and_folders_without_a_record_open(run, tokens):
    (run / files.RECORD).unlink()
    read_run(run)
    meta = json.loads((tokens / "meta.json").read_text())
    del meta["checksums"]
    (tokens / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(DataError, match=r"meta\.json"):
        open_token_folder(tokens)
    (tokens / files.RECORD).unlink()
    open_token_folder(tokens)


def test_a_writer_killed_at_its_rename_leaves_a_readable_run(run, monkeypatch):
    file = run / "checkpoints" / "global.safetensors"

    replace = os.replace

    def killed(*_):
        raise KeyboardInterrupt

    for at in ("before", "after"):
        target = "caramba.runs.files.os.replace" if at == "before" else "caramba.runs.files._sync_folder"
        with monkeypatch.context() as patch:
            # The record itself is renamed by the same function, so only the artifact's rename is cut short.
            if at == "before":
                patch.setattr(target, lambda a, b: killed() if str(b) == str(file) else replace(a, b))
            else:
                patch.setattr(target, lambda folder: killed() if folder == file.parent else None)
            with pytest.raises(KeyboardInterrupt):
                save_tensors(file, {"w": torch.zeros(3, 4)}, {"role": "student"})
        expected = WEIGHTS["w"] if at == "before" else torch.zeros(3, 4)
        assert torch.equal(load_tensors(file)["w"], expected)
    save_tensors(file, WEIGHTS)
    assert len(files.read_record(run)["checkpoints/global.safetensors"]) == 1


def test_a_writer_killed_at_the_rename_of_a_new_stage_leaves_a_run_that_resumes(run, monkeypatch):
    record = StageRecord(PhaseResult("final", "final", "none", 0, 0, 0.0, "", None))
    ledger, replace = StageLedger(run), os.replace

    def killed(source, target):
        if str(target).endswith("final.json"):
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr("caramba.runs.files.os.replace", killed)
        with pytest.raises(KeyboardInterrupt):
            ledger.add(record)
    read_run(run)
    StageLedger(run).add(record)
    read_run(run)


@pytest.mark.parametrize("remove", ["file", "folder"])
def test_a_removed_record_of_a_stage_is_refused(run, remove):
    if remove == "file":
        (run / "stages" / "00-global.json").unlink()
    else:
        shutil.rmtree(run / "stages")
    for read in (read_finished_stages, StageLedger):
        with pytest.raises(CheckpointError, match=r"00-global\.json: missing, expected"):
            read(run)


def test_a_stage_struck_from_the_ledger_is_not_missed(run):
    StageLedger(run).remove("global")
    read_run(run)
    assert read_finished_stages(run) == []


@pytest.mark.parametrize("kind", ["folder", "dangling link"])
def test_a_record_of_sums_that_is_no_file_is_refused(run, tokens, kind):
    for root, read in ((run, read_run), (tokens, open_token_folder)):
        (root / files.RECORD).unlink()
        if kind == "folder":
            (root / files.RECORD).mkdir()
        else:
            (root / files.RECORD).symlink_to("nowhere")
        with pytest.raises((CheckpointError, DataError), match="is no file, expected the record of sums"):
            read(root)


def test_large_files_are_hashed_once_for_all_processes(run, monkeypatch):
    file = run / "checkpoints" / "large.safetensors"
    save_tensors(file, {"w": torch.zeros(1_200_000)})
    monkeypatch.setattr(files, "_hashes", {})  # another process
    monkeypatch.setattr(files, "sha256_of", lambda file: pytest.fail(f"{file} was hashed again"))
    load_tensors(file)
    files._cache_file().write_text("{")  # a damaged cache costs time alone
    monkeypatch.setattr(files, "_hashes", {})
    with pytest.raises(pytest.fail.Exception, match="hashed again"):
        load_tensors(file)


def test_a_flat_array_with_a_bit_flipped_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("CARAMBA_HOME", str(tmp_path / "home"))
    (tmp_path / "text.txt").write_text("some text\n" * 50)
    output = tmp_path / "flat.npy"
    source = TextSource([tmp_path / "text.txt"], (".txt",))
    prepare(source, PrepareOptions(val_frac=0.0), output, say=lambda _: None, advance=lambda *_: None)
    assert open_token_file(output).tokens.size
    flip(output, random.Random(2))
    with pytest.raises(DataError, match=r"flat\.npy"):
        open_token_file(output)


@pytest.mark.parametrize("name", ["../tokens.npy", "/etc/passwd", "..", "a/b.npy", ""])
def test_a_shard_outside_its_folder_is_refused(tokens, name):
    (tokens / files.RECORD).unlink()
    meta = json.loads((tokens / "meta.json").read_text())
    del meta["checksums"]
    meta["splits"]["train"]["shards"][0]["file"] = name
    (tokens / "meta.json").write_text(json.dumps(meta))
    np.save(tokens.parent / "tokens.npy", np.zeros(19, np.uint16))
    with pytest.raises(DataError, match=r"meta\.json: names the shard"):
        open_token_folder(tokens)


def test_equal_weights_give_equal_files_in_every_process(tmp_path):
    code = (
        "import sys, torch; from pathlib import Path; from caramba.data.checkpoint import save_tensors;"
        "save_tensors(Path(sys.argv[1]), {n: torch.arange(7.) for n in 'cab'},"
        " {k: 'value' for k in ('spec', 'role', 'format', 'labels', 'phase')})"
    )
    files = [tmp_path / f"{index}.safetensors" for index in range(2)]
    for file in files:
        subprocess.run([sys.executable, "-c", code, str(file)], check=True)
    assert len({file.read_bytes() for file in files}) == 1
    assert torch.equal(load_tensors(files[0])["a"], torch.arange(7.0))


def test_errors_of_the_user_end_with_status_two():
    assert {kind.exit_status for kind in (CheckpointError, DataError, ConfigError)} == {2}
