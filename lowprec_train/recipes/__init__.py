"""One published scheme a file, each a function `recipe(...) -> LinearRecipe`. Nobody imports them: Hydra's `_target_`
is the only door.
"""
