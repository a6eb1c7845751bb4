"""Corpora, tokenizers and datasets of token windows. Opening a corpus does not load torch; datasets do."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from caramba.data.benchmark_text import BenchmarkText, open_benchmark_text
    from caramba.data.contamination import refuse_overlap
    from caramba.data.corpus import Corpus, open_corpus
    from caramba.data.dataset import IGNORED, NpyDataset, TokenDataset, TokensDataset, build_token_dataset
    from caramba.data.folder import TokenFolder, open_token_folder, write_token_folder
    from caramba.data.library import LibraryTokenizer, train_bpe
    from caramba.data.packing import DocumentDataset, PackedDataset, open_windows, pack_best_fit
    from caramba.data.sampler import WindowSampler, count_targets, epoch_permutation
    from caramba.data.stream import TokenStream
    from caramba.data.tokenizer import ByteTokenizer, Tokenizer, count_bytes
    from caramba.data.tokenizer_files import load_tokenizer

_HOMES = {
    "BenchmarkText": "benchmark_text",
    "open_benchmark_text": "benchmark_text",
    "Corpus": "corpus",
    "open_corpus": "corpus",
    "IGNORED": "dataset",
    "NpyDataset": "dataset",
    "TokenDataset": "dataset",
    "TokensDataset": "dataset",
    "build_token_dataset": "dataset",
    "TokenFolder": "folder",
    "open_token_folder": "folder",
    "write_token_folder": "folder",
    "refuse_overlap": "contamination",
    "WindowSampler": "sampler",
    "count_targets": "sampler",
    "epoch_permutation": "sampler",
    "LibraryTokenizer": "library",
    "DocumentDataset": "packing",
    "PackedDataset": "packing",
    "open_windows": "packing",
    "pack_best_fit": "packing",
    "TokenStream": "stream",
    "ByteTokenizer": "tokenizer",
    "Tokenizer": "tokenizer",
    "count_bytes": "tokenizer",
    "load_tokenizer": "tokenizer_files",
    "train_bpe": "library",
}

__all__ = [
    "IGNORED",
    "BenchmarkText",
    "ByteTokenizer",
    "Corpus",
    "DocumentDataset",
    "LibraryTokenizer",
    "NpyDataset",
    "PackedDataset",
    "TokenDataset",
    "TokenFolder",
    "TokenStream",
    "Tokenizer",
    "TokensDataset",
    "WindowSampler",
    "build_token_dataset",
    "count_bytes",
    "count_targets",
    "epoch_permutation",
    "load_tokenizer",
    "open_benchmark_text",
    "open_corpus",
    "open_token_folder",
    "open_windows",
    "pack_best_fit",
    "refuse_overlap",
    "train_bpe",
    "write_token_folder",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
