"""`lowprec estimate` of a run whose precision changes."""

from lowprec_train.tools import cli
from lowprec_train.tools.estimate.report import estimate
from lowprec_train.train.compose import composed

TINY = ("model.layers=2", "micro_batch=2", "data.seq_len=64")


def test_memory_is_that_of_the_largest_phase(capsys):
    """A last tenth in BF16 saves what BF16 saves; the rest is of the first phase."""
    run = ("model=llama_tiny", "compile='off'", *TINY, "tokens_per_step=128", "steps=100")
    bf16, coat, late = (
        estimate(composed(*run, *more))
        for more in (
            ("optim=adamw_coat",),
            ("+recipe=coat",),
            ("+recipe=coat", "precision/schedule=bf16_end"),
        )
    )
    assert coat["memory"]["total"] < late["memory"]["total"] == bf16["memory"]["total"]
    assert (coat["memory_from_step"], late["memory_from_step"], bf16["memory_from_step"]) == (0, 90, 0)
    assert late["flops_per_token"] == coat["flops_per_token"] != bf16["flops_per_token"]
    assert cli.main(["estimate", *run, "+recipe=coat", "precision/schedule=bf16_end"]) == 0
    assert "most at: loss, from step 90 on (precision.schedule)" in capsys.readouterr().out
