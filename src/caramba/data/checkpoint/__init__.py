"""Readers and writers of checkpoints: safetensors for weights, weights-only torch files for training state."""

from typing import TYPE_CHECKING

from caramba.exports import lazy_exports

if TYPE_CHECKING:
    from caramba.data.checkpoint.folder import fingerprint as fingerprint
    from caramba.data.checkpoint.folder import weight_files as weight_files
    from caramba.data.checkpoint.header import read_metadata as read_metadata
    from caramba.data.checkpoint.shards import index_tensors as index_tensors
    from caramba.data.checkpoint.shards import is_same_tensor as is_same_tensor
    from caramba.data.checkpoint.shards import stream_into as stream_into
    from caramba.data.checkpoint.tensors import load_into as load_into
    from caramba.data.checkpoint.tensors import load_tensors as load_tensors
    from caramba.data.checkpoint.tensors import save_tensors as save_tensors
    from caramba.data.checkpoint.tensors import without_aliases as without_aliases
    from caramba.data.checkpoint.training_state import load_training_state as load_training_state
    from caramba.data.checkpoint.training_state import save_training_state as save_training_state

__getattr__ = lazy_exports(__name__, __file__)
