"""One published scheme per file, each a function `recipe(...) -> LinearRecipe`. Hydra loads them by `_target_`; no
module imports them.
"""
