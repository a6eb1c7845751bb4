"""Swaps weights of linear layers for codes of 8 or 4 bits, by products of our own or torchao's; their ranges."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from caramba.config.benchmark import CalibrationConfig, WeightFormat
from caramba.errors import ConfigError, DataError, KernelUnavailable
from caramba.layer import LinearLayer
from caramba.layer.latent import FirstTokens
from caramba.layer.quantized_linear import QuantizedLinear
from caramba.model import Model
from caramba.model.model import Head, TiedHead, model_bytes
from caramba.ops.backend import upcast
from caramba.ops.small_batch_linear import pack_int4

HEAD = "head"
"""Name under which a model has its head."""


@dataclass(frozen=True)
class Ranges:
    """The range of each input channel of each layer, fp32 [d_in] by qualified name, and the tokens they come from."""

    of: Mapping[str, Tensor]
    tokens: int
    config: CalibrationConfig


class LargestMagnitudes:
    """The k largest magnitudes of every channel so far: their smallest is an exact percentile, the first the maximum.

    Of n values the percentile p is the ceil((1 - p / 100) n)-th largest, at least the first.
    """

    def __init__(self, k: int) -> None:
        self.k = k
        self.largest: Tensor | None = None

    def observe(self, x: Tensor) -> None:
        """Update with activations. Shape: [..., d_in]."""
        found = x.detach().flatten(0, -2).abs().float()
        every = found if self.largest is None else torch.cat((self.largest, found))
        self.largest = every.topk(min(self.k, len(every)), dim=0).values

    def range(self) -> Tensor:
        """Return the k-th largest magnitude of each channel. Shape: [d_in]."""
        assert self.largest is not None
        return self.largest[-1]


@torch.inference_mode()
def observe_ranges(
    model: Model, layers: Mapping[str, nn.Module], windows: Sequence[Tensor], config: CalibrationConfig
) -> Ranges:
    """Run windows of token ids [T] through a model in eval mode and return the ranges of what layers read.

    Raises:
        DataError: no text.
    """
    n_tokens = sum(len(window) for window in windows)
    if not n_tokens:
        raise DataError("calibration: no text to take ranges from; name a text of at least one token")
    share = 0.0 if config.method == "max" else 1 - config.percentile / 100
    # Rounded first: 1 - 99.9 / 100 is a hair above 0.001.
    seen = {name: LargestMagnitudes(max(1, math.ceil(round(share * n_tokens, 6)))) for name in layers}

    def watch(name: str) -> None:
        def hook(layer: nn.Module, given: tuple[Tensor, ...]) -> None:
            seen[name].observe(layer.reduce(given[0]) if isinstance(layer, LinearLayer) else given[0])

        # By the class: every pass of prefill calls the linear layers, though it refuses new hooks on them.
        hooks.append(nn.Module.register_forward_pre_hook(layers[name], hook))

    hooks: list[torch.utils.hooks.RemovableHandle] = []
    was_training, device = model.training, model.embedder.token.weight.device
    model.eval()
    try:
        for name in layers:
            if name != HEAD:
                watch(name)
        for window in windows:
            hidden = model.hidden(window.to(device)[None])
            if HEAD in seen:  # what it reads is at hand: its product with the whole vocabulary is not needed
                seen[HEAD].observe(hidden)
    finally:
        for hook in hooks:
            hook.remove()
        model.train(was_training)
    return Ranges({name: each.range() for name, each in seen.items()}, n_tokens, config)


GROUP_SIZES = (128, 64, 32)
"""Inputs that share a scale and a zero; the largest that divides a layer's."""
MOST_CODE = 15
LEAST_STEP = 2.0**-100
AT_A_TIME = 2**24
"""Weight elements quantised at once: temporaries take some 50 bytes each."""


def group_of(width: int) -> int | None:
    """Return the largest group size that divides a width, or None."""
    return next((size for size in GROUP_SIZES if width % size == 0), None)


