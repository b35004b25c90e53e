"""The start-up linter: rules over what a run is about to do, and what they find."""
