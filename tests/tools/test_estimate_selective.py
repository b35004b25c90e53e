"""`lowprec estimate` of `model.recompute=selective`: less than `none`, with every recipe."""

import pytest

from lowprec_train.tools.estimate.memory import saved_bytes
from lowprec_train.tools.estimate.subject import Subject
from lowprec_train.tools.estimate.traffic import activations
from lowprec_train.train.compose import composed
from tests.model.test_saved_bytes import LLAMA_7B
from tests.model.test_saved_bytes import selective as kept_by_gemms
from tests.recipes import SYSTEMS, one_of_a_kind_by_day

DIVIDED = {"fp8": 4096, "nvfp4": 2 * 4096, "fp4": 4096 + 4, "fp8_rowwise": 2 * 4096}
"""Recipe -> bytes of a row of X that are gathered again: of codes, with a scale a row, or in BF16."""
MORE_CODES = {"coat": 0.78, "fp8_rowwise": 0.87, "quartet2": 0.88, "nvfp4": 0.92, "averis": 0.92}
"""Largest share of what `none` saves of a token, for recipes that save few bytes anyway: packed codes, codes of saved
inputs, no copy of X for wgrad. Other recipes: 0.9, which do not save codes of what norms and attention return."""
BY_DAY = ("fp8", "coat")
"""Each recipe compiles eight models. What blocks of others keep is in tests/model and tests/test_compiled_saved.py."""


@pytest.mark.parametrize("recipe", one_of_a_kind_by_day(SYSTEMS, BY_DAY))
def test_selective_saves_less_than_none_with_every_recipe(recipe):
    """Of every block of 7B; what it saves is what GEMMs return, whatever the recipe, and nothing of the weights."""
    size = ("model=llama_7b", "model.layers=2", "micro_batch=1", "data.seq_len=2048", "tokens_per_step=2048")
    runs = (composed(*size, f"+recipe={recipe}", f"model.recompute={how}") for how in ("none", "selective"))
    pairs = zip(*(saved_bytes(Subject(run=run), run.model.recompute).blocks for run in runs), strict=True)
    for none, selective in pairs:
        assert selective.token == kept_by_gemms(recipe, LLAMA_7B).total() and selective.fixed == 0
        assert selective.token <= MORE_CODES.get(recipe, 0.9) * none.token


@pytest.mark.parametrize(
    ("recipe", "sent"),
    [pytest.param(*each, marks=[] if each[0] in BY_DAY else pytest.mark.nightly) for each in DIVIDED.items()],
)
def test_tensor_parallel_ranks_gather_rows_again_instead_of_saving_them(recipe, sent):
    """Of a block of 7B over 8 ranks. The rows of all of them are 8 times as large as a rank's own."""
    size = ("model=llama_7b", "model.layers=2", "micro_batch=1", "data.seq_len=2048", "tokens_per_step=2048")
    runs = [
        Subject(run=composed(*size, f"+recipe={recipe}", "parallel.tp=8", f"model.recompute={how}"), gpus=8)
        for how in ("none", "selective")
    ]
    (none, *_), (selective, *_) = (saved_bytes(each, each.run.model.recompute).blocks for each in runs)
    assert selective.token <= 0.76 * none.token and selective.fixed == 0
    if recipe != "fp4":  # whose X^T is decoded in the forward pass, too
        rows, parts = 2 * 2 * 4096, 2 * (3 * 4096 + 2 * 11008) + 4 * 32  # own rows; q, k, v, gate, up, softmax's sums
        assert selective.token == rows / 8 + parts / 8 + 2 * 4096 / 8
    before, after = (activations(each)["gather"] for each in runs)
    blocks, layers, others = 2, 2, 7  # qkv and gate_up
    assert after - before == blocks * layers * others * 2048 // 8 * sent
