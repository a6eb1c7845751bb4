"""Custom benchmark suites, as YAML or JSON lines: their schema, and a reader whose errors name file and line."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, model_validator

from caramba.config.base import Config
from caramba.config.layer_base import Positive
from caramba.config.parse import parse_as
from caramba.config.resolve import load_nodes, load_tree
from caramba.config.source import Path as Keys
from caramba.config.source import SourceMap, is_list, is_mapping
from caramba.config.verify import CaseId, ChoiceLogprobCase, IntGreedyCase, Text
from caramba.errors import ConfigError, clip, quote

MOST_BYTES = 64 << 20
MOST_YAML_NODES = 100_000
PLAIN_KEYS = frozenset({"id", "prompt"})
PerturbationName = Literal["typos", "case", "spaces", "distractor"]


class MatchItem(Config):
    """A prompt whose greedy continuation, cut at `stop`, has to equal an answer."""

    kind: Literal["exact_match", "normalized_match"] = Field(
        description="kind of the item: exact_match compares texts without outer white space, normalized_match also "
        "without case, punctuation and articles"
    )
    id: CaseId = Field(description="name of the item in results")
    prompt: Text = Field(description="text to continue")
    answer: Text | Annotated[tuple[Text, ...], Field(min_length=1)] = Field(
        description="the correct text, or a list of texts of which each is correct"
    )

    @property
    def answers(self) -> tuple[str, ...]:
        """All correct texts."""
        return (self.answer,) if isinstance(self.answer, str) else self.answer


class CodeItem(Config):
    """A prompt that begins a Python program; the program with its continuation and `tests` has to run to its end."""

    kind: Literal["code"] = Field(description="kind of the item: Python that is run in a sandbox")
    id: CaseId = Field(description="name of the item in results")
    prompt: Text = Field(description="beginning of the program")
    tests: Text = Field(description="Python that follows the program and raises where it is wrong")


class TextItem(Config):
    """A prompt without a right answer: repetition, distinct n-grams and length of its continuation are measured."""

    kind: Literal["text"] = Field(description="kind of the item: a prompt without a right answer")
    id: CaseId = Field(description="name of the item in results")
    prompt: Text = Field(description="text to continue")


SuiteItem = Annotated[IntGreedyCase | ChoiceLogprobCase | MatchItem | CodeItem | TextItem, Field(discriminator="kind")]


class CodeConfig(Config):
    """How code is generated and run: pass@k from `samples` programs an item, and the bounds of the sandbox."""

    samples: Positive = Field(default=1, description="programs of an item")
    k: Annotated[tuple[Positive, ...], Field(min_length=1)] = Field(
        default=(1,), description="numbers of programs of which one has to pass, for pass@k"
    )
    temperature: NonNegativeFloat = Field(default=0.0, description="softmax temperature; 0: the most likely token")
    seed: NonNegativeInt = Field(
        default=1337, description="seed of the first program of an item, one more for each further"
    )
    timeout_s: Annotated[float, Field(gt=0, le=600)] = Field(default=5.0, description="seconds that a program may run")
    memory_mb: Annotated[int, Field(ge=64)] = Field(default=512, description="address space of a program, in MiB")

    @model_validator(mode="after")
    def _rules(self) -> CodeConfig:
        if max(self.k) > self.samples:
            raise ValueError(f"k={max(self.k)} exceeds samples={self.samples}; raise samples, or lower k")
        if self.samples > 1 and self.temperature == 0:
            raise ValueError(f"samples={self.samples} at temperature=0 are all equal; set temperature, such as 0.8")
        return self


class SuiteConfig(Config):
    """A benchmark of one's own: its items, and how they are asked."""

    id: CaseId = Field(description="name of the suite in keys, tables and files")
    description: str = Field(default="", description="what the suite measures")
    data: Annotated[tuple[SuiteItem, ...], Field(min_length=1)] = Field(description="the items")
    max_new_tokens: Positive = Field(default=64, description="most new tokens of an answer")
    stop: tuple[Text, ...] | None = Field(
        default=None,
        description="texts that end an answer and are cut off; unset: a line end for matches, else none",
    )
    perturbations: tuple[PerturbationName, ...] = Field(
        default=(),
        description="changes of the prompts under which items are asked again: typos, case, spaces, distractor",
    )
    code: CodeConfig = Field(default=CodeConfig(), description="how items of the kind code are run")

    @model_validator(mode="after")
    def _once(self) -> SuiteConfig:
        if len(set(self.perturbations)) < len(self.perturbations):
            raise ValueError(f"perturbations={list(self.perturbations)} names one twice; name each once")
        return self


class SuiteDocument(Config):
    """The file of a suite."""

    benchmark: SuiteConfig = Field(description="the suite")


@dataclass(frozen=True)
class SuiteFile:
    """A suite as it was read, with the SHA-256 of its file."""

    path: Path
    sha256: str
    suite: SuiteConfig


