"""mkdocs hook: adds the pages and pictures that come from the code, so that they cannot be out of date."""

from __future__ import annotations

import architecture_picture
import catalogue
import command_pages
import op_pages
import schema_pages
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

PACKAGES = "<!-- packages -->"


def build_pages() -> dict[str, str]:
    """Return {path in the documentation: content}."""
    return {
        "reference/commands.md": command_pages.commands(),
        "reference/options.md": command_pages.options(),
        "reference/files.md": catalogue.files(),
        "reference/metrics.md": catalogue.metrics(),
        "reference/ops.md": op_pages.page(),
        **{f"reference/{name}.md": text for name, text in schema_pages.pages().items()},
        "pictures/packages.svg": architecture_picture.picture(),
    }


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    for path, content in build_pages().items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put the table of packages where a page has its mark."""
    return markdown.replace(PACKAGES, architecture_picture.package_table()) if PACKAGES in markdown else markdown
