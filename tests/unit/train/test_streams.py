from __future__ import annotations

import json
import math
import random
from pathlib import Path

import h5py
import pytest

from caramba.config.optional_deps import need_library
from caramba.errors import ConfigError
from caramba.launch.freeze import freeze
from caramba.runs import events
from caramba.runs.events import append_event, drop_metrics_after, metric_rows, read_events, start_phase
from caramba.train.display import Display, draw_curve
from caramba.train.loggers.events import EventLogger
from caramba.train.loggers.hdf5 import Hdf5Logger


def record(loggers: list, values: dict[str, float], step: int) -> None:
    for item in loggers:
        item.log_metrics(values, step=step)


def test_hdf5_is_readable_while_it_is_written(tmp_path: Path) -> None:
    loggers = [EventLogger(tmp_path, "a"), Hdf5Logger(tmp_path, "a")]
    record(loggers, {"loss": 2.0, "block/0": 1.0, "block/1": 2.0}, 10)
    with h5py.File(tmp_path / "metrics.h5", "r", libver="latest", swmr=True) as reader:
        loss, block = reader["a/loss"], reader["a/block"]
        assert loss["value"].tolist() == [2.0]
        record(loggers, {"loss": math.nan, "block/1": 3.0}, 20)
        loss.refresh()
        block.refresh()
        assert loss["step"].tolist() == [10, 20]
        assert math.isnan(loss["value"][1])
        assert block.attrs["layers"].tolist() == ["0", "1"]
        assert block["values"][0].tolist() == [1.0, 2.0]
        assert math.isnan(block["values"][1, 0])
        assert block["values"][1, 1] == 3.0
    record(loggers, {"loss": 1.0, "val_loss": 4.0, "block/2": 5.0}, 30)  # a metric and a layer that are new
    loggers[1].finalize("success")
    second = [EventLogger(tmp_path, "b"), Hdf5Logger(tmp_path, "b")]
    record(second, {"loss": 7.0}, 1)
    second[1].finalize("success")
    with h5py.File(tmp_path / "metrics.h5") as reader:
        assert reader["a/loss"]["step"].tolist() == [10, 20, 30]
        assert reader["a/val_loss"]["value"].tolist() == [4.0]
        assert reader["a/block"].attrs["layers"].tolist() == ["0", "1", "2"]
        assert reader["a/block"]["values"].shape == (3, 3)
        assert reader["b/loss"]["value"].tolist() == [7.0]


def test_rows_after_the_saved_state_are_dropped_and_nothing_else(tmp_path: Path) -> None:
    for phase, step in (("a", 10), ("a", 20), ("b", 20), ("a", 30)):
        append_event(tmp_path, "metrics", phase=phase, step=step, values={"loss": math.inf})
        append_event(tmp_path, "other", phase=phase, step=step)
    with open(tmp_path / "events.jsonl", "a") as file:
        file.write('{"time": 3, "ev')
    drop_metrics_after(tmp_path, "a", 10)
    append_event(tmp_path, "last")
    assert [(phase, step) for phase, step, _ in metric_rows(tmp_path)] == [("a", 10), ("b", 20)]
    assert all(values == {"loss": math.inf} for _, _, values in metric_rows(tmp_path))
    kinds = [event["event"] for event in read_events(tmp_path)]
    assert kinds.count("other") == 4
    assert kinds[-1] == "last", "an event after a line that was cut short is not lost"
    assert all(json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines())


