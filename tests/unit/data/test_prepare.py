from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from caramba.cli import main
from caramba.config.data import DataConfig
from caramba.data import TokenDataset, TokenStream, count_bytes, open_corpus, open_token_folder
from caramba.data import prepare as prepare_module
from caramba.data.prepare import PrepareOptions, prepare
from caramba.data.sources import MOST_DOCUMENT_CHARACTERS, TextSource
from caramba.errors import DataError

SEPARATOR = "<|endoftext|>"


def document(i: int) -> str:
    words = random.Random(i).choices(["the", "cat's", "naïve", "x = 1\n", "漢字", "12345", "\n\n"], k=40)
    return f"document {i}: " + " ".join(words)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(SEPARATOR.join(document(i) for i in range(300)).encode())
    return path


def make(text: Path, output: Path, request: PrepareOptions | None = None) -> None:
    source = TextSource([text], (".txt",), SEPARATOR)
    prepare(
        source,
        request or PrepareOptions(shard_tokens=10_000),
        output,
        say=lambda _: None,
        advance=lambda *_: None,
    )


def contents(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


def test_text_to_a_sharded_folder(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["prepare", "text", str(text), "--separator", SEPARATOR, "--train-bpe", "300"]
    assert main([*words, "--shard-tokens", "5k", "--val-frac", "0.2", "--output", str(tmp_path / "out")]) == 0
    assert "MB/s" in capsys.readouterr().out
    opened = open_token_folder(tmp_path / "out")
    assert isinstance(opened.train, TokenStream)
    assert all(part.size >= 5000 for part in opened.train.parts[:-1])
    seen = []
    for split, tokens in (("train", opened.train), ("val", opened.val)):
        assert tokens is not None
        starts = opened.documents(split)
        ends = [*starts[1:], tokens.size]
        texts = [tokens[a:b] for a, b in zip(starts, ends, strict=True)]
        assert all(ids[-1] == opened.tokenizer.eos_id for ids in texts)
        seen += [opened.tokenizer.decode(ids) for ids in texts]
        facts = opened.meta["splits"][split]
        assert facts["bytes"] == sum(len(d.encode()) for d in seen[-len(texts) :])
        assert facts["bytes"] == count_bytes(tokens, opened.token_bytes)
        assert facts["max_id"] == np.asarray(tokens).max()
    assert sorted(seen) == sorted(document(i) for i in range(300))
    assert 30 < opened.meta["splits"]["val"]["documents"] < 100
    config = DataConfig.model_validate({"type": "tokens", "path": str(tmp_path / "out")})
    corpus = open_corpus(config)
    corpus.check(vocab_size=300, block_size=64)
    assert TokenDataset(corpus.train, 64)[0][0].tolist() == opened.train[:64].tolist()
    assert main([*words, "--shard-tokens", "5k", "--val-frac", "0.2", "--output", str(tmp_path / "out")]) == 0
    assert "is there already" in capsys.readouterr().out


@pytest.mark.parametrize("bpe_size", [None, 300])
def test_a_killed_preparation_ends_with_the_same_bytes(text: Path, tmp_path: Path, bpe_size: int | None) -> None:
    tokenizer = "byte" if bpe_size is None else None
    request = PrepareOptions(tokenizer=tokenizer, bpe_size=bpe_size, shard_tokens=10_000, val_frac=0.2)
    make(text, tmp_path / "whole", request)
    code = f"""
import os, signal
from pathlib import Path
from caramba.data import folder, prepare as p
from caramba.data.sources import TextSource
p._CHECKPOINT_BYTES = 9_000
p.document_batches = lambda texts: folder.document_batches(texts, 2_000)
def advance(size, tokens):
    if size > LIMIT:
        os.kill(os.getpid(), signal.SIGKILL)
source = TextSource([Path({str(text)!r})], (".txt",), {SEPARATOR!r})
p.prepare(source, p.{request!r}, Path({str(tmp_path / "out")!r}), say=print, advance=advance)
"""
    said = []
    for limit, status in ((20_000, -signal.SIGKILL), (50_000, -signal.SIGKILL), (10**9, 0)):
        script = code.replace("LIMIT", str(limit))
        run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        assert run.returncode == status, run.stderr
        said.append(run.stdout)
    assert "resuming the unfinished preparation" in said[2]
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "text.txt", "whole"]


def test_going_on_starts_at_the_checkpoint(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_module, "_CHECKPOINT_BYTES", 1)
    batches = prepare_module.document_batches
    monkeypatch.setattr(prepare_module, "document_batches", lambda texts: batches(texts, 2_000))
    source = TextSource([text], (".txt",), SEPARATOR)
    sizes: list[int] = []

    def stop(size: int, tokens: int) -> None:
        sizes.append(size)
        if size > 30_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(source, PrepareOptions(), tmp_path / "out", say=lambda _: None, advance=stop)
    assert not (tmp_path / "out").exists()
    again: list[int] = []
    prepare(
        source,
        PrepareOptions(),
        tmp_path / "out",
        say=lambda _: None,
        advance=lambda size, _: again.append(size),
    )
    assert again[0] == sizes[-2]
    with pytest.raises(KeyboardInterrupt):
        prepare(source, PrepareOptions(), tmp_path / "other", say=lambda _: None, advance=stop)
    with pytest.raises(DataError, match=r"unfinished preparation with other settings.*val_frac was 0.05, is 0.5"):
        make(text, tmp_path / "other", PrepareOptions(val_frac=0.5))


@pytest.mark.parametrize("kind", ["folder", "npy"])
def test_an_output_in_the_way_is_left_alone(text: Path, tmp_path: Path, kind: str) -> None:
    output = tmp_path / ("x" if kind == "folder" else "x.npy")
    request = PrepareOptions(val_frac=0.0 if kind == "npy" else 0.05)
    make(text, output, request)
    with pytest.raises(DataError, match="already exists"):
        make(text, output, PrepareOptions(tokenizer=None, bpe_size=300, val_frac=request.val_frac))


def test_a_flat_array(text: Path, tmp_path: Path) -> None:
    words = ["prepare", "text", str(text), "--separator", SEPARATOR, "--shard-tokens", "5k"]
    part = tmp_path / "x.tokenizer" / ".checksums.json.abcdefgh.part"
    part.mkdir(parents=True)  # as a kill at the end of an earlier preparation leaves it
    assert main([*words, "--output", str(tmp_path / "x.npy")]) == 0
    assert not part.exists()
    tokens = np.load(tmp_path / "x.npy")
    expected = b"".join(document(i).encode() for i in range(300))
    assert bytes(tokens[tokens != 256].astype(np.uint8)) == expected
    assert (tokens == 256).sum() == 300
    assert open_corpus(DataConfig(type="tokens", path=str(tmp_path / "x.npy"))).val.size == round(tokens.size * 0.05)
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != "home") == [
        "text.txt",
        "x.npy",
        "x.tokenizer",
    ]
    assert main([*words, "--val-frac", "0.1", "--output", str(tmp_path / "y.npy")]) == 2


