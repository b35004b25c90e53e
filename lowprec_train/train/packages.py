"""Optional packages: checked before work begins; the error names the command that installs one."""

from __future__ import annotations

import importlib.util


def needs_package(package: str, *, extra: str, what: str, module: str | None = None) -> None:
    """Raise ValueError where an optional package is missing.

    extra: of this project, which has the package. what: needs it. module: to look for, where it has another name.
    """
    try:
        found = importlib.util.find_spec(module or package)
    except ModuleNotFoundError:  # of the package around the module
        found = None
    if found is None or found.origin is None:  # a directory of this name that happens to lie here is a spec as well
        raise missing(package, extra=extra, what=what)


def missing(package: str, *, extra: str, what: str, error: ImportError | None = None) -> ValueError:
    """The error to raise; error: what the import said."""
    why = f" ({error})" if error else ""
    return ValueError(f"{what} needs the package '{package}'{why}: pip install 'lowprec_train[{extra}]'")