def test_start_phase_returns_the_seconds_of_all_earlier_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trap: a resumed run reported the seconds since its last resume alone."""
    clock = random.Random(5)
    now = 1000.0
    monkeypatch.setattr(events.time, "time", lambda: now)
    expected, saved = 0.0, 0
    for process in range(40):
        append_event(tmp_path, "run_started")
        now += clock.uniform(1, 9)  # Imports and data are not of the phase.
        assert start_phase(tmp_path, "a", saved) == pytest.approx(expected, abs=0.01)
        drop_metrics_after(tmp_path, "a", saved)
        began = now
        for step in range(saved + 1, saved + clock.randint(1, 20)):
            now += clock.uniform(0.1, 2)
            append_event(tmp_path, "metrics", phase="a", step=step, values={"loss": 1.0})
            if clock.random() < 0.3:
                saved = step
        if process % 2:
            now += clock.uniform(0.1, 2)
            append_event(tmp_path, "run_interrupted")
        expected += now - began
        if not process % 2:
            with open(tmp_path / "events.jsonl", "a") as file:
                file.write('{"time": 3, "ev')  # Killed in the middle of a line.
        now += clock.uniform(10, 1000)
    append_event(tmp_path, "run_started")
    assert start_phase(tmp_path, "b", 0) == 0.0


def test_a_plot_needs_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    shown = Display("pretrain", 20, "plot")
    shown.open(0)
    shown.show(20, {"running_loss": 1.5, "tokens_per_s": 1200.4, "mfu": 0.471, "data_wait_share": 0.25})
    shown.close()
    line = capsys.readouterr().out
    assert line == (
        "pretrain  step 20  mean loss 1.5000  steps 20  tok/s 1,200  MFU 47.1%  data wait 25%  time 0:00:00  "
        "left 0:00:00\n"
    )
    drawn = draw_curve((10, 20, 30), (3.0, 2.0, 1.5), "pretrain loss", 60, 10).splitlines()
    assert len(drawn) == 10
    assert all(len(line) <= 60 for line in drawn)
    assert "pretrain loss" in drawn[0]
    assert any("\u2800" < mark <= "\u28ff" for line in drawn for mark in line)


def test_a_plain_line_has_held_out_loss_rate_and_times(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 500.0
    monkeypatch.setattr("caramba.train.display.time.monotonic", lambda: now)
    shown = Display("blockwise", 1000, "plain", work_after=2.0)
    shown.open(500)
    now += 50.0
    shown.show(550, {"running_loss": 1.5, "lr": 0.0003})
    shown.keep_held_out(1.25)
    now += 50.0
    shown.show(600, {"running_loss": 1.4, "lr": 0.0003})
    now += 70.0
    shown.show(610, {"running_loss": 1.4})
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "blockwise  step 600  mean loss 1.4000  steps 1,000  held-out loss 1.2500  lr 0.0003  time 0:01:40  "
        "left 0:06:40  all phases left 0:40:00",
        "blockwise  step 610  mean loss 1.4000  steps 1,000  held-out loss 1.2500  time 0:02:50  left 0:10:03  "
        "all phases left 1:01:34",
    ]


@pytest.mark.parametrize("width", [40, 79, 120, 200])
def test_a_bar_fits_its_terminal(width: int) -> None:
    import io

    from rich.console import Console as RichConsole
    from rich.progress import Progress

    from caramba.console import _columns  # pyright: ignore[reportPrivateUsage]

    screen = RichConsole(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
    bar = Progress(*_columns(True, width), console=screen)
    task = bar.add_task("blockwise", total=2000, loss="", rate="")
    bar.update(task, completed=1500, loss="mean loss 1.4000", rate="1,200 tok/s")
    screen.print(bar.get_renderable())
    text = screen.file.getvalue()  # type: ignore[attr-defined]
    assert "1500/2000" in text
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width


def test_instruments_are_settled_into_a_console_and_streams() -> None:
    words = ["model=tiny", "train=pretrain"]
    manifest = freeze([*words, "settings.instrument=[plot,hdf5,csv]", "logger.tensorboard=false"]).manifest
    assert manifest.settings.console == "plot"
    assert (manifest.logger.hdf5, manifest.logger.tensorboard, manifest.logger.wandb) == (True, False, False)
    with pytest.raises(ConfigError, match="instrument names plain and rich, and the console shows one of them"):
        freeze([*words, "settings.instrument=[plain,rich]"])
    with pytest.raises(ConfigError, match=r"settings.instrument: got 'hdf6'.*did you mean 'hdf5'"):
        freeze([*words, "settings.instrument=hdf6"])
    with pytest.raises(ConfigError, match=r"no_such: nothing_here is not installed; pip install 'caramba\[hdf5\]'"):
        need_library("nothing_here", "hdf5", "no_such")
