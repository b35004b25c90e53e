"""Final losses of a run on the whole validation split, written to evaluation.json.

    run    forward pass of the recipe
    bf16   BF16 forward pass with the same weights: the loss "in the weights"

run - bf16 is the cost of rounding in the forward pass; bf16 minus the loss of a BF16 run is the cost in training.
Samples are consecutive pieces of seq_len tokens, each evaluated once, in micro-batches of the run's size. The first 256
samples also give the sharpness of the loss (`sharpness`). Each checkpoint is evaluated once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from lowprec_train import json_schema
from lowprec_train.config import read_object, read_yaml
from lowprec_train.data.appending import write_whole
from lowprec_train.data.corpus import Corpus
from lowprec_train.data.loader import Batch, Dataset
from lowprec_train.json_schema import NUMBER, Named
from lowprec_train.model.transformer import Transformer
from lowprec_train.tools.study import sharpness
from lowprec_train.train import checks
from lowprec_train.train.construct import construct
from lowprec_train.train.rundir import EVALUATION
from lowprec_train.train.trained import OF_RUN, UNQUANTISED, Trained

SHARP = 256  # samples whose last token gives the sharpness


def read(run: Path) -> dict[str, Any]:
    """Return the content of evaluation.json; empty if the run was not evaluated or was trained further since. Raises
    ValueError, with the path, for other content.
    """
    advice = "remove it to evaluate the run again"
    found = read_object(run / EVALUATION, advice=advice)
    if wrong := json_schema.fault(found, {"loss?": Named(NUMBER), "sharpness?": Named(NUMBER)}):
        raise ValueError(f"{run / EVALUATION}: {wrong}; {advice}")
    ended = read_object(run / "DONE")
    return found if found.get("step") == ended.get("step") is not None else {}


def evaluated(run: Path, *, device: str = "auto") -> dict[str, Any]:
    """Return the losses of a finished run, and compute them if needed. Raises ValueError if the run is not finished."""
    if found := read(run):
        return found
    ended = read_object(run / "DONE")
    if not ended:
        raise ValueError(f"{run} is not finished: it has no DONE file")
    tree: Any = OmegaConf.to_container(read_yaml(run / "config.yaml"))
    text: Corpus = construct(tree["data"], "data")
    checks.corpus(run.name, read_object(run / "run.json").get("corpus_hash"), text.hash)
    trained, on = Trained(run, ended["step"]), checks.device(device)
    computed, micro_batch = trained.computed_as((OF_RUN, UNQUANTISED)), tree["micro_batch"]
    measured = {
        each: of(trained.model(each, device=on), text.valid, micro_batch, on)
        for each in dict.fromkeys(computed.values())
    }
    found = {
        "step": ended["step"],
        "corpus_hash": text.hash,
        "tokens": text.valid.seq_len * sum(each.samples(text.valid.seq_len) for each in text.valid.streams),
        "device": str(on),
        "loss": {forward: measured[each][0] for forward, each in computed.items()},
        "sharpness": {forward: measured[each][1] for forward, each in computed.items()},
    }
    write_whole(run / EVALUATION, f"{json.dumps(found, indent=2)}\n".encode())
    return found


def of(model: Transformer, dataset: Dataset, micro_batch: int, device: torch.device) -> tuple[float, float]:
    """(mean loss in nats per token, sharpness)."""
    first = islice(samples(dataset, micro_batch), max(1, SHARP // micro_batch))
    return loss(model, dataset, micro_batch, device), sharpness.sharpness(model, first, device)


@torch.inference_mode()
def loss(model: Transformer, dataset: Dataset, micro_batch: int, device: torch.device) -> float:
    """Mean loss in nats per token over all samples; non-finite if the model overflows."""
    total, targets = torch.zeros((), dtype=torch.float64, device=device), 0
    for batch in samples(dataset, micro_batch):
        documents = None if batch.documents is None else batch.documents.to(device)
        total += model.loss(batch.tokens.to(device), batch.targets.to(device), 1.0, documents).double()
        targets += batch.targets.numel()
    return float(total) / targets


def samples(dataset: Dataset, count: int) -> Iterator[Batch]:
    """Every sample of every stream once, in batches of `count`; the last batch of a stream may be smaller."""
    for stream in dataset.streams:
        alone = Dataset(
            streams=(stream,),
            seq_len=dataset.seq_len,
            vocab_size=dataset.vocab_size,
            seed=dataset.seed,
            document_mask=dataset.document_mask,
        )
        size = stream.samples(dataset.seq_len)
        yield from (alone.batch(0, first, min(count, size - first), size) for first in range(0, size, count))
