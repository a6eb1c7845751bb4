"""The studio's page and index: what is read of good, half-written and hostile runs, and what the page may load."""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import math
import os
import re
import sqlite3
import struct
import threading
from pathlib import Path

import pytest

from caramba.artifacts.studio import page, record
from caramba.artifacts.studio.page import build_data, build_page, find
from caramba.artifacts.studio.record import Curve, read_record, thin
from caramba.artifacts.studio.server import folder_version, make_server
from caramba.cli import main
from caramba.runs.annotations import Annotations, read_annotations, write_annotations
from caramba.runs.events import append_event
from caramba.runs.files import lock
from caramba.runs.index import index_file
from caramba.runs.state import FINISHED, RUNNING

PERPLEXITY = "perplexity.student.perplexity"
HOSTILE = "</script><script>alert(1)</script>\u202e\n' \"&amp;"


def make_run(folder: Path, loss: float = 3.0, steps: int = 40, **manifest: object) -> Path:
    """Write what a finished run leaves, as plain files."""
    train = {
        "steps": steps,
        "batch_size": 2,
        "block_size": 8,
        "gradient_accumulation_steps": 1,
        "lr": loss / 1000,
    }
    plain = {
        "name": "demo",
        "groups": [{"name": "main", "runs": [{"id": "pre", "train": train}]}],
        **manifest,
    }
    (folder / "artifacts").mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps(plain))
    (folder / "overrides.txt").write_text(f"train.lr={loss / 1000}\nseed=1\n")
    append_event(folder, "phase_started", phase="pre", step=0, earlier_s=0.0)
    for step in range(10, steps + 1, 10):
        values = {"running_loss": loss + 1 / step, "block/0": 1.0}
        append_event(folder, "metrics", phase="pre", step=step, values=values)
    append_event(folder, "run_finished")
    metric = {"value": math.exp(loss), "unit": "", "std": None, "standard_error": 0.25, "n": 64}
    report = {"metrics": {PERPLEXITY: metric}, "phases": [], "labels": {}}
    (folder / "artifacts" / "report.json").write_text(json.dumps(report))
    (folder / "result.json").write_text(json.dumps({"status": "finished"}))
    return folder


@pytest.fixture(name="root")
def _root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for number in range(3):
        make_run(tmp_path / "runs" / "demo" / f"run-{number}", 3.0 + number)
    return tmp_path / "runs"


