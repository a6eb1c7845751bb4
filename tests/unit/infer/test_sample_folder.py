"""Text that a model writes itself: a token folder, deduplicated, resumable, and what is refused."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from caramba.data import ByteTokenizer, TokenStream, open_token_folder
from caramba.errors import ConfigError, DataError
from caramba.infer import sample_folder as module
from caramba.infer.generator import Generator
from caramba.infer.sample_folder import SampleRequest, sample_folder
from caramba.model import Model, build_model
from tests.unit.infer.test_generator import byte_spec, sharp

TOKENIZER = ByteTokenizer()
REQUEST = SampleRequest(
    tokens=3000, start=256, temperatures=(0.8, 1.2), batch=8, length=64, val_frac=0.2, shard_tokens=1000
)


@pytest.fixture(scope="module")
def model() -> Model:
    return build_model(byte_spec(), seed=0)


def made(model: Model, output: Path, request: SampleRequest = REQUEST, **options: float) -> dict[str, int]:
    identity = {"model": "tiny", "dtype": "float32"}
    _, left_out = sample_folder(model, TOKENIZER, identity, request, output, advance=lambda *_: None, **options)
    return left_out


def contents(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


def test_sampled_documents_are_those_of_the_generator(model: Model, tmp_path: Path) -> None:
    made(model, tmp_path / "out")
    opened = open_token_folder(tmp_path / "out")
    assert isinstance(opened.train, TokenStream)
    assert opened.val is not None
    total = opened.train.size + opened.val.size
    assert REQUEST.tokens <= total < REQUEST.tokens + 8 * 65 * 2
    generator = Generator(model, temperature=0.8, max_new_tokens=63)
    rows = generator.generate([[256]] * 8, seeds=range(1337, 1345))
    written = np.concatenate([np.asarray(part) for part in opened.train.parts]).tolist()
    text = "".join(map(chr, written))
    found = 0
    for row in rows:
        pieces = "".join(map(chr, row.tokens)).split(chr(256))
        found += sum(piece + chr(256) in text for piece in pieces if len(piece) >= 16)
    assert found > 3


def test_killed_sampling_resumes_to_the_same_bytes(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(model, tmp_path / "whole")
    real, rounds = module._sample_rows, []

    def stop(*given: object) -> object:
        rounds.append(1)
        if len(rounds) == 5:
            raise KeyboardInterrupt
        return real(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "_sample_rows", stop)
    with pytest.raises(KeyboardInterrupt):
        made(model, tmp_path / "again", checkpoint_s=0.0)
    rounds.extend([1] * 5)
    made(model, tmp_path / "again", checkpoint_s=0.0)
    assert contents(tmp_path / "again") == contents(tmp_path / "whole")
    assert len(rounds) < 5 + 5 + 4 + 5  # rounds before the stop are not sampled again


def test_other_settings_or_model_are_refused(model: Model, tmp_path: Path) -> None:
    made(model, tmp_path / "out")
    made(model, tmp_path / "out")  # there already
    with pytest.raises(DataError, match="already exists"):
        made(model, tmp_path / "out", SampleRequest(tokens=3000, start=256, seed=2))


def test_duplicates_loops_and_short_documents_are_left_out() -> None:
    counts = {"short": 0, "duplicate": 0, "loop": 0}
    cut = module._Filter(frozenset((256,)), 256, 257, set(), counts)
    text = np.arange(40, 80)
    row = np.concatenate([text, [256], text, [256, 1, 2, 3, 256], np.tile([7, 8], 40), [300], text + 20])
    documents = [ids.tolist() for ids in cut.documents(row)]
    assert documents == [[*text, 256], [*(text + 20), 256]]
    assert counts == {"short": 1, "duplicate": 1, "loop": 1}


def test_rounds_of_duplicates_end_with_an_error(tmp_path: Path) -> None:
    request = SampleRequest(tokens=10_000, start=256, temperatures=(1e-6,), batch=2, length=32)
    with pytest.raises(ConfigError, match="rounds of 2 rows gave no new document"):
        made(sharp(byte_spec()), tmp_path / "out", request)
