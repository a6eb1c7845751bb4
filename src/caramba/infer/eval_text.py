"""The real text that a cache is judged on: a run's held-out split, or a file that is named."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from caramba.data import Corpus, Tokenizer, open_benchmark_text, open_corpus
from caramba.data.folder import Tokens
from caramba.errors import ConfigError, DataError
from caramba.infer.model_bundle import ModelBundle

HASHED_TOKENS = 1_000_000
TOKEN_FILES = (".npy", ".tokens")


@dataclass(frozen=True)
class EvalText:
    """Tokens to evaluate a cache on; without any, `name` is the reason."""

    name: str
    tokens: Tokens | None = None
    fingerprint: str = ""

    @classmethod
    def of_corpus(cls, corpus: Corpus) -> "EvalText":
        """Return the split that no training has seen."""
        return cls(f"the held-out split of {corpus.name}", corpus.val, f"{corpus.fingerprint}:val")

    @classmethod
    def of_file(
        cls, text: str, tokenizer: Tokenizer | None, vocab_size: int, key: str = "cache_quality_text"
    ) -> "EvalText":
        """Open a token folder, a .npy or .tokens file, or another file as UTF-8 text; `key` named it.

        Raises:
            ConfigError: no such file, text that is not UTF-8, or text and no tokenizer.
            DataError: tokens of another vocabulary.
        """
        path = Path(text).expanduser()
        if path.is_dir() or path.suffix in TOKEN_FILES:
            opened = open_benchmark_text(path)
            opened.check(vocab_size, 1, tokenizer)
            return cls(str(path), opened.tokens, _hash(opened.tokens))
        if tokenizer is None:
            raise ConfigError(f"{key}={text}: a text, and there is no tokenizer; name tokens, or give a tokenizer")
        try:
            content = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{key}={text}: {error}; name a token folder or a UTF-8 text file") from None
        tokens = np.asarray(tokenizer.encode(content), dtype=np.int64)
        return cls(str(path), tokens, _hash(tokens))


def held_out_of(opened: ModelBundle) -> EvalText:
    """Return the held-out split of the data that a run's model was trained on, or why there is none."""
    corpus = corpus_of(opened, "cache_quality_text")
    return EvalText(corpus) if isinstance(corpus, str) else EvalText.of_corpus(corpus)


def corpus_of(opened: ModelBundle, key: str) -> Corpus | str:
    """Return the data that a run's model was trained on, or why there is none; `key` could name some.

    Raises:
        DataError: tokens outside the model's vocabulary.
    """
    if opened.manifest is None:
        return f"{opened.path} is no run, so its held-out text is not known; name {key}"
    groups = opened.manifest.groups_to_run()
    parts = opened.path.parts
    named = [group for group in groups if "groups" in parts and group.name in parts]
    corpus = open_corpus((named or groups)[-1].data)
    ours, theirs = opened.tokenizer, corpus.tokenizer
    if ours is not None and theirs is not None and ours.hash != theirs.hash:
        return f"the run's data has another tokenizer ({theirs.name}) than the model; name {key}"
    largest = max(corpus.max_ids)
    if largest >= opened.model.spec.embedder.vocab_size:
        raise DataError(f"{corpus.folder}: token {largest} is outside the model's vocabulary; name {key}")
    return corpus


def _hash(tokens: Tokens) -> str:
    content = np.asarray(tokens[:HASHED_TOKENS]).astype(np.int64).tobytes()
    return hashlib.sha256(content + str(tokens.size).encode()).hexdigest()
