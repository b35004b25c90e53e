"""The compiled kernels as a run meets them: found or said to be missing, loaded or refused, tested before use.

What each kernel computes is compared here on the cases of the start-up self-test, and at length in tests/numerics.
"""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_map

from lowprec_train.ops import cases, kernels, library, self_test
from lowprec_train.ops.schema import SCHEMAS

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
TESTED = sorted(set(SCHEMAS) - {"scaled_mm"})  # sums in FP32: no claim of bits, and no library serves it
built = pytest.mark.skipif("cpu" not in kernels.present(), reason="_C.abi3.so is not built here (make kernels)")


def python(code: str, folder: Path = ROOT) -> subprocess.CompletedProcess:
    """Run code in a process of its own that imports the package from `folder`, whatever is installed."""
    first = f"sys.path.insert(0, {str(folder)!r})"
    installed = "sys.meta_path[:] = [each for each in sys.meta_path if 'editable' not in type(each).__module__]"
    command = [sys.executable, "-c", f"import sys; {first}; {installed}\n{code}"]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=120)


# --- found, loaded, or refused ----------------------------------------------------------------------------------------


def test_no_library_is_no_error(tmp_path):
    assert kernels.load(SCHEMAS, tmp_path) == {"cpu": frozenset(), "cuda": frozenset()}


@pytest.mark.parametrize("content", [b"", b"not a library", b"\x7fELF" + bytes(60)])
def test_a_library_that_does_not_load_is_named_with_the_cause(content, tmp_path):
    broken = tmp_path / "_C.abi3.so"
    broken.write_bytes(content)
    with pytest.raises(ImportError, match="do not load: ") as caught:
        kernels.load(SCHEMAS, tmp_path)
    assert str(broken) in str(caught.value) and "make kernels" in str(caught.value)
    cause = str(caught.value.__cause__)
    assert cause and cause in str(caught.value)


def test_an_import_with_a_broken_library_fails(tmp_path):
    package = shutil.copytree(ROOT / "lowprec_train", tmp_path / "lowprec_train", ignore=shutil.ignore_patterns("*.so"))
    (package / "ops" / "_C.abi3.so").write_bytes(b"broken")
    ended = python("import lowprec_train.ops", tmp_path)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith(f"ImportError: {package / 'ops' / '_C.abi3.so'}: ")


def test_without_libraries_the_reference_runs_and_says_so(tmp_path):
    shutil.copytree(ROOT / "lowprec_train", tmp_path / "lowprec_train", ignore=shutil.ignore_patterns("*.so"))
    code = """
import torch
from lowprec_train.ops import library, self_test
assert library.__file__.startswith(sys.path[0]), library.__file__
assert set(library.live_kernels(torch.device("cpu")).values()) == {"reference"}
assert library.live_kernels(torch.device("cuda"))["scaled_mm"] == "cuBLASLt"
assert library.live_kernels(torch.device("cuda"))["quantize"] == "reference, compiled"
self_test.self_test(torch.device("cpu"))
print(torch.ops.lowprec.unpack_e2m1(torch.tensor([0x71], dtype=torch.uint8)).float().tolist())
"""
    ended = python(code, tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == "[0.5, 6.0]"


def test_a_process_tests_its_kernels_once(monkeypatch):
    calls = []

    def tested(device, **gemms):
        calls.append(gemms)
        if gemms["decoded"]:
            raise kernels.KernelError("wrong bits")

    monkeypatch.setattr(self_test, "self_test", tested)
    device = torch.device("cpu:0")  # a key of its own
    for _ in range(2):
        self_test.self_test_once(device, block_formats=frozenset({"MXFP8"}))
        with pytest.raises(kernels.KernelError):
            self_test.self_test_once(device, decoded=True)
    assert [each["decoded"] for each in calls] == [False, True, True]


@built
def test_what_a_library_serves_is_live():
    live = library.live_kernels(CPU)
    assert list(live) == list(SCHEMAS)
    for op, kernel in live.items():
        assert (kernel == "C++") == kernels.has_kernel(op, "cpu"), op
    assert live["pack_e2m1"] == live["unpack_e2m1"] == "C++"


@built
def test_the_library_is_a_module_too():
    assert importlib.import_module("lowprec_train.ops._C").__file__ == str(kernels.present()["cpu"])


def test_a_kernel_is_not_asked_for_other_devices():
    assert not kernels.has_kernel("quantize", "mps")
    for device, ops in library.SERVED.items():
        assert all(kernels.has_kernel(op, device) for op in ops)


# --- GPUs that a library was built for --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "capability", "runs"),
    [
        ("90a", (9, 0), True),
        ("90a", (10, 0), False),
        ("89", (8, 9), True),
        ("80", (8, 6), True),
        ("89", (8, 6), False),
        ("89", (9, 0), False),
        ("100a", (10, 0), True),
        ("100a", (10, 3), False),
        ("100f", (10, 3), True),
        ("120a", (12, 0), True),
        ("120", (12, 1), True),
        ("120", (10, 0), False),
    ],
)
def test_machine_code_runs_on_its_own_architecture(architecture, capability, runs):
    assert kernels.runs_on(architecture, capability) == runs


