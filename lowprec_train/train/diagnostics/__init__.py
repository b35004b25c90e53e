"""What explains a run that fails, hangs, diverges or is slow, and what its roundings lose."""
