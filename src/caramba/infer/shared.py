"""`torchrun ... -m caramba generate`: one model whose layers the ranks share, one text, which rank 0 prints."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from caramba.config.generate import GenerateConfig
from caramba.config.kvcache import KVCacheKind
from caramba.errors import ConfigError
from caramba.model import Model
from caramba.runtime import choose_device, get_world_size

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


@contextlib.contextmanager
def joined_ranks(words: argparse.Namespace, config: GenerateConfig) -> Iterator[DeviceMesh | None]:
    """Join the ranks that torchrun started, for the length of a block; None for one process alone.

    On CUDA each rank takes the GPU of its place on the node.

    Raises:
        ConfigError: fewer GPUs than ranks, or an option by which ranks would part from each other.
    """
    if get_world_size() == 1:
        yield None
        return
    _refuse(words, config)
    device = choose_device(words.device)
    if device.type not in BACKENDS:
        raise ConfigError(f"generate: ranks cannot share a model on {device.type}; use --device cpu or cuda")
    if device.type == "cuda":
        place, n_devices = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if place >= n_devices:
            raise ConfigError(
                f"generate: rank {place} of this node has no GPU of its own, {n_devices} are here; start torchrun with "
                f"--nproc-per-node {n_devices} or fewer"
            )
        torch.cuda.set_device(place)
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group(BACKENDS[device.type])
    try:
        yield init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("tp",))
    finally:
        dist.destroy_process_group()


def share_layers(model: Model, mesh: DeviceMesh) -> None:
    """Keep this rank's part of every layer of a model that all ranks hold, to generate with.

    Raises:
        ConfigError: a layer that the ranks cannot share.
    """
    from caramba.model.parallel import apply_tensor_parallel, keep_local  # slow to import, and rare

    apply_tensor_parallel(model, mesh, split_vocabulary=True)
    keep_local(model)


def refuse_ranks(command: str) -> None:
    """Check that a command which runs as one process is one.

    Raises:
        ConfigError: torchrun started several.
    """
    if get_world_size() > 1:
        raise ConfigError(
            f"{command}: {get_world_size()} ranks were started, and {command} runs as one process; start it without "
            "torchrun (generate is what ranks share)"
        )


def _refuse(words: argparse.Namespace, config: GenerateConfig) -> None:
    reasons = {
        "--cache-kind auto": (
            config.cache_kind is KVCacheKind.AUTO,
            "each rank would measure, and choose, by itself",
        ),
        "--spec-method draft": (
            words.spec_method == "draft",
            "a draft model is not split; use lookup or early_exit",
        ),
        "--weights int8_dynamic": (
            words.weights == "int8_dynamic",
            "its ranges are those of whole layers; use int8",
        ),
        "--weights-head": (words.weights_head, "each rank has its entries of the vocabulary only"),
    }
    for option, (is_asked, reason) in reasons.items():
        if is_asked:
            raise ConfigError(
                f"generate: {option} does not go with {get_world_size()} ranks: {reason}; or start it without torchrun"
            )
