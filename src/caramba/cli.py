"""The `caramba` command: a small dispatcher that imports what a command needs when it is called."""

from __future__ import annotations

import io
import sys
from pathlib import Path

from caramba import __version__
from caramba.config.names import nearest
from caramba.errors import ConfigError
from caramba.launch.argv import NATIVE, Request, parse_argv
from caramba.launch.argv import main as launch_main
from caramba.launch.help import COMMANDS, LATER, command_help
from caramba.runs.exit_codes import run_command
from caramba.runs.starting import imports_without_gc


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit status: 0, 1 for a failure, 2 for a user's mistake, 130 when interrupted."""
    words = sys.argv[1:] if argv is None else argv
    for stream in (sys.stdout, sys.stderr):
        # A terminal or pipe that has no sign for what a model writes gets its number, and no traceback in mid-answer.
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
    return run_command(lambda: _dispatch(words), is_debug="--debug" in words)


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("--help", "-h", "help"):
        return launch_main(["--help"])
    if argv[0] == "--version":
        print(f"caramba {__version__}")
        return 0
    command, rest = argv[0], argv[1:]
    if "=" in command or command.startswith(("-", "+", "~")):
        return launch_main(argv)
    if command in LATER:
        raise ConfigError(f"{command}: not built yet: it comes with {LATER[command]}")
    if command not in COMMANDS:
        raise ConfigError(
            f"caramba: unknown command {command!r}{nearest(command, COMMANDS) or ';'} commands: {', '.join(COMMANDS)}"
        )
    if command != "launch" and ("--help" in rest or "-h" in rest):
        print(command_help(command))
        return 0
    return {
        "launch": launch_main,
        "run": _run,
        "compile": _compile,
        "resume": _resume,
        "rerun": _rerun,
        "status": _status,
        "collect": _collect,
        "compare": _compare,
        "export": _export,
        "eval": _eval,
        "generate": _generate,
        "chat": _chat,
        "serve": _serve,
        "doctor": _doctor,
        "schema": _schema,
        "prepare": _prepare,
        "tune": _tune,
        "paper": _paper,
    }[command](rest)


def _run(argv: list[str]) -> int:
    request = _request(argv, value_flags=("--group",))
    files, overrides = _split(request)
    if len(files) != 1:
        raise ConfigError(
            f"run: expected one manifest file, got {files or 'none'}; caramba run FILE [--group NAME] [KEY=VALUE]"
        )
    request.overrides = [f"manifest={files[0]}", *overrides]
    from caramba.launch.run import launch

    return launch(request)


def _compile(argv: list[str]) -> int:
    as_json = "--json" in argv
    # The plan is what compile prints; with --json, --print-plan prints it too, to stderr.
    prints_plan = "--print-plan" in argv
    request = _request(
        [word for word in argv if word not in ("--json", "--print-plan")], value_flags=("--group",)
    )
    files, overrides = _split(request)
    if len(files) > 1:
        raise ConfigError(f"compile: expected overrides or one manifest file, got {files}")
    request.overrides = [*(f"manifest={file}" for file in files), *overrides]
    from caramba.launch.plan import compile_plan

    return compile_plan(request, prints_json=as_json, prints_plan=prints_plan)


def _resume(argv: list[str]) -> int:
    request = _request(argv)
    if len(request.overrides) != 1 or "=" in request.overrides[0]:
        raise ConfigError(
            "resume: expected one run, which resumes unchanged: caramba resume RUN (a directory, runs/NAME, or latest; "
            "or the directory of a sweep)"
        )
    from caramba.launch.run import resume

    return resume(request.overrides[0], [flag for flag in ("--debug", "--quiet") if flag in argv])


def _rerun(argv: list[str]) -> int:
    request = _request(argv)
    if len(request.overrides) != 1 or "=" in request.overrides[0]:
        raise ConfigError(
            "rerun: expected one run, which is run again unchanged: caramba rerun RUN (a directory, runs/NAME, latest, "
            "or a manifest.json)"
        )
    from caramba.launch.run import rerun

    return rerun(request.overrides[0], [flag for flag in ("--debug", "--quiet") if flag in argv])


