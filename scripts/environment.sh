#!/usr/bin/env bash
# Makes sure that there is an environment with torch, the pinned dependencies and this project; prints its python.
#
#   scripts/environment.sh          print the python to use; messages go to stderr
#   scripts/environment.sh --hint   print how to activate that environment
#
# The active environment is used if its python is 3.11 or newer and imports torch 2.11 to 2.13; its torch is not
# changed. Otherwise VENV (default .venv) is created with PYTHON (default: the first of python3, python3.12, python3.11
# that is 3.11 or 3.12) and gets the torch that constraints.txt pins.
#
#   TORCH_INDEX   package index for torch alone (a CPU-only one saves about 3 GB of download)
#   PIP_INDEX     package index for everything else
#   KERNELS=off   do not build the compiled kernels; else scripts/kernels.sh builds into the checkout what it can
# A stamp file in the environment has the hash of what was installed, so that a second call is fast.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}
root=$PWD

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }

# Returns whether the environment of this interpreter fits (python >= 3.11, torch 2.11 to 2.13, writable by pip).
fits() {
    "$1" - <<'PYTHON' 2>/dev/null
import os, sys, sysconfig
assert sys.version_info >= (3, 11)
managed = os.path.join(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED")
assert sys.prefix != sys.base_prefix or not os.path.exists(managed)
import torch, pip
assert (2, 11) <= tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 14)
PYTHON
}

supported() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; }

active_python() {
    local candidate
    for candidate in python python3; do
        if command -v "$candidate" >/dev/null && fits "$candidate"; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    return 1
}

base_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.12 python3.11 python}; do
        if command -v "$candidate" >/dev/null && supported "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    die "no Python 3.11 or 3.12 found${PYTHON:+ (PYTHON=$PYTHON)}; install one, or name it: make env PYTHON=/path/to/python3.12"
}

make_venv() {
    local base version
    base=$(base_python)
    version=$("$base" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    if ! "$base" -c 'import ensurepip, venv' 2>/dev/null; then
        die "$base cannot make a virtual environment (no ensurepip): install the package python$version-venv" \
            "(Debian, Ubuntu: apt-get install python$version-venv), then run this again"
    fi
    say "making $venv with $base ($version)"
    "$base" -m venv "$venv"
}

# An editable install stores the list of packages: a module that became a package is found after a new install only.
fingerprint() {
    { cat pyproject.toml constraints.txt; find lowprec_train -name __init__.py | sort; echo "$root"; } | sha256sum | cut -c1-32
}

install_torch() {
    local pinned
    pinned=$(grep '^torch==' constraints.txt)
    say "installing $pinned${TORCH_INDEX:+ from $TORCH_INDEX} (the default Linux build is a download of about 3 GB)"
    "$1" -m pip install --quiet ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$pinned" >&2
}

# Installs CMake and ninja as wheels if there is a compiler and they are missing.
build_tools() {
    command -v c++ g++ clang++ >/dev/null || return 0
    command -v cmake >/dev/null || echo cmake
    command -v ninja >/dev/null || echo ninja
}

# Installs the other pinned dependencies, then the project without build isolation, which would hide torch.
install_project() {
    local python=$1 pins torch
    pins=$(mktemp)
    torch=$("$python" -c 'import importlib.metadata as m; print(m.version("torch"))')
    sed "s/^torch==.*/torch==$torch/" constraints.txt >"$pins"
    say "installing the pinned needs and the project beside torch $torch"
    # shellcheck disable=SC2046
    "$python" -m pip install --quiet ${PIP_INDEX:+--index-url "$PIP_INDEX"} -c "$pins" scikit-build-core wheel $(build_tools) >&2
    "$python" -m pip install --quiet ${PIP_INDEX:+--index-url "$PIP_INDEX"} -c "$pins" --no-build-isolation \
        --config-settings=wheel.cmake=false -e '.[dev]' >&2
    rm -f "$pins"
    [ "${KERNELS:-on}" = off ] || scripts/kernels.sh "$python" >&2
}

ready() { [ -x "$1" ] && [ "$(cat "$(dirname "$1")/../lowprec_train.stamp" 2>/dev/null)" = "$(fingerprint)" ]; }

stamp() { fingerprint >"$(dirname "$1")/../lowprec_train.stamp"; }

if [ -n "${VIRTUAL_ENV:-}" ] && ready "$VIRTUAL_ENV/bin/python"; then
    python=$VIRTUAL_ENV/bin/python
elif python=$(active_python); then
    ready "$python" || { install_project "$python" && stamp "$python"; }
else
    python=$(realpath -m -s "$venv")/bin/python
    if ! ready "$python"; then
        [ -x "$python" ] || make_venv
        fits "$python" || install_torch "$python"
        install_project "$python"
        stamp "$python"
    fi
fi

if [ -f build/kernels/built ] && [ "${KERNELS:-on}" != off ] && [ -n "$(find csrc -type f -newer build/kernels/built -print -quit)" ]; then
    say "note: csrc/ has changed since its kernels were built: make kernels"
fi

if [ "${1:-}" != --hint ]; then
    echo "$python"
elif [ "$(command -v python || true)" = "$python" ]; then
    echo "The environment is active: lowprec train +recipe=fp4"
else
    echo "To use the environment: source ${python%/python}/activate && lowprec train +recipe=fp4"
fi
