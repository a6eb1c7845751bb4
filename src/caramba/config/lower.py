"""Lowering: composed groups, or the short forms of a single file, become the groups and runs of one Manifest.

Lowering moves plain data and remembers, for each value it moved, the path that the user typed (`origins`), so an
error in the manifest is reported where it was written.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from caramba.config.manifest import CONSOLES, STREAMS, Manifest
from caramba.config.source import Path, is_list, is_mapping, list_of, mapping_of
from caramba.config.train import PhaseConfig, PhaseName, checkpointing_word
from caramba.errors import ConfigError, bare, nearest, quote

NEEDS_TEACHER = ("blockwise", "drift", "global")
DEFAULT_SEED = 1337
BATCH_SIZE = PhaseConfig.model_fields["batch_size"].default
LEAST_WINDOW = 256  # tokens of a fidelity check, whatever training reads


def write_explicit_defaults(manifest: dict[str, Any], origins: dict[Path, Path], given: Collection[Path]) -> None:
    """Make every setting that holds for more than one run explicit in each run, in place."""
    settings = mapping_of(manifest.get("settings"))
    _default_streams(manifest, settings)
    for index, group in enumerate(list_of(manifest.get("groups"))):
        if not is_mapping(group):
            continue
        if is_mapping(group.get("data")):
            for key in ("tokenizer", "val_frac"):
                if settings.get(key) is not None and not _is_made(group["data"], key, settings):
                    group["data"] = {**group["data"], key: settings[key]}
                    if settings[key] == "byte" and ("data", "vocab_size") not in given:
                        group["data"].pop("vocab_size", None)  # it was that of another tokenizer
                    origins["groups", index, "data", key] = ("settings", key)
            group["data"] = _with_tokenizer(group["data"], mapping_of(manifest.get("model")), given)
        runs = list_of(group.get("runs"))
        if is_list(group.get("benchmarks")):
            group["benchmarks"] = [dict(item) if is_mapping(item) else item for item in group["benchmarks"]]
        for number, run in enumerate(runs):
            if is_mapping(run) and is_mapping(run.get("train")):
                later = [item["train"].get("phase") for item in runs[number + 1 :] if _trains(item)]
                _default_run(run, manifest, settings, later, ("groups", index, "runs", number), origins, given)
        _default_windows(runs)
        _default_controls(runs, mapping_of(manifest.get("debug")).get("max_steps"), given)
    if not has_teacher_weights(manifest):
        for group in list_of(manifest.get("groups")):
            for item in list_of(mapping_of(group).get("benchmarks")):
                if is_mapping(item):
                    item.setdefault("models", ["student"])


def _is_made(data: Mapping[str, Any], key: str, settings: Mapping[str, Any]) -> bool:
    """Whether a key asks for the model's tokenizer, of tokens that are made already."""
    return key == "tokenizer" and data.get("type") == "tokens" and settings[key] in ("model", "auto")


def _default_windows(runs: list[Any]) -> None:
    """Give fidelity checks without a `block_size` the longest window that a run trains on, 256 tokens or more."""
    trained = [run["train"].get("block_size") for run in runs if _trains(run)]
    longest = max((size for size in trained if isinstance(size, int)), default=0)
    for run in runs:
        if is_mapping(run) and is_list(run.get("verify")):
            run["verify"] = [
                {**check, "block_size": max(longest, LEAST_WINDOW)} if _needs_window(check) else check
                for check in run["verify"]
            ]


def _needs_window(check: Any) -> bool:
    return is_mapping(check) and check.get("type") == "fidelity" and check.get("block_size") is None


