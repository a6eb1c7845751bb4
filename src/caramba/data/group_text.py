"""The text of a group, checked against everything in it that reads it before anything is trained; loads no torch."""

from __future__ import annotations

from pathlib import Path

from caramba.config.benchmark import (
    ControlsBenchmarkConfig,
    LongContextBenchmarkConfig,
    PerplexityBenchmarkConfig,
)
from caramba.config.data import DataConfig
from caramba.config.manifest import GroupConfig, Manifest
from caramba.config.verify import CompareVerifyConfig, FidelityVerifyConfig
from caramba.console import logger
from caramba.data.benchmark_text import open_benchmark_text
from caramba.data.corpus import Corpus, is_built, open_corpus
from caramba.data.tokenizer_files import load_tokenizer
from caramba.errors import DataError

LEAST_STDLIB_BYTES = 8_000_000  # of any Python's library

# Words, capitals, code, digits, white space and other scripts: two tokenizers that agree here have one vocabulary.
PROBE = (
    "The quick brown Fox's 1234567 jumps;\n\n    def f(x):\n\treturn [x**2, 'naïve', \"東京\"]  # Привет!\n"
)


def open_text(manifest: Manifest, group: GroupConfig) -> Corpus:
    """Open the data of a group and check that its model, phases and benchmarks can read it.

    Raises:
        DataError: data that is missing or damaged, or does not fit them.
    """
    corpus = open_corpus(group.data, progress=logger.info)
    vocab_size = manifest.model.embedder.vocab_size
    corpus.check(vocab_size=vocab_size, block_size=_longest_block(group))
    for bench in group.benchmarks:
        if isinstance(bench.config, PerplexityBenchmarkConfig) and bench.config.dataset:
            _check_dataset(bench.id, bench.config, group.data, corpus, vocab_size)
    return corpus


def check_text(manifest: Manifest) -> None:
    """Check the data of every selected group, as `open_text` does, before anything is written or torch is loaded.

    The standard library is not tokenised for this, which takes longer than all else, unless it may be too short.

    Raises:
        DataError: data that is missing or damaged, or does not fit the model, a phase or a benchmark.
    """
    for group in manifest.groups_to_run():
        if reads_text(manifest, group) and (is_built(group.data) or _may_be_short(group)):
            open_text(manifest, group)


def reads_text(manifest: Manifest, group: GroupConfig) -> bool:
    """Whether a group opens its data: without runs, benchmarks and a teacher its model is only loaded."""
    return bool(group.runs or group.benchmarks) or manifest.model.teacher is not None


def _may_be_short(group: GroupConfig) -> bool:
    """Whether the standard library, at a generous 16 bytes a token, may hold less than a window of held-out text."""
    n_bytes = min(group.data.max_bytes or LEAST_STDLIB_BYTES, LEAST_STDLIB_BYTES)
    has_own_text = any(
        isinstance(bench.config, PerplexityBenchmarkConfig) and bench.config.dataset
        for bench in group.benchmarks
    )
    return has_own_text or n_bytes * group.data.val_frac < 16 * (_longest_block(group) + 1)


def _longest_block(group: GroupConfig) -> int:
    """Return the longest window, in tokens, that a phase, check or benchmark reads of the group's data."""
    blocks = [run.train.block_size for run in group.runs if run.train]
    blocks += [
        check.block_size
        for run in group.runs
        for check in run.verify
        if isinstance(check, CompareVerifyConfig | FidelityVerifyConfig)
    ]
    blocks += [
        bench.config.block_size
        for bench in group.benchmarks
        if (isinstance(bench.config, PerplexityBenchmarkConfig) and not bench.config.dataset)
        or isinstance(bench.config, ControlsBenchmarkConfig)
    ]
    blocks += [
        max(bench.config.lengths)
        for bench in group.benchmarks
        if isinstance(bench.config, LongContextBenchmarkConfig)
    ]
    return max(blocks, default=1)


def _check_dataset(
    name: str, config: PerplexityBenchmarkConfig, data: DataConfig, corpus: Corpus, vocab_size: int
) -> None:
    """Refuse a benchmark's own data before anything is trained, not after."""
    assert config.dataset is not None
    try:
        text = open_benchmark_text(config.dataset)
        text.check(vocab_size, config.block_size, corpus.tokenizer)
    except DataError as error:
        raise DataError(f"benchmark {name!r}: dataset={config.dataset}: {error}") from None
    trained_on = None if data.path is None else Path(data.path).expanduser()
    if not text.is_held_out and trained_on is not None and text.path.samefile(trained_on):
        raise DataError(
            f"benchmark {name!r}: dataset={config.dataset} is what the run trains on, and it has no validation split; "
            "leave dataset out to measure on the data that is held out of it"
        )


def check_tokenizer(corpus: Corpus, folder: Path, where: str) -> None:
    """Refuse tokens of another tokenizer than a Hugging Face folder brings: its ids would have other meanings.

    Files of one tokenizer may be written differently, so what counts is that both give the same ids. Data or a folder
    that does not say which tokenizer it has passes.

    Raises:
        DataError: the two give a text different ids.
    """
    ours = corpus.tokenizer
    if ours is None or not (folder / "tokenizer.json").is_file():
        return
    theirs = load_tokenizer(folder)
    if theirs.hash == ours.hash or theirs.encode(PROBE) == ours.encode(PROBE):
        return
    raise DataError(
        f"{where}: {folder} has a tokenizer of {theirs.vocab_size} entries, and the tokens of {corpus.folder} were "
        f"made with another one, {ours.name} of {ours.vocab_size}: the same ids mean other text; prepare the data "
        f"with the model's (caramba prepare text PATH --tokenizer {folder} --output DIR; data=tokens data.path=DIR)"
    )
