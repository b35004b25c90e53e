"""What the `lowprec` command offers. A subcommand is a module with a `register` function, listed in `cli`."""
