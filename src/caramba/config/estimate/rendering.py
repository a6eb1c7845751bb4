"""A plan for people: a tree of each model, and tables of cache bytes, stages and memory, in 110 columns."""

from __future__ import annotations

import io
from fractions import Fraction

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from caramba.config.cost import Cost
from caramba.config.estimate.fit import FitResult
from caramba.config.estimate.model import ModelCost
from caramba.config.estimate.planning import ExperimentPlan, StagePlan
from caramba.config.estimate.units import format_bytes, format_count, format_flops, format_ratio, short_count
from caramba.config.kvcache import KVCacheKind

WIDTH = 10_000
"""Columns of plain text: no table is cut, and no line wrapped."""


def render(plan: ExperimentPlan) -> Group:
    """Return the plan as rich renderables; a narrow console wraps the cells of a table."""
    parts: list[RenderableType] = [Text(f"Plan of {plan.name}", style="bold"), Text()]
    if plan.fit is not None:
        parts += [_fit_table(plan.fit)]
    if plan.teacher is not None:
        parts += [*_model(plan.teacher, "Teacher", plan.context, plan.teacher_source), Text()]
    elif plan.teacher_source is not None:
        parts += [Text(f"Teacher: described by its checkpoint, {plan.teacher_source}"), Text()]
    parts += [*_model(plan.student, "Student" if plan.upcycles else "Model", plan.context, None), Text()]
    parts += [_cache_table(plan)]
    if plan.stages:
        parts += [_stage_table(plan.stages), _memory_table(plan.stages)]
        named = zip(_names(plan.stages), plan.stages, strict=True)
        parts += [Text(f"  {name}: {stage.note}", style="yellow") for name, stage in named if stage.note]
    else:
        parts += [Text("No training stages.")]
    parts += [Text(f"Then: {', '.join(plan.benchmarks)}")] if plan.benchmarks else []
    parts += [Text(f"Note: {note}", style="yellow") for note in plan.notes]
    return Group(*parts)


def command_line(plan: ExperimentPlan) -> str:
    """Return the line with the command that runs the plan, never wrapped; empty without a command."""
    return f"Run it: {plan.command}\n" if plan.command else ""


def render_text(plan: ExperimentPlan) -> str:
    """Return the plan as plain text, without control sequences."""
    buffer = io.StringIO()
    Console(file=buffer, width=WIDTH, color_system=None, force_terminal=False, legacy_windows=False).print(render(plan))
    lines = "".join(f"{line.rstrip()}\n" for line in buffer.getvalue().splitlines())
    return lines + command_line(plan)


def _model(model: ModelCost, title: str, context: int, checkpoint: str | None) -> list[RenderableType]:
    origin = f", from {checkpoint}" if checkpoint else ""
    head = Text.assemble((f"{title} ", "bold"), f"{model.name}: {format_count(model.params)} parameters{origin}")
    tree = Tree(head, guide_style="dim")
    positions = f" + {model.max_positions} positions" if model.max_positions else ""
    tree.add(
        _line(
            "embedder",
            f"{model.vocab_size:,} tokens{positions}",
            f"[B,T,{model.d_model}]",
            model.embedder_params,
        )
    )
    _branch(tree, model.topology)
    tree.add(
        _line(
            "head",
            "tied to the embedder" if model.tied else "",
            f"[B,T,{model.vocab_size}]",
            model.head_params,
        )
    )
    parts = ", ".join(f"{part} {short_count(count)}" for part, count in model.params_per_part.items())
    forward, training = model.flops_per_token(context), model.training_flops_per_token(context)
    least = "at least " if model.undeclared("flops") else ""
    work = f"{least}{format_flops(forward)} forward, {format_flops(training)} training"
    decode = model.decode_flops_per_token(context)
    if decode != forward:
        work += f", {format_flops(decode)} decoding"
    sequence = format_bytes(model.topology.kv_bytes(KVCacheKind.FP16, context))
    return [
        tree,
        Text(f"  parameters: {parts}"),
        Text(f"  per token at {context}: {work}"),
        Text(f"  cache of one sequence of {context} tokens: {sequence} in fp16"),
    ]


def _branch(tree: Tree, cost: Cost) -> None:
    label = cost.label
    if cost.repeat > 1:
        times = f"x{cost.repeat}" + (", shared weights" if cost.shared else "")
        label = f"{label} {times}".strip()
    shape = str(cost.width_in) if cost.width_in == cost.width_out else f"{cost.width_in} -> {cost.width_out}"
    node = tree.add(_line(cost.type, label, shape, cost.params))
    for child in cost.children:
        _branch(node, child)


