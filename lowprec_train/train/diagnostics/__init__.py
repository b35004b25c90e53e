"""Diagnostics: failures, hangs, divergence, memory, profiles, and telemetry of roundings."""
