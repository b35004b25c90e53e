"""Weights that hold NaN or infinity are refused in one line by whatever reads them, and leave nothing behind."""

import dataclasses
import math

import pytest
import torch

from lowprec_train.model.generation import Sampling
from lowprec_train.tools.cli import main
from lowprec_train.train import build
from lowprec_train.train.trained import Trained
from tests.recipes import composed
from tests.saved import save
from tests.tools.evaluated import MODEL, subject
from tests.tools.exchanged import MODELS, drawn, save_run

SPOILED = "blocks.1.mlp.down.weight"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run with a checkpoint at step 4, and one at step 8 with three lost numbers."""
    made = subject(tmp_path_factory.mktemp("spoiled"))
    run = composed("+recipe=fp4", *MODEL)
    model = build.layout(run).model
    build.weights(model, torch.device("cpu"), 0)
    with torch.no_grad():
        model.get_parameter(SPOILED).view(-1)[[3, 99, 1000]] = torch.tensor([math.nan, math.inf, -math.inf])
    save(made.run, run, model, 8, recipe="fp4", tokenizer=made.tokenizer and next(made.run.parent.glob("*.model")))
    return made


def refusal(capsys, *arguments):
    status = main([str(each) for each in arguments])
    out, err = capsys.readouterr()
    assert (status, out) == (2, "") and err.count("\n") == 1 and "Traceback" not in err
    return err


def test_export_evaluation_and_generation(made, capsys, tmp_path):
    commands = (
        ("export-hf", made.run, "--out", tmp_path / "out"),
        ("evaluate", made.run, "--data", made.raw, "--device", "cpu"),
        ("generate", made.run, "--prompt", "tile", "--device", "cpu"),
    )
    for command in commands:
        err = refusal(capsys, *command)
        assert f"lowprec {command[0]}: error: " in err and "step-8 holds NaN or infinity" in err
        assert f"{SPOILED} (3 of 8,192 elements)" in err
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="holds NaN or infinity"):
        Trained(made.run).model("run", device=torch.device("cpu"))
    assert main(["export-hf", str(made.run), "--out", str(tmp_path / "out"), "--step", "4"]) == 0


def test_an_imported_model(capsys, tmp_path):
    """Written by import-hf before its numbers were lost; then such a directory of transformers."""
    from safetensors.torch import load_file, save_file

    sizes = MODELS["llama"]
    run = save_run(tmp_path / "run", drawn(sizes), sizes)
    assert main(["export-hf", str(run), "--out", str(tmp_path / "theirs")]) == 0
    assert main(["import-hf", str(tmp_path / "theirs"), "--out", str(tmp_path / "ours")]) == 0
    capsys.readouterr()
    for directory in ("theirs", "ours"):
        file = tmp_path / directory / "model.safetensors"
        tensors = load_file(file)
        tensors[sorted(tensors)[0]].view(-1)[5] = math.nan
        save_file(tensors, file, metadata={"format": "pt"})
    err = refusal(capsys, "import-hf", tmp_path / "theirs", "--out", tmp_path / "again")
    assert "lm_head.weight (1 of 6,144 elements)" in err and not (tmp_path / "again").exists()
    err = refusal(capsys, "export-hf", tmp_path / "ours", "--out", tmp_path / "again")
    assert "(1 of " in err and not (tmp_path / "again").exists()


def test_weights_that_overflow_under_a_recipe(made, capsys, tmp_path):
    """Finite in the file, and no number comes out of them."""
    run = composed("+recipe=bf16", *MODEL)
    model = build.layout(run).model
    build.weights(model, torch.device("cpu"), 0)
    with torch.no_grad():
        model.get_parameter("head.weight").fill_(3e38)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    large = save(tmp_path / "large", run, model, 4, tokenizer=next(made.run.parent.glob("*.model")))
    for command in (("evaluate", large, "--data", made.raw), ("generate", large, "--prompt", "tile")):
        status = main([str(each) for each in (*command, "--device", "cpu")])
        err = capsys.readouterr().err
        assert status == 2 and "not finite: its weights overflow under this recipe" in err and "Traceback" not in err
    with pytest.raises(ValueError, match="logits are not finite"):
        Sampling(temperature=0.0).choose(torch.tensor([1.0, math.nan]), torch.Generator())


def test_the_first_weights_of_a_run(made):
    run = composed("+recipe=bf16", *MODEL, f"weights={made.run}", "model=from_checkpoint")
    assert dataclasses.is_dataclass(run)
    with pytest.raises(ValueError, match="holds NaN or infinity"):
        opened = build.first_weights(run, made.run.parent / "none")
        assert opened is not None
        opened.read(SPOILED)
