"""Second moments of what attention layers read, collected over calibration text or taken from weights alone."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from caramba.errors import CheckpointError, ConfigError
from caramba.layer import AttentionLayer, Documents, StandardProjection
from caramba.layer.projection import split_heads
from caramba.layer.rope import rotate
from caramba.model import Model


@dataclass(frozen=True)
class LayerStatistics:
    """Moments of one attention layer's projections: H query heads, K key/value heads, P = D / 2 pairs.

    Attributes:
        moment: E[y y^T] of y = [k; v], each head by head, [K (D + Dv), K (D + Dv)] float64.
        mean: E[y], [K (D + Dv)] float64.
        queries: E[q q^T] of each query head, [H, D, D] float64.
        rotation: the attention-weighted mean rotation of each key/value head and pair, [K, P] complex128.
    """

    moment: Tensor
    mean: Tensor
    queries: Tensor
    rotation: Tensor

    @property
    def covariance(self) -> Tensor:
        """E[(y - E y)(y - E y)^T]."""
        return self.moment - torch.outer(self.mean, self.mean)

    def to(self, device: torch.device | str) -> "LayerStatistics":
        """Return the same on `device`."""
        return LayerStatistics(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})


def standard_projection(layer: AttentionLayer) -> StandardProjection:
    """Return a teacher layer's projection, which the checks before any work have found to be a standard one."""
    projection = layer.projection
    if not isinstance(projection, StandardProjection) or projection.rope is None:
        raise TypeError(f"surgery reads standard attention with RoPE, got {type(projection).__name__}")
    return projection


