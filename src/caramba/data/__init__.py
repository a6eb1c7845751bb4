"""Corpora, tokenizers and datasets of token windows. Opening a corpus does not load torch; datasets do."""

from typing import TYPE_CHECKING

from caramba.exports import lazy_exports

if TYPE_CHECKING:
    from caramba.data.corpus import Corpus as Corpus
    from caramba.data.corpus import open_corpus as open_corpus
    from caramba.data.dataset import IGNORED as IGNORED
    from caramba.data.dataset import DocumentDataset as DocumentDataset
    from caramba.data.dataset import NpyDataset as NpyDataset
    from caramba.data.dataset import PackedDataset as PackedDataset
    from caramba.data.dataset import TokenDataset as TokenDataset
    from caramba.data.dataset import TokensDataset as TokensDataset
    from caramba.data.dataset import Windows as Windows
    from caramba.data.dataset import WindowSampler as WindowSampler
    from caramba.data.dataset import batches as batches
    from caramba.data.dataset import build_token_dataset as build_token_dataset
    from caramba.data.dataset import count_targets as count_targets
    from caramba.data.dataset import documents_of as documents_of
    from caramba.data.dataset import epoch_permutation as epoch_permutation
    from caramba.data.dataset import open_windows as open_windows
    from caramba.data.dataset import pack_best_fit as pack_best_fit
    from caramba.data.dataset import refuse_overlap as refuse_overlap
    from caramba.data.dataset import samples_of as samples_of
    from caramba.data.dataset import spread_windows as spread_windows
    from caramba.data.folder import TokenStream as TokenStream
    from caramba.data.folder import open_token_folder as open_token_folder
    from caramba.data.folder import write_token_folder as write_token_folder
    from caramba.data.token_file import open_benchmark_text as open_benchmark_text
    from caramba.data.tokenizer import ByteTokenizer as ByteTokenizer
    from caramba.data.tokenizer import Tokenizer as Tokenizer
    from caramba.data.tokenizer import count_bytes as count_bytes
    from caramba.data.tokenizer import train_bpe as train_bpe
    from caramba.data.tokenizer_files import load_tokenizer as load_tokenizer

__getattr__ = lazy_exports(__name__, __file__)
