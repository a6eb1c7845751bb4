"""The arguments of the drafter's tools: closed schemas, from which the model's JSON Schema is made."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import Field

from caramba.config.base import Config
from caramba.config.paper import SectionName
from caramba.config.parse import parse_as
from caramba.errors import AgentError, ConfigError
from caramba.paper.folder import PAPER
from caramba.paper.untrusted import read_json

Text = Annotated[str, Field(max_length=60_000)]
Words = Annotated[str, Field(min_length=1, max_length=400)]
Prefix = Annotated[str, Field(max_length=200, description="only names that begin with this")]


class ReadTexFile(Config):
    """Read the paper: its sections with their hashes, or another .tex or .bib file of its folder by its path."""

    path: Annotated[str, Field(max_length=400)] = PAPER


class SectionText(Config):
    section: SectionName
    body: Text = Field(description="LaTeX between the heading, which code writes, and the next section")


class WriteTexFile(Config):
    """Write several sections at once, such as the whole paper. It is checked and compiled: all are taken or none."""

    sections: Annotated[tuple[SectionText, ...], Field(min_length=1)]


class UpdateSection(Config):
    """Replace one section. `base_hash` is the hash of the text that you replace, empty for a section not yet there."""

    section: SectionName
    body: Text
    base_hash: Annotated[str, Field(max_length=64)] = ""


class AddCitation(Config):
    """Make a record citable by the id that a search or list_artifacts gave; returns the key for \\citep."""

    source_id: Annotated[str, Field(max_length=200)]


class Search(Config):
    """Search for works to cite."""

    query: Words
    max_results: Annotated[int, Field(ge=1, le=20)] = 5


class SearchArxiv(Search):
    """Search arXiv; returns ids for add_citation with titles, authors, years, and what abstracts state."""


class SearchSemanticScholar(Search):
    """Search Semantic Scholar; returns ids for add_citation with titles, authors, years, and what abstracts state."""


class GetExperimentManifest(Config):
    """List what was set, as paths for \\setting{PATH} with their values."""

    prefix: Prefix = ""


class GetExperimentResults(Config):
    """List what was measured, as keys for \\result{KEY} with value, unit, dispersion, and whether it is a proxy's."""

    prefix: Prefix = ""


class ListArtifacts(Config):
    """List figures, tables and files of the run, what failed or is missing, and the entries that may be cited."""


class IncludeFigure(Config):
    """Return the LaTeX that shows a figure of list_artifacts, with its label."""

    name: Annotated[str, Field(max_length=200)]
    caption: Annotated[str, Field(min_length=1, max_length=2000)]


class GetPaperTemplate(Config):
    """Return the sections, the commands that they may use, and an example."""


def by_name(*tools: type[Config]) -> dict[str, type[Config]]:
    """Return tools by their names: ReadTexFile is read_tex_file."""
    return {re.sub("(?<!^)(?=[A-Z])", "_", tool.__name__).lower(): tool for tool in tools}


TOOLS = by_name(
    ReadTexFile, WriteTexFile, UpdateSection, AddCitation, SearchArxiv, SearchSemanticScholar, GetExperimentManifest,
    GetExperimentResults, ListArtifacts, IncludeFigure, GetPaperTemplate,
)  # fmt: skip


def tool_schemas(names: Iterable[str], tools: Mapping[str, type[Config]] = TOOLS) -> list[dict[str, Any]]:
    """Return the tools as the chat-completions protocol describes them."""
    described = [(name, " ".join((tools[name].__doc__ or "").split())) for name in names]
    return [{"type": "function", "function": {"name": name, "description": text,
                                              "parameters": tools[name].model_json_schema()}}
            for name, text in described]  # fmt: skip


def read_arguments(name: str, text: str, tools: Mapping[str, type[Config]] = TOOLS) -> Config:
    """Read what a model wrote as the arguments of a tool.

    Raises:
        AgentError: no JSON object, or one that the tool's schema refuses; the message is for the model.
    """
    try:
        plain = read_json(text or "{}")
    except ValueError as error:
        raise AgentError(
            f"{name}: the arguments are no JSON ({error}); they may have been cut short"
        ) from None
    if not isinstance(plain, dict):
        raise AgentError(f"{name}: the arguments are {type(plain).__name__}, expected an object")
    try:
        return parse_as(tools[name], plain)
    except ConfigError as error:
        raise AgentError(f"{name}: {error}") from None
