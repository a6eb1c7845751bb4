"""The plan by which a model's layers are split over ranks, from its topology."""

from collections.abc import Iterator

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from caramba.config.parallel_check import check_dropout, check_features, dims_of_rank
from caramba.errors import ConfigError
from caramba.layer import (
    AttentionLayer,
    DropoutLayer,
    LayerNormLayer,
    LinearLayer,
    MemoryBankLayer,
    RMSNormLayer,
    SwiGLULayer,
)
from caramba.model import Model
from caramba.model.parallel.styles import (
    GatedMLPParallel,
    HeadParallel,
    Replicated,
    SequenceParallel,
    VocabParallelEmbedding,
    VocabParallelHead,
)
from caramba.model.topology import Topology

WHOLE = (RMSNormLayer, LayerNormLayer, LinearLayer, DropoutLayer)


def apply_tensor_parallel(
    model: Model, mesh: DeviceMesh, *, split_vocabulary: bool = False, split_sequence: bool = False
) -> Model:
    """Split a model's layers over the ranks of a mesh of one dimension, in place, and return it.

    Afterwards its parameters are DTensors on the mesh under the names they had, its forward takes and gives whole
    tensors on every rank, and losses and gradients are those of one process: a gradient is split as its parameter
    is. Every rank gives the same batch, and brings the same weights: it keeps its part of its own. Caches that
    `new_context` makes hold this rank's heads. Random choices outside attention, such as a DropoutLayer's, are to be
    the same on all ranks, so seed them alike; attention drops other probabilities on each.

    Args:
        split_vocabulary: whether each rank keeps its entries of the vocabulary only, where they divide evenly: logits
            are whole but have no gradient then, so to generate, not to train. Otherwise embedding and head are whole
            on every rank, and a loss over the vocabulary is each rank's own.

        split_sequence: whether norms and what else is not split works on a rank's own tokens, and activations between
            layers are kept of these alone: to train, without a cache or dropout layers, on lengths that the ranks
            divide. Hooks on the residual stream see these tokens only.

    Raises:
        ConfigError: a mesh of several dimensions, a model that is split already, heads or features that the ranks
            cannot share equally, dropout of a rank's own tokens, or a layer without a plan; nothing is changed then.
    """
    if mesh.ndim != 1:
        raise ConfigError(
            f"tensor parallel: got a mesh of {mesh.ndim} dimensions, expected 1; pass the one of the split: mesh['tp']"
        )
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ConfigError("tensor parallel: the model is split already; build a new one, and split it before FSDP does")
    options = {"split_vocabulary": split_vocabulary, "split_sequence": split_sequence}
    plan = tensor_parallel_plan(model, mesh.size(), **options)
    parallelize_module(model, mesh, plan)
    return model


def tensor_parallel_plan(
    model: Model, n_ranks: int, *, split_vocabulary: bool = False, split_sequence: bool = False
) -> dict[str, ParallelStyle]:
    """Return how each layer of a model is split over `n_ranks`, by its name.

    Raises:
        ConfigError: heads or features that the ranks cannot share equally, dropout of a rank's own tokens, or a layer
            without a plan.
    """
    entries = model.spec.embedder.vocab_size
    by_entry = split_vocabulary and entries % n_ranks == 0
    plan: dict[str, ParallelStyle] = {"embedder.token": VocabParallelEmbedding() if by_entry else Replicated()}
    if model.embedder.position is not None:
        plan["embedder.position"] = Replicated()
    for name, layer in _layers(model.topology, "topology"):
        try:
            plan[name] = _style(layer, n_ranks, by_sequence=split_sequence)
        except ConfigError as error:
            raise ConfigError(f"{error} (model.{name})") from None
    if split_sequence:
        plan["topology"] = SequenceParallel()
    plan["head"] = VocabParallelHead() if by_entry else Replicated()
    return plan


def _layers(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield (qualified name, layer) of the nodes that are no topologies."""
    if not isinstance(module, Topology):
        yield name, module
        return
    for index, layer in enumerate(module.layers):
        yield from _layers(layer, f"{name}.layers.{index}")


def _style(layer: nn.Module, n_ranks: int, *, by_sequence: bool) -> ParallelStyle:
    if isinstance(layer, AttentionLayer) and not isinstance(layer, MemoryBankLayer):
        dims_of_rank(layer.dims, n_ranks, layer.config.is_latent)
        return HeadParallel(by_sequence=by_sequence)
    if isinstance(layer, SwiGLULayer):
        check_features(layer.gate.out_features, n_ranks)
        return GatedMLPParallel(by_sequence=by_sequence)
    if by_sequence and isinstance(layer, DropoutLayer):
        check_dropout(layer.p, n_ranks)
    if isinstance(layer, WHOLE):
        return Replicated(by_sequence=by_sequence)
    raise ConfigError(
        f"tensor parallel: there is no plan for a {type(layer).__name__}; plans exist for attention, SwiGLU, norms, "
        "linear maps and dropout; run this model on one device, or under ddp or fsdp2"
    )
