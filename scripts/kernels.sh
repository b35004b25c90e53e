#!/usr/bin/env bash
# Builds the kernels of csrc/ into the checkout, lowprec_train/ops/_C.abi3.so and _cuda.so, only what has changed.
#
#   scripts/kernels.sh PYTHON     the interpreter whose torch gives the headers
#
#   CUDA            ON, OFF, or AUTO (default): if nvcc and a GPU are found
#   ARCHITECTURES   GPUs to compile for, separated by semicolons (default 90a)
#   NATIVE          ON: C++ for this machine's processor only (default OFF)
# Without a compiler or CMake it prints a message and builds nothing: the package then uses its reference ops. Code that
# does not compile is an error.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(command -v "$1")
PATH=$PATH:$(dirname "$python") # CMake and ninja may be wheels of the environment
build=build/kernels

none() { echo "no kernels built, the package runs on its reference: $*"; exit 0; }

command -v c++ g++ clang++ >/dev/null || none "no C++ compiler"
command -v cmake >/dev/null || none "no CMake"
if command -v ninja >/dev/null; then generator=Ninja; else generator="Unix Makefiles"; fi
command -v ninja make >/dev/null || none "neither ninja nor make"
if ! grep -qs "^CMAKE_GENERATOR:INTERNAL=$generator$" $build/CMakeCache.txt; then
    rm -rf $build
fi

mkdir -p $build
log=$build/configure.log
cmake -S csrc -B $build -G "$generator" -DCMAKE_MAKE_PROGRAM="$(command -v ninja || command -v make)" \
    -DPython_EXECUTABLE="$python" -DSKBUILD_STATE=editable -DLOWPREC_CUDA="${CUDA:-AUTO}" \
    -DLOWPREC_CUDA_ARCHITECTURES="${ARCHITECTURES:-90a}" -DLOWPREC_NATIVE="${NATIVE:-OFF}" >$log 2>&1 || { cat $log; exit 1; }
grep -- "lowprec:" $log
touch $build/begun # scripts/environment.sh compares it with the sources
cmake --build $build --parallel
mv $build/begun $build/built