def _line(name: str, label: str, shape: str, params: int) -> Text:
    count = f"  {short_count(params)}" if params else ""
    return Text.assemble((name, "cyan"), f" {label}" if label else "", (f"  {shape}", "green"), (count, "dim"))


def _table(title: str, first: int, *columns: str) -> Table:
    """A table whose `first` columns are words, to the left, and the rest numbers, to the right."""
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < first else "right", overflow="fold")
    return table


def _fit_table(fit: FitResult) -> Table:
    table = _table(f"Fitted to {short_count(fit.target_params)} parameters", 4, "what", "from", "to", "why")
    for row in fit.rows:
        table.add_row(row.what, row.before, row.after, row.why)
    return table


def _cache_table(plan: ExperimentPlan) -> Table:
    """Bytes in full, as a paper quotes them; `smaller` compares within the format, `than fp16` with fp16."""
    title = "KV cache, bytes per token"
    if plan.teacher is None:
        table = _table(title, 1, "format", "per layer", f"all {len(plan.student.kv_layers)} layers")
        for row in plan.cache:
            table.add_row(str(row.kind), _per_layer(row.student_layers), _plain(row.student_total))
        return table
    columns = (
        *("teacher/layer", "teacher, all", "student/layer", "student, all", "student/teacher", "smaller"),
        *("than fp16",),
    )
    table = _table(title, 1, "format", *columns)
    full = plan.teacher.kv_bytes_per_token(KVCacheKind.FP16)
    for row in plan.cache:
        ratio = row.ratio
        table.add_row(
            str(row.kind),
            _per_layer(row.teacher_layers or ()),
            _plain(row.teacher_total or Fraction(0)),
            _per_layer(row.student_layers),
            _plain(row.student_total),
            f"{float(ratio):.4f}" if ratio is not None else "-",
            format_ratio(1 / ratio) if ratio else "-",
            format_ratio(full / row.student_total) if row.student_total else "-",
        )
    return table


def _per_layer(layers: tuple[Fraction, ...]) -> str:
    """One figure where all layers agree, and the range where they do not."""
    if not layers:
        return "-"
    low, high = min(layers), max(layers)
    return _plain(low) if low == high else f"{_plain(low)} to {_plain(high)}"


def _plain(value: Fraction) -> str:
    return f"{value.numerator:,}" if value.denominator == 1 else f"{float(value):,.2f}"


def _names(stages: tuple[StagePlan, ...]) -> list[str]:
    """Each stage's id, after its group where there is more than one."""
    several = len({stage.group for stage in stages}) > 1
    return [f"{stage.group}/{stage.id}" if several else stage.id for stage in stages]


def _stage_table(stages: tuple[StagePlan, ...]) -> Table:
    table = _table("Stages", 4, "stage", "phase", "trains", "loss", "steps", "batch", "block", "tokens", "lr", "FLOPs")
    for name, stage in zip(_names(stages), stages, strict=True):
        batch = f"{stage.batch_size}" + (f" x {stage.accumulation}" if stage.accumulation > 1 else "")
        loss = stage.objective if stage.phase in ("pretrain", "global") else "block L1"
        trained = "" if stage.estimate is None else f" {short_count(stage.estimate.trained_params)}"
        table.add_row(
            name,
            stage.phase,
            f"{stage.trains}{trained}",
            loss,
            f"{stage.steps:,}",
            batch,
            str(stage.block_size),
            "-" if stage.tokens is None else short_count(stage.tokens),
            f"{stage.lr:g}",
            "-" if stage.total_flops is None else format_flops(stage.total_flops),
        )
    return table


def _memory_table(stages: tuple[StagePlan, ...]) -> Table:
    """The parts of each stage's memory; what ranks gather from each other is shown where there is any."""
    parts = {"weights": "weights", "gradients": "gradients", "optimizer": "optimiser"}
    parts["activations"] = "activations"
    if any(stage.estimate is not None and stage.estimate.memory.gathered_bytes for stage in stages):
        parts["gathered"] = "gathered"
    table = _table("Memory per device, estimated", 1, "stage", *parts.values(), "total")
    for name, stage in zip(_names(stages), stages, strict=True):
        if stage.estimate is None:
            table.add_row(name, *["-"] * (len(parts) + 1))
            continue
        memory, least = stage.estimate.memory, ">= " if stage.estimate.uncounted else ""
        sizes = [
            f"{least if part == 'activations' else ''}{format_bytes(getattr(memory, f'{part}_bytes'))}"
            for part in parts
        ]
        table.add_row(name, *sizes, f"{least}{format_bytes(memory.total_bytes)}")
    return table
