"""The method `dba`: activation-aware, function-preserving surgery of one layer, in both layouts."""

from torch import Tensor

from caramba.config.layer import AttentionLayerConfig
from caramba.layer import AttentionLayer
from caramba.layer.projection import Projection
from caramba.result import TransplantedLayer
from caramba.surgery.algebra import Geometry, Grid, select_geometry
from caramba.surgery.collect import LayerStatistics, standard_projection
from caramba.surgery.held_out import EvalWindows, latent_output, per_head_output, sink_token
from caramba.surgery.latent import LatentMaps, latent_maps, latent_state
from caramba.surgery.per_head import per_head_maps, per_head_state

BETA_STEPS = range(-3, 4)


def convert(
    teacher: AttentionLayer,
    student: AttentionLayer,
    statistics: LayerStatistics,
    held_out: EvalWindows | None,
) -> TransplantedLayer:
    """Initialise a decoupled student layer from its teacher's statistics, in place, and say what it kept.

    With `held_out` the latent layout searches beta, the weight of values against keys, on the block output's error.
    """
    config = student.config
    if config.layout == "latent":
        assert config.geo_dim is not None
        assert config.sem_dim is not None
        # Statistics of weights alone know no attention: rotations are then judged by their energy.
        frequencies = grid_frequencies(student)
        geometry = split_keys(teacher, statistics, config.geo_dim, turns=held_out is not None, frequencies=frequencies)
        n_first = config.exact_first_tokens
        norm_eps = config.latent_norm_eps if config.mla else None
        maps = search_beta(
            teacher,
            statistics,
            geometry,
            config.sem_dim,
            held_out,
            n_first,
            norm_eps=norm_eps,
            frequencies=frequencies,
        )
        state = latent_state(
            teacher,
            maps,
            rotary_factor(student.projection),
            has_bias=bool(config.bias),
            keeps_first=n_first > 0,
        )
        error = None if held_out is None else held_out.relative(latent_output(held_out, maps, n_first))
        kept, beta, pairs = maps.energy, maps.beta, maps.geometry.pairs
    else:
        maps = per_head_maps(
            teacher,
            statistics,
            statistics.queries,
            widths_per_head(config),
            centres_values=student.out.bias is not None,
        )
        state = per_head_state(
            teacher,
            maps,
            rotary_factor(student.projection),
            has_bias=bool(config.bias),
            has_out_bias=student.out.bias is not None,
        )
        error = None if held_out is None else held_out.relative(per_head_output(held_out, maps))
        kept, beta, pairs = sum(maps.energy) / 2, None, maps.pairs
    load_layer(student, state)
    return describe(config, teacher.config, energy_kept=kept, error=error, beta=beta, frequencies=len(pairs.unique()))


def split_keys(
    teacher: AttentionLayer,
    statistics: LayerStatistics,
    geo_dim: int,
    *,
    turns: bool = True,
    frequencies: Tensor | None = None,
) -> Geometry:
    """Return the latent layout's split of the keys into `geo_dim` rotating features and a residual.

    With `frequencies` each feature pair is the component of the teacher's that its frequency serves best.
    """
    grid = None
    if frequencies is not None:
        rope = standard_projection(teacher).rope
        assert rope is not None
        grid = Grid(frequencies[0].double(), rope.inv_freq[0].double())
    return select_geometry(statistics, statistics.queries, geo_dim, teacher.dims.n_kv_heads, turns=turns, grid=grid)


def grid_frequencies(student: AttentionLayer) -> Tensor | None:
    """Return the frequencies [1, geo_dim / 2] that a student of multi-head latent attention is bound to, else None."""
    rope = student.projection.rope
    return rope.inv_freq if student.config.mla and rope is not None else None


def search_beta(
    teacher: AttentionLayer,
    statistics: LayerStatistics,
    geometry: Geometry,
    rank: int,
    held_out: EvalWindows | None,
    first_tokens: int = 0,
    *,
    norm_eps: float | None = None,
    frequencies: Tensor | None = None,
) -> LatentMaps:
    """Return the latent maps with the best beta = 2^n, walking down the held-out block error from beta = 1.

    The block has `first_tokens` that stay exact; `norm_eps` and `frequencies` as in `latent_maps`. Without exact first
    tokens the maps count the attention sink where that lowers the error.
    """

    def at(step: int, sink: Tensor | None = None) -> tuple[float, LatentMaps]:
        maps = latent_maps(
            teacher, statistics, geometry, statistics.queries, rank, 2.0**step, norm_eps, frequencies, sink
        )
        if held_out is None:
            return 0.0, maps
        return held_out.relative(latent_output(held_out, maps, first_tokens)), maps

    best, sink = at(0), None
    if held_out is None:
        return best[1]
    if first_tokens == 0:
        with_sink = at(0, sink_token(held_out))
        if with_sink[0] < best[0]:
            best, sink = with_sink, sink_token(held_out)
    for direction in (1, -1):
        step = direction
        while step in BETA_STEPS:
            tried = at(step, sink)
            if tried[0] >= best[0]:
                break
            best, step = tried, step + direction
        if step != direction:  # this direction was downhill
            break
    return best[1]


def widths_per_head(config: AttentionLayerConfig) -> tuple[int, int, int]:
    """Return the semantic, geometric and value widths of one key/value head."""
    width = {name: size for name, _, size in config.dims().streams}
    return width["k_sem"], width["k_geo"], width["v"]


def rotary_factor(projection: Projection) -> float:
    """Return what the layer's rotary table multiplies queries and keys by."""
    return 1.0 if projection.rope is None else projection.rope.attention_factor


def load_layer(layer: AttentionLayer, state: dict[str, Tensor]) -> None:
    """Copy tensors into a layer by name; what is not named (gates, temperatures) goes to its neutral value.

    Raises:
        KeyError: a name that the layer does not have.
    """
    for module in (layer, layer.projection):
        module.reset_parameters()
    own = layer.state_dict()
    for name, tensor in state.items():
        own[name].copy_(tensor.reshape(own[name].shape))


def describe(config: AttentionLayerConfig, teacher: AttentionLayerConfig, **found: object) -> TransplantedLayer:
    """Return the report of one layer, still without its name."""
    streams = {name: heads * width for name, heads, width in config.dims().streams}
    return TransplantedLayer(
        name="",
        layout=config.layout if config.mode == "decoupled" else str(config.mode),
        sem_dim=streams.get("k_sem", streams.get("c", 0)),
        geo_dim=streams.get("k_geo", streams.get("k", 0)),
        v_dim=streams.get("v", 0),
        cached=config.dims().cached,
        teacher_cached=teacher.dims().cached,
        **found,  # pyright: ignore[reportArgumentType]
    )