def data_of(text: str) -> dict:
    """Read the data of a page as a browser would."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def run_named(data: dict, name: str) -> dict:
    return next(run for run in data["runs"] if run["name"] == name)


def test_page_has_every_run_with_its_numbers_and_origin(root: Path) -> None:
    data = data_of(build_page(build_data(find(root))))
    assert [run["name"] for run in data["runs"]] == ["demo/run-0", "demo/run-1", "demo/run-2"]
    run = data["runs"][1]
    assert run["state"] == FINISHED
    assert run["metrics"] == [[0, math.exp(4.0), 0.25, 1, 64]]
    assert data["metrics"] == [[PERPLEXITY, "", 0]]
    assert run["last"]["loss"] == ["pre", 40, pytest.approx(4.025)]
    assert run["phases"] == [["pre", 40, 16, False]]
    assert run["sha"] == hashlib.sha256((root / "demo/run-1/manifest.json").read_bytes()).hexdigest()
    assert data["swept"] == ["train.lr"]
    differing = {
        data["keys"][key]: data["values"][value] for key, value in zip(*[iter(run["config"])] * 2, strict=True)
    }
    assert differing == {"groups[main].runs[pre].train.lr": "0.004"}, "keys that are equal in all runs are left out"
    assert data["curves"] == [["pre", "running_loss"]], "curves of single blocks are left out"
    packed = struct.unpack("<12f", base64.b64decode(run["packed"]))
    assert packed[:4] == (10, 20, 30, 40)
    assert packed[8:] == pytest.approx([4 + 1 / step for step in (10, 20, 30, 40)])


def test_page_may_load_nothing_and_runs_only_its_own_scripts(root: Path) -> None:
    text = build_page(build_data(find(root)))
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    assert policy[1].startswith("default-src 'none'")
    assert "connect-src 'none'" in policy[1]
    scripts = re.findall(r"<script(?: type=\"text/plain\" id=\"[^\"]*\")?>(.*?)</script>", text, re.DOTALL)
    assert len(scripts) == 4
    for script in scripts:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy[1]
    assert not re.search(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=", text)


def test_page_without_data_weighs_less_than_a_megabyte(root: Path) -> None:
    data = build_data(find(root)) | {"runs": []}
    assert len(build_page(data).encode()) < 1_000_000


def test_vendored_files_are_those_of_the_record() -> None:
    folder = Path(page.__file__).parent / "vendor"
    listed = json.loads((folder / "vendor.json").read_text())
    for entry in listed:
        assert hashlib.sha256((folder / entry["file"]).read_bytes()).hexdigest() == entry["sha256"], entry["file"]
        assert entry["license"] in ("MIT", "ISC")
    licences = {file.name for file in folder.glob("*.LICENSE")}
    assert licences == {"uPlot.LICENSE", "d3.LICENSE", "plot.LICENSE"}
    assert {file.name for file in folder.iterdir()} - licences == {
        "vendor.json",
        *(item["file"] for item in listed),
    }


def test_hostile_names_and_values_stay_data(root: Path) -> None:
    name = "<img src=x onerror=alert(1)>\n\u202e'\""
    run = make_run(root / "demo" / name, notes=HOSTILE)
    (run / "overrides.txt").write_text(f"group=</script>{HOSTILE}")
    write_annotations(run, Annotations([HOSTILE], HOSTILE))
    raw = root / "demo" / os.fsdecode(b"not-utf8-\xff")
    make_run(raw)
    text = build_page(build_data(find(root)))
    assert text.count("</script>") == 5, "no value ends a script"
    assert "<img" not in text
    data = data_of(text)
    assert run_named(data, f"demo/{name}")["tags"] == [HOSTILE]
    assert any(run["name"].startswith("demo/not-utf8-") for run in data["runs"])


def test_half_written_runs_are_shown_with_what_is_wrong(root: Path) -> None:
    torn, older, empty = (root / "demo" / name for name in ("torn", "older", "empty"))
    make_run(torn)
    (torn / "manifest.json").write_text('{"name": "de')
    (torn / "artifacts" / "report.json").write_text("")
    (torn / "annotations.json").write_text("[1]")
    with open(torn / "events.jsonl", "a") as file:
        file.write('{"time": 1.0, "event": "metrics", "pha')
    make_run(older)
    (older / "artifacts" / "report.json").write_text('{"metrics": {"a": 1}}')
    (older / "manifest.json").write_text('["a list"]')
    empty.mkdir()
    (empty / "manifest.json").write_bytes(b"")
    data = build_data(find(root))
    problems = {run["name"]: " ".join(run["problems"]) for run in data["runs"]}
    assert "manifest.json: cannot be read: JSONDecodeError" in problems["demo/torn"]
    assert "artifacts/report.json: cannot be read" in problems["demo/torn"]
    assert "annotations.json: expected tags (a list) and note (a text)" in problems["demo/torn"]
    assert "events.jsonl" not in problems["demo/torn"], "a line cut short by a killed writer is no fault"
    assert run_named(data, "demo/torn")["last"]["loss"][1] == 40
    assert "holds list, expected an object" in problems["demo/older"]
    assert "artifacts/report.json: cannot be read" in problems["demo/older"]
    assert run_named(data, "demo/empty")["state"] == "waiting"
    assert problems["demo/run-0"] == ""
    assert data_of(build_page(data)) == json.loads(json.dumps(data))


def test_damaged_line_of_events_is_named_and_metrics_are_kept(root: Path) -> None:
    run = root / "demo" / "run-0"
    lines = (run / "events.jsonl").read_text().splitlines()
    (run / "events.jsonl").write_text("\n".join([lines[0], '{"event": "metrics", x}', "garbage", *lines[1:]]))
    found = run_named(build_data(find(root)), "demo/run-0")
    assert "events.jsonl: cannot be read: JSONDecodeError" in found["problems"][0]
    assert found["metrics"]
    assert found["curves"] == []


def test_ten_megabytes_of_notes_are_cut(root: Path) -> None:
    run = make_run(root / "demo" / "wordy", notes="n" * 10_000_000)
    write_annotations(run, Annotations([], "m" * 10_000_000))
    data = build_data(find(root))
    assert len(json.dumps(data)) < 100_000
    assert run_named(data, "demo/wordy")["note"].endswith("(10,000,000 characters in all)")
    assert any("10,000,002 characters, SHA-256" in value for value in data["values"])
    assert read_annotations(run).note == "m" * 10_000_000


def test_values_that_are_not_finite_are_counted_not_drawn(root: Path) -> None:
    run = root / "demo" / "run-0"
    append_event(run, "metrics", phase="pre", step=50, values={"running_loss": float("nan")})
    record, curves = read_record(run)
    assert record.problems == ["pre: 1 values are not finite"]
    assert list(curves[0].steps) == [10, 20, 30, 40]


def test_repeated_step_counts_once_and_time_sums_over_sittings(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=20)
    events = [
        {"time": 100.0, "event": "phase_started", "phase": "pre", "earlier_s": 0.0},
        {"time": 110.0, "event": "metrics", "phase": "pre", "step": 10, "values": {"running_loss": 5.0}},
        {"time": 900.0, "event": "phase_started", "phase": "pre", "earlier_s": 12.0},
        {"time": 904.0, "event": "metrics", "phase": "pre", "step": 10, "values": {"running_loss": 4.0}},
        {"time": 909.0, "event": "metrics", "phase": "pre", "step": 20, "values": {"running_loss": 3.0}},
    ]
    (run / "events.jsonl").write_text("\n".join(map(json.dumps, events)))
    record, (curve,) = read_record(run)
    assert (curve.steps, curve.seconds, curve.values) == ([10, 20], [16.0, 21.0], [4.0, 3.0])
    assert record.seconds == 21.0


def test_thinned_curve_keeps_ends_and_every_spike() -> None:
    values = [1.0 + 0.001 * (step % 7) for step in range(10_000)]
    values[4321], values[8765] = 50.0, -3.0
    kept = thin(values, 100)
    assert len(kept) <= 100
    assert {0, 4321, 8765, 9999} <= set(kept)
    assert kept == sorted(set(kept))
    assert thin(values[:100], 100) == list(range(100))
    assert len(Curve("a", "b", values, values, values).pack(100)) == 12 * len(kept)


def test_only_changed_runs_are_read_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    monkeypatch.setattr(record, "read_record", lambda run: (read.append(run.name), read_record(run))[1])
    first = build_data(find(root))
    assert read == ["run-0", "run-1", "run-2"]
    assert build_data(find(root)) | {"made": ""} == first | {"made": ""}
    assert len(read) == 3
    append_event(root / "demo" / "run-1", "metrics", phase="pre", step=50, values={"running_loss": 2.0})
    data = build_data(find(root))
    assert read[3:] == ["run-1"]
    assert run_named(data, "demo/run-1")["last"]["loss"] == ["pre", 50, 2.0]


def test_state_of_an_ended_run_follows_its_lock(root: Path) -> None:
    assert {run["state"] for run in build_data(find(root))["runs"]} == {FINISHED}
    with lock(root / "demo" / "run-1"):
        states = [run["state"] for run in build_data(find(root))["runs"]]
    assert states == [FINISHED, RUNNING, FINISHED]
    assert {run["state"] for run in build_data(find(root))["runs"]} == {FINISHED}


def test_removed_run_leaves_the_index(root: Path) -> None:
    build_data(find(root))
    (root / "demo" / "run-0").rename(root.parent / "elsewhere")
    assert len(build_data(find(root))["runs"]) == 2
    with sqlite3.connect(index_file(root)) as database:
        assert database.execute("SELECT count(*) FROM runs").fetchone() == (2,)


@pytest.mark.parametrize("damage", ["garbage", "version", "gone", "folder"])
def test_index_is_made_again_whatever_happened_to_it(root: Path, damage: str) -> None:
    first = build_data(find(root))
    file = index_file(root)
    if damage == "garbage":
        file.write_bytes(b"no database" * 1000)
    elif damage == "version":
        with sqlite3.connect(file) as database:
            database.execute("PRAGMA user_version = 99999")
            database.execute("UPDATE runs SET record = 'of another form'")
    else:
        file.unlink()
    if damage == "folder":
        file.mkdir()
    assert build_data(find(root)) | {"made": ""} == first | {"made": ""}


def test_many_curves_have_fewer_points_each(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(root / "demo" / "long", steps=20_000)
    fine = run_named(build_data(find(root)), "demo/long")["curves"][0][1]
    monkeypatch.setattr(page, "MOST_FINE", 3)
    coarse = run_named(build_data(find(root)), "demo/long")["curves"][0][1]
    assert 90 <= coarse <= 100 < 500 <= fine <= 600


def test_command_writes_a_page_next_to_the_runs(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["studio"]) == 0
    assert f"wrote {root / 'studio.html'}: 3 runs" in capsys.readouterr().out
    assert len(data_of((root / "studio.html").read_text())["runs"]) == 3
    (root / "demo" / "run-0" / "artifacts" / "report.html").write_text("")
    assert main(["studio", "demo", "--out", "a page.html"]) == 0
    data = data_of((root.parent / "a page.html").read_text())
    assert data["runs"][0]["link"] == "runs/demo/run-0/artifacts/report.html", "links are relative to the page"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["absent"], "absent: no such folder"),
        (["."], "no runs under"),
        (["--serve", "--out", "x.html"], "leave out --out, or --serve"),
        (["runs", "--serve", "--port", "99999"], "--port 99999: cannot listen there"),
        (["--port", "x"], "invalid int value"),
    ],
)
def test_mistakes_are_named(root: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    (root.parent / "empty").mkdir()
    os.chdir(root.parent / "empty" if words == ["."] else root.parent)
    assert main(["studio", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.fixture(name="address")
def _address(root: Path):
    with make_server(root, 0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def get(port: int, path: str, host: str | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", path, headers={"Host": host} if host else {})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_server_has_the_page_new_data_and_artifacts_alone(root: Path, address: int) -> None:
    status, text = get(address, "/")
    assert status == 200
    assert "connect-src 'self'" in text
    assert 'data-live="1"' in text
    version = get(address, "/version")[1]
    assert version == folder_version(root) == get(address, "/version")[1]
    append_event(root / "demo" / "run-0", "metrics", phase="pre", step=50, values={"running_loss": 2.5})
    assert get(address, "/version")[1] != version
    assert run_named(json.loads(get(address, "/data.json")[1]), "demo/run-0")["last"]["loss"][2] == 2.5
    assert get(address, "/demo/run-0/artifacts/report.json")[0] == 200
    (root.parent / "artifacts").mkdir()
    (root.parent / "artifacts" / "secret.json").write_text("{}")
    (root / "demo" / "artifacts").symlink_to(root.parent / "artifacts")
    for path in (
        "/demo/run-0/manifest.json",
        "/../artifacts/secret.json",
        "/%2e%2e/artifacts/secret.json",
        "/demo/artifacts/secret.json",
        "/demo/run-0/artifacts",
        "/%00",
    ):
        assert get(address, path)[0] == 404, path
    assert get(address, "/", host="attacker.example:80")[0] == 403


def test_tags_and_notes_are_kept_and_shown(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    version = folder_version(root)
    assert main(["tag", "demo/run-1", "best", "paper"]) == 0
    assert main(["tag", "demo/run-1", "best", "lr"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "demo/run-1: best, paper, lr"
    assert main(["tag", "demo/run-1", "paper", "--remove"]) == 0
    assert main(["note", "demo/run-1", "the one\nwith <b>"]) == 0
    assert read_annotations(root / "demo" / "run-1") == Annotations(["best", "lr"], "the one\nwith <b>")
    run = run_named(build_data(find(root)), "demo/run-1")
    assert (run["tags"], run["note"]) == (["best", "lr"], "the one\nwith <b>")
    assert folder_version(root) != version, "a live page shows them"
    capsys.readouterr()
    assert main(["note", "demo/run-1"]) == 0
    assert capsys.readouterr().out == "the one\nwith <b>\n"
    assert main(["note", "demo/run-1", ""]) == 0
    assert read_annotations(root / "demo" / "run-1") == Annotations(["best", "lr"], "")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tag", "demo/run-1", "two words"], "expected one word"),
        (["tag", "demo/run-1", "a,b"], "expected one word"),
        (["tag", "demo/run-1", "n" * 81], "at most 80 characters"),
        (["tag", "demo/run-1", "absent", "--remove"], "has no such tag; tags: none"),
        (["tag", "demo/run-9", "x"], "no run there"),
        (["note", "demo/run-0", "x"], "repair annotations.json, or remove it"),
        (["tag", "demo/run-0", "x"], "repair annotations.json, or remove it"),
    ],
)
def test_mistakes_of_tags_and_notes_lose_nothing(
    root: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    file = root / "demo" / "run-0" / "annotations.json"
    file.write_text('{"tags": ["kept"], "no')
    assert main(words) == 2
    assert message in capsys.readouterr().err
    assert file.read_text() == '{"tags": ["kept"], "no'
    assert not (root / "demo" / "run-1" / "annotations.json").exists()
