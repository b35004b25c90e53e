"""docs/quickstart.md, followed to the letter in an empty directory, with a smaller model and fewer steps.

Commands of ours run in this process, which saves an import of torch each; the shell has the rest.
"""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from torch.nn.functional import cross_entropy

from lowprec_train.config import RunConfig
from lowprec_train.tools import cli
from lowprec_train.train import build
from lowprec_train.train.trained import Trained

DOCUMENT = Path(__file__).parent.parent / "docs" / "quickstart.md"
SMALL = (
    *("model.layers=1", "model.dim=64", "model.ffn=64", "model.heads=2", "model.kv_heads=2", "data.seq_len=64"),
    *("micro_batch=2", "tokens_per_step=256", "steps=3", "eval_batches=1", "log_interval=1"),
)
CPU = torch.device("cpu")
KEPT = 30  # files of the standard library: the page copies them all


def blocks() -> list[tuple[str, str]]:
    """(language, text) of each fenced block, in order."""
    return re.findall(r"^```(bash|python)\n(.*?)^```", DOCUMENT.read_text(), flags=re.DOTALL | re.MULTILINE)


class Reader:
    """Someone who types what the page says."""

    def __init__(self, monkeypatch, capfd):
        self.monkeypatch, self.capfd = monkeypatch, capfd

    def follow(self, language, text):
        """What a block prints."""
        if language == "python":
            exec(compile(text, str(DOCUMENT), "exec"), {})
        elif text.startswith("lowprec "):
            for line in text.replace("\\\n", " ").splitlines():
                self.command(*shlex.split(line))
        else:
            subprocess.run(["bash", "-euo", "pipefail", "-c", text], check=True)
        return self.capfd.readouterr().out

    def command(self, program, *words):
        if (program, words[0]) == ("lowprec", "train"):
            self.train(*words[1:])
        else:
            assert cli.main(words) == 0, (words, self.capfd.readouterr().err)

    def train(self, *words):
        sizes = SMALL[5:] if "model=from_checkpoint" in words else SMALL
        with pytest.raises(SystemExit) as end:
            cli.main(["train", *words, *sizes])
        assert not end.value.code, (words, self.capfd.readouterr().err)


@pytest.fixture
def reader(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return Reader(monkeypatch, capfd)


def losses(name):
    lines = (json.loads(line) for line in Path("runs", name, "metrics.jsonl").read_text().splitlines())
    return [line["train/loss"] for line in lines if "train/loss" in line]


def first_losses(run, weights):
    """Loss on the run's first batch, under its recipe: of imported weights, and of random ones of its seed."""
    saved = OmegaConf.load(run / "config.yaml")
    options = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(RunConfig), saved))
    sequences = options.tokens_per_step // saved.data.seq_len
    batch = build.corpus(options).train.batch(0, 0, sequences, sequences)
    imported, untaught = (Trained(weights).model(saved.precision.name, device=CPU) for _ in range(2))
    build.weights(untaught, CPU, options.seed)
    with torch.no_grad():
        logits = [model(batch.tokens).flatten(0, 1).float() for model in (imported, untaught)]
    return [cross_entropy(each, batch.targets.flatten()).item() for each in logits]


def test_the_quickstart_does_what_it_says(reader):
    text, *rest = blocks()
    reader.follow(*text)
    files = sorted(Path("corpus").glob("*.txt"), key=lambda path: path.stat().st_size)
    for file in [*files[: -2 * KEPT], *files[-KEPT:]]:  # of middling size
        file.unlink()
    told = [reader.follow(*block) for block in rest]
    assert len(losses("mine-bf16")) == 3 and losses("mine-bf16") != losses("mine-fp4")
    assert "mine-fp4" in Path("runs/comparison/report.html").read_text()
    assert any("perplexity" in each.lower() for each in told)
    assert sum("def main(" in each for each in told) == 2  # generated here and by transformers
    assert json.loads(Path("runs/more/run.json").read_text())["weights"] == "imported/mine"
    begun, untaught = first_losses(Path("runs/more"), Path("imported/mine"))
    assert losses("more")[0] == pytest.approx(begun, abs=0.002) and abs(begun - untaught) > 0.01
