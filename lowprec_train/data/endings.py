"""The error of a tokenizer that has no end-of-document token."""


class NoEnding(ValueError):
    """The tokenizer can be read, but has no end-of-document token, not the requested one, or several candidates."""
