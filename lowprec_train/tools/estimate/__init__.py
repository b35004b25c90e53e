"""Estimates of a run's memory, communication and step time, computed from its configuration."""
