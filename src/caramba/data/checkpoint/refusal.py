"""Pickled weight files are refused: loading one runs whatever code its author put in it."""

from __future__ import annotations

from pathlib import Path

from caramba.errors import CheckpointError

_SUFFIXES = frozenset({".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle"})
_PICKLE_STARTS = (b"PK\x03\x04", *(bytes([0x80, protocol]) for protocol in (2, 3, 4, 5)))


def refuse_pickle(path: Path) -> None:
    """Raise if `path` is a pickle by its suffix or by its first bytes (or torch's zip of one).

    Raises:
        CheckpointError: the reason, and how to convert the file.
    """
    with open(path, "rb") as file:
        first = file.read(8)
    # A safetensors file starts with a header length below 2**27, so its bytes 4 to 7 are zero; a pickle's are not.
    is_pickle = first.startswith(_PICKLE_STARTS) and first[4:8] != bytes(4)
    if is_pickle or path.suffix.lower() in _SUFFIXES:
        raise CheckpointError(
            f"{path}: a pickled checkpoint, and pickles run code when they are loaded; expected safetensors. Use the"
            " .safetensors file of the same model, or convert one that you trust:"
            f" safetensors.torch.save_file(torch.load({path.name!r}, weights_only=True), 'model.safetensors')"
        )
