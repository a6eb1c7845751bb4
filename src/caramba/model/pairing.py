"""The attention layers of a teacher and its student, in pairs."""

from __future__ import annotations

from caramba.errors import ConfigError
from caramba.layer import AttentionLayer
from caramba.model.model import Model


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