def test_a_gpu_that_the_library_was_not_built_for_is_refused(monkeypatch):
    monkeypatch.setattr(kernels, "present", lambda folder=None: {"cuda": Path("ops/_cuda.so")})
    monkeypatch.setattr(kernels, "architectures", lambda path: ["89", "90a"])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setitem(library.SERVED, "cuda", frozenset({"quantize"}))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    with pytest.raises(
        kernels.KernelError, match=r"_cuda.so was built for sm_89, sm_90a, and cuda:1 \(a GPU\)"
    ) as caught:
        self_test.self_test(torch.device("cuda:1"))
    assert "compute capability 10.0: make kernels CUDA=ON ARCHITECTURES=100a" in str(caught.value)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    kernels.check_architecture(torch.device("cuda:1"))


# --- the self-test ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", TESTED)
def test_kernels_return_the_bits_of_the_reference(op):
    """Whatever serves the op here; where that is the reference, the cases are at least sound."""
    self_test.self_test(CPU, [op])


@pytest.mark.gpu
@pytest.mark.parametrize("op", sorted(set(TESTED) - {"block_scaled_mm"}))  # torch's, and of Blackwell alone
def test_cuda_kernels_return_the_bits_of_the_reference(op):
    assert library.SERVED["cuda"], "_cuda.so is not built here: make kernels"
    self_test.self_test(torch.device("cuda"), [op])


@pytest.mark.parametrize("op", TESTED)
def test_cases_have_edges(op):
    """Each op has cases, and its inputs hold zeros where they are numbers."""
    made = cases.cases(op)
    assert made
    inputs = [x for case in made.values() for each in case for x in (each if isinstance(each, list) else [each])]
    assert any((x.float() == 0).any() for x in inputs if isinstance(x, torch.Tensor))


