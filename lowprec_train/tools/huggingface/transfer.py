"""The two ways, one tensor at a time: weights -> a directory of `transformers`, and such a directory -> weights.

What is wrong is found before the first tensor is read: sizes and names of both sides are known from headers, and a
layout of rows applied to tensors without memory says what shapes it makes. A directory appears whole or not at all.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import reduce
from pathlib import Path

import torch
from omegaconf import OmegaConf
from torch import Tensor

from lowprec_train.config import MODEL_FILE, ModelConfig, read_object
from lowprec_train.tools.huggingface import shards
from lowprec_train.tools.huggingface.families import family_named, family_of
from lowprec_train.tools.huggingface.family import SPECIAL_IDS, Family, Json
from lowprec_train.tools.huggingface.quantized import WeightCodes
from lowprec_train.tools.huggingface.rows import Rows
from lowprec_train.tools.huggingface.shards import TensorSpec
from lowprec_train.train.weights import Weights, read_tensor, shapes, stored, weight_files

IDS_FILE = "token_ids.json"  # of an imported directory
DTYPES = {torch.float32, torch.float16, torch.bfloat16, torch.float64}
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


def narrowest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """The narrowest dtype that holds numbers of all of these exactly."""
    return reduce(torch.promote_types, dtypes)


def export(
    weights: Weights,
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    max_bytes: int,
    tokenizer: Mapping[str, bytes],
    ids: Json,
    codes: WeightCodes | None = None,
) -> torch.dtype:
    """Write a directory that `transformers` opens; returns the dtype of its tensors.

    dtype: None for the narrowest that loses nothing. tokenizer: files by name. ids: the SPECIAL_IDS that are known.
    codes: which linear layers are written in codes, and how.
    Raises ValueError for a model that has no form there, and when `out` is in use.
    """
    family, model = family_of(weights.model), weights.model
    dtype = dtype or narrowest(map(weights.dtype, weights.names()))
    layouts = {name: family.layout(name, model) for name in weights.names()}
    if codes is not None:
        codes.check(family, model)

    def taken_apart(name: str, ours: Tensor) -> Iterator[tuple[str, Tensor]]:
        if codes is not None and codes.has(name) and not ours.is_meta:
            yield from codes.tensors(name, family.theirs(name), layouts[name], ours)
        else:
            yield from zip(family.theirs(name), layouts[name].split(ours), strict=True)

    def slots_of(name: str) -> Iterator[TensorSpec]:
        for theirs, part in taken_apart(name, torch.empty(weights.shape(name), device="meta")):
            if codes is not None and codes.has(name):
                yield from codes.specs(theirs.removesuffix(".weight"), part.shape)
            else:
                yield TensorSpec(name=theirs, shape=part.shape, dtype=dtype)

    slots = [slot for name in layouts for slot in slots_of(name)]
    tensors = (each for name in layouts for each in taken_apart(name, weights.read(name)))
    config = family.config(model, dtype=dtype, ids=ids)
    if codes is not None:
        plain = [name for name in layouts if codes.leaves(name)]
        config |= {"quantization_config": codes.config([each for name in plain for each in family.theirs(name)])}
    with whole(out) as directory:
        shards.write(directory, slots, tensors, max_bytes)
        _write_files(directory, {**tokenizer, "config.json": _json(config)})
    return dtype


def import_(source: Path, out: Path, *, name: str, max_bytes: int, tokenizer: Mapping[str, bytes]) -> ModelConfig:
    """Write an imported directory from one of `transformers`; returns the model's sizes. Tensors keep their dtypes.

    Raises ValueError for a model that this project does not compute, files that cannot be read, tensors that the model
    has no use for or that are absent, and when `out` is in use.
    """
    config = read_config(source)
    family = family_named(config)
    model = family.model(config, name)
    tensors = imported_tensors(source, family, model)
    ids = {key: config[key] for key in SPECIAL_IDS if config.get(key) is not None}
    sizes = OmegaConf.to_yaml(OmegaConf.create(asdict(model)))
    with whole(out) as directory:
        slots = [each.spec for each in tensors]
        shards.write(directory, slots, ((each.spec.name, each.read()) for each in tensors), max_bytes)
        _write_files(directory, {**tokenizer, MODEL_FILE: sizes.encode(), IDS_FILE: _json(ids)})
    return model


def _write_files(directory: Path, contents: Mapping[str, bytes]) -> None:
    for file, content in contents.items():
        (directory / file).write_bytes(content)


def _json(content: Json) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()


def special_ids(directory: Path) -> Json:
    """The SPECIAL_IDS that an imported model came with; of a run none."""
    return read_object(directory / IDS_FILE)


def read_config(source: Path) -> Json:
    """A directory's config.json. Raises ValueError where there is none."""
    try:
        config: Json = json.loads((source / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{source} is not a directory of transformers (config.json): {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{source} is not a directory of transformers: config.json holds {config!r:.40}, not a table")
    return config


@dataclass(frozen=True, kw_only=True)
class ImportedTensor:
    """A tensor of ours that is made of tensors in a directory's files. parts: their names there."""

    spec: TensorSpec
    layout: Rows
    parts: Mapping[str, Path]

    def read(self) -> Tensor:
        return self.layout.join([read_tensor(file, name) for name, file in self.parts.items()])


def imported_tensors(source: Path, family: Family, model: ModelConfig) -> list[ImportedTensor]:
    """Our tensors as they can be made of a directory's files. Raises ValueError unless the two fit exactly."""
    files, wanted = weight_files(source), shapes(model)
    forms = stored(files)
    stored_as = {_full(name, family): name for name in files if name in forms}
    _check_names(source, stored_as.keys(), {each for name in wanted for each in family.theirs(name)}, tied=model.tied)
    found = []
    for name, shape in wanted.items():
        theirs, layout = family.theirs(name), family.layout(name, model)
        parts = {stored_as[each]: files[stored_as[each]] for each in theirs}
        dtypes = {each: forms[part][1] for each, part in zip(theirs, parts)}
        if not DTYPES.issuperset(dtypes.values()):
            told = ", ".join(f"{each} {dtype}" for each, dtype in dtypes.items())
            raise ValueError(f"{source}: {told}: weights must be BF16, FP16 or FP32")
        sizes = [forms[part][0] for part in parts]
        try:
            made = layout.join([torch.empty(size, device="meta") for size in sizes]).shape
        except RuntimeError as error:
            raise ValueError(f"{', '.join(theirs)} of {list(map(tuple, sizes))} do not fit") from error
        if made != shape:
            raise ValueError(
                f"{source}: {', '.join(theirs)} make a tensor {tuple(made)}, and config.json a model with "
                f"{tuple(shape)}"
            )
        spec = TensorSpec(name=name, shape=shape, dtype=narrowest(dtypes.values()))
        found.append(ImportedTensor(spec=spec, layout=layout, parts=parts))
    return found


def _check_names(source: Path, there: Set[str], wanted: Set[str], *, tied: bool) -> None:
    absent, useless = sorted(wanted - there), {"lm_head.weight"} if tied else set()
    more = [name for name in sorted(there - wanted - useless) if not NOT_WEIGHTS.fullmatch(name)]
    for what, names in (("has no", absent), ("has more than the model that config.json describes:", more)):
        if names:
            raise ValueError(f"{source} {what} {', '.join(names[:6])}{' ...' if len(names) > 6 else ''}")


def _full(name: str, family: Family) -> str:
    """A tensor's name in the model with a head: files of the bare model leave the first part out."""
    return name if name.startswith((family.prefix, "lm_head.")) else family.prefix + name
