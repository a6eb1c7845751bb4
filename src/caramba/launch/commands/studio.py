"""`caramba studio [FOLDER]`: one page for all runs and sweeps below a folder, as a file or served live."""

from __future__ import annotations

from pathlib import Path

from caramba.artifacts.studio.page import build_data, build_page, find
from caramba.artifacts.studio.server import serve
from caramba.console import print_stderr
from caramba.errors import ConfigError
from caramba.launch.commands.arguments import CommandArguments
from caramba.runs.files import write_whole

FILE = "studio.html"
# Fewer runs are read before a person wonders.
_SAID_FROM = 200


def main(argv: list[str]) -> int:
    """Write the page, or serve it.

    Raises:
        ConfigError: the folder is not there, or has neither a run nor a sweep.
    """
    parser = CommandArguments("studio")
    parser.add_argument("folder", nargs="?", default="runs")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--port", type=int, default=8765)
    args = parser.parse_args(argv)
    folder = Path(args.folder).expanduser()
    if not folder.is_dir() and (Path("runs") / folder).is_dir():
        folder = Path("runs") / folder
    if not folder.is_dir():
        raise ConfigError(
            f"studio: {args.folder}: no such folder; give one with runs, or start one with caramba launch"
        )
    if args.serve:
        if args.out is not None:
            raise ConfigError("studio: --serve writes no file; leave out --out, or --serve")
        return serve(folder, args.port)
    found = find(folder)
    if not found.runs:
        raise ConfigError(
            f"studio: no runs under {folder.absolute()} (a run is a directory with manifest.json); start one with "
            "caramba launch"
        )
    out = (args.out or found.folder / FILE).absolute()
    write_whole(out, build_page(build_data(found, None if args.quiet else _report, out.parent)))
    print(f"wrote {out}: {len(found.runs):,} {'run' if len(found.runs) == 1 else 'runs'}")
    return 0


def _report(done: int, total: int) -> None:
    if total >= _SAID_FROM and (done % _SAID_FROM == 0 or done == total):
        print_stderr(f"studio: read {done:,} of {total:,} changed runs")
