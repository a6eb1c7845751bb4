"""The working state of one group: device, text, models, and what each finished stage returned, kept in `stages/`."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from torch.utils.data import Subset

from caramba import kernels, surgery
from caramba.config.benchmark import AccuracyBenchmarkConfig, BenchmarkConfig, PerplexityBenchmarkConfig
from caramba.config.layer import AttentionLayerConfig
from caramba.config.manifest import GroupConfig, Manifest, RunConfig
from caramba.config.model import ModelConfig, ModelSpec, SurgeryConfig
from caramba.config.surgery import check_surgery, keeps_copied, makes_student
from caramba.config.topology import attention_configs
from caramba.config.train import AUTO_LR_WIDTH, BLOCK_PHASES, PhaseConfig
from caramba.config.verify import EvalVerifyConfig, FidelityVerifyConfig
from caramba.console import logger
from caramba.data import Corpus, PackedDataset, TokenDataset, open_windows
from caramba.data.checkpoint import fingerprint
from caramba.data.checkpoint.locate import find_checkpoint, record_loaded
from caramba.data.corpus import check_tokenizer, open_text, reads_text
from caramba.distill import Batch
from caramba.errors import CheckpointError, ConfigError
from caramba.evaluation import Subjects, check_accuracy, check_other_texts, prepare_verification, run_suite
from caramba.lower.document_separation import documents_path
from caramba.lower.split_keys import uses_split_keys_kernel
from caramba.model import Model, build_model, load_pretrained, save_model
from caramba.result import BenchmarkResult, PhaseResult, TransplantReport, Verdict, to_plain
from caramba.runs.files import check_tree, remove_recorded, write_json
from caramba.runs.manifest import DATA, check_source
from caramba.runtime import (
    AttentionChoice,
    Decision,
    Ranks,
    RuntimePlan,
    check_gpu,
    choose_attention,
    choose_device,
    data_share,
    families_of,
    is_main_process,
    plan,
    trainable_decision,
)


@dataclass(frozen=True)
class StageRecord:
    """Results of one stage: its phase, its verdicts, and the rows that it added to the tables."""

    phase: PhaseResult
    verdicts: tuple[Verdict, ...] = ()
    benchmarks: tuple[BenchmarkResult, ...] = ()
    transplant: TransplantReport | None = None


class StageLedger:
    """Stage records of one run by stage id, in the order in which they finished."""

    def __init__(self, run_dir: Path) -> None:
        self.folder = run_dir / "stages"
        adapter = TypeAdapter(StageRecord)
        check_tree(self.folder)
        files = sorted(self.folder.glob("*.json"), key=_number) if self.folder.is_dir() else []
        self._records = {file.stem.split("-", 1)[1]: _read(file, adapter) for file in files}

    def __contains__(self, stage: str) -> bool:
        return stage in self._records

    def __getitem__(self, stage: str) -> StageRecord:
        return self._records[stage]

    def records(self) -> tuple[StageRecord, ...]:
        return tuple(self._records.values())

    def add(self, record: StageRecord) -> None:
        """Keep a finished stage. Its weights are on disk by now: the record marks it as done."""
        stage = record.phase.id
        number = max(map(_number, self.folder.glob("*.json")), default=-1) + 1
        write_json(self.folder / f"{number:02d}-{stage}.json", to_plain(record))
        self._records[stage] = record

    def replace(self, record: StageRecord) -> None:
        """Keep what a stage that is on record has returned since, at its place among the others."""
        stage = record.phase.id
        write_json(self._file(stage), to_plain(record))
        self._records[stage] = record

    def put(self, record: StageRecord) -> None:
        """Keep a stage, at its place among the others where it is on record already."""
        (self.replace if record.phase.id in self else self.add)(record)

    def put_row(self, result: BenchmarkResult) -> None:
        """Keep a row of a benchmark whose rows are stages of their own."""
        phase = PhaseResult.untrained(result.id, result.type, result.seconds)
        self.put(StageRecord(phase, benchmarks=(result,)))

    def remove(self, stage: str) -> None:
        """Strike a stage from the record: it is to be done again."""
        remove_recorded(self._file(stage))
        del self._records[stage]

    def is_measured(self, stage: str) -> bool:
        """Whether a stage is on record, and no benchmark of it failed."""
        return stage in self and all(result.error is None for result in self[stage].benchmarks)

    def _file(self, stage: str) -> Path:
        return next(file for file in self.folder.glob("*.json") if file.stem.split("-", 1)[1] == stage)


def _read(file: Path, adapter: TypeAdapter[StageRecord]) -> StageRecord:
    try:
        return adapter.validate_python(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{file}: cannot be read as the record of a stage ({type(error).__name__}); restore it, or delete the run"
        ) from error


def _number(file: Path) -> int:
    return int(file.stem.split("-", 1)[0])


# Labels of models that were trained here from scratch: of the one that a run's teacher is, and of any other.
PROXY, ORIGIN = "proxy", "origin"
OF_FOLDERS = ("teacher_weights", "student_weights")


def is_fresh_init(model: ModelConfig, role: str | None) -> bool:
    """Return whether the weights of `role` come from no file."""
    if role == "teacher":
        return model.teacher is None or model.teacher.checkpoint is None
    return model.path is None and model.checkpoint is None


def labels_as(role: str, labels: Mapping[str, str]) -> dict[str, str]:
    """Return the labels of weights that are read as `role`: a teacher that another run trained from scratch is a proxy,
    as one that the run trains itself. Which folders the run that trained them read its own models from stays with it.
    """
    found = {key: label for key, label in labels.items() if not key.startswith(OF_FOLDERS)}
    if role == "teacher" and ORIGIN in found:
        found.setdefault(PROXY, found.pop(ORIGIN))
    return found


def attention_decisions(
    made: RuntimePlan, layers: Sequence[AttentionLayerConfig], choice: AttentionChoice, *, has_documents: bool
) -> dict[str, Decision]:
    """Return the decisions `two_part_keys` and `documents`, each if it applies.

    `two_part_keys` counts the layers whose own kernel replaces the order of `attention`; `documents` is what separates
    the documents of a row.
    """
    device, dtype = torch.device(made.value("device")), getattr(torch, made.value("dtype"))
    found: dict[str, Decision] = {}
    n_own = sum(config.is_latent and uses_split_keys_kernel(config, device, dtype) for config in layers)
    if n_own:
        value = f"decoupled_attention in {n_own} of {len(layers)} attention layers"
        found["two_part_keys"] = Decision(value, "their keys are wider than flash and cuDNN take")
    if has_documents:
        is_compiled = bool(made.value("compile_model"))
        found["documents"] = Decision(*documents_path(device, dtype, layers, choice, is_compiled=is_compiled))
    return found


@dataclass
class Session:
    """One group's run. `teacher` and `student` are the current models; both stay on `device`."""

    manifest: Manifest
    group: GroupConfig
    run_dir: Path
    device: torch.device
    text: Corpus | None
    ledger: StageLedger
    teacher: Model | None = None
    student: Model | None = None
    labels: dict[str, str] = field(default_factory=dict)
    measured: dict[str, RuntimePlan] = field(default_factory=dict)
    plan_signatures: dict[str, str] = field(default_factory=dict)
    """Run id -> what was measured for it, or what it went on with after memory ran out."""
    ranks: Ranks | None = None
    _windows: dict[tuple[str, int], TokenDataset] = field(default_factory=dict)

    @classmethod
    def open(cls, manifest: Manifest, group: GroupConfig, run_dir: Path, ranks: Ranks | None = None) -> Session:
        """Open the data, check that it fits the model, and load or build the models that the group starts from.

        Without runs, benchmarks and a teacher no data is read: the model is loaded, recorded and ready to export.
        """
        device = choose_device(manifest.device)
        check_gpu(device, manifest.settings.gpu)
        kernels.load(device, manifest.kernels)
        text = open_text(manifest, group) if reads_text(manifest, group) else None
        if text is not None:
            if any(isinstance(bench.config, AccuracyBenchmarkConfig) for bench in group.benchmarks):
                check_accuracy(group.benchmarks, text.tokenizer)
            if is_main_process():
                check_source(run_dir, DATA, str(text.folder), text.content)
        session = cls(manifest, group, run_dir, device, text, StageLedger(run_dir), ranks=ranks)
        session._open_models()
        session._check_surgery()
        session._check_questions()
        return session

    def _open_models(self) -> None:
        model = self.manifest.model
        if model.teacher is not None:
            if model.teacher.checkpoint is not None:
                self.teacher = self._load(
                    model.teacher.checkpoint, "teacher", model.teacher.manifest, "model.teacher.checkpoint"
                )
            elif self.trains("teacher"):
                assert model.teacher.manifest is not None
                seed = self.seed_of("teacher")
                self.teacher = build_model(model.teacher.manifest, seed=seed).to(self.device)
        if model.path is not None:
            self.student = self._load(model.path, "student", model, "model.path")
        elif model.checkpoint is not None:
            self.student = self._load(model.checkpoint, "student", model, "model.checkpoint")
        elif self.teacher is None:
            self.student = build_model(model, seed=self.seed_of("student")).to(self.device)

    @functools.cached_property
    def attention(self) -> AttentionChoice:
        """The order of attention backends for the shapes of the group's models, the same throughout the run."""
        # The table is of 16 bits, and of backends that layers with a kernel of their own do not ask.
        layers = [
            config
            for config in self._layers()
            if not (config.is_latent and uses_split_keys_kernel(config, self.device, torch.bfloat16))
        ]
        return choose_attention(self.device, families_of(layers, self.group.data.keeps_documents_apart))

    def _layers(self) -> list[AttentionLayerConfig]:
        specs: list[ModelSpec] = [model.spec for model in (self.teacher, self.student) if model is not None]
        if self.makes_student:
            specs.append(self.manifest.model)
        return [config for spec in specs for config in attention_configs(spec.topology)]

    @property
    def makes_student(self) -> bool:
        """Whether surgery makes the student that the group trains first or measures, from the teacher it has."""
        return self.teacher is not None and self.student is None and makes_student(self.manifest.model, self.group)

    def _check_surgery(self) -> None:
        """Refuse a student that cannot be made from its teacher before anything is measured or trained.

        A teacher read from a run describes itself only here; one in the manifest has been checked but for its shapes.
        """
        model = self.manifest.model
        if not self.makes_student:
            return
        assert self.teacher is not None
        assert model.teacher is not None
        known = model.teacher.model_copy(update={"manifest": self.teacher.spec})
        check_surgery(model.model_copy(update={"teacher": known}))
        surgery.check_models(self.teacher, build_model(model, device="meta"), model.surgery or SurgeryConfig())

    def _check_questions(self) -> None:
        """Refuse, before anything trains, cases of verify eval that could not be asked after it, and missing texts."""
        specs: list[ModelSpec] = [self.manifest.model]
        if self.teacher is not None:
            specs.append(self.teacher.spec)
        for run in self.group.runs:
            for config in run.verify:
                if isinstance(config, FidelityVerifyConfig):
                    check_other_texts(config.texts, self.corpus.tokenizer)
                if isinstance(config, EvalVerifyConfig):
                    prepare_verification(config, self.corpus.tokenizer, specs)

    def trains(self, role: str) -> bool:
        """Return whether a run of this group trains the model of `role`; a control trains neither."""
        return any(phase.trains == role and not phase.control for _, phase in self.group.trained)

    @property
    def has_only_variants(self) -> bool:
        """Whether the group trains nothing but from-scratch variants, so that there is no student."""
        trained = self.group.trained
        return bool(trained) and all(run.exp is not None for run, _ in trained)

    def seed_of(self, role: str) -> int:
        """Return the seed of the weights of `role`: that of the first run that trains it, else the manifest's."""
        seeds = [run.seed for run, phase in self.group.trained if phase.trains == role]
        return seeds[0] if seeds else self.manifest.seed

    def stream_seed(self, run: RunConfig) -> int:
        """Return the seed of the order in which a run reads the data; a control reads as the student did."""
        return self.seed_of("student") if run.train is not None and run.train.control else run.seed

    def _load(self, source: str, role: str, expected: ModelSpec | None, where: str) -> Model:
        """Read a model's weights; of a Hugging Face folder the run keeps a reference, for `labels` and for exports."""
        path = find_checkpoint(Path(source), role=role)
        if self.text is not None and path.is_dir():
            check_tokenizer(self.text, path, where)
        model, labels = load_pretrained(
            path, expected=expected, device=self.device, where=where, tokenizer_hash=self.tokenizer_hash
        )
        self.labels |= labels_as(role, labels)
        if is_main_process():
            check_source(self.run_dir, role, str(path.absolute()), fingerprint(path))
        if path.is_dir() and is_main_process():
            self.labels |= record_loaded(self.run_dir, role, path)
        logger.path(str(path), role)
        return model

    @property
    def corpus(self) -> Corpus:
        """The group's text.

        Raises:
            ConfigError: the group has neither runs nor benchmarks, so none was opened.
        """
        if self.text is None:
            raise ConfigError(f"group {self.group.name!r} opens no data; give it runs or benchmarks")
        return self.text

    def data_labels(self) -> dict[str, str]:
        """Return what the group's text is: its name, fingerprint and tokenizer, and how documents become windows."""
        if self.text is None:
            return {}
        labels = {"data": self.text.name, "data_fingerprint": self.text.fingerprint[:16]}
        if self.text.tokenizer is not None:
            labels["tokenizer"] = f"{self.text.tokenizer.name} ({self.text.tokenizer.hash[:8]})"
        separation = ", separate documents" if self.text.documents is not None else ""
        return labels | {"packing": f"{self.text.packing}{separation}"}

    @property
    def tokenizer_hash(self) -> str:
        """Hash of the tokenizer that made the data; empty when a bare token file does not say."""
        return self.text.tokenizer.hash if self.text is not None and self.text.tokenizer is not None else ""

    def model_of(self, role: str) -> Model:
        """Return the current teacher or student.

        Raises:
            ConfigError: the model does not exist at this point.
        """
        model = self.teacher if role == "teacher" else self.student
        if model is None:
            raise ConfigError(f"model: no {role} at this point; give model.teacher a checkpoint or a manifest")
        return model

    def shapes_of(self, role: str) -> dict[str, Any] | None:
        """Return the spec of the current teacher or student without where its weights come from."""
        model = self.teacher if role == "teacher" else self.student
        return None if model is None else model.spec.model_dump(mode="json", include=set(ModelSpec.model_fields))

    def weights_path(self, stage: str) -> Path:
        """Return where a stage's final weights are."""
        return self.run_dir / "checkpoints" / f"{stage}.safetensors"

    def relative_path(self, stage: str) -> str:
        """Return where a stage's final weights are, within the run directory."""
        return str(self.weights_path(stage).relative_to(self.run_dir))

    def save(self, model: Model, stage: str, role: str) -> None:
        """Write a stage's final weights whole."""
        save_model(
            model,
            self.weights_path(stage),
            role=role,
            phase=stage,
            labels=self.labels,
            tokenizer_hash=self.tokenizer_hash,
        )

    def reload(self, stage: str, role: str) -> None:
        """Replace the current model of `role` by what a finished stage saved."""
        model, labels = load_pretrained(self.weights_path(stage), device=self.device)
        self.labels |= labels
        if role == "teacher":
            self.teacher = model
        elif role == "student":
            self.student = model

    def phases(self) -> list[PhaseResult]:
        """Return what has been trained or transplanted so far, in order."""
        return [record.phase for record in self.ledger.records() if record.phase.trains != "none"]

    def windows(self, split: str, block_size: int) -> TokenDataset:
        """Return the disjoint windows of `train` or `val`, made once: packing reads the whole document index."""
        key = (split, block_size)
        if key not in self._windows:
            windows = self._windows[key] = open_windows(self.corpus, split, block_size)
            if isinstance(windows, PackedDataset):
                logger.info(
                    f"{split} packed by best fit: {len(windows):,} windows of {block_size}, "
                    f"{windows.padding:.2%} padding"
                )
        return self._windows[key]

    def training_windows(self, phase: PhaseConfig) -> TokenDataset | Subset[Batch]:
        """Return the windows that a phase trains on: all, or under debug=overfit those of the first batches."""
        windows = self.windows("train", phase.block_size)
        batches = self.manifest.debug.overfit_batches
        if batches is None:
            return windows
        assert isinstance(phase.batch_size, int)
        return Subset(windows, range(min(len(windows), batches * phase.batch_size * self.data_ranks)))

    def plan(
        self, phase: PhaseConfig, name: str, d_model: int = AUTO_LR_WIDTH, run_id: str | None = None
    ) -> RuntimePlan:
        """Plan the phase of a run from its measurements, with the kernels of its device attached.

        Raises:
            KernelUnavailable: `kernels: require`, and an op would run its reference there.
        """
        asked, policy = self.manifest.device, self.manifest.kernels
        ops = kernels.load(choose_device(phase.device or asked), policy)
        made = plan(
            phase,
            device=asked,
            kernels=policy,
            ops=ops,
            name=name,
            d_model=d_model,
            attention=self.attention,
            measured=self.measured.get(run_id or name),
            ranks=self.data_ranks,
        )
        own = attention_decisions(
            made, self._layers(), self.attention, has_documents=self.group.data.keeps_documents_apart
        )
        if phase.phase in BLOCK_PHASES:
            is_kept = keeps_copied(phase, self.manifest.model, self.group)
            own["trainable"] = trainable_decision(phase, is_kept=is_kept)
        return dataclasses.replace(made, decisions=made.decisions | own)

    @property
    def data_ranks(self) -> int:
        """How many ranks share the data of a step."""
        return data_share(self.manifest.parallel.ranks_per_batch)[1]

    def move_to(self, device: torch.device) -> None:
        """Put the current models on the device of the next phase."""
        self.device = device
        for model in (self.teacher, self.student):
            if model is not None:
                model.to(device)

    def measure(
        self, benchmarks: Sequence[BenchmarkConfig], models: Mapping[str, Model]
    ) -> tuple[BenchmarkResult, ...]:
        """Run benchmarks on named models and say what they found."""
        if not benchmarks:
            return ()
        subjects = Subjects(
            models=models,
            windows=lambda block_size: self.windows("val", block_size),
            token_bytes=self.corpus.token_bytes,
            vocab_size=self.manifest.model.embedder.vocab_size,
            device=self.device,
            tokenizer=self.corpus.tokenizer,
            max_length=self.longest(),
            train_windows=lambda block_size: self.windows("train", block_size),
        )
        results = run_suite(benchmarks, subjects)
        for result in results:
            for metric in result.metrics:
                key, _, given = metric.key.partition("@")
                if key.endswith((".perplexity", ".bits_per_byte")):
                    family, name = key.rsplit(".", 1)[1], key.split(".")[1]
                    logger.benchmark_result(family, f"{name} {given}".rstrip(), metric.value, metric.unit)
        return results

    def longest(self) -> int:
        """Return the longest sequence that the models can be asked to read: what learned positions allow, else what a
        run trains on."""
        models = [model.spec for model in (self.teacher, self.student) if model is not None]
        learned = [spec.embedder.max_positions for spec in models if spec.embedder.max_positions is not None]
        seen = [phase.block_size for _, phase in self.group.trained]
        return min(learned, default=max(seen, default=2048))

    def retry_failed_benchmarks(self, stage: str) -> None:
        """Run the benchmarks of a stage on record that failed; what was measured stays as it is.

        What they lacked, memory say, may be there now. Nothing is trained, and nothing is loaded where none failed.
        """
        if self.ledger.is_measured(stage):
            return
        record = self.ledger[stage]
        model = load_pretrained(self.weights_path(stage), device=self.device)[0].eval()
        benchmarks = {bench.id: bench for bench in self.group.benchmarks}

        def retry(result: BenchmarkResult) -> BenchmarkResult:
            if result.error is None:
                return result
            bench, _, row = result.id.rpartition(".")  # rows have no point in their name
            (found,) = self.measure([benchmarks[bench]], {row: model})
            return dataclasses.replace(found, id=result.id)

        self.ledger.replace(dataclasses.replace(record, benchmarks=tuple(map(retry, record.benchmarks))))

    def stage_row(self, row: str, model: Model) -> tuple[BenchmarkResult, ...]:
        """Measure the perplexity row that a stage adds to the tables, under the group's own perplexity benchmarks.

        Those that read through a cache of some format are about the final models.
        """
        benchmarks = [
            bench
            for bench in self.group.benchmarks
            if isinstance(bench.config, PerplexityBenchmarkConfig) and bench.config.cache_kind is None
        ]
        # Lightning has put a model of several ranks on the CPU by the time a phase's end is announced.
        results = self.measure(benchmarks, {row: model.to(self.device)})
        return tuple(dataclasses.replace(result, id=f"{result.id}.{row}") for result in results)

    def stream_start(self, run: RunConfig) -> int:
        """Return the global sample at which a run's data begins: runs read one stream in turn, and a control reads
        again what the student's phases read."""
        if run.exp is not None:
            return 0
        position, student_start = 0, None
        for other in self.group.runs:
            phase = other.train
            if phase is None or other.exp is not None:
                continue
            if phase.trains == "student" and student_start is None:
                student_start = position
            if other.id == run.id:
                return student_start if phase.control and student_start is not None else position
            if not phase.control:
                assert isinstance(phase.batch_size, int)
                per_step = phase.batch_size * phase.gradient_accumulation_steps * self.data_ranks
                position += phase.steps * per_step
        return position
