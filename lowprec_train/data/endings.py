"""The error of a tokenizer that has no end-of-document token."""


class NoEnding(ValueError):
    """A tokenizer that can be read, but has no end-of-document token, not the one asked for, or several candidates."""