def _default_streams(manifest: dict[str, Any], settings: dict[str, Any]) -> None:
    """Let `logger` alone say where metrics go: other names of its keys in settings become those keys.

    metrics.csv and events.jsonl need no switch.
    """
    asked = settings.get("instrument")
    words = [asked] if isinstance(asked, str) else list_of(asked)
    streams = [name for name in ("hdf5", "tensorboard", "wandb") if name in words]
    plain = dict(settings)
    if settings.get("wandb") is True:
        streams.append("wandb")
        plain.pop("wandb")
    consoles = [word for word in words if word not in STREAMS]
    if consoles != words and all(word in CONSOLES for word in consoles):
        plain["instrument"] = consoles[0] if len(consoles) == 1 else consoles or "rich"
    if plain != settings:
        manifest["settings"] = plain
    if streams:
        logger = manifest.get("logger")
        manifest["logger"] = {**(logger if is_mapping(logger) else {}), **dict.fromkeys(streams, True)}


def _with_tokenizer(data: Mapping[str, Any], model: Mapping[str, Any], given: Collection[Path]) -> dict[str, Any]:
    """Return the data section with the value of tokenizer=auto, and the path of the model's."""
    asked, found = data.get("tokenizer"), dict(data)
    if data.get("type", "stdlib") == "tokens" or asked not in ("auto", "model"):
        return found
    folder = _tokenizer_folder(model)
    if asked == "auto" and (folder is None or ("data", "vocab_size") in given):
        return found | {"tokenizer": "bpe"}
    if folder is None:
        raise ConfigError(
            "data.tokenizer=model: neither model.path, model.checkpoint nor model.teacher.checkpoint is a folder with "
            "tokenizer.json; name a Hugging Face folder there, or use data.tokenizer=bpe"
        )
    if ("data", "vocab_size") in given:
        raise ConfigError(
            f"data.vocab_size={bare(data.get('vocab_size'))}: data.tokenizer=model has the entries of {folder}; leave "
            "vocab_size out, or use data.tokenizer=bpe"
        )
    found.pop("vocab_size", None)  # it is that of a tokenizer trained here
    return found | {"tokenizer": "model", "tokenizer_path": str(folder)}


def _tokenizer_folder(model: Mapping[str, Any]) -> pathlib.Path | None:
    """Return the Hugging Face folder on this machine that a model or its teacher comes from, if it has a tokenizer."""
    places = (model.get("path"), model.get("checkpoint"), mapping_of(model.get("teacher")).get("checkpoint"))
    for place in places:
        if isinstance(place, str) and (pathlib.Path(place).expanduser() / "tokenizer.json").is_file():
            return pathlib.Path(place).expanduser().absolute()
    return None


def _trains(run: Any) -> bool:
    return is_mapping(run) and is_mapping(run.get("train"))


def _default_run(
    run: dict[str, Any],
    manifest: dict[str, Any],
    settings: dict[str, Any],
    later: list[Any],
    here: Path,
    origins: dict[Path, Path],
    given: Collection[Path],
) -> None:
    train = {PhaseConfig.aliases.get(key, key): value for key, value in run["train"].items()}
    run["train"] = train
    for key in ("steps", "seed"):
        if run.get(key) is None:
            continue
        if train.get(key) is not None and train[key] != run[key]:
            raise ConfigError(
                f"run {quote(run.get('id'))} sets {key}={bare(run[key])} and train.{key}={bare(train[key])}; keep one"
            )
        train[key] = run[key]
        origins[(*here, "train", key)] = (*here, key)
    run.pop("steps", None)
    if train.get("seed") is None:
        train["seed"] = manifest.get("seed", DEFAULT_SEED)
    run["seed"] = train["seed"]
    for key, setting in (("save_every", "save_every"), ("eval_every", "eval_iters")):
        if train.get(key) is None and settings.get(setting) is not None:
            train[key] = settings[setting]
            origins[(*here, "train", key)] = ("settings", setting)
    _default_checkpointing(run, mapping_of(manifest.get("parallel")), here, origins, given)
    if train.get("device") is None:
        train["device"] = manifest.get("device", "auto")
    if train.get("trains") is None and run.get("exp") is not None and train.get("control") is not True:
        train["trains"] = "variant"
    elif train.get("trains") is None:
        train["trains"] = infer_trained_model(train, later, manifest)
    _shorten(run, manifest, here, origins, given)


