"""A trained model's weights, read one whole tensor at a time, from a run's checkpoint or from an imported model.

A checkpoint stores tensors under names and whole shapes that do not depend on the layout. One process can therefore
read what 1,024 ranks have saved, without a process group and with memory for one tensor. All users of a trained model
(a new run that starts from it, export, evaluation) read it through `Weights` and do not distinguish the two sources.

    a run directory         config.yaml, checkpoints/step-N/           as `train.py` writes it, also during training
    an imported directory   model.yaml, *.safetensors                  as `lowprec import-hf` writes it

Names are those of the model, `blocks.0.attention.qkv.weight`, and so is the order of rows (qkv grouped by key-value
head, gate and up alternating).
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from omegaconf import OmegaConf
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from lowprec_train.config import LAUNCHED, ModelConfig, model_of, read_object, read_yaml, run_and_step
from lowprec_train.data.manifest import sha256
from lowprec_train.data.tokenizer import FILES as TOKENIZER_FILES
from lowprec_train.data.tokenizer import load
from lowprec_train.model.architecture import Architecture
from lowprec_train.model.transformer import Fill, Transformer, fill_whole
from lowprec_train.train import digests
from lowprec_train.train.checkpoint_folder import latest, listed, path_of, steps
from lowprec_train.train.checkpoint_keys import read_metadata
from lowprec_train.train.diagnostics import finite
from lowprec_train.train.digests import CheckpointError
from lowprec_train.train.launch import first
from lowprec_train.train.packages import needs_package

INDEX_FILE = "model.safetensors.index.json"
PROBE = "In 2024 the naïve fox,\n    def jump(over): return 'lazy dogs'  # 3.14\n"
NOT_SIZES = {"name", "norm_backend", *LAUNCHED}
Form = tuple[torch.Size, torch.dtype]


class Weights(ABC):
    """Named whole tensors of a model, read one at a time.

    model: its sizes. path: the directory. source: a description for messages. tensors: name -> stored shape and dtype.
    place: the path for errors. Raises ValueError if the tensors do not fit the model.
    """

    def __init__(self, model: ModelConfig, path: Path, source: str, tensors: Mapping[str, Form], place: Path) -> None:
        self.model, self.path, self.source = model, path, source
        self._shapes, self._tensors = shapes(model), tensors
        _same_shapes(place, self._shapes, {name: shape for name, (shape, _) in tensors.items()})

    def names(self) -> list[str]:
        """Fully qualified names of all parameters, in the model's order."""
        return list(self._shapes)

    def shape(self, name: str) -> torch.Size:
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        """Return the stored dtype: FP32, or BF16 if the run has reduced-precision master weights of a matrix."""
        return self._tensors[name][1]

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """Return the whole tensor on the CPU, as stored. Raises ValueError if it cannot be read or is not finite."""


class RunWeights(Weights):
    """The model in one checkpoint of a run, saved with any layout of processes. All ranks create it.

    step: None: the one that `latest` names, as seen by rank 0. Its bytes are compared with its manifest
    (train/digests.py), unless the run has checkpoint_verify=false.

    Raises ValueError for a directory without a usable checkpoint, for a damaged checkpoint (no other one is loaded
    instead), and for a checkpoint that does not fit config.yaml.
    """

    def __init__(self, path: Path, step: int | None = None) -> None:
        model, checkpoints = model_of(path), path / "checkpoints"
        self.step = first(lambda: newest(path)) if step is None else step
        directory = path_of(checkpoints, self.step)
        try:
            if self.step not in steps(checkpoints):
                raise CheckpointError(f"{checkpoints} has no {directory.name}")
            verify = OmegaConf.select(read_yaml(path / "config.yaml"), "checkpoint_verify", default=True)
            digests.verify(directory, whole=bool(verify))
            self._reader = _Reader(directory)
            saved = read_metadata(self._reader).state_dict_metadata
        except CheckpointError as error:
            raise _refused(error, checkpoints) from error
        tensors = {
            key.removeprefix("model."): (each.size, each.properties.dtype)
            for key, each in saved.items()
            if key.startswith("model.") and isinstance(each, TensorStorageMetadata)
        }
        super().__init__(model, path, f"{path}, step {self.step}", tensors, directory)

    def read(self, name: str) -> Tensor:
        key = f"model.{name}"
        whole = {key: torch.empty(self.shape(name), dtype=self.dtype(name))}
        try:
            dcp.load(whole, storage_reader=self._reader, no_dist=True)
        except (OSError, dcp.CheckpointException) as error:
            raise ValueError(f"cannot read {name} from {self._reader.path}: {error}") from error
        return finite.check(name, whole[key], self._reader.path)


