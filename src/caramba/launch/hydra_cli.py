"""What Hydra's own command line answers: --hydra-help, --info and shell completion."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from typing import Any

import hydra
from omegaconf import OmegaConf

from caramba.config.source import is_mapping, mapping_of
from caramba.errors import ConfigError, nearest
from caramba.launch.compose import compose
from caramba.launch.overrides import HYDRA_FLAGS, CommandLine, refuse_unsafe_folder, refuse_unsafe_overrides


@hydra.main(config_path="pkg://caramba.conf", config_name="config", version_base="1.3")
def _composed(config: object) -> None:
    raise AssertionError("Hydra was asked for information, and started the application")


def run_native(args: CommandLine) -> int:
    """Hand a command line to Hydra, after the same refusals as everywhere else."""
    is_completion = any(word.startswith(("-sc", "--shell-completion")) for word in args.native)
    if is_completion and any("query=" in word for word in (*args.native, *args.overrides)):
        return _complete(args)
    return _ask_hydra(args)


def _complete(args: CommandLine) -> int:
    """Print the words that may come next in COMP_LINE, or nothing: a shell shows errors in the middle of the line."""
    from caramba.launch.completion import complete_word  # loads every schema, which `--cfg job` rarely needs

    words = os.environ.get("COMP_LINE", "").split()[1:]
    line = os.environ.get("COMP_LINE", "")
    typed = "" if line.endswith(" ") or not words else words[-1]
    before = words[: len(words) - bool(typed)]
    # A shell prints errors into the line that is typed, so a failure completes nothing.
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stderr(nowhere),
        contextlib.suppress(SystemExit, Exception),
    ):
        found = complete_word(before, typed)
        if found is None:
            return _ask_hydra(args)
        print("\n".join(found), end="\n" if found else "")
    return 0


def _ask_hydra(args: CommandLine) -> int:
    refuse_unsafe_overrides(args.overrides)
    for folder in args.config_dirs:
        refuse_unsafe_folder(folder)
    for command in ("launch", "compile", "run"):
        # Completion sees the whole line; Hydra knows the program's name but not the command after it.
        line = os.environ.get("COMP_LINE", "")
        words = line.split(" ")
        if len(words) > 2 and words[1] == command:
            os.environ["COMP_LINE"] = " ".join([words[0], *words[2:]])
    folders = [item for folder in args.config_dirs for item in ("--config-dir", str(folder))]
    program = "caramba" if sys.argv[0].endswith((".py", "-c")) else sys.argv[0]
    sys.argv = [program, *args.native, *folders, *args.overrides]
    if "--hydra-help" not in args.native:
        _composed()
        return 0
    try:
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            _composed()
    except SystemExit as ended:  # Hydra ends the process when it has answered
        if ended.code:
            raise
    print(correct_hydra_help(shown.getvalue()))
    return 0


def correct_hydra_help(text: str) -> str:
    """Return Hydra's help with what is done in place of the flags and groups that are not taken."""
    flags = text.partition("== Configuration groups ==")[0].replace("[job|hydra|all]", "[job]")

    def answer(match: re.Match[str]) -> str:
        instead = HYDRA_FLAGS.get(match["flag"])
        return match[0] if instead is None else f"{match['names']} : not taken: {instead}\n"

    flags = re.sub(r"(?m)^(?P<names>(?P<flag>--[\w-]+)\S*) : .*\n(?: {8,}\S.*\n)*", answer, flags)
    return (
        f"{flags.rstrip()}\n\nGroups and settings of Hydra are fixed: caramba --info config shows them, "
        "caramba launch --cfg job what runs."
    )


def show_config(args: CommandLine) -> int:
    """Print what the overrides compose to; `--resolve` replaces references by their values.

    Raises:
        ConfigError: another part than `job`, or a search, whose points are not known before it runs.
    """
    if args.cfg != "job":
        raise ConfigError(f"--cfg {args.cfg}: only `job` is shown; Hydra's own settings are fixed (--info shows them)")
    if not args.is_multirun:
        print(_text(args, args.overrides), end="")
        return 0
    searches = [word for word in args.overrides if word.lstrip("+").startswith("hydra/sweeper=")]
    if searches:
        raise ConfigError(
            f"--cfg job: {searches[0]} draws its points from what earlier ones measured; leave it and -m out, and give "
            "each key one value"
        )
    from caramba.launch.overrides import expand_sweep

    for words in expand_sweep(args.overrides, args.config_dirs):
        print(f"---\n# {' '.join(words)}\n{_text(args, words)}", end="")
    return 0


def _text(args: CommandLine, words: list[str]) -> str:
    composed = compose(words, args.config_dirs)
    tree = composed.tree if args.resolves else composed.raw
    verify = mapping_of(tree.get("verify"))
    if verify.get("checks"):
        from caramba.config.lower import keeps_checks

        if not keeps_checks(composed.tree, composed.given, composed.chosen):
            tree = {**tree, "verify": {**verify, "checks": []}}
    part: Any = tree
    for name in (args.package or "").split(".") if args.package else ():
        if not is_mapping(part) or name not in part:
            raise ConfigError(
                f"--package {args.package}: there is no {name!r}{nearest(name, mapping_of(part)) or ';'} keys: "
                f"{', '.join(map(str, mapping_of(part)))}"
            )
        part = part[name]
    return OmegaConf.to_yaml(OmegaConf.create({args.package: part} if not is_mapping(part) else part))
