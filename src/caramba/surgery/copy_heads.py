"""The method `copy`: fewer key/value heads by mean-pooling the teacher's, the control at matched cache bytes."""

from __future__ import annotations

from torch import Tensor

from caramba.layer import AttentionLayer, StandardProjection
from caramba.result import TransplantedLayer
from caramba.surgery.dba import describe, load_layer


def copy_heads(teacher: AttentionLayer, student: AttentionLayer) -> TransplantedLayer:
    """Initialise a GQA layer of K' key/value heads: each is the mean of K / K' of its teacher's; the rest is copied.

    Reference: Ainslie et al., 2023, arXiv:2305.13245, section 2.1.
    """
    source = teacher.projection
    assert isinstance(source, StandardProjection)
    kv_heads = student.dims.n_kv_heads

    def pool_heads(value: Tensor) -> Tensor:
        heads = value.double().unflatten(0, (kv_heads, teacher.dims.n_kv_heads // kv_heads, -1))
        return heads.mean(1).flatten(0, 1)

    state = {
        name: pool_heads(value) if name.startswith(("projection.k.", "projection.v.")) else value
        for name, value in teacher.state_dict().items()
    }
    load_layer(student, state)
    return describe(student.config, teacher.config)
