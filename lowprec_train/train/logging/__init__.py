"""What a run reports: metrics, and the sinks that take them."""
