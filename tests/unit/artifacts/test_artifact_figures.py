"""What the figures show, read back from matplotlib's own objects before they become pixels."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from matplotlib.text import Text
from sample_run import STAGE_NLL, without

from caramba.artifacts import style, summary, write
from caramba.artifacts.metrics import collect
from caramba.result import RunResult
from caramba.runs.events import append_event


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Collect each figure as it is drawn, still made of axes and lines."""
    drawn: list[Any] = []
    real = style.to_picture

    def keep(figure: Any, labels: dict[str, str]) -> style.Picture:
        drawn.append(figure)
        return real(figure, labels)

    monkeypatch.setattr(summary, "to_picture", keep)
    return drawn


def drawn_labels(axis: Any) -> list[Any]:
    """Return the labels of the ticks within an axis; a locator has some outside too."""
    low, high = sorted(axis.get_view_interval())
    rest = 1e-9 * (high - low)
    return [tick.label1 for tick in axis.get_major_ticks() if low - rest <= tick.get_loc() <= high + rest]


def assert_no_overlap(figure: Any) -> None:
    """No two visible texts of a figure touch, and none leaves it."""
    renderer = figure.canvas.get_renderer()
    texts = [text for axes in figure.axes for text in (axes.title, axes._left_title, *axes.texts)]
    texts += [label for axes in figure.axes for label in (*drawn_labels(axes.xaxis), axes.xaxis.label)]
    boxes = [(t.get_text(), t.get_window_extent(renderer)) for t in texts if t.get_text() and t.get_visible()]
    for index, (text, box) in enumerate(boxes):
        assert figure.bbox.x0 - 1 <= box.x0, text
        assert box.x1 <= figure.bbox.x1 + 1, text
        for other_text, other in boxes[index + 1 :]:
            assert not box.overlaps(other), (text, other_text)
    for axes in figure.axes:
        ticks = [label for label in drawn_labels(axes.yaxis) if label.get_text()]
        seen = [label.get_window_extent(renderer) for label in ticks]
        assert all(not a.overlaps(b) for i, a in enumerate(seen) for b in seen[i + 1 :])


def test_summary_bars_are_the_metrics(result: RunResult, figures: list[Any]) -> None:
    metrics = collect(result)
    _, omitted = summary.draw_summary(result, metrics)
    (figure,) = figures
    perplexity, speed, cache = figure.axes
    order = ["teacher", "teacher_continued", "student_transplant", "student_blockwise", "student_global"]
    heights = [bar.get_height() for bar in perplexity.patches]
    assert heights == [metrics[f"perplexity.{model}.perplexity"].value for model in order]
    assert perplexity.get_yscale() == "log"
    assert [label.get_text().replace("\n", " ") for label in perplexity.get_xticklabels()][1] == "Teacher, continued"
    assert [bar.get_height() for bar in cache.patches] == [2048.0, 768.0]
    assert cache.get_title(loc="left") == "KV cache: student/teacher = 0.375"
    assert speed.get_title(loc="left") == "Throughput: student/teacher = 1.22"
    assert speed.get_xlabel() == "prompt 1,024, gen 32, batch 1\nbars: standard deviation"
    assert perplexity.get_xlabel().endswith("bars: standard error")
    assert len(perplexity.collections) == len(speed.collections) == 1  # error bars
    assert not cache.collections
    assert omitted == []
    assert_no_overlap(figure)


def test_perplexity_is_linear_from_zero_within_a_factor_of_ten(result: RunResult, figures: list[Any]) -> None:
    metrics = {key: metric for key, metric in collect(result).items() if "transplant" not in key}
    summary.draw_summary(result, metrics)
    assert figures[0].axes[0].get_yscale() == "linear"
    assert figures[0].axes[0].get_ylim()[0] == 0
    assert_no_overlap(figures[0])


def test_the_final_student_has_its_own_bar_when_no_stage_measured_it(result: RunResult) -> None:
    metrics = collect(result)
    stages = [model for model, _ in summary.stage_bars(metrics)]
    assert stages == [model for model in STAGE_NLL if model != "student"]
    metrics.pop("perplexity.student_global.perplexity")
    assert [model for model, _ in summary.stage_bars(metrics)][-1] == "student"


