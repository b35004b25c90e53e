"""What the `lowprec` command offers. A subcommand is a module that `cli` lists."""