def newest(path: Path) -> int:
    """Return the step of the checkpoint that `latest` names.

    Raises ValueError if there is none; the message lists the others.
    """
    directory = path / "checkpoints"
    try:
        found, there = latest(directory), steps(directory)
    except CheckpointError as error:
        raise _refused(error, directory) from error
    if found is None and there:
        raise ValueError(
            f"{directory / 'latest'} is missing; choose a checkpoint, {directory}/step-N; {listed(directory)}"
        )
    if found is None:
        raise ValueError(f"{path} has no checkpoint yet (no checkpoints/latest)")
    return found


def _refused(error: CheckpointError, directory: Path) -> ValueError:
    """Return the error as a ValueError, with the existing checkpoints if they can be listed."""
    with suppress(CheckpointError):
        return ValueError(f"{error}; {listed(directory)}")
    return ValueError(str(error))


class _Reader(dcp.FileSystemReader):
    """Reads the metadata once, not once per tensor: its size grows with the number of processes."""

    known: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self.known = self.known or super().read_metadata(*args, **kwargs)
        return self.known


class ImportedWeights(Weights):
    """The model in a directory that `lowprec import-hf` wrote.

    Raises ValueError for a directory whose files are missing, unreadable or do not fit model.yaml.
    """

    def __init__(self, path: Path) -> None:
        needs_package("safetensors", extra="hf", what=f"reading {path}")
        model, self._files = model_of(path), weight_files(path)
        there = {name: form for name, form in stored(self._files).items() if name in self._files}
        super().__init__(model, path, str(path), there, path)

    def read(self, name: str) -> Tensor:
        return read_tensor(self._files[name], name)


def open_weights(path: Path, step: int | None = None) -> Weights:
    """Open the weights of a run directory, at checkpoint `step` or the one that `latest` names, or of an imported one.

    path: may also be `<run>/checkpoints/step-N`. All ranks call it. The directory is not changed.
    Raises ValueError for any other path, for a checkpoint that is missing, incomplete or damaged, and if a package that
    reads the files is missing.
    """
    directory, named = run_and_step(path)
    if step is not None and named not in (None, step):
        raise ValueError(f"step {step} was requested, but {path} is the checkpoint of step {named}")
    if (directory / "config.yaml").is_file():
        return RunWeights(directory, named if step is None else step)
    if step is not None:
        raise ValueError(f"step {step} was requested, but {path} is not a run directory (no config.yaml)")
    return ImportedWeights(path)


def tokenizer_facts(path: Path | None) -> dict[str, str | None]:
    """Return run.json's facts of a run's tokenizer: its path, and its SHA-256, which `tokenizer_of` compares."""
    sha = sha256(path) if path and path.is_file() else None
    return {"tokenizer": str(path.resolve()) if path else None, "tokenizer_sha256": sha}


def tokenizer_of(directory: Path) -> Path | None:
    """Return the path of a model's tokenizer: the one that run.json names, which may no longer exist, or the imported
    directory if it has one.

    Raises ValueError if the tokenizer was replaced.
    """
    about = directory / "run.json"
    if not about.is_file():
        return directory if any((directory / file).is_file() for file in TOKENIZER_FILES) else None
    facts = read_object(about)
    named, was = facts.get("tokenizer"), facts.get("tokenizer_sha256")
    path = named and Path(named)
    if path and was and path.is_file() and (now := sha256(path)) != was:
        raise ValueError(
            f"{directory}: the tokenizer {path} was replaced (SHA-256 {now[:12]}, was {was[:12]}); "
            "use --tokenizer FILE or --tokenizer none"
        )
    return path


def other_tokenizer(weights: Weights, corpus: Path | None) -> str:
    """Return a warning if the weights were trained with other token ids than the corpus has; else "".

    corpus: its tokenizer. Tokenizers that cannot be read are not compared.
    """
    try:
        trained_with = tokenizer_of(weights.path)
        here, there = (trained_with and load(trained_with)), (corpus and load(corpus))
    except ValueError:
        return ""
    if not (here and there) or here.encode([PROBE]) == there.encode([PROBE]):
        return ""
    return (
        f"{weights.source} was trained with the tokenizer {trained_with}, but the data has {corpus}: the token ids "
        "differ, so the trained embeddings do not fit the data"
    )


