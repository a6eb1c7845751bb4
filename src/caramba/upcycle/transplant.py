"""Teacher to student: copy what both have, initialise each converted attention, report every weight."""

from __future__ import annotations

from collections.abc import Callable

import torch

from caramba.config.model import SurgeryConfig
from caramba.errors import ConfigError
from caramba.layer import AttentionLayer
from caramba.model import Model
from caramba.result import TransplantReport
from caramba.upcycle.weight_svd import weight_svd

Method = Callable[[AttentionLayer, AttentionLayer], float]


def keep_random(teacher: AttentionLayer, student: AttentionLayer) -> float:
    """Leave the student's attention at its random initialisation: the control that shows what surgery is worth."""
    return 0.0


METHODS: dict[str, Method] = {"weight_svd": weight_svd, "random": keep_random}


def pair_attention(teacher: Model, student: Model) -> list[tuple[str, AttentionLayer, AttentionLayer]]:
    """Pair the attention layers of both models in execution order as (student name, teacher layer, student layer).

    Raises:
        ConfigError: the models have different numbers of attention layers.
    """
    theirs, ours = teacher.attention_layers(), student.attention_layers()
    if len(theirs) != len(ours):
        raise ConfigError(
            f"model.topology: the student has {len(ours)} attention layers, its teacher {len(theirs)}; make them equal"
        )
    return [(name, source, target) for (_, source), (name, target) in zip(theirs, ours, strict=True)]


@torch.no_grad()
def transplant(teacher: Model, student: Model, surgery: SurgeryConfig) -> TransplantReport:
    """Initialise `student` from `teacher` in place and account for every weight of both.

    Weights outside converted attention are copied by name. An attention layer whose config equals its teacher's is
    copied too; the others go through `surgery.method`.

    Raises:
        ConfigError: a weight of the student has no counterpart, or the models do not pair.
    """
    converted: dict[str, tuple[AttentionLayer, AttentionLayer]] = {}
    teacher_names = {id(layer): name for name, layer in teacher.attention_layers()}
    taken: set[str] = set()
    for name, source, target in pair_attention(teacher, student):
        if source.config != target.config:
            converted[name] = (source, target)
            taken.add(teacher_names[id(source)] + ".")
    theirs, ours = teacher.state_dict(), student.state_dict()
    copied, initialised = [], []
    for key, tensor in ours.items():
        if any(key.startswith(name + ".") for name in converted):
            initialised.append(key)
            continue
        source_tensor = theirs.get(key)
        if source_tensor is None or source_tensor.shape != tensor.shape:
            found = "nothing of that name" if source_tensor is None else f"shape {tuple(source_tensor.shape)}"
            raise ConfigError(
                f"model: the student's {key} has shape {tuple(tensor.shape)}, its teacher has {found}; "
                "outside attention a student's layers are its teacher's"
            )
        tensor.copy_(source_tensor)
        copied.append(key)
    energies = [METHODS[surgery.method](source, target) for source, target in converted.values()]
    unmapped = [
        key for key in theirs if key not in copied and not any(key.startswith(prefix) for prefix in taken)
    ]
    if surgery.method == "random":
        unmapped += [key for key in theirs if any(key.startswith(prefix) for prefix in taken)]
    return TransplantReport(
        method=surgery.method,
        copied=tuple(copied),
        initialised=tuple(initialised),
        unmapped_teacher=tuple(unmapped),
        energy_kept=tuple(energies),
    )