def test_files_and_folders(tmp_path: Path) -> None:
    root = tmp_path / "code"
    (root / "deep").mkdir(parents=True)
    (root / ".git").mkdir()
    for name in ("b.py", "a.md", "deep/c.txt", "no.bin", ".git/d.txt", ".hidden.py"):
        (root / name).write_text(f"{name}\r\n")
    (root / "latin.txt").write_bytes("é".encode("latin-1"))
    (root / "empty.txt").write_text("")
    source = TextSource([root, root / "no.bin", root / "b.py"], (".txt", ".md", ".py"))
    assert list(source.documents(None)) == ["a.md\r\n", "b.py\r\n", "deep/c.txt\r\n", "no.bin\r\n"]
    assert source.not_utf8 == [str(root / "latin.txt")]
    assert list(source.documents(3)) == ["no.bin\r\n"]
    with pytest.raises(DataError, match=r"no file with text in it; looked for \.rs"):
        TextSource([root], (".rs",))
    with pytest.raises(DataError, match="no such file or folder"):
        TextSource([tmp_path / "none"], ())


def test_long_files_are_cut_where_lines_end(tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_text("é" * 70 + "\n" + ("line of text\n" * 7 + "\n") * 30_000 + "z" * 3_000_000)
    documents = list(TextSource([path], ()).documents(None))
    assert "".join(documents) == path.read_text()
    assert max(map(len, documents)) <= MOST_DOCUMENT_CHARACTERS
    assert documents[0].endswith("\n\n")
    marked = tmp_path / "marked.txt"
    marked.write_text(SEPARATOR.join(["a" * 1_048_570, "b", "", "c" * 2_000_000]))
    assert [len(d) for d in TextSource([marked], (), SEPARATOR).documents(None)] == [
        1_048_570,
        1,
        1 << 20,
        951_424,
    ]


def test_memory_stays_flat(tmp_path: Path) -> None:
    """Ten times the text takes no more memory: peak resident size of the command in processes of their own."""
    block = "some words of a plain line of text\n" * 300 + SEPARATOR
    peaks = []
    for megabytes in (6, 60):
        path = tmp_path / f"{megabytes}.txt"
        with open(path, "w") as file:
            file.writelines(f"{i} {block}" for i in range(megabytes * 1_000_000 // len(block)))
        code = (
            "import sys, resource; from caramba.cli import main;"
            f"status = main(['prepare', 'text', {str(path)!r}, '--separator', {SEPARATOR!r},"
            f" '--output', {str(tmp_path / f'out{megabytes}')!r}, '--shard-tokens', '10M', '--quiet']);"
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss); sys.exit(status)"
        )
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        peaks.append(int(run.stdout.split()[-1]) / (1024 if sys.platform != "darwin" else 1024**2))
    assert peaks[1] < peaks[0] + 25, peaks


def test_stop_at_a_number_of_tokens(text: Path, tmp_path: Path) -> None:
    make(text, tmp_path / "x", PrepareOptions(most_tokens=7_000))
    tokens = sum(facts["tokens"] for facts in open_token_folder(tmp_path / "x").meta["splits"].values())
    assert 7_000 <= tokens < 7_000 + 400


def test_one_document_makes_no_val_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "book.txt").write_text("once upon a time " * 100)
    assert main(["prepare", "text", str(tmp_path / "book.txt"), "--output", str(tmp_path / "x")]) == 0
    assert "no document falls into val; data=tokens will hold out" in capsys.readouterr().err
    assert open_corpus(DataConfig(type="tokens", path=str(tmp_path / "x"))).val.size == 85


def test_a_file_of_another_encoding_alone_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "latin.txt").write_bytes("café ".encode("latin-1") * 9)
    assert main(["prepare", "text", str(tmp_path / "latin.txt"), "--output", str(tmp_path / "x")]) == 2
    assert f"{tmp_path}/latin.txt: not UTF-8 text, and there is no other" in capsys.readouterr().err