def fill_from(weights: Weights, fill: Fill = fill_whole) -> Fill:
    """Return a `fill` for `Transformer.init_weights` that sets parameters from weights, one tensor at a time.

    fill: sets a parameter, or this process's shard of it, from the value of the whole parameter, e.g.
    `Distribution.fill`.
    """

    def from_weights(name: str, parameter: Tensor, first_value: Callable[[torch.Size], Tensor]) -> None:
        fill(name, parameter, lambda shape: weights.read(name))

    return from_weights


def check_sizes(model: ModelConfig, weights: Weights) -> None:
    """Raise ValueError with every size in which the run's model differs from the weights.

    max_seq_len may differ with rotary positions, which are computed.
    """
    free = NOT_SIZES | ({"max_seq_len"} if model.positions == "rotary" else set())
    keys = [each.name for each in fields(model) if each.name not in free]
    pairs = [(key, getattr(weights.model, key), getattr(model, key)) for key in keys]
    differing = [f"  model.{key}: weights {there}, run {here}" for key, there, here in pairs if there != here]
    if differing:
        lines = "\n".join(differing)
        raise ValueError(f"weights=... has other sizes than the run's model; use model=from_checkpoint:\n{lines}")


def shapes(model: ModelConfig) -> dict[str, torch.Size]:
    """Return name -> whole shape of every parameter of a model, without allocating it."""
    return {name: parameter.shape for name, parameter in without_memory(model).named_parameters()}


def without_memory(model: ModelConfig, **options: Any) -> Transformer:
    """Return the model on the meta device. options: further arguments of `Transformer`."""
    with torch.device("meta"):
        return Transformer(architecture(model), **options)


def architecture(model: ModelConfig) -> Architecture:
    """Return a configuration as an `Architecture`, without its name."""
    return Architecture(**{key: value for key, value in asdict(model).items() if key != "name"})


def weight_files(path: Path) -> dict[str, Path]:
    """Return tensor name -> safetensors file of a directory. Raises ValueError if there are no readable weights."""
    from safetensors import SafetensorError, safe_open

    try:
        if (path / INDEX_FILE).is_file():
            return {name: path / file for name, file in _weight_map(path / INDEX_FILE).items()}
        with safe_open(path / "model.safetensors", framework="pt") as file:
            return dict.fromkeys(file.keys(), path / "model.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"{path} has no readable weights (model.safetensors or {INDEX_FILE}): {error}") from error


def _weight_map(index: Path) -> dict[str, str]:
    """Return tensor name -> file name beside the index."""
    found = json.loads(index.read_text(encoding="utf-8"))
    names = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(names, dict) or not names:
        raise ValueError(f'{index.name} holds {found!r:.80}, not {{"weight_map": {{name of a tensor: file, ...}}}}')
    for name, file in names.items():
        if not isinstance(file, str) or file in ("", "..") or Path(file).name != file:
            raise ValueError(f"{index.name} maps {name} to {file!r:.80}, not to the name of a file beside it")
    return names


def stored(files: Mapping[str, Path]) -> dict[str, Form]:
    """Return the shape and dtype of every tensor, from the file headers. Raises ValueError if one cannot be read."""
    forms: dict[str, Form] = {}
    for path in sorted(set(files.values())):
        with _opened(path, str(path)) as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
            for name, each in slices.items():
                shape = torch.Size(each.get_shape())
                forms[name] = shape, (each[:0] if shape else file.get_tensor(name)).dtype
    return forms


def read_tensor(file: Path, name: str) -> Tensor:
    """Read one whole tensor, memory-mapped. Raises ValueError if it cannot be read or is not finite."""
    with _opened(file, f"{name} from {file}") as opened:
        return finite.check(name, opened.get_tensor(name), file)


@contextmanager
def _opened(file: Path, what: str) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot read {what}: {error}") from error


def _same_shapes(path: Path, expected: Mapping[str, torch.Size], found: Mapping[str, torch.Size]) -> None:
    wrong = [
        f"  {name}: {tuple(found[name]) if name in found else 'missing'}, the model has {tuple(shape)}"
        for name, shape in expected.items()
        if found.get(name) != shape
    ]
    if wrong:
        more = [f"  and {len(wrong) - 8} more"] if len(wrong) > 8 else []
        raise ValueError(f"{path} does not fit the model that it describes:\n" + "\n".join(wrong[:8] + more))