def infer_trained_model(train: Mapping[Any, Any], later: list[Any], manifest: Mapping[str, Any]) -> str:
    """Return `teacher` or `student`: the model that a phase trains when it names none, with the phases after it."""
    teaches = train.get("phase") == "pretrain" and any(phase in NEEDS_TEACHER for phase in later)
    trains_teacher = train.get("control") is True or (teaches and _has_teacher(manifest))
    return "teacher" if trains_teacher else "student"


def _default_checkpointing(
    run: dict[str, Any],
    parallel: Mapping[str, Any],
    here: Path,
    origins: dict[Path, Path],
    given: Collection[Path],
) -> None:
    """Give a phase `parallel.activation_checkpointing`: typed, it replaces a preset's value, else it fills in."""
    key, train = "activation_checkpointing", run["train"]
    asked, own = checkpointing_word(parallel.get(key)), checkpointing_word(train.get(key))
    if asked is None:
        return
    is_typed = key in _typed_keys(run, here, given)
    if ("parallel", key) in given and is_typed and own != asked:
        raise ConfigError(
            f"parallel.{key}={bare(asked)} and train.{key}={bare(own)} of run {quote(run.get('id'))} are the same "
            "setting; keep one"
        )
    if own is None or (("parallel", key) in given and not is_typed):
        train[key] = asked
        origins[(*here, "train", key)] = ("parallel", key)


