"""The two ways, one tensor at a time: weights -> a directory of `transformers`, and such a directory -> weights.

What is wrong is found before the first tensor is read: sizes and names of both sides are known from headers, and a
layout of rows applied to tensors without memory says what shapes it makes. A directory appears whole or not at all.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import reduce
from pathlib import Path

import torch
from omegaconf import OmegaConf
from torch import Tensor

from lowprec_train.config import MODEL_FILE, ModelConfig, read_json
from lowprec_train.tools.huggingface import shards
from lowprec_train.tools.huggingface.families import SPECIAL_IDS, Family, Json, family_named, family_of
from lowprec_train.tools.huggingface.shards import TensorSpec
from lowprec_train.train.weights import Weights, read_tensor, shapes, stored, weight_files

IDS_FILE = "token_ids.json"  # of an imported directory
# Tensors of older files that are not weights: causal masks and tables of angles.
NOT_WEIGHTS = re.compile(r".*\.(attn\.(masked_)?bias|rotary_emb\.inv_freq)")


@contextmanager
def whole(out: Path) -> Iterator[Path]:
    """A directory to fill, which becomes `out` when all went well. Raises ValueError when `out` is in use."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists; choose another directory, or remove it")
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.{os.getpid()}.unfinished")
    try:
        partial.mkdir()
    except OSError as error:
        raise ValueError(f"{out} cannot be made: {error.strerror}") from error
    try:
        yield partial
        if out.exists():
            out.rmdir()
        partial.rename(out)
    except BaseException:
        shutil.rmtree(partial)
        raise


def one_dtype(weights: Weights) -> torch.dtype:
    """The narrowest dtype that holds every tensor of a model exactly."""
    return reduce(torch.promote_types, (weights.dtype(name) for name in weights.names()))


def export(
    weights: Weights,
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    max_bytes: int,
    tokenizer: Mapping[str, bytes],
    ids: Json,
) -> torch.dtype:
    """Write a directory that `transformers` opens; returns the dtype of its tensors.

    dtype: None for the narrowest that loses nothing. tokenizer: files by name. ids: the SPECIAL_IDS that are known.
    Raises ValueError for a model that has no form there, and when `out` is in use.
    """
    family, model = family_of(weights.model), weights.model
    dtype = dtype or one_dtype(weights)
    layouts = {name: family.layout(name, model) for name in weights.names()}

    def taken_apart(name: str, ours: Tensor) -> Iterator[tuple[str, Tensor]]:
        yield from zip(family.theirs(name), layouts[name].split(ours), strict=True)

    apart = [each for name in layouts for each in taken_apart(name, torch.empty(weights.shape(name), device="meta"))]
    slots = [TensorSpec(name=name, shape=part.shape, dtype=dtype) for name, part in apart]
    tensors = (each for name in layouts for each in taken_apart(name, weights.read(name)))
    with whole(out) as directory:
        shards.write(directory, slots, tensors, max_bytes)
        for file, content in tokenizer.items():
            (directory / file).write_bytes(content)
        config = family.config(model, dtype=dtype, ids=ids)
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return dtype


def import_(source: Path, out: Path, *, name: str, max_bytes: int, tokenizer: Mapping[str, bytes]) -> ModelConfig:
    """Write an imported directory from one of `transformers`; returns the model's sizes. Tensors keep their dtypes.

    Raises ValueError for a model that this project does not compute, files that cannot be read, tensors that the model
    has no use for or that are absent, and when `out` is in use.
    """
    config = read_config(source)
    family, model = described(config, name)
    sources = Sources(source, family, model)
    with whole(out) as directory:
        shards.write(
            directory, sources.slots, ((slot.name, sources.read(slot.name)) for slot in sources.slots), max_bytes
        )
        for file, content in tokenizer.items():
            (directory / file).write_bytes(content)
        OmegaConf.save(OmegaConf.create(asdict(model)), directory / MODEL_FILE)
        ids = {key: config[key] for key in SPECIAL_IDS if config.get(key) is not None}
        (directory / IDS_FILE).write_text(json.dumps(ids, indent=2) + "\n")
    return model