def read_suite(path: str | Path, *, where: str, allow_code: bool) -> SuiteFile:
    """Read and check the file of a suite.

    Args:
        where: what the errors call the caller.
        allow_code: whether programs that a model wrote may run.

    Raises:
        ConfigError: the file cannot be read, or does not fit the schema, with the line; or it has code and that is
            not allowed.
    """
    file = Path(path).expanduser()
    content = _read_bytes(file, where)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: {file}: is not UTF-8 ({error}); replace the file") from None
    data, lines = _from_lines(file, text) if file.suffix == ".jsonl" else _from_yaml(file, text)
    _fill_defaults(data, file)
    try:
        suite = parse_as(SuiteDocument, data, source=lines).benchmark
    except ConfigError as error:
        raise ConfigError(f"{where}: {file}: {error}") from None
    _check_items(suite, lines, where, allow_code=allow_code)
    return SuiteFile(file, hashlib.sha256(content).hexdigest(), suite)


class _Lines:
    """Knows the line of every path; a path without one has that of what it is in."""

    def __init__(self, file: Path, lines: dict[Keys, int]) -> None:
        self.file, self.lines = file, lines

    def place(self, path: Keys) -> str:
        found = next((self.lines[path[:n]] for n in range(len(path), -1, -1) if path[:n] in self.lines), None)
        return "" if found is None else f"{self.file}:{found}"


def _read_bytes(file: Path, where: str) -> bytes:
    try:
        size = file.stat().st_size
        if size > MOST_BYTES:
            raise ConfigError(f"{where}: {file}: {size:,} bytes, expected at most {MOST_BYTES:,}; split the suite")
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{where}: suite {str(file)!r} cannot be read ({error.strerror}); give a YAML or JSONL file"
        ) from None


def _from_yaml(file: Path, text: str) -> tuple[Any, _Lines]:
    import yaml

    try:
        root = load_nodes(text, str(file), MOST_YAML_NODES)
        data = load_tree(text, str(file))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        reason = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"{file}{line}: is not YAML ({clip(str(reason), 200)}); correct the line") from None
    lines: dict[Keys, int] = {}
    pending: list[tuple[Keys, Any]] = [] if root is None else [((), root)]
    while pending:
        path, node = pending.pop()
        lines.setdefault(path, node.start_mark.line + 1)
        if node.id == "mapping":
            for key, value in node.value:
                lines.setdefault((*path, str(key.value)), key.start_mark.line + 1)
                pending.append(((*path, str(key.value)), value))
        elif node.id == "sequence":
            pending += [((*path, index), value) for index, value in enumerate(node.value)]
    if not is_mapping(data):
        raise ConfigError(f"{file}:1: expected a mapping with the key benchmark; got {quote(data)}")
    return data, _Lines(file, lines)


def _from_lines(file: Path, text: str) -> tuple[dict[str, Any], _Lines]:
    """Read JSON lines: items, after an optional first line `{"benchmark": {…}}` without data."""
    header: dict[str, Any] = {}
    items: list[Any] = []
    lines: dict[Keys, int] = {(): 1}
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            item = json.loads(line, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{file}:{number}: is not JSON ({error}); expected one object a line") from None
        if not is_mapping(item):
            raise ConfigError(f"{file}:{number}: is {quote(item)}; expected one JSON object a line")
        if set(item) == {"benchmark"} and not items and not header and is_mapping(item["benchmark"]):
            header = dict(item["benchmark"])
            if "data" in header:
                raise ConfigError(f"{file}:{number}: benchmark has data; in JSONL each further line is an item")
            lines["benchmark",] = number
            continue
        lines["benchmark", "data", len(items)] = number
        items.append(item)
    return {"benchmark": header | {"data": items}}, _Lines(file, lines)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def _fill_defaults(data: Any, file: Path) -> None:
    """Name the suite after its file and items after their place; an item of a prompt alone has the kind text."""
    suite = data.get("benchmark")
    if not is_mapping(suite):
        return
    suite.setdefault("id", file.stem)
    items = suite.get("data")
    for number, item in enumerate(items if is_list(items) else [], start=1):
        if is_mapping(item):
            if "prompt" in item and item.keys() <= PLAIN_KEYS:
                item["kind"] = "text"
            item.setdefault("id", str(number))
            if isinstance(item["id"], int) and not isinstance(item["id"], bool):
                item["id"] = str(item["id"])


def _check_items(suite: SuiteConfig, lines: SourceMap, where: str, *, allow_code: bool) -> None:
    seen: dict[str, int] = {}
    for index, item in enumerate(suite.data):
        place = lines.place(("benchmark", "data", index))
        if item.id in seen:
            first = lines.place(("benchmark", "data", seen[item.id]))
            raise ConfigError(f"{where}: {place}: id {quote(item.id)} is that of {first} too; give each its own")
        seen[item.id] = index
        if isinstance(item, CodeItem) and not allow_code:
            raise ConfigError(
                f"{where}: {place}: item {quote(item.id)} runs Python that the model wrote, and allow_code is off; "
                "set allow_code: true (caramba eval --allow-code) to run it in a sandbox, or remove the item"
            )