def _status(argv: list[str]) -> int:
    from caramba.artifacts.across_runs.status import status

    return status(argv)


def _collect(argv: list[str]) -> int:
    from caramba.artifacts.across_runs.command import collect

    return collect(argv)


def _compare(argv: list[str]) -> int:
    from caramba.artifacts.across_runs.compare_command import compare

    return compare(argv)


def _export(argv: list[str]) -> int:
    with imports_without_gc():
        from caramba.export.command import export

    return export(argv)


def _eval(argv: list[str]) -> int:
    with imports_without_gc():
        from caramba.evaluation.evaluate import evaluate

    return evaluate(argv)


def _generate(argv: list[str]) -> int:
    with imports_without_gc():
        from caramba.infer.generate_command import generate

    return generate(argv)


def _chat(argv: list[str]) -> int:
    with imports_without_gc():
        from caramba.infer.chat_command import chat

    return chat(argv)


def _serve(argv: list[str]) -> int:
    with imports_without_gc():
        from caramba.serve.command import serve

    return serve(argv)


def _doctor(argv: list[str]) -> int:
    _no_arguments("doctor", argv)
    from caramba.launch.doctor import doctor

    return doctor()


def _prepare(argv: list[str]) -> int:
    from caramba.data.prepare_command import main as prepare_main

    return prepare_main(argv)


def _tune(argv: list[str]) -> int:
    from caramba.lower.tune.command import main as tune_main

    return tune_main(argv)


def _paper(argv: list[str]) -> int:
    from caramba.launch.paper import paper

    return paper(argv)


def _schema(argv: list[str]) -> int:
    as_json = "--json" in argv
    plugins = [word for word in argv if word.startswith("plugins=")]
    _no_arguments("schema", [word for word in argv if word != "--json" and word not in plugins])
    from caramba.config.plugins import use_plugins
    from caramba.config.schema import json_schema, key_table

    names = plugins[-1].partition("=")[2].strip("[]") if plugins else ""
    use_plugins({"plugins": [name.strip() for name in names.split(",") if name.strip()]})
    if as_json:
        import json

        print(json.dumps(json_schema(), indent=2))
        return 0
    section = None
    for name, key, default, note in key_table():
        if name != section:
            print(f"{'' if section is None else chr(10)}{name}")
            section = name
        print(f"  {key:<34} {default:<16} {note}".rstrip())
    return 0


def _request(argv: list[str], value_flags: tuple[str, ...] = ()) -> Request:
    """Parse a command's words; `--group NAME` becomes the override `group=NAME`."""
    words: list[str] = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        if flag in value_flags:
            if not equals and not rest:
                raise ConfigError(f"command line: {flag} needs a value")
            words.append(f"{flag.lstrip('-')}={value if equals else rest.pop(0)}")
        else:
            words.append(word)
    request = parse_argv(words)
    if request.native or request.is_multirun or request.cfg:
        raise ConfigError(
            f"command line: {', '.join(NATIVE)}, --multirun and --cfg belong to `caramba launch`"
        )
    return request


def _split(request: Request) -> tuple[list[str], list[str]]:
    files = [word for word in request.overrides if "=" not in word and not word.startswith("~")]
    for file in files:
        if Path(file).is_dir():
            held = "its manifest.json" if (Path(file) / "manifest.json").is_file() else "a file"
            raise ConfigError(f"{file} is a folder; give {held}")
        if not Path(file).is_file():
            raise ConfigError(f"{file}: no such file, and not an override (KEY=VALUE)")
    return files, [word for word in request.overrides if word not in files]


def _no_arguments(command: str, argv: list[str]) -> None:
    extra = [word for word in argv if word not in ("--debug", "--quiet")]
    if extra:
        raise ConfigError(
            f"{command}: unexpected {' '.join(extra)}; usage: caramba {command} {COMMANDS[command][0]}".rstrip()
        )


if __name__ == "__main__":
    sys.exit(main())