def test_json_lines_as_plain_text_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"text": document(i)}) + "\n" for i in range(9)))
    assert main(["prepare", "text", str(file), "--output", str(tmp_path / "x")]) == 0
    assert f"{file}: read as plain text, names and escapes of its JSON included" in capsys.readouterr().err


def test_a_damaged_line_of_json_is_a_mistake_in_the_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("datasets", reason="the `data` extra is not installed")
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"text": document(1)}) + "\n{broken\n")
    assert main(["prepare", "fineweb", "--from", str(file), "--output", str(tmp_path / "x")]) == 2
    error = capsys.readouterr().err
    assert str(file) in error
    assert "cannot be read: JSON parse error" in error
    assert not (tmp_path / "x").exists()


def test_stdlib_is_what_data_stdlib_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "lib"
    library.mkdir()
    for i in range(40):
        (library / f"m{i}.py").write_text(document(i))
    monkeypatch.setattr("caramba.data.corpus.stdlib_root", lambda: library)
    assert main(["prepare", "stdlib", "--train-bpe", "300", "--output", str(tmp_path / "x")]) == 0
    own = open_corpus(DataConfig(type="stdlib", vocab_size=300))
    assert contents(tmp_path / "x") == contents(own.folder)
    assert main(["prepare", "stdlib", "--tokenizer", "byte", "--output", str(tmp_path / "x.npy")]) == 0
    assert (np.load(tmp_path / "x.npy") == 256).sum() == 40


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_fineweb_from_local_files(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets", reason="the `data` extra is not installed")
    rows = [{"text": document(i), "id": i} for i in range(120)]
    for half in (0, 1):
        part = rows[half * 60 : half * 60 + 60]
        if form == "jsonl":
            (tmp_path / f"{half}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
        else:
            pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
            pq.write_table(pa.Table.from_pylist(part), tmp_path / f"{half}.parquet", row_group_size=7)
    files = [str(tmp_path / f"{half}.{form}") for half in (0, 1)]
    words = ["prepare", "fineweb", "--from", *files, "--tokens", "20k", "--val-frac", "0.3", "--output"]
    assert main([*words, str(tmp_path / "whole")]) == 0

    monkeypatch.setattr(prepare_module, "_CHECKPOINT_BYTES", 1)
    batches = prepare_module.document_batches
    monkeypatch.setattr(prepare_module, "document_batches", lambda texts: batches(texts, 1_000))
    write, count = prepare_module.write_json, [0]

    def stop(path: Path, value: object) -> None:
        write(path, value)
        count[0] += 1
        if count[0] == 7:
            raise KeyboardInterrupt

    monkeypatch.setattr(prepare_module, "write_json", stop)
    assert main([*words, str(tmp_path / "out")]) == 130
    assert not (tmp_path / "out").exists()
    assert main([*words, str(tmp_path / "out")]) == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    opened = open_token_folder(tmp_path / "out")
    assert opened.tokenizer.decode(opened.train[: opened.documents("train")[1]]) in {row["text"] for row in rows}
    with_field = [*words[:-1], "--field", "content", "--output", str(tmp_path / "z")]
    assert main(with_field) == 2


def test_fineweb_without_a_network_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("datasets", reason="the `data` extra is not installed")
    code = (
        "import sys; from caramba.cli import main;"
        f"sys.exit(main(['prepare', 'fineweb', '--tokens', '1M', '--output', {str(tmp_path / 'x')!r}]))"
    )
    start = time.perf_counter()
    # A closed port stands for the hub, so that the test needs no network and finds none.
    env = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "hf")}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert run.returncode == 2, run.stderr
    assert "the hub cannot be reached" in run.stderr
    assert "give them with --from PATH" in run.stderr
    assert "Traceback" not in run.stderr
    assert time.perf_counter() - start < 90  # its own retries take minutes
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tex"], "invalid choice: 'tex'"),
        (["text", "a.txt"], "the following arguments are required: --output"),
        (
            ["text", "a", "--output", "x", "--train-bpe", "20"],
            "a byte-level BPE has from 257 (256 bytes, end mark) to 1,000,000 entries",
        ),
        (["fineweb", "--output", "x", "--tokens", "many"], "'many' is not a number of tokens"),
        (["text", "a", "--output", "x", "--val-frac", "2"], "is not a share from 0"),
    ],
)
def test_wrong_words(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", *words]) == 2
    assert message in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", "--help"]) == 0
    assert main(["prepare", "text", "--help"]) == 0
    assert "--train-bpe" in capsys.readouterr().out