def quantize_int4(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return packed codes q, scales s and zeros z of a weight w = q s + z.

    s is a fifteenth of the group's range and z its minimum. Both are rounded to bfloat16 before codes are chosen, so
    that q is the nearest code for the values used later. (torchao's z is the value of code 8. The minimum is itself a
    weight, exact in bfloat16 for bfloat16 weights, and s q + z needs no subtraction.)

    Shape: weight [N, K] to int16 [N, K / 4] and bfloat16 [N, K / group, 2].
    """
    words, scales = [], []
    for rows in weight.detach().split(max(1, AT_A_TIME // weight.shape[1])):
        grouped = upcast(rows).unflatten(1, (-1, group))
        low, high = grouped.aminmax(dim=2)
        scale = torch.stack([((high - low) / MOST_CODE).clamp(min=LEAST_STEP), low], dim=2).bfloat16()
        step, zero = scale.to(grouped.dtype)[..., None].unbind(2)
        codes = ((grouped - zero) / step).round_().clamp_(0, MOST_CODE)
        words.append(pack_int4(codes.flatten(1), group))
        scales.append(scale)
    return torch.cat(words), torch.cat(scales)


INT4_CAPABILITY = (8, 0)
MISSING = "torchao is not installed, whose products of quantised weights run here; pip install 'caramba[quantise]'"


def _is_installed() -> bool:
    return importlib.util.find_spec("torchao") is not None


def load_torchao() -> ModuleType:
    """Return `torchao.quantization`.

    Raises:
        KernelUnavailable: torchao is not installed.
    """
    if not _is_installed():
        raise KernelUnavailable(f"weights: {MISSING}")
    # Its start tells of extensions for other Python and CUDA builds, none of which are used here.
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        return importlib.import_module("torchao.quantization")
    finally:
        logging.disable(before)


def format_refusal(form: WeightFormat, device: torch.device) -> str | None:
    """Return why weights of a format cannot run on a device, None where they can."""
    if not _is_installed():
        return f"weights={form}: {MISSING}"
    if device.type not in ("cpu", "cuda"):
        return f"weights={form}: torchao has no kernel for {device.type}; use device=cpu or cuda, or leave it out"
    return None


def refuse_packed_int4(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why torchao's packed int4 GEMM cannot run on a device with activations of a dtype, or None.

    Layers split over ranks use it.
    """
    if device.type != "cuda":
        return (
            f"weights=int4: torchao's packed 4-bit product of a shared layer needs a CUDA device, the model is on "
            f"{device.type}; use weights=int8"
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < INT4_CAPABILITY:
        return f"weights=int4: needs compute capability 8.0, this device has {'.'.join(map(str, capability))}; use int8"
    if dtype is not torch.bfloat16:
        return (
            f"weights=int4: the 4-bit product takes bfloat16, the model is {str(dtype).removeprefix('torch.')}; "
            "use --dtype bf16"
        )
    return None


MOST, MOST_REDUCED = 127, 63
"""Largest code; on CPUs that add pairs of products in 16 bits half of it, so that no pair overflows."""
FEWEST_ROWS = 32
"""CUDA's 8-bit product takes more than 16 rows; fewer are filled up with zeros."""
TINY = 1e-12


class DynamicLinear(nn.Module):
    """Linear map of codes: y_to = s_t s_o sum_j q_tj w_oj + b_o, with q_tj = round(x_tj / (c_j s_t)).

    Every token has a symmetric scale of its own, s_t = max_j |x_tj / c_j| / 127, and every output channel one, s_o;
    `smoothing` c moves ranges from activations to weights, whose codes hold w_oj c_j. Sums are exact, in int32.

    Shape: codes int8 [N, K], scale fp32 [N], smoothing [K] or None; forward [..., K] to [..., N] in its input's dtype.

    Reference: Xiao et al., 2022, arXiv:2211.10438.
    """

    def __init__(
        self,
        codes: Tensor,
        scale: Tensor,
        smoothing: Tensor | None,
        bias: Tensor | None,
        *,
        reduce: Callable[[Tensor], Tensor] | None = None,
        is_reduced: bool = False,
    ) -> None:
        super().__init__()
        self.register_buffer("codes", codes)
        self.register_buffer("scale", scale)
        self.register_buffer("inverse", None if smoothing is None else 1 / smoothing)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.reduce, self.most = reduce, MOST_REDUCED if is_reduced else MOST

    codes: Tensor
    scale: Tensor
    inverse: Tensor | None

    def forward(self, input: Tensor, token_weight: Tensor | None = None) -> Tensor:
        x = input if self.reduce is None else self.reduce(input)
        rows = upcast(x).flatten(0, -2)
        rows = rows if self.inverse is None else rows * self.inverse
        step = rows.abs().amax(-1, keepdim=True).clamp(min=TINY) / self.most
        q = (rows / step).round().to(torch.int8)
        n_rows = len(q)
        if q.is_cuda and n_rows < FEWEST_ROWS:
            q = F.pad(q, (0, 0, 0, FEWEST_ROWS - n_rows))
        sums = torch.ops.aten._int_mm(q, self.codes.t())[:n_rows]
        y = sums * step * self.scale
        y = y if self.bias is None else y + self.bias
        return y.to(x.dtype).unflatten(0, x.shape[:-1])


TILE = 8
"""Both widths of an 8-bit product on CUDA are multiples of this."""
GATE = "gate_dynamic"
CODED = (nn.Linear, LinearLayer, Head, TiedHead)
"""Layers in whose place one of codes can stand. Others have a forward of their own, such as those that ranks share, and
read torchao's tensor as their weight."""
SMALLEST = 1e-5


@dataclass(frozen=True)
class QuantisedWeights:
    """What was quantised. Bytes are those of all parameters and buffers, counted from storage.

    Attributes:
        layers: qualified names of the layers whose weights are codes.
        kept: those that stay as they were, with the reason.
        calibration_tokens: tokens that the ranges of `int8_dynamic` come from.
    """

    form: WeightFormat
    layers: tuple[str, ...]
    kept: dict[str, str]
    bytes_before: int
    bytes_after: int
    calibration_tokens: int = 0

    @property
    def summary(self) -> str:
        """One line about the result, for a log."""
        kept = "".join(f"; {n} kept ({why})" for why, n in Counter(self.kept.values()).items())
        sizes = f"{self.bytes_before / 1e6:.2f} to {self.bytes_after / 1e6:.2f} MB"
        return f"weights {self.form.value}: {len(self.layers)} linear layers, {sizes}{kept}"

    def record(self) -> dict[str, Any]:
        """Return it for a JSON file; `kept` counts layers by reason."""
        return {
            "weights": self.form.value,
            "layers": len(self.layers),
            "kept": dict(Counter(self.kept.values())),
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "calibration_tokens": self.calibration_tokens,
        }


@dataclass(frozen=True)
class Candidates:
    """Linear layers by qualified name, those to quantise and why the others are not."""

    layers: dict[str, nn.Module] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)


class QuantisedTiedHead(TiedHead):
    """A tied head with a quantised copy of the embedding, which is still used for lookups.

    Shape: hidden [..., M] and the embedding [V, M], which is not read, to logits [..., V].
    """

    def __init__(self, token_weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(token_weight.detach(), requires_grad=False)

    def forward(self, input: Tensor, token_weight: Tensor) -> Tensor:
        return F.linear(input, self.weight)


def linear_layers(model: Model, form: WeightFormat, device: torch.device, *, with_head: bool = False) -> Candidates:
    """Return the linear layers of a model's topology: projections of attention, SwiGLU, LinearLayer; the head if asked.

    The per-head maps of the latent layout are no linear layers and stay as they are, as do norms and embeddings.
    """
    found = Candidates()
    inside_first = {
        name
        for parent, module in model.named_modules()
        if isinstance(module, FirstTokens)
        for name in (f"{parent}.k", f"{parent}.v")
    }
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or name == HEAD:
            continue
        if name in inside_first:
            found.kept[name] = "of the first tokens alone, most steps give it none"
        elif name.rpartition(".")[2] == GATE:
            found.kept[name] = "a gate, one output per head"
        elif reason := _unfit(module, form, device):
            found.kept[name] = reason
        else:
            found.layers[name] = module
    if with_head:
        table = model.head if isinstance(model.head, nn.Linear) else model.embedder.token
        has_own = isinstance(model.head, Head | TiedHead)
        reason = _unfit(table, form, device) if has_own else "it is of codes already"
        if reason:
            found.kept[HEAD] = reason
        else:
            found.layers[HEAD] = model.head
    return found


@torch.no_grad()
def quantise_weights(
    model: Model, form: WeightFormat, *, with_head: bool = False, ranges: Ranges | None = None
) -> QuantisedWeights:
    """Swap weights for codes in place; the model is for inference from then on.

    `int8`: w = s_o q, symmetric, one fp32 scale per output channel. `int4`: w = s q + z, q of 0 to 15 with a scale and
    a zero per group of inputs, bfloat16. `int8_dynamic`: activations are symmetric 8-bit codes too, one scale per
    token; with `ranges` r of their channels, x_j / c_j and w_ij c_j take the place of x_j and w_ij, c_j =
    sqrt(r_j / max_i |w_ij|).

    Raises:
        KernelUnavailable: torchao is missing, or has no kernel for the format on the model's device; in `int4` for
            layers that ranks share, whose products are torchao's.
        ConfigError: the model has no layer that can be quantised, or `int8_dynamic` without ranges.

    Reference: Dettmers et al., 2022, arXiv:2208.07339 (codes by row); Xiao et al., 2022, arXiv:2211.10438 (moving
    ranges into weights; theirs are maxima).
    """
    weight = model.embedder.token.weight
    reason = format_refusal(form, weight.device)
    if reason is not None:
        raise KernelUnavailable(reason)
    torchao = load_torchao()
    if form is WeightFormat.INT8_DYNAMIC and ranges is None:
        raise ConfigError("weights=int8_dynamic: needs the ranges of activations; name a text to calibrate on")
    found = linear_layers(model, form, weight.device, with_head=with_head)
    if not found.layers:
        why = "; ".join(f"{name}: {reason}" for name, reason in list(found.kept.items())[:3]) or "it has none"
        raise ConfigError(f"weights={form}: no linear layer of this model can be quantised ({why})")
    if form is WeightFormat.INT4:
        for name, layer in found.layers.items():
            reason = None if type(layer) in CODED else refuse_packed_int4(weight.device, weight_of(layer).dtype)
            if reason is not None:
                raise KernelUnavailable(f"{reason} ({name} is a {type(layer).__name__})")
    before = model_bytes(model)
    for name, layer in found.layers.items():
        if form is WeightFormat.INT8_DYNAMIC:
            assert ranges is not None
            own = weight if isinstance(layer, TiedHead) else weight_of(layer)
            model.set_submodule(name, _dynamic(layer, own, ranges.of[name]))
            continue
        own = weight if isinstance(layer, TiedHead) else weight_of(layer)
        if form is WeightFormat.INT4 and type(layer) in CODED:
            model.set_submodule(name, _grouped(layer, own))
            continue
        codes = _codes(torchao, own, form)
        if form is WeightFormat.INT8 and type(layer) in CODED:
            model.set_submodule(name, _coded(layer, codes))
            continue
        if isinstance(layer, TiedHead):
            layer = model.head = QuantisedTiedHead(weight)
        layer.weight = nn.Parameter(codes, requires_grad=False)
    tokens = 0 if ranges is None or form is not WeightFormat.INT8_DYNAMIC else ranges.tokens
    return QuantisedWeights(form, tuple(found.layers), found.kept, before, model_bytes(model), tokens)


def weight_of(layer: nn.Module) -> Tensor:
    """Return a layer's weight [N, K]."""
    return layer.get_parameter("weight")


def _unfit(layer: nn.Module, form: WeightFormat, device: torch.device) -> str | None:
    """Return why a layer's weight [N, K] cannot be quantised to a format, or None."""
    n_out, n_in = weight_of(layer).shape
    if form is WeightFormat.INT4 and n_in % GROUP_SIZES[-1]:
        return f"{n_in} inputs, not a multiple of {GROUP_SIZES[-1]}"
    if form is WeightFormat.INT8_DYNAMIC and device.type == "cuda" and (n_in % TILE or n_out % TILE):
        return f"{n_out} x {n_in}, not multiples of {TILE}"
    return None


def _codes(torchao: Any, weight: Tensor, form: WeightFormat) -> Tensor:
    """Return torchao's quantised tensor of a weight [N, K]."""
    carrier = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    carrier.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if form is WeightFormat.INT8:
        config = torchao.Int8WeightOnlyConfig(set_inductor_config=False)
    else:
        config = torchao.Int4WeightOnlyConfig(
            group_size=group_of(weight.shape[1]),
            int4_packing_format="tile_packed_to_4d",
            set_inductor_config=False,
        )
    torchao.quantize_(carrier, config)
    return carrier.weight


def _coded(layer: nn.Module, codes: Any) -> QuantizedLinear:
    """Return a layer of torchao's codes.

    Raises:
        KernelUnavailable: a torchao whose codes are not symmetric.
    """
    zeros = getattr(codes, "zero_point", None)
    if zeros is not None and bool(zeros.any()):
        raise KernelUnavailable("weights=int8: this torchao makes codes with zero points; expected symmetric ones")
    return QuantizedLinear(codes.qdata, codes.scale.flatten().float(), getattr(layer, "bias", None), _reduce(layer))


def _grouped(layer: nn.Module, weight: Tensor) -> QuantizedLinear:
    """Return a layer of codes of 4 bits in place of one with a weight [N, K]."""
    group = group_of(weight.shape[1])
    assert group is not None
    return QuantizedLinear(*quantize_int4(weight, group), getattr(layer, "bias", None), _reduce(layer))


def _reduce(layer: nn.Module) -> Callable[[Tensor], Tensor] | None:
    return layer.reduce if isinstance(layer, LinearLayer) else None


def _dynamic(layer: nn.Module, weight: Tensor, range_of: Tensor) -> DynamicLinear:
    """Return a layer of codes in place of one with a weight [N, K], after moving ranges into the weight."""
    from torchao.quantization import Int8Tensor, PerRow
    from torchao.utils import should_reduce_range

    wide = upcast(weight.detach())
    moved = (range_of / wide.abs().amax(0).clamp(min=SMALLEST)).sqrt()
    # A channel that was silent on the text, or has no weight, keeps its scale.
    moved = torch.where((range_of > SMALLEST) & (moved > SMALLEST), moved, 1.0)
    is_reduced = should_reduce_range(weight.device)
    codes = Int8Tensor.from_hp(wide * moved, PerRow(), reduce_range=is_reduced)
    return DynamicLinear(
        codes.qdata,
        codes.scale.flatten(),
        moved,
        getattr(layer, "bias", None),
        reduce=_reduce(layer),
        is_reduced=is_reduced,
    )
