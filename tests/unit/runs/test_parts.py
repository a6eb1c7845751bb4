"""Temporary files and folders of killed writers go with the next start, and those of live ones stay."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from caramba.runs.files import part_of, whole_file, write_whole

WRITER = """
import sys, time
from pathlib import Path
from caramba.runs.files import part_of

with part_of(Path(sys.argv[1])) as part:
    print(part, flush=True)
    time.sleep(60)
"""


def _writer(path: Path) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_a_part_goes_once_its_writer_was_killed_and_not_before(tmp_path: Path) -> None:
    process, part = _writer(tmp_path / "out")
    try:
        with part_of(tmp_path / "out"):
            assert part.exists()
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert part.exists()
    with part_of(tmp_path / "out") as ours:
        assert [item.name for item in tmp_path.iterdir()] == [ours.name]
    assert list(tmp_path.iterdir()) == []


def test_a_part_that_goes_with_its_writer_is_no_abandoned_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trap: two writers removed the same folder at once, and one of them failed with FileNotFoundError."""
    remove = shutil.rmtree

    def begun_meanwhile(part: Path) -> None:
        monkeypatch.setattr(shutil, "rmtree", remove)
        with part_of(tmp_path / "out"):
            assert part.exists()
        remove(part)

    with part_of(tmp_path / "out"):
        monkeypatch.setattr(shutil, "rmtree", begun_meanwhile)
    assert list(tmp_path.iterdir()) == []


def test_a_writer_that_replaces_its_file_is_not_taken_for_killed(tmp_path: Path) -> None:
    """Trap: safetensors writes beside and renames, so two runs that stored one cache lost a file to each other."""
    with whole_file(tmp_path / "out") as temporary:
        (tmp_path / "other").write_text("first")
        os.replace(tmp_path / "other", temporary)
        write_whole(tmp_path / "out", "second")
    assert (tmp_path / "out").read_text() == "first"
    assert [item.name for item in tmp_path.iterdir()] == ["out"]


def test_parts_of_other_names_and_folders_that_are_resumed_stay(tmp_path: Path) -> None:
    for name in (".out.part", ".other.abcdefgh.part", ".out.txt"):
        (tmp_path / name).touch()
    write_whole(tmp_path / "out", "text")
    assert sorted(os.listdir(tmp_path)) == [".other.abcdefgh.part", ".out.part", ".out.txt", "out"]


def test_a_file_system_without_locks_is_written_to_and_no_part_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    (tmp_path / ".out.abcdefgh.part").touch()
    write_whole(tmp_path / "out", "text")
    assert (tmp_path / "out").read_text() == "text"
    assert sorted(os.listdir(tmp_path)) == [".out.abcdefgh.part", "out"]


def test_an_error_of_a_full_disk_names_the_file_that_was_written(tmp_path: Path) -> None:
    with (
        pytest.raises(OSError, match="No space left on device") as found,
        part_of(tmp_path / "tokens.npy"),
        open("/dev/full", "w") as full,
    ):
        full.write("x")
    assert found.value.filename == str(tmp_path / "tokens.npy")
    assert list(tmp_path.iterdir()) == []
