"""What a tokenizer of either kind says when it has no token to close documents with."""


class NoEnding(ValueError):
    """A tokenizer that can be read, but has no end-of-document token, not the one asked for, or several candidates."""
