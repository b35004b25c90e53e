"""Optional packages: checked before work starts; the error has the command that installs the package."""

from __future__ import annotations

import importlib.util


def needs_package(package: str, *, extra: str, what: str, module: str | None = None) -> None:
    """Raise ValueError if an optional package is missing.

    extra: the extra of this project that installs it. what: the feature that needs it. module: to look for, if its name
    differs from the package's.
    """
    try:
        found = importlib.util.find_spec(module or package)
    except ModuleNotFoundError:  # the parent package of the module is missing
        found = None
    if found is None or found.origin is None:  # a directory with this name gives a spec without an origin
        raise missing(package, extra=extra, what=what)


def missing(package: str, *, extra: str, what: str, error: ImportError | None = None) -> ValueError:
    """Return the error for a missing package. error: the exception of the import."""
    why = f" ({error})" if error else ""
    return ValueError(f"{what} needs the package '{package}'{why}: pip install 'lowprec_train[{extra}]'")
