from __future__ import annotations

import json
import os
import resource
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from caramba.data.checkpoint import load_into, load_tensors, read_metadata, save_tensors, without_aliases
from caramba.data.checkpoint import tensors as tensors_module
from caramba.errors import CheckpointError


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedder = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedder.weight
        self.register_buffer("steps", torch.tensor(3))


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """A write beyond `size` bytes fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_round_trip_of_types_shapes_and_metadata(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "x.safetensors"
    base = torch.arange(24.0).reshape(4, 6)
    tensors = {
        "fp32": base.clone(),
        "bf16": torch.randn(3, 2).bfloat16(),
        "scalar": torch.tensor(5),
        "empty": torch.empty(0, 3),
        "transposed": base.t(),
        "grad": nn.Parameter(torch.randn(2)),
    }
    save_tensors(path, tensors, {"note": "ünïcode", "config": json.dumps({"a": 1})})
    loaded = load_tensors(path)
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)
    assert read_metadata(path) == {"note": "ünïcode", "config": '{"a": 1}'}
    save_tensors(path, {"a": torch.ones(1)})
    assert read_metadata(path) == {}
    assert [p.name for p in path.parent.iterdir()] == ["x.safetensors"]


def test_a_small_view_of_a_large_tensor_is_saved_small(tmp_path: Path) -> None:
    big = torch.randn(100_000)
    save_tensors(tmp_path / "x.safetensors", {"a": big[:10], "b": big[10:20]})
    assert (tmp_path / "x.safetensors").stat().st_size < 1000
    assert torch.equal(load_tensors(tmp_path / "x.safetensors")["b"], big[10:20])


def test_tied_weights_are_refused_then_dropped_then_restored(tmp_path: Path) -> None:
    path, model = tmp_path / "x.safetensors", Tied()
    with pytest.raises(CheckpointError, match=r"embedder\.weight and head\.weight share memory.*without_aliases"):
        save_tensors(path, model.state_dict())
    kept, aliases = without_aliases(model.state_dict())
    assert aliases == {"head.weight": "embedder.weight"}
    assert "head.weight" not in kept
    save_tensors(path, kept)
    other = Tied()
    load_into(other, load_tensors(path), "x")
    assert torch.equal(other.head.weight, model.embedder.weight)
    assert other.head.weight is other.embedder.weight
    renamed = load_tensors(path)
    renamed["head.weight"] = renamed.pop("embedder.weight")
    load_into(Tied(), renamed, "the other name of a tied weight")


def test_aliases_do_not_depend_on_the_order_of_names() -> None:
    shared = torch.randn(3)
    assert (
        without_aliases({"b": shared, "a": shared})[1] == without_aliases({"a": shared, "b": shared})[1] == {"b": "a"}
    )
    parts = torch.randn(4)
    assert without_aliases({"a": parts[:2], "b": parts[2:]})[1] == {}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"a": torch.empty(2, device="meta")}, "a is on the meta device"),
        ({"a": 3}, "a is int, expected a tensor"),
        ({"a": torch.eye(2).to_sparse()}, "layout torch.sparse_coo"),
    ],
)
def test_unsavable(tmp_path: Path, tensors: dict, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        save_tensors(tmp_path / "x.safetensors", tensors)
    with pytest.raises(CheckpointError, match="metadata 'steps' is int"):
        save_tensors(tmp_path / "x.safetensors", {"a": torch.ones(1)}, {"steps": 3})  # type: ignore[dict-item]
    assert list(tmp_path.iterdir()) == []


def test_overlapping_views_are_refused(tmp_path: Path) -> None:
    whole = torch.randn(10)
    with pytest.raises(CheckpointError, match="a and b share memory"):
        save_tensors(tmp_path / "x.safetensors", {"a": whole[:6], "b": whole[5:]})


def test_load_into_names_every_difference_and_changes_nothing() -> None:
    model = Tied()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    given = {
        "embedder.weight": torch.randn(7, 4),
        "norm.weight": torch.randn(5),
        "steps": torch.tensor(1.5),
        "norm.scale": torch.randn(4),
    }
    with pytest.raises(CheckpointError) as caught:
        load_into(model, given, "runs/x/model.safetensors")
    text = str(caught.value)
    assert text.startswith("runs/x/model.safetensors: does not fit Tied")
    assert "missing norm.bias [4] float32" in text
    assert "unexpected norm.scale [4] float32" in text
    assert "norm.weight: expected [4] float32, found [5] float32" in text
    assert "steps: expected [] int64, found [] float32" in text
    assert "missing head.weight" not in text
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_load_into_converts_floating_types_and_keeps_grad_flags() -> None:
    model = nn.Linear(3, 2).bfloat16()
    weight = torch.randn(2, 3)
    load_into(model, {"weight": weight, "bias": torch.zeros(2)}, "x")
    assert model.weight.dtype == torch.bfloat16
    assert model.weight.requires_grad
    assert torch.equal(model.weight, weight.bfloat16())


def test_load_into_refuses_a_module_without_memory() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 1, bias=False)
    with pytest.raises(CheckpointError, match="weight: the module is on meta"):
        load_into(model, {"weight": torch.ones(1, 2)}, "x")


@pytest.mark.parametrize("cut", [1, 100, 1000])
def test_truncated_files_name_both_sizes(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "x.safetensors"
    save_tensors(path, {"a": torch.randn(300)})
    size = path.stat().st_size
    os.truncate(path, size - cut)
    with pytest.raises(CheckpointError, match=rf"x\.safetensors: the file is truncated: {size - cut} bytes, .*{size}"):
        load_tensors(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "truncated: 0 bytes"),
        (b"123", "truncated: 3 bytes"),
        (struct.pack("<Q", 50) + b"{}", "truncated: 10 bytes, its header alone needs 58"),
        (b"hello world, this is text", "announce a header of"),
        (struct.pack("<Q", 4) + b"{{{{", "corrupt header in a file of 12 bytes"),
        (struct.pack("<Q", 12) + b'{"a": "b"}  ', "corrupt header"),
        (struct.pack("<Q", 2) + b"{}" + b"extra", "corrupt: 15 bytes, its header states 10"),
    ],
)
def test_files_that_are_not_safetensors(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    for reader in (load_tensors, read_metadata):
        with pytest.raises(CheckpointError, match=message):
            reader(path)


def test_a_header_that_lies_about_shapes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_tensors(path, {"a": torch.randn(300)})
    path.write_bytes(path.read_bytes().replace(b"[300]", b"[301]"))
    with pytest.raises(CheckpointError, match="not a readable safetensors file"):
        load_tensors(path)


@pytest.mark.parametrize("name", ["x.pt", "x.bin", "x.ckpt", "x.pth", "renamed.safetensors", "none"])
@pytest.mark.parametrize("is_zip", [True, False])
def test_pickles_are_refused(tmp_path: Path, name: str, is_zip: bool) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / name, _use_new_zipfile_serialization=is_zip)
    with pytest.raises(CheckpointError, match=r"pickles run code when they are loaded; expected safetensors"):
        load_tensors(tmp_path / name)


def test_a_header_length_that_looks_like_a_pickle_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for fill in range(500, 660):  # 0x0280 bytes of header: the first two bytes of a pickle of protocol 2
        save_tensors(path, {"a": torch.ones(2)}, {"n": "x" * fill})
        if path.read_bytes()[:2] == b"\x80\x02":
            break
    else:
        pytest.fail("no header of 640 bytes was made")
    assert load_tensors(path)["a"].tolist() == [1, 1]


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no such checkpoint file"):
        load_tensors(tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match="is a folder"):
        load_tensors(tmp_path)


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.safetensors"
    save_tensors(path, {"a": torch.zeros(3)})
    whole_file = tensors_module.whole_file

    @contextmanager
    def interrupted(target: Path) -> Iterator[Path]:
        with whole_file(target) as temporary:
            yield temporary
            assert temporary.stat().st_size > 0
            raise KeyboardInterrupt

    monkeypatch.setattr(tensors_module, "whole_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_tensors(path, {"a": torch.ones(3)})
    assert load_tensors(path)["a"].tolist() == [0, 0, 0]
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_tensors(path, {"a": torch.zeros(3)})
    with (
        file_size_limit(10_000),
        pytest.raises(OSError, match=r"x\.safetensors: could not write 80000 bytes"),
    ):
        save_tensors(path, {"a": torch.randn(20_000)})
    assert load_tensors(path)["a"].tolist() == [0, 0, 0]
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]
