"""`lowprec estimate` of `model.recompute=selective`: less than `none`, with every recipe."""

import pytest

from lowprec_train.tools.estimate.memory import saved_bytes
from lowprec_train.tools.estimate.subject import Subject
from lowprec_train.train.compose import composed
from tests.model.test_saved_bytes import LLAMA_7B
from tests.model.test_saved_bytes import selective as kept_by_gemms
from tests.recipes import SYSTEMS, one_of_a_kind_by_day

MORE_CODES = {"coat": 0.75, "fp8_rowwise": 0.87, "quartet2": 0.88, "nvfp4": 0.92, "averis": 0.92}
"""Largest share of what `none` saves of a token, for recipes that save few bytes anyway: packed codes, codes of saved
inputs, no copy of X for wgrad. Other recipes: 0.85."""


@pytest.mark.parametrize("recipe", one_of_a_kind_by_day(SYSTEMS))
def test_selective_saves_less_than_none_with_every_recipe(recipe):
    """Of every block of 7B; what it saves is what GEMMs return, whatever the recipe, and nothing of the weights."""
    size = ("model=llama_7b", "model.layers=2", "micro_batch=1", "data.seq_len=2048", "tokens_per_step=2048")
    runs = (composed(*size, f"+recipe={recipe}", f"model.recompute={how}") for how in ("none", "selective"))
    pairs = zip(*(saved_bytes(Subject(run=run), run.model.recompute).blocks for run in runs), strict=True)
    for none, selective in pairs:
        assert selective.token == kept_by_gemms(recipe, LLAMA_7B).total() and selective.fixed == 0
        assert selective.token <= MORE_CODES.get(recipe, 0.85) * none.token
