"""The Manifest: everything a worker needs, validated and frozen. `manifest.json` is its dump."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveFloat, model_validator

from caramba.config.base import SLUG, Config, PathText, Seed, nearest
from caramba.config.benchmark import AccuracyBenchmarkConfig, BenchmarkConfig
from caramba.config.data import DataConfig
from caramba.config.extension import Callback, MetricLogger
from caramba.config.generate import ChatConfig, SampleConfig
from caramba.config.layer_base import Positive
from caramba.config.model import FitConfig, ModelConfig
from caramba.config.paper import PaperConfig, ResearchLoopConfig, ReviewConfig
from caramba.config.parallel import ClusterConfig, LauncherConfig, ParallelConfig
from caramba.config.parse import parse_as
from caramba.config.plugins import Plugins, use_plugins
from caramba.config.source import Path, SourceMap
from caramba.config.train import PhaseConfig
from caramba.config.trainer import TrainerConfig
from caramba.config.verify import VerifyConfig
from caramba.errors import SYNONYMS, quote

# A name becomes a file name, to which a control adds two others and a temporary file its own part: 255 bytes in all.
Slug = Annotated[str, Field(pattern=SLUG, max_length=100)]


# What shows training on the console, and where its metrics go.
Instrument = Literal["rich", "plain", "plot", "none", "jsonl", "csv", "hdf5", "tensorboard", "wandb"]
CONSOLES, STREAMS = ("rich", "plain", "plot", "none"), ("jsonl", "csv", "hdf5", "tensorboard", "wandb")

ExperimentName = Literal["baseline", "gqa", "bottleneck", "decoupled"]


class SettingsConfig(Config):
    """Experiment-wide settings; single-file manifests may call this section `defaults`."""

    @classmethod
    def hint(cls, key: str, names: Sequence[str]) -> str:
        name = SYNONYMS.get(key, key)
        if name in PhaseConfig.model_fields and name not in names:
            return f"; did you mean 'train.{name}', a key of phases?"
        return nearest(key, names)

    tokenizer: Literal["bpe", "byte", "model", "auto"] | None = Field(
        default=None, description="overrides data.tokenizer; a single-file manifest may call model llama"
    )
    val_frac: Annotated[float, Field(gt=0, lt=1)] | None = Field(default=None, description="overrides data.val_frac")
    instrument: Instrument | tuple[Instrument, ...] = Field(
        default="rich",
        description="rich, plain, plot or none for the console; hdf5, tensorboard and wandb are read as "
        "logger.hdf5, logger.tensorboard and logger.wandb; csv and jsonl are always written",
    )
    peak_tflops: PositiveFloat | None = Field(
        default=None,
        description="the device's dense peak for MFU, in TFLOP/s; by default from a table of GPUs",
    )
    gpu: str | None = Field(
        default=None, description="a word of the GPU's name; a run on another GPU, or on none, is refused"
    )
    wandb: bool = Field(default=False, description="read as logger.wandb, for single-file manifests")
    wandb_project: str = Field(default="caramba", description="W&B project")
    wandb_entity: str | None = Field(default=None, description="W&B user or team; unset: the default of the account")
    eval_iters: Positive | None = Field(default=None, description="steps between held-out validation runs")
    save_every: Positive | None = Field(default=None, description="steps between checkpoints, where unset")

    @model_validator(mode="after")
    def _one_console(self) -> SettingsConfig:
        shown = [word for word in self._words() if word in CONSOLES]
        if len(shown) > 1:
            raise ValueError(
                f"instrument names {' and '.join(shown)}, and the console shows one of them; keep one of "
                f"{', '.join(CONSOLES)}, with any of {', '.join(STREAMS)}"
            )
        return self

    @property
    def console(self) -> str:
        """What the console shows while a phase trains: rich, plain, plot or none."""
        return next((word for word in self._words() if word in CONSOLES), CONSOLES[0])

    def _words(self) -> tuple[str, ...]:
        return (self.instrument,) if isinstance(self.instrument, str) else self.instrument


STAGES = ("transplant", "final", "verify")  # recorded with a group's runs, under these ids


class RunConfig(Config):
    """One run of a group: a phase of training with its own checkpoint, checks alone, sampling, or a conversation."""

    id: Slug = Field(description="name of the run in its group")
    mode: Literal["train", "sample", "chat"] = Field(
        default="train", description="train, sample (generate texts) or chat"
    )
    exp: ExperimentName | None = Field(
        default=None,
        description="train this attention from scratch in the manifest's model, d_ff set so that parameters match",
    )
    seed: Seed = Field(default=1337, description="seed of the run")
    steps: Positive | None = Field(default=None, description="overrides train.steps")
    train: PhaseConfig | None = Field(default=None, description="the phase of training; unset: none")
    verify: tuple[VerifyConfig, ...] = Field(
        default=(), description="checks of the student against its teacher after the phase"
    )
    sample: SampleConfig | None = Field(default=None, description="what mode=sample generates")
    chat: ChatConfig | None = Field(default=None, description="messages of mode=chat, and how they are answered")

    @model_validator(mode="after")
    def _talks_alone(self) -> RunConfig:
        if self.mode != "chat":
            if self.chat is not None:
                raise ValueError(f"mode={self.mode} has no use for chat; set mode: chat, or remove it")
        elif self.train is not None or self.verify or self.steps or self.exp:
            raise ValueError("mode=chat trains and verifies nothing; move train and verify to a run before it")
        return self

    @model_validator(mode="after")
    def _samples_alone(self) -> RunConfig:
        if (self.mode == "sample") != (self.sample is not None):
            raise ValueError(
                f"mode={self.mode} {'has no use for' if self.sample else 'needs'} sample; write both, such as "
                'mode: sample with sample: {prompts: ["Once upon a time"]}'
            )
        if self.sample is not None and (self.train is not None or self.verify or self.steps or self.exp):
            raise ValueError("mode=sample trains and verifies nothing; move train and verify to a run before it")
        return self

    @model_validator(mode="after")
    def _variants_stand_alone(self) -> RunConfig:
        is_variant = self.train is not None and self.train.trains == "variant"
        if self.exp is None:
            if is_variant:
                raise ValueError("trains=variant belongs to a run with exp; set exp, or remove trains")
            return self
        if self.train is None or self.train.phase != "pretrain" or not is_variant:
            raise ValueError(
                f"exp={self.exp} trains a model of its own from scratch; give the run train: {{phase: pretrain}}, "
                "without trains and control"
            )
        if self.verify:
            raise ValueError(f"exp={self.exp} has no teacher to be verified against; remove verify")
        return self


class GroupConfig(Config):
    """Runs that execute in order on one dataset, and the benchmarks that follow them."""

    name: Slug = Field(description="name of the group")
    description: str = Field(default="", description="text for reports")
    data: DataConfig = Field(description="data of all runs of the group")
    runs: tuple[RunConfig, ...] = Field(default=(), description="runs, in order")
    benchmarks: tuple[BenchmarkConfig, ...] = Field(default=(), description="measurements after the last run")

    @property
    def trained(self) -> tuple[tuple[RunConfig, PhaseConfig], ...]:
        """The runs that train, each with its phase."""
        return tuple((run, run.train) for run in self.runs if run.train is not None)

    @model_validator(mode="after")
    def _distinct_ids(self) -> GroupConfig:
        ids_of = {"run": [run.id for run in self.runs], "benchmark": [bench.id for bench in self.benchmarks]}
        for kind, ids in ids_of.items():
            twice = next((name for name in ids if ids.count(name) > 1), None)
            if twice is not None:
                raise ValueError(f"two {kind}s of group {quote(self.name)} are called {quote(twice)}; ids are distinct")
        taken = next((name for name in ids_of["run"] if name in STAGES), None)
        if taken is not None:
            raise ValueError(
                f"a run of group {quote(self.name)} is called {taken!r}, which is a stage of every run's own; "
                f"call it otherwise, such as {taken}_run"
            )
        return self


LightningLogger = Literal["CSVLogger", "CometLogger", "LitLogger", "MLFlowLogger", "NeptuneLogger"]


class LoggerConfig(Config):
    """Where metrics go besides metrics.csv and events.jsonl, which every run writes."""

    tensorboard: bool = Field(default=True, description="whether TensorBoard files are written")
    hdf5: bool = Field(default=False, description="metrics.h5, readable during the run")
    wandb: bool = Field(default=False, description="whether metrics go to W&B")
    wandb_mode: Literal["online", "offline", "disabled"] = Field(
        default="offline", description="W&B mode: online, offline or disabled"
    )
    lightning: dict[LightningLogger, dict[str, Any]] = Field(
        default={},
        description="loggers of Lightning by class name, each with its arguments, as in {MLFlowLogger: "
        "{experiment_name: mine}}",
    )
    extra: tuple[MetricLogger, ...] = Field(
        default=(), description="loggers of your own, from plugins, each with its type and keys"
    )


class DebugConfig(Config):
    """Small or instrumented runs: `fdr` does one step of each phase, `overfit` repeats the first batches, `profile`
    records a few steps of each phase in `profile/`."""

    name: Literal["none", "fdr", "overfit", "profile"] = Field(
        default="none", description="none, fdr (one step of each phase), overfit (repeats batches) or profile"
    )
    max_steps: Positive | None = Field(default=None, description="most steps of each phase; unset: no limit")
    overfit_batches: Positive | None = Field(
        default=None, description="number of batches that are repeated; unset: no repeats"
    )


class Manifest(Config):
    """A validated experiment. Groups run in order, or only the one that `group` names."""

    aliases: ClassVar[dict[str, str]] = {"defaults": "settings"}

    version: Literal[1] = Field(default=1, description="version of this schema")
    name: Slug = Field(description="name of the experiment, and of its folder under runs/")
    notes: str = Field(default="", description="text for reports")
    vars: dict[str, Any] = Field(default={}, description="values that other keys read as ${vars.NAME}")
    settings: SettingsConfig = Field(default=SettingsConfig(), description="experiment-wide settings")
    seed: Seed = Field(default=1337, description="seed of all runs without their own")
    deterministic: bool = Field(
        default=False, description="only algorithms that give the same bits again; slower on a GPU"
    )
    device: Literal["auto", "cpu", "cuda", "mps"] = Field(
        default="auto", description="device: auto (the fastest one available), cpu, cuda or mps"
    )
    group: str | None = Field(default=None, description="the only group to run; unset: all")
    resume: PathText = Field(default="auto", description="auto, never, or the path of a run to resume")
    kernels: Literal["auto", "require", "reference"] = Field(
        default="auto",
        description="device kernels: auto (where available), require (an error without them) or reference (none)",
    )
    plan: PathText = Field(
        default="auto",
        description="auto: measure what a key leaves to auto, once per machine; refresh: again; off: measure nothing; "
        "else the path of a plan.json to go by",
    )
    model: ModelConfig = Field(description="the network, and the teacher that it comes from")
    fit: FitConfig | None = Field(
        default=None, description="scale the model to a size; a launch resolves it into concrete widths"
    )
    groups: Annotated[tuple[GroupConfig, ...], Field(min_length=1)] = Field(description="groups of runs, in order")
    parallel: ParallelConfig = Field(default=ParallelConfig(), description="how a run is spread over devices")
    launcher: LauncherConfig = Field(default=LauncherConfig(), description="what starts the workers")
    cluster: ClusterConfig = Field(default=ClusterConfig(), description="what a SLURM job asks for")
    logger: LoggerConfig = Field(default=LoggerConfig(), description="where metrics are written")
    debug: DebugConfig = Field(default=DebugConfig(), description="small or instrumented runs")
    trainer: TrainerConfig = Field(default=TrainerConfig(), description="flags of Lightning's Trainer, for every phase")
    callbacks: tuple[Callback, ...] = Field(
        default=(), description="callbacks of your own, from plugins, each with its type and keys"
    )
    paper: PaperConfig | None = Field(default=None, description="paper that is drafted after the run; unset: none")
    review: ReviewConfig | None = Field(default=None, description="how the paper is reviewed; unset: by rule alone")
    research: ResearchLoopConfig | None = Field(
        default=None, description="loop of `caramba research RUN`; unset: its defaults, without experiments"
    )
    plugins: Plugins = Field(default=(), description="modules of your own that add layers and extensions")
    origin: Literal["human", "agent"] = Field(
        default="human", description="author of the manifest: human, or agent, which may not name plugins"
    )

    @model_validator(mode="after")
    def _rules(self) -> Manifest:
        names = [group.name for group in self.groups]
        if len(set(names)) != len(names):
            raise ValueError(f"two groups share a name: {', '.join(names)}; names are distinct")
        if self.group is not None and self.group not in names:
            raise ValueError(
                f"group={quote(self.group)} is not a group of this manifest{nearest(self.group, names) or ';'} "
                f"groups: {', '.join(names)}"
            )
        if self.origin == "agent" and self.plugins:
            raise ValueError("a manifest whose origin is an agent may not name plugins; remove plugins")
        if self.origin == "agent" and self.logger.lightning:
            raise ValueError(
                "a manifest whose origin is an agent may not set logger.lightning, which can send data; remove it"
            )
        if self.origin == "agent" and any(
            isinstance(bench.config, AccuracyBenchmarkConfig) and bench.config.allow_code
            for group in self.groups
            for bench in group.benchmarks
        ):
            raise ValueError("a manifest whose origin is an agent may not set allow_code, which runs code; remove it")
        if self.origin == "agent" and (self.review is not None or self.research is not None):
            raise ValueError("a manifest whose origin is an agent may not set review or research; remove them")
        named = self.paper.reaches_out() if self.origin == "agent" and self.paper is not None else ()
        if named:
            # A server and a variable together would send any secret of the environment anywhere.
            raise ValueError(
                f"a manifest whose origin is an agent may not set {', '.join(f'paper.{key}' for key in named)}; "
                "remove it, and give it to `caramba paper RUN`"
            )
        return self

    @property
    def open_ranks_per_node(self) -> int | None:
        """Ranks that `parallel.dp=auto` makes of a node, None where only the machine that runs them can tell.

        They are `launcher.nproc_per_node`, else of a SLURM job the multiple of tp nearest below `cluster.gpus`.
        """
        launcher, tp = self.launcher, self.parallel.tp
        if launcher.nproc_per_node is not None or not launcher.is_slurm:
            return launcher.nproc_per_node
        number = str(self.cluster.gpus).rpartition(":")[2]
        if self.device not in ("auto", "cuda") or not number.isdecimal() or int(number) < tp:
            return None
        return int(number) // tp * tp

    def groups_to_run(self) -> tuple[GroupConfig, ...]:
        """Return the groups that run, in order."""
        return tuple(group for group in self.groups if self.group in (None, group.name))


def parse_manifest(
    data: Any,
    *,
    source: SourceMap | None = None,
    origins: Mapping[Path, Path] | None = None,
    typed: Any = None,
) -> Manifest:
    """Validate a lowered manifest, such as the content of manifest.json, with the types of its plugins.

    The arguments and errors are those of `parse_as`.
    """
    use_plugins(data, source=source)
    return parse_as(Manifest, data, source=source, origins=origins, typed=typed)
