"""Lowering: composed groups, or the short forms of a single file, become the groups and runs of one Manifest.

Lowering moves plain data and remembers, for each value it moved, the path that the user typed (`origins`), so an
error in the manifest is reported where it was written.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from caramba.config.explicit_defaults import has_teacher_weights, infer_trained_model, write_explicit_defaults
from caramba.config.names import nearest
from caramba.config.narrowing import is_list, is_mapping, list_of, mapping_of
from caramba.config.source import Path
from caramba.config.train import PhaseConfig, PhaseName
from caramba.errors import ConfigError

SHARED = (
    *(
        "version",
        "name",
        "notes",
        "vars",
        "settings",
        "seed",
        "deterministic",
        "device",
        "group",
        "resume",
        "kernels",
        "plan",
        "model",
        "fit",
    ),
    *(
        "parallel",
        "launcher",
        "cluster",
        "logger",
        "debug",
        "trainer",
        "callbacks",
        "paper",
        "review",
        "plugins",
        "origin",
    ),
)


@dataclass
class Lowered:
    """A manifest as plain data, and where its parts came from."""

    manifest: dict[str, Any]
    origins: dict[Path, Path] = field(default_factory=lambda: {})


def lower_groups(
    tree: Mapping[str, Any], choices: Mapping[str, str], given: Collection[Path], chosen: Collection[str] = ()
) -> Lowered:
    """Lower composed config groups; `tree` has passed the `Composition` schema.

    Checks that do not run (`keeps_checks`) are left out; of checks that the user asked for, `cross_check` names what
    they lack.

    Args:
        tree: the composed, resolved groups.
        choices: the option chosen for each group, for the names of the experiment and of its one manifest group.
        given: paths that were set on the command line, which win over values that hold for all phases.
        chosen: groups whose option was named on the command line.
    """
    shared = {key: tree[key] for key in SHARED if tree.get(key) is not None}
    shared.setdefault("name", _slug(f"{choices.get('model', 'model')}_{choices.get('train', 'train')}"))
    origins: dict[Path, Path] = {
        ("groups", 0, "data"): ("data",),
        ("groups", 0, "benchmarks"): ("benchmark", "benchmarks"),
        ("groups", 0): ("train",),
    }
    runs: list[dict[str, Any]] = []
    for name, phase, sources in _phases(mapping_of(tree.get("train")), given):
        here: Path = ("groups", 0, "runs", len(runs))
        origins[here] = ("train", "phases", name)
        origins[(*here, "train")] = ("train", "phases", name)
        origins.update({(*here, "train", key): origin for key, origin in sources.items()})
        runs.append({"id": name, "train": phase})
    checks = (
        list_of(mapping_of(tree.get("verify")).get("checks")) if keeps_checks(tree, given, chosen) else []
    )
    if checks and not runs:  # what is there is checked as it is
        origins["groups", 0, "runs", 0] = ("verify",)
        runs.append({"id": "check"})
    # A control may come last; what is verified is the student that the last phase of its own leaves.
    last = max(
        (at for at, run in enumerate(runs) if not mapping_of(run.get("train")).get("control")), default=-1
    )
    if runs and checks:
        runs[last]["verify"] = checks
        origins["groups", 0, "runs", last % len(runs), "verify"] = ("verify", "checks")
    suite = choices.get("benchmark", "none")
    group = {
        "name": "main" if suite == "none" else _slug(suite),
        "data": tree.get("data"),
        "runs": runs,
        "benchmarks": list_of(mapping_of(tree.get("benchmark")).get("benchmarks")),
    }
    lowered = Lowered({**shared, "groups": [group]}, origins)
    write_explicit_defaults(lowered.manifest, lowered.origins, given)
    return lowered


def keeps_checks(tree: Mapping[str, Any], given: Collection[Path], chosen: Collection[str]) -> bool:
    """Whether the checks of composed groups run.

    Checks that the user asked for do. Others need a phase, and a teacher whose weights are given or trained by one.
    """
    if "verify" in chosen or any(path[0] == "verify" for path in given):
        return True
    phases = [phase for _, phase, _ in _phases(mapping_of(tree.get("train")), given)]
    if not phases:
        return False
    for index, phase in enumerate(phases):
        later = [item.get("phase") for item in phases[index + 1 :]]
        if phase.get("trains") is None:
            phase["trains"] = infer_trained_model(phase, later, tree)
    return has_teacher_weights({**tree, "groups": [{"runs": [{"train": phase} for phase in phases]}]})


def lower_file(tree: Mapping[str, Any], name: str, given: Collection[Path]) -> Lowered:
    """Lower a single-file manifest: top-level runs, data, benchmarks and verify stand for one group called main.

    `data` at the top also serves every group without its own; as a text it is the path of a token file.
    """
    manifest = dict(tree)
    origins: dict[Path, Path] = {}
    if "defaults" in manifest and "settings" not in manifest:
        manifest["settings"] = manifest.pop("defaults")
        origins["settings",] = ("defaults",)
    manifest.setdefault("name", _slug(name))
    if not isinstance(manifest.get("name"), str):
        manifest["name"] = _slug(name)
    data = manifest.pop("data", None)
    sugar = {key: manifest.pop(key) for key in ("runs", "benchmarks", "verify") if key in manifest}
    if "groups" in manifest and ("runs" in sugar or "benchmarks" in sugar):
        raise ConfigError(
            "runs and benchmarks stand at the top of a manifest only when it has no groups; move them into one"
        )
    groups = manifest.get("groups")
    if groups is None:
        groups = [{"name": "main", **{key: sugar[key] for key in ("runs", "benchmarks") if key in sugar}}]
        origins.update({("groups", 0, key): (key,) for key in ("runs", "benchmarks", "data")})
    if is_list(groups):
        manifest["groups"] = [_file_group(group, index, data, origins) for index, group in enumerate(groups)]
        if "verify" in sugar:
            _verify_last(manifest["groups"], sugar["verify"], origins)
    write_explicit_defaults(manifest, origins, given)
    return Lowered(manifest, origins)


def _file_group(group: Any, index: int, data: Any, origins: dict[Path, Path]) -> Any:
    if not is_mapping(group):
        return group
    out = dict(group)
    if out.get("data") is None and data is not None:
        out["data"] = data
        origins["groups", index, "data"] = ("data",)
    if isinstance(out.get("data"), str):
        out["data"] = {"type": "tokens", "path": out["data"]}
    if is_list(out.get("runs")):
        out["runs"] = [dict(run) if is_mapping(run) else run for run in out["runs"]]
    return out


def _verify_last(groups: list[Any], checks: Any, origins: dict[Path, Path]) -> None:
    for index in reversed(range(len(groups))):
        runs = groups[index].get("runs") if is_mapping(groups[index]) else None
        for number, run in reversed(list(enumerate(list_of(runs)))):
            if not is_mapping(run) or mapping_of(run.get("train")).get("control"):
                continue
            if run.get("verify"):
                raise ConfigError("verify is set at the top of the manifest and in its last run; keep one")
            run["verify"] = checks
            origins["groups", index, "runs", number, "verify"] = ("verify",)
            return
    raise ConfigError(
        "verify is set at the top of the manifest, and there is no run that it could check; add runs"
    )


def _phases(
    train: Mapping[str, Any], given: Collection[Path]
) -> list[tuple[str, dict[str, Any], dict[str, Path]]]:
    """Each phase's name, its settings under canonical keys, and which of them were set at `train.KEY`."""
    common = {
        PhaseConfig.aliases.get(key, key): (key, value) for key, value in train.items() if key != "phases"
    }
    phases = mapping_of(train.get("phases"))
    if common.get("phase", (None, None))[1] is not None:
        if phases:
            raise ConfigError(
                f"train.phase is set together with train.phases ({', '.join(phases)}); keep one of the two"
            )
        phases = {str(common["phase"][1]): dict[str, Any]()}
    common.pop("phase", None)
    out: list[tuple[str, dict[str, Any], dict[str, Path]]] = []
    for name, settings in phases.items():
        own = mapping_of(settings)
        if name not in get_args(PhaseName) and "phase" not in own:
            hint = nearest(str(name), (*get_args(PhaseName), *phases.keys() - {name}))
            raise ConfigError(
                f"train.phases.{name}: unknown phase{hint or ';'} known: {', '.join(get_args(PhaseName))}; "
                "a phase under another name needs a key `phase`"
            )
        phase: dict[str, Any] = {"phase": name} if name in get_args(PhaseName) else {}
        phase.update(
            {PhaseConfig.aliases.get(key, key): item for key, item in own.items() if item is not None}
        )
        sources: dict[str, Path] = {}
        for key, (typed, value) in common.items():
            if value is not None and ("train", "phases", name, key) not in given:
                phase[key] = value
                sources[key] = ("train", typed)
        out.append((name, phase, sources))
    return out


def _slug(text: str) -> str:
    slug = "".join(char if (char.isalnum() and char.isascii()) or char in "_.-" else "_" for char in text)
    return slug if slug[:1].isalnum() else f"x{slug}"
