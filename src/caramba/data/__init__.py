"""Corpora, tokenizers and datasets of token windows. Opening a corpus does not load torch; datasets do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from caramba.exports import lazy_exports

if TYPE_CHECKING:
    from caramba.data.benchmark_text import BenchmarkText, open_benchmark_text
    from caramba.data.contamination import refuse_overlap
    from caramba.data.corpus import Corpus, open_corpus
    from caramba.data.dataset import (
        IGNORED,
        DocumentDataset,
        NpyDataset,
        PackedDataset,
        TokenDataset,
        TokensDataset,
        Windows,
        WindowSampler,
        batches,
        build_token_dataset,
        count_targets,
        documents_of,
        epoch_permutation,
        open_windows,
        pack_best_fit,
        samples_of,
        spread_windows,
    )
    from caramba.data.folder import TokenFolder, open_token_folder, write_token_folder
    from caramba.data.stream import TokenStream
    from caramba.data.tokenizer import ByteTokenizer, LibraryTokenizer, Tokenizer, count_bytes, train_bpe
    from caramba.data.tokenizer_files import load_tokenizer

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
    "Windows",
    "batches",
    "build_token_dataset",
    "count_bytes",
    "count_targets",
    "documents_of",
    "epoch_permutation",
    "load_tokenizer",
    "open_benchmark_text",
    "open_corpus",
    "open_token_folder",
    "open_windows",
    "pack_best_fit",
    "refuse_overlap",
    "samples_of",
    "spread_windows",
    "train_bpe",
    "write_token_folder",
]

__getattr__ = lazy_exports(__name__, __file__)