def special_ids(directory: Path) -> Json:
    """The SPECIAL_IDS that an imported model came with; of a run none."""
    file = directory / IDS_FILE
    ids: Json = read_json(file) if file.is_file() else {}
    return ids


def read_config(source: Path) -> Json:
    """A directory's config.json. Raises ValueError where there is none."""
    try:
        config: Json = json.loads((source / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{source} is not a directory of transformers (config.json): {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{source} is not a directory of transformers: config.json holds {config!r:.40}, not a table")
    return config


def described(config: Json, name: str) -> tuple[Family, ModelConfig]:
    """Family and sizes of a config.json. Raises ValueError as `import_`."""
    family = family_named(config)
    return family, family.model(config, name)


class Sources:
    """Our tensors as they can be made of a directory's files. Raises ValueError unless the two fit exactly."""

    def __init__(self, source: Path, family: Family, model: ModelConfig) -> None:
        files = weight_files(source)
        self._stored = {_full(name, family): name for name in files}
        self._files = {full: files[name] for full, name in self._stored.items()}
        forms = stored(files)
        self._layouts = {name: family.layout(name, model) for name in shapes(model)}
        self._theirs = {name: family.theirs(name) for name in self._layouts}
        self._complete(source, model)
        there = {name: [forms[self._stored[each]] for each in theirs] for name, theirs in self._theirs.items()}
        wrong = [name for name, each in there.items() if not all(_kept(dtype) for _, dtype in each)]
        if wrong:
            parts = ", ".join(f"{part} {dtype}" for part, (_, dtype) in zip(self._theirs[wrong[0]], there[wrong[0]]))
            raise ValueError(f"{source}: {parts}: weights must be BF16, FP16 or FP32")
        self.slots = [
            TensorSpec(name=name, shape=self._joined(name, [shape for shape, _ in each]), dtype=_widest(each))
            for name, each in there.items()
        ]
        unfit = [slot for slot in self.slots if slot.shape != shapes(model)[slot.name]]
        if unfit:
            raise ValueError(
                f"{source}: {', '.join(self._theirs[unfit[0].name])} make a tensor {tuple(unfit[0].shape)}, and "
                f"config.json a model with {tuple(shapes(model)[unfit[0].name])}"
            )

    def read(self, name: str) -> Tensor:
        """One tensor of ours."""
        parts = [read_tensor(self._files[each], self._stored[each]) for each in self._theirs[name]]
        return self._layouts[name].join(parts)

    def _joined(self, name: str, theirs: Sequence[torch.Size]) -> torch.Size:
        try:
            return self._layouts[name].join([torch.empty(shape, device="meta") for shape in theirs]).shape
        except RuntimeError as error:
            raise ValueError(f"{', '.join(self._theirs[name])} of {list(map(tuple, theirs))} do not fit") from error

    def _complete(self, source: Path, model: ModelConfig) -> None:
        wanted = {each for theirs in self._theirs.values() for each in theirs}
        useless = {"lm_head.weight"} if model.tied else set()
        absent = sorted(wanted - set(self._files))
        more = [name for name in sorted(set(self._files) - wanted - useless) if not NOT_WEIGHTS.fullmatch(name)]
        for what, names in (("has no", absent), ("has more than the model that config.json describes:", more)):
            if names:
                raise ValueError(f"{source} {what} {', '.join(names[:6])}{' ...' if len(names) > 6 else ''}")


def _full(name: str, family: Family) -> str:
    """A tensor's name in the model with a head: files of the bare model leave the first part out."""
    return name if name.startswith((family.prefix, "lm_head.")) else family.prefix + name


def _kept(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize >= 2


def _widest(parts: Sequence[tuple[torch.Size, torch.dtype]]) -> torch.dtype:
    """The narrowest dtype that holds every part exactly."""
    return reduce(torch.promote_types, (dtype for _, dtype in parts))
