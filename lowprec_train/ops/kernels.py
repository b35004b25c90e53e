"""Compiled kernels: two shared libraries in this folder, built from csrc/ (docs/building.md).

    _C.abi3.so   C++, dispatch key CPU
    _cuda.so     CUDA, dispatch key CUDA; loaded only if torch has CUDA, whose symbols it needs

A library registers its ops when it is loaded, and torch's dispatcher then lists them. It also lists the formats and
roundings of its kernels, with their numbers, which must equal those of `ops.formats`. If a library does not exist, the
reference runs; if it exists and does not load, that is an error. This is the second file that may use private names of
torch (decision 0016): the dispatcher has no public query.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable
from pathlib import Path

import torch

from lowprec_train.ops.formats import FORMATS, Format

FOLDER = Path(__file__).parent
FILES = {"cpu": "_C.abi3.so", "cuda": "_cuda.so"}  # device type -> library


class KernelError(RuntimeError):
    """Raised if a compiled kernel cannot be used on this device or differs from the reference."""


def present(folder: Path = FOLDER) -> dict[str, Path]:
    """Return device type -> path of the library, for libraries that exist and that this torch can load."""
    wanted = {device: folder / name for device, name in FILES.items() if device == "cpu" or torch.version.cuda}
    return {device: path for device, path in wanted.items() if path.exists()}


def has_kernel(op: str, device: str) -> bool:
    """Return whether the dispatcher has a kernel of `lowprec::op` for this device type, without fallbacks."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"lowprec::{op}", device.upper())


def load(ops: Iterable[str], folder: Path = FOLDER) -> dict[str, frozenset[str]]:
    """Load the libraries that exist; return device type -> ops with a kernel there. Schemas must be defined before.

    Raises ImportError, with the file and the loader's message, if a library does not load.
    """
    ops, served = tuple(ops), dict.fromkeys(FILES, frozenset[str]())
    for device, path in present(folder).items():
        try:
            torch.ops.load_library(path)
        except OSError as error:
            raise ImportError(
                f"{path}: the compiled kernels do not load: {error}. Build them again for this torch "
                f"({torch.__version__}) with `make kernels`, or remove the file to run on the reference"
            ) from error
        served[device] = frozenset(op for op in ops if has_kernel(op, device))
    return served


def names(folder: Path = FOLDER) -> dict[str, frozenset[str]]:
    """Return device type -> names of the formats and roundings that the kernels of its library support.

    Raises ImportError if a library does not list them, or has other numbers for a format than `ops.formats`.
    """
    served = dict.fromkeys(FILES, frozenset[str]())
    for device, path in present(folder).items():
        try:
            list_names = ctypes.CDLL(str(path)).lowprec_served
        except AttributeError as error:
            raise ImportError(f"{path} was built from older sources: build it again with `make kernels`") from error
        list_names.restype = ctypes.c_char_p
        rows = [line.split() for line in list_names().decode().splitlines()]
        for name, *numbers in rows:
            if numbers and _numbers_of(FORMATS[name]) != (here := _parse_numbers(numbers)):
                raise ImportError(
                    f"{path} was built from other sources: its {name} is {here}, that of ops/formats.py "
                    f"{_numbers_of(FORMATS[name])} (mantissa bits, smallest exponent, largest value, scaled, bytes); "
                    "build it again with `make kernels`"
                )
        served[device] = frozenset(row[0] for row in rows)
    return served


Numbers = tuple[int, int, float, bool, int]


def _numbers_of(format: Format) -> Numbers:
    return format.mantissa_bits, format.min_exponent, format.max, format.scaled, format.carrier.itemsize


def _parse_numbers(fields: list[str]) -> Numbers:
    mantissa, lowest, largest, scaled, size = fields
    return int(mantissa), int(lowest), float.fromhex(largest), scaled == "1", int(size)


def architectures(path: Path) -> list[str]:
    """Return the GPU architectures for which a CUDA library has code, such as ["90a"]."""
    name = ctypes.CDLL(str(path)).lowprec_architectures
    name.restype = ctypes.c_char_p
    return name().decode().split("_")


def runs_on(architecture: str, capability: tuple[int, int]) -> bool:
    """Return whether code for `architecture` runs: sm_89 on 8.9 and later minor versions; sm_90a on 9.0 only."""
    number, suffix = re.fullmatch(r"(\d+)([a-z]?)", architecture).groups()  # type: ignore[union-attr]
    major, minor = divmod(int(number), 10)
    same = capability[0] == major
    return same and (capability[1] == minor if suffix == "a" else capability[1] >= minor)


def check_architecture(device: torch.device, folder: Path = FOLDER) -> None:
    """Raise KernelError if the CUDA library has no code for this GPU."""
    path = present(folder)["cuda"]
    built, capability = architectures(path), torch.cuda.get_device_capability(device)
    if not any(runs_on(each, capability) for each in built):
        needed = "".join(map(str, capability)) + ("a" if capability[0] >= 9 else "")
        raise KernelError(
            f"{path} was built for sm_{', sm_'.join(built)}, and {device} ({torch.cuda.get_device_name(device)}) has "
            f"compute capability {capability[0]}.{capability[1]}: make kernels CUDA=ON ARCHITECTURES={needed}, or "
            "CUDA=OFF to run on the reference"
        )
