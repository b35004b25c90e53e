"""The start-up linter: rules that find settings which run but give bad results."""