def project_without_rope(layer: AttentionLayer, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q [B, H, T, D], k [B, K, T, D], v [B, K, T, Dv] before RoPE and scale."""
    projection, dims = standard_projection(layer), layer.dims
    return (
        split_heads(projection.q(x), dims.n_heads),
        split_heads(projection.k(x), dims.n_kv_heads),
        split_heads(projection.v(x), dims.n_kv_heads),
    )


def weight_statistics(layer: AttentionLayer) -> LayerStatistics:
    """Return the statistics that white, centred features would give: moments from weights and biases alone.

    Biases are the means of queries, keys and values then. The rotation is the identity: no attention is known.
    """
    projection, dims = standard_projection(layer), layer.dims
    joint = torch.cat((projection.k.weight, projection.v.weight)).double()
    mean = torch.cat((bias_of(projection.k), bias_of(projection.v)))
    queries = projection.q.weight.double().unflatten(0, (dims.n_heads, dims.qk))
    query_mean = bias_of(projection.q).unflatten(0, (dims.n_heads, dims.qk))
    rotation = torch.ones(dims.n_kv_heads, dims.qk // 2, dtype=torch.complex128, device=joint.device)
    return LayerStatistics(
        joint @ joint.T + torch.outer(mean, mean),
        mean,
        queries @ queries.transpose(1, 2) + query_mean[:, :, None] * query_mean[:, None, :],
        rotation,
    )


def bias_of(linear: nn.Linear) -> Tensor:
    """Return a layer's bias in float64, zeros where it has none."""
    return linear.weight.new_zeros(len(linear.weight)).double() if linear.bias is None else linear.bias.double()


def pack(statistics: Sequence[LayerStatistics]) -> dict[str, Tensor]:
    """Return the statistics as named real tensors, for a file."""
    tensors: dict[str, Tensor] = {}
    for index, item in enumerate(statistics):
        for field in fields(item):
            value = getattr(item, field.name)
            tensors[f"{index}.{field.name}"] = torch.view_as_real(value) if value.is_complex() else value
    return tensors


def unpack(tensors: dict[str, Tensor]) -> list[LayerStatistics]:
    """Return what `pack` was given."""
    names = [field.name for field in fields(LayerStatistics)]
    layers = range(len(tensors) // len(names))
    found = []
    for index in layers:
        values = {name: tensors[f"{index}.{name}"] for name in names}
        # A tensor in a mapped file begins at any multiple of 8 bytes, and complex128 arithmetic reads 16 at a time.
        values["rotation"] = torch.view_as_complex(values["rotation"].clone())
        found.append(LayerStatistics(**values))
    return found


QUERY_CHUNK = 256
BATCH_TOKENS = 8192
ACCUMULATOR_BYTES = 4 * 2**30  # of the layers that one pass measures; a model with more takes more passes


@torch.no_grad()
def mean_rotation(
    layer: AttentionLayer, q: Tensor, k: Tensor, documents: Tensor | None = None, first_tokens: int = 0
) -> tuple[Tensor, Tensor]:
    """Sum the teacher's attention-weighted rotations exp(i theta_p (t - u)) over sequences, queries and keys, and the
    weights.

    Attention is computed from QUERY_CHUNK queries at a time, with the layer's own window and rotary table, within
    documents if these are separate; queries of padding, of document -1, do not count, and neither do the first
    `first_tokens` keys of a sequence or document.

    Shape: q [B, H, T, D], k [B, K, T, D] unrotated, documents [B, T] -> [H, P] complex128 and [H] float64.
    """
    projection = standard_projection(layer)
    rope = projection.rope
    assert rope is not None
    n_tokens, group = q.shape[2], q.shape[1] // k.shape[1]
    cos, sin = rope(0, n_tokens, q.device)
    turned = rotate(k, cos, sin).repeat_interleave(group, dim=1)
    queries = rotate(q, cos, sin) * layer.dims.qk**-0.5
    cos, sin = (table[0].to(turned.dtype) / rope.attention_factor for table in (cos, sin))
    window = layer.config.local_window or n_tokens
    positions = torch.arange(n_tokens, device=q.device)
    seen_from = None if documents is None else Documents.of(documents).first[:, None, :, None]
    counted = None if documents is None else (documents >= 0)[:, None, :, None]
    places = positions if documents is None else Documents.of(documents).positions[:, None, None]
    is_first = places < first_tokens  # [T] or [B, 1, 1, T]
    total = torch.zeros(q.shape[1], cos.shape[1], dtype=torch.complex128, device=q.device)
    mass = torch.zeros(q.shape[1], dtype=torch.float64, device=q.device)
    for start in range(0, n_tokens, QUERY_CHUNK):
        stop = min(start + QUERY_CHUNK, n_tokens)
        first = max(0, start - window + 1)
        rows, columns = positions[start:stop, None], positions[None, first:stop]
        hidden = (columns > rows) | (columns <= rows - window)
        if seen_from is not None:
            hidden = hidden | (columns < seen_from[:, :, start:stop])
        scores = queries[:, :, start:stop] @ turned[:, :, first:stop].transpose(-1, -2)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        weights = weights if counted is None else weights * counted[:, :, start:stop]
        weights = weights.masked_fill(is_first[..., first:stop], 0.0)
        mass += weights.double().sum((0, 2, 3))
        even, odd = weights @ cos[first:stop], weights @ sin[first:stop]
        real = (even * cos[start:stop] + odd * sin[start:stop]).double().sum((0, 2))
        imaginary = (even * sin[start:stop] - odd * cos[start:stop]).double().sum((0, 2))
        total += torch.complex(real, imaginary)
    return total, mass


class _Accumulator:
    """The running sums of one layer."""

    def __init__(self, layer: AttentionLayer, first_tokens: int = 0) -> None:
        dims, device = layer.dims, layer.out.weight.device
        width = dims.n_kv_heads * (dims.qk + dims.v)

        def zeros(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.layer = layer
        self.moment, self.sum = zeros(width, width), zeros(width)
        self.queries = zeros(dims.n_heads, dims.qk, dims.qk)
        self.rotation = zeros(dims.n_heads, dims.qk // 2, dtype=torch.complex128)
        self.mass = zeros(dims.n_heads)
        self.n_tokens = 0
        self.first_tokens = first_tokens

    def add(self, x: Tensor, rotates: bool, documents: Tensor | None = None) -> bool:
        """Add the features of some sequences [B, T, M] but padding; return whether what they gave is finite."""
        q, k, v = project_without_rope(self.layer, x)
        counted = self._counted(x, documents)
        joint = (
            torch.cat((k.transpose(1, 2).flatten(2), v.transpose(1, 2).flatten(2)), -1).flatten(0, 1)[counted].double()
        )
        self.moment += joint.T @ joint
        self.sum += joint.sum(0)
        wide = q.transpose(0, 1).flatten(1, 2)[:, counted].double()
        self.queries += wide.transpose(1, 2) @ wide
        self.n_tokens += joint.shape[0]
        if rotates:
            rotation, mass = mean_rotation(self.layer, q, k, documents, self.first_tokens)
            self.rotation += rotation
            self.mass += mass
        sums = self.sum.sum() + self.moment.diagonal().sum() + self.queries.sum() + self.rotation.abs().sum()
        return bool(torch.isfinite(sums))

    def _counted(self, x: Tensor, documents: Tensor | None) -> Tensor | slice:
        """Return which of the tokens [B, T, M] are neither padding nor first ones, [B T]."""
        if documents is None and not self.first_tokens:
            return slice(None)
        if documents is None:
            places = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
            return (places >= self.first_tokens).flatten()
        places = Documents.of(documents).positions
        return ((documents >= 0) & (places >= self.first_tokens)).flatten()

    def hook(
        self, where: str, *, rotates: bool, documents: Tensor | None
    ) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        """Return a forward pre-hook that adds what the layer is given."""

        def add(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if not self.add(inputs[0], rotates, documents):
                raise CheckpointError(
                    f"surgery: calibration of {where} gave values that are not finite; look at the teacher's weights "
                    "(a damaged or half-precision checkpoint), or use other calibration data"
                )

        return add

    def finish(self) -> LayerStatistics:
        kv_heads = self.layer.dims.n_kv_heads
        if not self.n_tokens:
            raise ConfigError(
                f"surgery: no document of the calibration text has more than exact_first_tokens={self.first_tokens} "
                "tokens, which leaves none to measure; use longer documents or fewer first tokens"
            )
        # Heads that look at first tokens alone have no rotation to average.
        mass = self.mass.unflatten(0, (kv_heads, -1)).sum(1).clamp_min(torch.finfo(torch.float64).tiny)
        rotation = self.rotation.unflatten(0, (kv_heads, -1)).sum(1) / mass[:, None]
        n = self.n_tokens
        return LayerStatistics(self.moment / n, self.sum / n, self.queries / n, rotation)


def in_groups(layers: Sequence[tuple[str, AttentionLayer]], most_bytes: int) -> list[list[tuple[str, AttentionLayer]]]:
    """Return the layers in runs whose accumulators take at most `most_bytes` together, or that are one layer."""
    groups: list[list[tuple[str, AttentionLayer]]] = []
    taken = 0
    for name, layer in layers:
        dims = layer.dims
        joint = dims.n_kv_heads * (dims.qk + dims.v)
        size = 8 * (joint**2 + dims.n_heads * dims.qk**2)
        if not groups or taken + size > most_bytes:
            groups.append([])
            taken = 0
        groups[-1].append((name, layer))
        taken += size
    return groups


def batch_size(windows: Tensor) -> int:
    """Return how many of the windows [N, T] make about BATCH_TOKENS tokens."""
    return max(1, BATCH_TOKENS // windows.shape[1])


def batches(windows: Tensor, documents: Tensor | None, device: torch.device) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Split token windows and their document ids, each [N, T], into batches on `device`."""
    size = batch_size(windows)
    for start in range(0, len(windows), size):
        ids = None if documents is None else documents[start : start + size].to(device)
        yield windows[start : start + size].to(device), ids


def refuse_short_windows(block_size: int, first_tokens: int) -> None:
    """Refuse calibration windows that have no token after the first ones.

    Raises:
        ConfigError: naming both lengths.
    """
    if block_size <= first_tokens:
        raise ConfigError(
            f"surgery: calibration windows have {block_size} tokens, and exact_first_tokens={first_tokens} "
            "leaves none to measure; use a longer block_size or fewer first tokens"
        )


@torch.no_grad()
def collect_statistics(
    teacher: Model,
    layers: Sequence[tuple[str, AttentionLayer]],
    windows: Tensor,
    *,
    documents: Tensor | None = None,
    rotation_windows: int = 32,
    first_tokens: int = 0,
    progress: Callable[[str], None] | None = None,
) -> list[LayerStatistics]:
    """Run the teacher once over token windows [N, T] and return the statistics of the named layers.

    `documents` [N, T] are separate, as in `Model`, and padding, of document -1, is left out; so are the first
    `first_tokens` of each.

    The mean rotation comes from about `rotation_windows` of them, spread evenly: text changes along a corpus. Memory is
    one batch's activations, a batch's joint vector and the accumulators, 8 (K (D + Dv))^2 + 8 H D^2 bytes a layer.
    Layers whose accumulators exceed ACCUMULATOR_BYTES together are measured in several passes over the windows, and
    what is measured waits in the host's memory.

    Raises:
        CheckpointError: a layer gave a value that is not finite; the message names layer and batch.
        ConfigError: windows or documents no longer than the first tokens.
    """
    refuse_short_windows(windows.shape[1], first_tokens)
    groups = in_groups(layers, ACCUMULATOR_BYTES)
    found: list[LayerStatistics] = []
    for group in groups:
        if progress is not None and len(groups) > 1:
            progress(f"calibration: layers {len(found)} to {len(found) + len(group) - 1} of {len(layers)}")
        sums = [_Accumulator(layer, first_tokens) for _, layer in group]
        names = [name for name, _ in group]
        _add_windows(teacher, names, sums, windows, documents, rotation_windows, progress)
        measured = [total.finish() for total in sums]
        found += measured if len(groups) == 1 else [item.to("cpu") for item in measured]
    return found


def _add_windows(
    teacher: Model,
    names: Sequence[str],
    sums: Sequence[_Accumulator],
    windows: Tensor,
    documents: Tensor | None,
    rotation_windows: int,
    progress: Callable[[str], None] | None,
) -> None:
    seen, size = 0, batch_size(windows)
    n_batches, wanted = -(-len(windows) // size), -(-rotation_windows // size)
    device = teacher.embedder.token.weight.device
    for index, (batch, ids) in enumerate(batches(windows, documents, device)):
        rotates = index * wanted % n_batches < wanted
        with ExitStack() as stack:
            for name, total in zip(names, sums, strict=True):
                hook = total.hook(f"{name}: batch {index}", rotates=rotates, documents=ids)
                stack.callback(total.layer.register_forward_pre_hook(hook).remove)
            teacher.hidden(batch, documents=ids)
        seen += batch.shape[0]
        if progress is not None and (index + 1) % 8 == 0:
            progress(f"calibration: {seen} of {len(windows)} windows")