def test_latency_lines_and_percentile_bars(result: RunResult, figures: list[Any]) -> None:
    summary.draw_latency(result, collect(result))
    (figure,) = figures
    decode, prefill = figure.axes
    assert decode.get_legend_handles_labels()[1] == ["Teacher", "Student"]
    bars = decode.containers[1]
    assert list(bars.lines[0].get_xdata()) == [64, 128, 256, 512, 1024]
    rows = [row for row in result.benchmarks[1].rows if row["model"] == "student"]
    segments = bars.lines[2][0].get_segments()
    for segment, row in zip(segments, rows, strict=True):
        assert [point[1] for point in segment] == pytest.approx([row["tok_s_p20"], row["tok_s_p80"]])
    assert prefill.containers[0].lines[0].get_ydata()[0] == result.benchmarks[1].rows[0]["prefill_ms"]
    assert [label.get_text() for label in decode.get_xticklabels()][-1] == "1,024"
    assert_no_overlap(figure)


def test_latency_without_percentiles_has_no_bars(result: RunResult, figures: list[Any]) -> None:
    bare = dataclasses.replace(result.benchmarks[1], rows=())
    run = dataclasses.replace(result, benchmarks=(bare,))
    summary.draw_latency(run, collect(run))
    assert not figures[0].axes[0].containers
    assert len(figures[0].axes[0].get_lines()) == 2


def test_crowded_prompt_lengths_lose_labels_not_points(result: RunResult, figures: list[Any]) -> None:
    bench = result.benchmarks[1]
    one = bench.metrics[4]
    lengths = [*range(1000, 1100, 4), 60000]
    many = tuple(dataclasses.replace(one, key=f"latency.student.tok_s@prompt={n},gen=1,batch=1") for n in lengths)
    run = dataclasses.replace(result, benchmarks=(dataclasses.replace(bench, metrics=many, rows=()),))
    _, omitted = summary.draw_latency(run, collect(run))
    assert [item.name for item in omitted] == ["latency_vs_context.png: prefill_ms"]
    assert len(figures[0].axes[0].get_lines()[0].get_xdata()) == len(lengths)
    assert_no_overlap(figures[0])


def test_memory_lines_are_cache_bytes_and_weights_are_dashed(result: RunResult, figures: list[Any]) -> None:
    summary.draw_memory(result, collect(result))
    axes = figures[0].axes[0]
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert len(lines) == 8
    assert list(lines["Student, q8_0"].get_ydata()) == [384 * 1.0625 * seq for seq in (256, 1024, 4096)]
    weights = lines["Teacher, weights (4.05 MiB)"]
    assert weights.get_linestyle() == "--"
    assert weights.get_ydata()[0] == 4_251_648.0
    assert_no_overlap(figures[0])


def test_no_data_is_no_picture(result: RunResult) -> None:
    run = without(result, "memory", "boom")
    png, omitted = summary.draw_memory(run, collect(run))
    assert png is None
    assert omitted[0].reason == "memory benchmark failed: bad_memory: boom"


def test_bytes_read_well() -> None:
    assert [style.byte_text(value) for value in (0, 768, 1024, 1536, 4 * 2**20, 3 * 2**30, 5 * 2**40)] == [
        "0 B", "768 B", "1 KiB", "1.5 KiB", "4 MiB", "3 GiB", "5 TiB",
    ]  # fmt: skip


# What A4 leaves between its margins, where a page is printed; on a screen a figure keeps its size and scrolls.
PRINTED_INCHES = 7.27


def test_texts_of_every_figure_of_a_report_can_be_read_and_do_not_touch(
    result: RunResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    saved = style._saved
    monkeypatch.setattr(
        style,
        "_saved",
        lambda figure, form, metadata: drawn.append(figure) or saved(figure, form, metadata),
    )
    for phase in ("blockwise_0", "global_0"):
        for step in range(10, 400, 10):
            values = {"running_loss": 3 + 1 / step, "lr": 1e-3, "tokens_per_s": 5000.0, "val_loss": 3.0}
            append_event(tmp_path, "metrics", phase=phase, step=step, values=values)
    write(result, tmp_path)
    figures = list({id(figure): figure for figure in drawn}.values())
    assert len(figures) >= 5
    for figure in figures:
        scale = min(1.0, PRINTED_INCHES / figure.get_size_inches()[0])
        for text in figure.findobj(Text):
            if text.get_visible() and text.get_text().strip():
                pixels = text.get_fontsize() * 96 / 72 * scale
                assert pixels >= 9, (text.get_text(), pixels)
        assert_no_overlap(figure)