WRONG = """
import torch
from lowprec_train.ops import cases, kernels, library, self_test

def wrong(*arguments):
    {body}

library.SERVED["cpu"] |= {{"{op}"}}
implementation = torch.library.Library("lowprec", "IMPL")
implementation.impl("{op}", wrong, "CPU", allow_override=True)
try:
    self_test.self_test(torch.device("cpu"))
except kernels.KernelError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("op", "body", "says"),
    [
        (
            "unpack_e2m1",
            "return (library.EAGER['unpack_e2m1'](*arguments).float() + 0).to(torch.float8_e4m3fn)",
            "case 'every byte', output 0, differs",
        ),
        ("transpose", "return arguments[0].t()", "case 'odd', output 0, differs"),  # right numbers, wrong layout
        (
            "fold",
            "codes, scale = library.EAGER['fold'](*arguments); return codes, scale * 1.0000002",
            "output 1, differs",
        ),
        ("hadamard", "raise RuntimeError('no such thing')", "case 'signs', failed: no such thing"),
    ],
)
def test_a_wrong_kernel_is_caught(op, body, says):
    ended = python(WRONG.format(op=op, body=body))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith(f"the compiled kernel of lowprec::{op} on cpu, ") and says in ended.stdout


def test_one_bit_is_a_difference_and_a_nan_is_a_nan():
    x = torch.tensor([[1.0, torch.nan, -0.0]])
    negative = torch.tensor([[0x3F800000, -0x400000, -0x80000000]]).to(torch.int32).view(torch.float32)
    assert self_test.same(x, negative)
    assert not self_test.same(x, x + 0.0)  # the sign of zero
    assert not self_test.same(x, x * (1 + 2**-23))
    assert not self_test.same(torch.zeros(4, 1), torch.zeros(1, 4))
    assert not self_test.same(torch.zeros(4, dtype=torch.uint8), torch.zeros(4, dtype=torch.int8))


def test_bounded_results_have_a_bound():
    x = torch.tensor([[1.0, -2.0, torch.nan, 1e-6]])
    assert self_test.close(x, x * (1 + 2**-8)) and not self_test.close(x, x * (1 + 2**-6))
    assert self_test.close(x, x + 1e-5) and not self_test.close(x, x.nan_to_num())
    assert not self_test.close(x.nan_to_num(), x) and not self_test.close(x, x.bfloat16())


def test_a_run_does_not_begin_with_a_wrong_kernel(tmp_path):
    code = f"""
from lowprec_train import main
from lowprec_train.ops import self_test
from lowprec_train.ops.kernels import KernelError

def fails(device, **how):
    raise KernelError(f"wrong on {{device}}")

self_test.self_test = fails
sys.argv = ["train.py", "+recipe=fp8", "steps=1", "device=cpu", "run_root={tmp_path}"]
main.main()
"""
    ended = python(code)
    assert ended.returncode == 1 and "error: wrong on cpu" in ended.stderr
    assert not any(tmp_path.rglob("run.json"))


# --- fakes ------------------------------------------------------------------------------------------------------------


def bits(x: torch.Tensor) -> list[int]:
    return x.contiguous().flatten().view(torch.uint8).tolist()


@pytest.mark.parametrize("op", TESTED)
def test_fakes_and_schemas_are_true(op):
    """Shapes, dtypes and strides are those that the compiler is told, and no output aliases or changes an input, but
    for those that the schema says the op writes to.
    """
    for case, arguments in cases.cases(op).items():
        into = {id(each) for each in self_test.written(op, arguments)}
        given = [x for each in arguments for x in (each if isinstance(each, list) else [each])]
        tensors = [each for each in given if isinstance(each, torch.Tensor) and id(each) not in into]
        before = [bits(each) for each in tensors]
        outputs = self_test.listed(getattr(torch.ops.lowprec, op)(*arguments))
        assert [bits(each) for each in tensors] == before, case
        assert not {each.data_ptr() for each in outputs} & {each.data_ptr() for each in tensors}, case
        with torch._subclasses.FakeTensorMode() as mode:
            faked = tree_map(lambda x: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x, list(arguments))
            fakes = self_test.listed(getattr(torch.ops.lowprec, op)(*faked))
        told = [(fake.shape, fake.dtype, fake.stride()) for fake in fakes]
        assert told == [(each.shape, each.dtype, each.stride()) for each in outputs], case


def test_compiled_code_is_cached_under_the_schemas():
    """Inductor's code calls ops with all their arguments, and torch's key of its cache knows nothing of ours."""
    tag = library.cache_tag(SCHEMAS)
    assert torch.compiler.config.cache_key_tag.endswith(tag)
    assert library.cache_tag(SCHEMAS | {"fold": SCHEMAS["fold"].replace("str carrier", "str carrier, int top")}) != tag
