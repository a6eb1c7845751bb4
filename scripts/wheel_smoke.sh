#!/usr/bin/env bash
# Build the wheel of the tracked files, install it in an empty environment, and run a small experiment from an empty folder.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unset PYTHONDONTWRITEBYTECODE # what is loaded is compiled once, instead of all that is installed
mkdir "$work/source" "$work/elsewhere"
(cd "$root" && git ls-files -z | tar --create --null --files-from=-) | tar --extract --directory "$work/source"
python3 -m venv "$work/venv"
pip=("$work/venv/bin/pip" --quiet --disable-pip-version-check)
"${pip[@]}" wheel --no-deps --wheel-dir "$work/dist" "$work/source"
"${pip[@]}" install --no-compile --constraint "$root/constraints.txt" "$work"/dist/*.whl
cd "$work/elsewhere"
"$work/venv/bin/caramba" compile model=llama32_dba train=blockwise --print-plan
"$work/venv/bin/caramba" experiment=smoke --quiet
ls runs/*/*/artifacts/report.json runs/*/*/artifacts/report.html runs/*/*/artifacts/tables.tex runs/*/*/artifacts/summary.png
