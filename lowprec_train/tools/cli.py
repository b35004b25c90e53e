"""The `lowprec` command, with subcommands such as `lowprec compare RUN RUN ...`.

A subcommand is a module whose docstring is the text of `--help`: a description, and what follows the options. HELP is
its line in the list of commands, `add_options(parser)` adds its options, and `run(arguments)` returns the exit status.
An optional PARSER has further settings of its parser. Exit statuses are the same for all: 0 done, 1 a check failed, 2
bad input, with a one-line error, 141 for an output that its reader has closed (`| head`), without one; `train` has
those of train.py, 1 for every failure. torch is imported only when it is needed.
"""

import argparse
import os
import platform
import select
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import metadata
from typing import Any, NoReturn

from lowprec_train import __version__
from lowprec_train.tools import export_hf, generate, import_hf, inspect_data, prepare_data, train, train_tokenizer
from lowprec_train.tools.bench import command as bench
from lowprec_train.tools.compare import command as compare
from lowprec_train.tools.estimate import command as estimate
from lowprec_train.tools.evaluate import command as evaluate
from lowprec_train.tools.study import command as study

COMMANDS: dict[str, Any] = {
    "train": train,
    "compare": compare,
    "study": study,
    "bench": bench,
    "estimate": estimate,
    "train-tokenizer": train_tokenizer,
    "prepare-data": prepare_data,
    "inspect-data": inspect_data,
    "export-hf": export_hf,
    "import-hf": import_hf,
    "evaluate": evaluate,
    "generate": generate,
}
CLOSED_BY_READER = 128 + 13  # as of a process that SIGPIPE ends


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status. argparse exits with 2 for a wrong option."""
    parsed = parse(arguments)
    try:
        status: int = parsed.run(parsed)
        sys.stdout.flush()
        return status
    except (ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError) and _output_is_closed():
            return CLOSED_BY_READER
        print(f"lowprec {parsed.command}: error: {error}", file=sys.stderr)
        return 2


def _output_is_closed() -> bool:
    """Return whether the reader of stdout has closed it; then what is still printed goes nowhere, without an error."""
    output = sys.stdout.fileno()
    poll = select.poll()
    poll.register(output, 0)
    closed = any(event & select.POLLERR for _, event in poll.poll(0))
    if closed:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, output)
        os.close(nowhere)
    return closed


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the options of one subcommand. `train` passes unknown arguments to Hydra, in order, as `overrides`."""
    parsed, rest = parser().parse_known_args(arguments)
    if parsed.command == "train":
        parsed.overrides = rest
    return parsed


class Parser(argparse.ArgumentParser):
    """A parser that reports a wrong option in two lines, without the usage of all options."""

    @property
    def options(self) -> list[str]:
        """Names of all options, including those of groups."""
        return [name for name in self._option_string_actions if name.startswith("--")]

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Report an unknown argument here, where the options of the command are known. A parser with the default `open`
        returns it instead. argparse also returns what follows an option in a list such as RUN ...: it is appended.
        """
        if self.get_default("open"):
            return super().parse_known_args(args, namespace)
        first = next(iter(sys.argv[1:] if args is None else args), "")
        if first.startswith("--") and not any(each.startswith(first.partition("=")[0]) for each in self.options):
            self._refuse([first])
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown and not getattr(parsed, "open", False):
            self._append(parsed, unknown)
            unknown = []
        return parsed, unknown

    def _append(self, parsed: argparse.Namespace, unknown: Sequence[str]) -> None:
        """Append values to the positional argument that takes any number of them."""
        taken = next((each for each in self._get_positional_actions() if each.nargs in ("*", "+")), None)
        option = next((place for place, each in enumerate(unknown) if each.startswith("-")), None)
        if taken is None or option is not None:
            self._refuse(unknown[option if taken is not None else 0 :])
        read = taken.type if callable(taken.type) else str
        setattr(parsed, taken.dest, [*getattr(parsed, taken.dest), *map(read, unknown)])

    def _refuse(self, unknown: Sequence[str]) -> NoReturn:
        close = get_close_matches(unknown[0].partition("=")[0], self.options, n=1)
        suggestion = f"; did you mean {close[0]}?" if close else ""
        self.error(f"there is no argument {' '.join(unknown)}{suggestion}")

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n{self.prog} --help lists all arguments\n")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line. Documentation and tests also use it."""
    top = Parser(prog="lowprec", description="Low-precision pretraining: runs, and the tools around them.")
    top.add_argument("--version", action="version", version=version())
    subparsers = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        description, _, epilog = (command.__doc__ or "").partition("\n\n")
        texts = {"help": command.HELP, "description": description, "epilog": epilog}
        settings = {"formatter_class": argparse.RawDescriptionHelpFormatter, **getattr(command, "PARSER", {})}
        each = subparsers.add_parser(name, **texts, **settings)
        each.set_defaults(run=command.run)
        command.add_options(each)
    return top


def version() -> str:
    """Return the versions of the package, torch and Python, for example for a bug report."""
    return f"lowprec_train {__version__} (torch {metadata.version('torch')}, Python {platform.python_version()})"


if __name__ == "__main__":
    sys.exit(main())
