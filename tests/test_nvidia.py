"""States of an installation of TransformerEngine and of apex: each unusable one is an error that says what was found.

Packages are written to a directory that comes first on the path.
"""

from __future__ import annotations

import importlib
import sys

import pytest

from lowprec_train import nvidia

NEEDS = "Linear = autocast = is_fp8_available = is_fp8_block_scaling_available = is_mxfp8_available = object\n"
TE = {"transformer_engine/__init__.py": "__version__ = '2.20.2'\n", "transformer_engine/pytorch/__init__.py": NEEDS}
ADAM = "class FusedAdam: ...\n"
APPLIER = "class Applier:\n    available = True\n\nmulti_tensor_applier = Applier()\n"
NORMS = "mixed_dtype_fused_rms_norm_affine = mixed_dtype_fused_layer_norm_affine = print\n"
APEX = {
    "apex/__init__.py": "",
    "apex/optimizers/__init__.py": ADAM,
    "apex/multi_tensor_apply/__init__.py": APPLIER,
    "apex/normalization/__init__.py": "",
    "apex/normalization/fused_layer_norm.py": NORMS,
    "amp_C.py": "def multi_tensor_adam_capturable(): ...\n",
    "fused_layer_norm_cuda.py": "",
}
PACKAGES = ("transformer_engine", "apex", "amp_C", "fused_layer_norm_cuda")


def forget():
    for name in [each for each in sys.modules if each.partition(".")[0] in PACKAGES]:
        del sys.modules[name]
    for cached in (nvidia.transformer_engine, nvidia.apex_adam, nvidia.apex_norms):
        cached.cache_clear()
    importlib.invalidate_caches()


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A function that writes files of packages; none of them is there before."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *(each for each in sys.path if not each.endswith("-packages"))])
    forget()

    def write(files):
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        importlib.invalidate_caches()
        return tmp_path

    yield write
    forget()


def refused(function):
    with pytest.raises(ValueError) as error:
        function()
    text = str(error.value)
    assert "\n" not in text
    return text


def test_what_is_there_is_returned(installed):
    installed(TE | APEX)
    assert nvidia.transformer_engine().__name__ == "transformer_engine.pytorch"
    assert nvidia.te_version() == "2.20.2"
    applier, kernel = nvidia.apex_adam()
    assert applier.available and kernel.__name__ == "multi_tensor_adam_capturable"
    assert nvidia.apex_norms().__name__ == "apex.normalization.fused_layer_norm"


def test_absent(installed):
    installed({})
    assert "'transformer_engine' is the package, is not installed: pip install 'lowprec_train[te]'" in refused(
        nvidia.transformer_engine
    )
    for which in (nvidia.apex_adam, nvidia.apex_norms):
        assert "NVIDIA's apex, is not installed: NVIDIA's apex is built from github.com/NVIDIA/apex" in refused(which)


def test_a_directory_of_the_name(installed):
    home = installed({"transformer_engine/notes.txt": "", "apex/notes.txt": ""})
    assert f"{home / 'transformer_engine'} is a directory of that name" in refused(nvidia.transformer_engine)
    assert f"{home / 'apex'} is a directory of that name" in refused(nvidia.apex_adam)


TE_FAULTS = {
    "a stub without the extension": (
        {"transformer_engine/pytorch/__init__.py": "raise FileNotFoundError('Could not find shared object file')\n"},
        ("cannot be imported: FileNotFoundError: Could not find shared object file",),
    ),
    "the library does not load": (
        {"transformer_engine/pytorch/__init__.py": "raise OSError('libcublas.so.13: cannot open')\n"},
        ("OSError: libcublas.so.13: cannot open",),
    ),
    "an empty metapackage": (
        {"transformer_engine/__init__.py": "raise RuntimeError('Found empty `transformer-engine` meta package')\n"},
        ("RuntimeError: Found empty",),
    ),
    "no torch part": ({"transformer_engine/pytorch/__init__.py": ""}, ("(version 2.20.2) has no Linear, autocast",)),
    "older": ({"transformer_engine/__init__.py": "__version__ = '1.13.0'\n"}, ("1.13.0", "older than 2.")),
    "another project": ({"transformer_engine/pytorch/__init__.py": "def hello(): ...\n"}, ("another project",)),
}


@pytest.mark.parametrize("fault", TE_FAULTS)
def test_unusable_transformer_engine(installed, fault):
    files, says = TE_FAULTS[fault]
    home = installed(TE | files)
    text = refused(nvidia.transformer_engine)
    assert str(home / "transformer_engine" / "__init__.py") in text and all(each in text for each in says)


def test_unusable_apex(installed):
    """The package index's `apex` has neither optimizers nor normalization."""
    home = installed({"apex/__init__.py": "__version__ = '0.9.10dev'\n"})
    text = refused(nvidia.apex_adam)
    assert f"'apex' 0.9.10dev at {home / 'apex' / '__init__.py'} is not NVIDIA's: it has no apex.optimizers" in text
    assert "an unrelated project of that name" in text and text == refused(nvidia.apex_norms)


APEX_FAULTS = {
    "python alone": ({"apex/multi_tensor_apply/__init__.py": APPLIER.replace("True", "False")}, "without its CUDA"),
    "older": ({"amp_C.py": ""}, "has no multi_tensor_adam_capturable"),
    "built for another torch": ({"amp_C.py": "raise ImportError('undefined symbol: _ZN3c10')\n"}, "undefined symbol"),
}


@pytest.mark.parametrize("fault", APEX_FAULTS)
def test_unusable_apex_optimizer(installed, fault):
    files, says = APEX_FAULTS[fault]
    home = installed(APEX | files)
    text = refused(nvidia.apex_adam)
    assert says in text and str(home) in text


def test_apex_without_its_norms(installed):
    installed({name: text for name, text in APEX.items() if name != "fused_layer_norm_cuda.py"})
    assert "No module named 'fused_layer_norm_cuda'" in refused(nvidia.apex_norms)
    assert nvidia.apex_adam()


def test_a_fault_of_a_run_is_reported_before_its_first_step(installed, monkeypatch):
    """What asks for a library on a GPU that it cannot use."""
    import torch

    from lowprec_train.precision.transformer_engine import TransformerEngine

    installed(TE | {"transformer_engine/pytorch/__init__.py": NEEDS + ANSWERS})
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    text = refused(lambda: TransformerEngine(scaling="delayed").check_machine(device))
    assert "scaling=delayed cannot run on NVIDIA A100 (compute capability 8.0): Device compute capability 8.9" in text
    text = refused(lambda: TransformerEngine(scaling="nvfp4").check_machine(device))
    assert text == "TransformerEngine 2.20.2 has no NVFP4BlockScaling (no is_nvfp4_available)"


ANSWERS = """
def is_fp8_available(return_reason=False):
    return False, "Device compute capability 8.9 or higher required for FP8 execution."
"""