def _default_controls(runs: list[Any], most: Any, given: Collection[Path]) -> None:
    """Give each control as many steps as it takes to see what the student's phases see."""
    phases = [run["train"] for run in runs if _trains(run)]
    samples = sum(_samples(phase) for phase in phases if phase.get("trains") == "student")
    for run in runs:
        phase: dict[str, Any] = run["train"] if _trains(run) else {}
        if phase.get("control") is True:
            if ("train", "phases", _id_of(run), "steps") in given:
                raise ConfigError(
                    f"train.phases.{bare(run.get('id'))}.steps: a control reads what the student's phases read, "
                    "so its steps follow from theirs; leave it out"
                )
            if "auto" in (item.get("batch_size") for item in (phase, *phases)):
                raise ConfigError(
                    f"run {quote(run.get('id'))}: a control reads what the student's phases read, whose "
                    "batch_size=auto is known on the machine only; give batch_size a number"
                )
            per_step = _samples({**phase, "steps": 1})
            steps = max(1, -(-samples // per_step)) if per_step else 1
            phase["steps"] = min(steps, most) if isinstance(most, int) else steps
            if isinstance(phase.get("warmup_steps"), int):
                phase["warmup_steps"] = min(phase["warmup_steps"], phase["steps"])


def _samples(phase: Mapping[str, Any]) -> int:
    """Windows that a phase reads; 0 when a value is not a number, which the schema refuses afterwards."""
    sizes = [
        phase.get("steps"),
        phase.get("batch_size", BATCH_SIZE),
        phase.get("gradient_accumulation_steps", 1),
    ]
    numbers = [size for size in sizes if isinstance(size, int)]
    return math.prod(numbers) if len(numbers) == len(sizes) else 0


def _shorten(
    run: dict[str, Any],
    manifest: dict[str, Any],
    here: Path,
    origins: Mapping[Path, Path],
    given: Collection[Path],
) -> None:
    """Apply debug.max_steps, and let a warm-up that nobody asked for follow a shorter run (a tenth of it)."""
    train = run["train"]
    debug = manifest.get("debug")
    most = debug.get("max_steps") if is_mapping(debug) else None
    if isinstance(most, int) and isinstance(train.get("steps"), int):
        train["steps"] = min(train["steps"], most)
    steps, warmup, typed = train.get("steps"), train.get("warmup_steps"), _typed_keys(run, here, given)
    changed = (
        isinstance(most, int)
        or "steps" in typed
        or (*here, "steps") in given
        or origins.get((*here, "train", "steps")) == ("train", "steps")
    )
    is_longer = isinstance(steps, int) and isinstance(warmup, int) and warmup > steps
    if changed and is_longer and "warmup_steps" not in typed:
        train["warmup_steps"] = steps // 10


def _typed_keys(run: Mapping[str, Any], here: Path, given: Collection[Path]) -> set[str]:
    """Return the keys of a phase that were typed: for all phases, for this one, or in the run of a manifest."""
    places: tuple[Path, ...] = (("train",), ("train", "phases", _id_of(run) or ""), (*here, "train"))
    typed = [str(path[-1]) for path in given if path[:-1] in places]
    return {PhaseConfig.aliases.get(key, key) for key in typed}


def _has_teacher(manifest: Mapping[str, Any]) -> bool:
    model = manifest.get("model")
    return is_mapping(model) and is_mapping(model.get("teacher"))


def has_teacher_weights(manifest: Mapping[str, Any]) -> bool:
    """Whether a settled manifest has a teacher whose weights are given or trained by one of its runs."""
    if not _has_teacher(manifest):
        return False
    if manifest["model"]["teacher"].get("checkpoint"):
        return True
    groups = [group for group in list_of(manifest.get("groups")) if is_mapping(group)]
    runs = [run for group in groups for run in list_of(group.get("runs")) if _trains(run)]
    return any(run["train"].get("trains") == "teacher" and not run["train"].get("control") for run in runs)


def _id_of(run: Mapping[str, Any]) -> str | None:
    """Return the id of a run as typed; None if it is no text, which validation refuses by name."""
    value = run.get("id")
    return value if isinstance(value, str) else None


SHARED = tuple(key for key in Manifest.model_fields if key != "groups")
"""Keys of a composition that are a manifest's own."""


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
    checks = list_of(mapping_of(tree.get("verify")).get("checks")) if keeps_checks(tree, given, chosen) else []
    if checks and not runs:  # what is there is checked as it is
        origins["groups", 0, "runs", 0] = ("verify",)
        runs.append({"id": "check"})
    # A control may come last; what is verified is the student that the last phase of its own leaves.
    last = max((at for at, run in enumerate(runs) if not mapping_of(run.get("train")).get("control")), default=-1)
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
    if mapping_of(manifest.get("settings")).get("tokenizer") == "llama":  # the model's own, as manifests of before say
        manifest["settings"] = {**mapping_of(manifest["settings"]), "tokenizer": "model"}
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
        for number, run in enumerate(out["runs"]):
            if is_mapping(run) and is_mapping(run.get("verify")):  # one check is a list of one
                run["verify"] = [run["verify"]]
                here: Path = ("groups", index, "runs", number, "verify")
                origins[(*here, 0)] = here
    return out


def _verify_last(groups: list[Any], checks: Any, origins: dict[Path, Path]) -> None:
    for index in reversed(range(len(groups))):
        runs = groups[index].get("runs") if is_mapping(groups[index]) else None
        for number, run in reversed(list(enumerate(list_of(runs)))):
            if not is_mapping(run) or mapping_of(run.get("train")).get("control"):
                continue
            if run.get("verify"):
                raise ConfigError("verify is set at the top of the manifest and in its last run; keep one")
            run["verify"] = [checks] if is_mapping(checks) else checks
            here: Path = ("groups", index, "runs", number, "verify")
            origins[(*here, 0) if is_mapping(checks) else here] = ("verify",)
            return
    raise ConfigError("verify is set at the top of the manifest, and there is no run that it could check; add runs")


def _phases(train: Mapping[str, Any], given: Collection[Path]) -> list[tuple[str, dict[str, Any], dict[str, Path]]]:
    """Each phase's name, its settings under canonical keys, and which of them were set at `train.KEY`."""
    common = {PhaseConfig.aliases.get(key, key): (key, value) for key, value in train.items() if key != "phases"}
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
        phase.update({PhaseConfig.aliases.get(key, key): item for key, item in own.items() if item is not None})
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
