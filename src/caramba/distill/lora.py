"""Low-rank updates of linear layers, named as in peft, trained in place of the layers and merged into them."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from caramba.errors import ConfigError
from caramba.model import Model

ADAPTER = "default"
ALL_LINEAR = "all-linear"


class LoraLinear(nn.Module):
    """A frozen linear layer plus a trained update of rank r: y = W x + b + (alpha / r) B A dropout(x).

    A starts at Kaiming-uniform, B at zero, so that the layer starts as it was. `weight` is W + (alpha / r) B A, for
    code that reads weights. State names are peft's: base_layer, lora_A.default, lora_B.default.

    Shape: [..., d_in] to [..., d_out]; A [r, d_in], B [d_out, r].

    Reference: Hu et al., 2021, arXiv:2106.09685.
    """

    def __init__(self, base: nn.Linear, rank: int, alpha: float, dropout: float) -> None:
        super().__init__()
        self.base_layer = base
        self.scaling = alpha / rank
        place = {"device": base.weight.device, "dtype": base.weight.dtype}
        down = nn.Linear(base.in_features, rank, bias=False, **place)
        up = nn.Linear(rank, base.out_features, bias=False, **place)
        nn.init.kaiming_uniform_(down.weight, a=math.sqrt(5))
        nn.init.zeros_(up.weight)
        self.lora_A, self.lora_B = nn.ModuleDict({ADAPTER: down}), nn.ModuleDict({ADAPTER: up})
        self.dropout = nn.Dropout(dropout)

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight + self.scaling * self._factor("B") @ self._factor("A")

    @property
    def bias(self) -> Tensor | None:
        return self.base_layer.bias

    def forward(self, x: Tensor) -> Tensor:
        update = F.linear(F.linear(self.dropout(x), self._factor("A")), self._factor("B"))
        return self.base_layer(x) + self.scaling * update

    def _factor(self, which: str) -> Tensor:
        weight = getattr(self, f"lora_{which}")[ADAPTER].weight
        assert isinstance(weight, Tensor)
        return weight

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """Return the plain layer with the update added to its weight."""
        self.base_layer.weight.copy_(self.weight)
        return self.base_layer


class Lora:
    """The low-rank updates of one model, from when they are attached until they are merged."""

    def __init__(
        self,
        model: Model,
        *,
        rank: int,
        alpha: float,
        targets: Sequence[str] = (ALL_LINEAR,),
        dropout: float = 0.0,
    ) -> None:
        """Replace the linear layers that `targets` name (last parts of names; `all-linear`: all but the head).

        Raises:
            ConfigError: a target that names no linear layer of the model.
        """
        self.model = model
        layers = {
            name: module
            for name, module in model.topology.named_modules(prefix="topology")
            if type(module) is nn.Linear  # not a LinearLayer, which is a node and takes a context
        }
        known = sorted({name.rsplit(".", 1)[-1] for name in layers})
        for target in targets:
            if target != ALL_LINEAR and target not in known:
                raise ConfigError(
                    f"lora.targets: {target!r} names no linear layer of the model; "
                    f"names: {', '.join(known)}, {ALL_LINEAR}"
                )
        self.names = [name for name in layers if ALL_LINEAR in targets or name.rsplit(".", 1)[-1] in targets]
        for name in self.names:
            self._replace(name, LoraLinear(layers[name], rank, alpha, dropout))

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return the updates' parameters by name."""
        return [(name, value) for name, value in self.model.named_parameters() if ".lora_" in name]

    def merge(self) -> None:
        """Add every update to its layer and put the plain layer back."""
        for name in self.names:
            layer = self.model.get_submodule(name)
            assert isinstance(layer, LoraLinear)
            self._replace(name, layer.merged())
        self.names = []

    def _replace(self, name: str, module: nn.Module) -> None:
        parent, _, child = name.rpartition(".")
        setattr(self.model.get_submodule(parent), child, module)
