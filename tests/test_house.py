"""The rules of the house, held by tests: floors, budgets, banned patterns, packaging."""

import ast
import re
import shutil
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "lowprec_train"
SOURCES = sorted(PACKAGE.rglob("*.py"))
SCRIPTS = [ROOT / "train.py", *sorted((ROOT / "scripts").rglob("*.py"))]
TESTS = sorted((ROOT / "tests").rglob("*.py"))
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

MAX_FILE_LINES = 400
MAX_KERNEL_LINES = 120
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 12
OP_SCHEMAS = ("lowprec_train/ops/",)
P90_FUNCTION_LINES = 35
MEDIAN_FUNCTION_LINES = 14
# Facts of the launch, set by torchrun or Slurm: where this process stands, never what it computes.
LAUNCH_FACTS = {"WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"}
LAUNCH_FACTS |= {"SLURM_JOB_ID", "SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID"}
# Where torch's flight recorder writes what ranks last did: set here where nobody has.
LAUNCH_FACTS |= {"TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DUMP_ON_TIMEOUT"}
LAUNCH_FACTS |= {"TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"}
LAUNCH_FACTS |= {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}  # addresses of GPU memory (decision 0100)
LAUNCH_FACTS |= {"NCCL_GRAPH_REGISTER"}  # set where nobody has (decision 0114)
LAUNCH_FACTS |= {"TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE", "LOWPREC_LAUNCHER"}
LAUNCHERS = {"lowprec_train/train/processes.py"}  # hand the whole environment on to the processes that they start
# The files that may touch torch's private names (decisions 0008, 0016 and 0017).
TORCH_ADAPTERS = {
    "lowprec_train/ops/tensor_cores.py",
    "lowprec_train/ops/kernels.py",
    "lowprec_train/comm/process_group.py",
}
TORCH_ADAPTERS |= {"lowprec_train/train/diagnostics/snapshots.py", "lowprec_train/parallel/fsdp_parameters.py"}
TORCH_ADAPTERS |= {"lowprec_train/comm/fsdp_backward.py", "lowprec_train/comm/symmetric_memory.py"}
TORCH_ADAPTERS |= {"lowprec_train/train/diagnostics/flight.py", "lowprec_train/tools/bench/storages.py"}
TORCH_ADAPTERS |= {"lowprec_train/model/joint_graph.py"}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def functions(module: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(module) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function from its `def` on, its docstring left out: prose is not what the budget is about."""
    length = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function) is not None:
        docstring = function.body[0]
        length -= docstring.end_lineno - docstring.lineno + 1
    return length


def places(found: list[tuple[Path, ast.AST]]) -> list[str]:
    return [f"{relative(path)}:{node.lineno}" for path, node in found]


def nodes(kind: type, paths: list[Path] = SOURCES) -> Iterator[tuple[Path, ast.AST]]:
    for path in paths:
        for node in ast.walk(tree(path)):
            if isinstance(node, kind):
                yield path, node


# --- floors and budgets ---------------------------------------------------------------------------------------------


def test_floors():
    """In a process of its own: import-linter's set-up of logging disables the loggers of whoever calls it."""
    lint = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    assert subprocess.run([sys.executable, "-c", lint, "--no-cache"], cwd=ROOT).returncode == 0


@pytest.mark.parametrize("path", [*SOURCES, *SCRIPTS, *TESTS], ids=relative)
def test_file_length(path):
    lines = len(path.read_text().splitlines())
    assert lines <= MAX_FILE_LINES, f"{relative(path)} has {lines} lines: one idea a file, at most {MAX_FILE_LINES}"


def test_function_lengths():
    lengths = {
        f"{relative(path)}:{node.lineno} {node.name}": code_lines(node)
        for path in SOURCES
        for node in functions(tree(path))
    }
    ordered = sorted(lengths.values())
    too_long = {name: length for name, length in lengths.items() if length > MAX_FUNCTION_LINES}
    assert not too_long, f"functions over {MAX_FUNCTION_LINES} lines: {too_long}"
    longest = sorted(lengths.items(), key=lambda item: -item[1])
    assert ordered[int(0.9 * len(ordered))] <= P90_FUNCTION_LINES, longest[:10]
    assert statistics.median(ordered) <= MEDIAN_FUNCTION_LINES


@pytest.mark.parametrize("path", sorted((ROOT / "csrc").rglob("*.[ch]*")), ids=relative)
def test_kernel_lengths(path):
    """Of C++ and CUDA: a function begins at the first column and ends with a brace there."""
    begun = 0
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line == "}":
            assert number - begun < MAX_KERNEL_LINES, f"{relative(path)}:{begun} has {number - begun + 1} lines"
        if line[:1].isalpha() or line[:1] == "_":
            begun = number


def imports() -> dict[str, set[str]]:
    """Module -> the package's modules that it imports, inside of functions too."""
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in SOURCES}
    found: dict[str, set[str]] = {name: set() for name in names}
    for name, path in names.items():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                each = {f"{node.module}.{alias.name}" for alias in node.names}
                found[name] |= {inner if inner in names else node.module for inner in each}
            elif isinstance(node, ast.Import):
                found[name] |= {alias.name for alias in node.names}
        found[name] = (found[name] & names.keys()) - {name}
    return found


def test_no_import_circles():
    """Neither at start-up nor later: an import inside a function counts."""
    left = imports()
    while free := {name for name, needs in left.items() if not needs}:
        left = {name: needs - free for name, needs in left.items() if name not in free}
    assert not left, f"modules in import circles, or above one: {sorted(left)}"


def test_rooms_of_the_trainer_have_no_circles():
    """lint, logging and diagnostics of train/ seen as one module each."""
    rooms: dict[str, set[str]] = {}
    for name, needs in imports().items():
        match name.split("."), [need.split(".") for need in needs]:
            case ["lowprec_train", "train", room, _], others:
                inside = {other[2] for other in others if other[:2] == ["lowprec_train", "train"] and len(other) == 4}
                rooms.setdefault(room, set()).update(inside - {room})
    assert rooms.keys() == {"lint", "logging", "diagnostics"}
    while free := {name for name, needs in rooms.items() if not needs & rooms.keys()}:
        rooms = {name: needs for name, needs in rooms.items() if name not in free}
    assert not rooms, rooms


def test_benchmarks_are_a_room_that_only_the_command_line_enters():
    room = "lowprec_train.tools.bench"
    guests = {name for name, needs in imports().items() if any(need.startswith(room) for need in needs)}
    assert {name for name in guests if not name.startswith(room)} == {"lowprec_train.tools.cli"}


def test_signatures():
    """Ops take what a kernel takes; all else is a value with names. Found by the parser: defaults count too."""

    def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
        found = node.args
        return len([*found.posonlyargs, *found.args, *found.kwonlyargs, *filter(None, (found.vararg, found.kwarg))])

    wide = [(path, node) for path in SOURCES for node in functions(tree(path)) if parameters(node) > MAX_PARAMETERS]
    assert not [place for place in places(wide) if not place.startswith(OP_SCHEMAS)]


def test_modules_teach():
    silent = [relative(path) for path in [*SOURCES, *SCRIPTS] if not (ast.get_docstring(tree(path)) or "").strip()]
    assert not silent, f"modules without a docstring: {silent}"


def test_no_rooms_without_an_idea():
    vague = {"utils", "util", "helpers", "helper", "common", "manager", "misc", "core", "base"}
    assert not [relative(path) for path in SOURCES if path.stem in vague or path.parent.name in vague]


# --- the build -----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("cmake") is None, reason="no CMake")
@pytest.mark.parametrize("gpu", [False, True])
def test_cuda_is_compiled_where_it_can_run(gpu, tmp_path):
    """AUTO: nvcc alone is no reason for minutes of compilation. With a GPU it asks for nvcc."""
    device = tmp_path / "nvidiactl"
    if gpu:
        device.touch()
    options = (f"-DPython_EXECUTABLE={sys.executable}", f"-DLOWPREC_GPU_FILES={device}", "-DLOWPREC_CUDA=AUTO")
    sources = tmp_path / "checkout" / "csrc"  # beside which no kernels have been built
    shutil.copytree(ROOT / "csrc", sources)
    command = ["cmake", "-S", str(sources), "-B", str(tmp_path / "build"), *options]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert ("this machine has no GPU; LOWPREC_CUDA=ON builds them all the same" in told) == (not gpu)
    assert ("lowprec: CUDA kernels for 90a" in told or "nvcc: " in told) == gpu


# --- banned patterns, each seen to rot a codebase -------------------------------------------------------------------


def environment_key(node: ast.AST) -> ast.AST | None:
    """The key of an `os.environ[...]`, `os.environ.get(...)` or `os.getenv(...)`; the node itself for any other use."""
    match node:
        case ast.Subscript(value=ast.Attribute(attr="environ"), slice=key):
            return key
        case ast.Call(
            func=ast.Attribute(value=ast.Attribute(attr="environ"), attr="get" | "setdefault"), args=[key, *_]
        ):
            return key
        case ast.Compare(left=key, ops=[ast.NotIn() | ast.In()], comparators=[ast.Attribute(attr="environ")]):
            return key
        case ast.Call(func=ast.Attribute(attr="getenv"), args=[key, *_]):
            return key
    return None


def test_environment_is_launch_facts_only():
    """D6: no environment variable changes numerics."""
    for path in (each for each in SOURCES if relative(each) not in LAUNCHERS):
        module = tree(path)
        attributes = [node for node in ast.walk(module) if isinstance(node, ast.Attribute)]
        uses = [node for node in attributes if node.attr in ("environ", "getenv")]
        keys = [key for node in ast.walk(module) if (key := environment_key(node)) is not None]
        assert len(keys) == len(uses), f"{relative(path)}: os.environ used other than by a literal key"
        for key in keys:
            assert isinstance(key, ast.Constant), f"{relative(path)}:{key.lineno}: the key is not a literal"
            assert key.value in LAUNCH_FACTS, f"{relative(path)}:{key.lineno}: {key.value} is not a launch fact"


def names_a_recipe(node: ast.AST) -> bool:
    match node:
        case ast.Name(id=name):
            return "recipe" in name
        case ast.Attribute(attr="recipe"):
            return True
        case ast.Attribute(value=value, attr="name"):
            return names_a_recipe(value)
    return False


def test_no_recipe_ladders():
    """Code that computes never asks a recipe for its name; a tool may, to find a baseline among run directories."""

    def ladder(node: ast.Compare) -> bool:
        operands = [node.left, *node.comparators]
        literal = any(isinstance(item, ast.Constant) and isinstance(item.value, str) for item in operands)
        return literal and any(names_a_recipe(item) for item in operands)

    computing = [path for path in SOURCES if "tools" not in path.parts]
    assert not places([(path, node) for path, node in nodes(ast.Compare, computing) if ladder(node)])


def test_optional_imports_are_never_none():
    """D4: a missing extra is an error when it is asked for, never a None that fails at step 1."""

    def hides(handler: ast.ExceptHandler) -> bool:
        caught = ast.unparse(handler.type) if handler.type else ""
        assigned = [node.value for node in ast.walk(handler) if isinstance(node, ast.Assign)]
        return "Import" in caught and any(isinstance(value, ast.Constant) and value.value is None for value in assigned)

    assert not places([(path, node) for path, node in nodes(ast.ExceptHandler) if hides(node)])


def test_no_host_synchronisation_in_the_step():
    trainer = PACKAGE / "train" / "trainer.py"
    steps = [node for node in functions(tree(trainer)) if node.name == "step"]
    assert steps, "trainer.py has no step"
    reads = {"item", "tolist", "cpu", "numpy", "synchronize"}
    for step in steps:
        calls = [node.func for node in ast.walk(step) if isinstance(node, ast.Call)]
        called = {function.attr for function in calls if isinstance(function, ast.Attribute)}
        assert not called & reads, f"Trainer.step waits for the device: {called & reads}"


def test_no_randomness_inside_the_graph():
    """A torch.rand* in a compiled region is drawn again in the backward graph, silently: draws come from Philox."""
    draws = r"torch\.(rand|randn|randint|rand_like|randn_like|bernoulli|randperm|dropout)\b"
    banned = re.compile(draws + r"|\.(bernoulli_|random_|normal_|uniform_)\(")
    rooms = ("ops", "numerics", "precision", "recipes")
    for path in (path for room in rooms for path in (PACKAGE / room).rglob("*.py")):
        calls = [ast.unparse(node) for node in ast.walk(tree(path)) if isinstance(node, ast.Call)]
        assert not [call for call in calls if banned.search(call)], relative(path)


def test_no_tensor_subclasses():
    def subclass(node: ast.ClassDef) -> bool:
        return any(ast.unparse(base) in ("torch.Tensor", "Tensor") for base in node.bases)

    assert not places([(path, node) for path, node in nodes(ast.ClassDef) if subclass(node)])


def private_torch(node: ast.AST) -> bool:
    match node:
        case ast.ImportFrom(module=str(module)) if module.split(".")[0] == "torch":
            return any(part.startswith("_") and part != "__future__" for part in module.split("."))
        case ast.Import(names=names):
            return any(name.name.startswith("torch.") and "._" in name.name for name in names)
        case ast.Attribute(attr=attr):
            private = attr.startswith("_") and not attr.startswith("__")
            return private and ast.unparse(node.value).split(".")[0] == "torch"
    return False


def test_private_torch_names_live_in_adapters():
    """D8: works on torch 2.11 to 2.13, so what may move without notice is behind adapters, each with its one need."""
    found = [
        (path, node) for path, node in nodes(ast.AST) if private_torch(node) and relative(path) not in TORCH_ADAPTERS
    ]
    assert not places(found)


def test_private_names_are_known_to_their_own_tests_only():
    """`module._name` and `from module import _name`: in test_module.py alone."""

    def private(node: ast.AST, modules: dict[str, str]) -> str | None:
        """The module whose private name this is."""
        match node:
            case ast.ImportFrom(module=str(module), names=names) if module.startswith("lowprec_train."):
                if any(re.match("_[a-z]|_[A-Z]", alias.name) for alias in names):
                    return module
            case ast.Attribute(value=ast.Name(id=name), attr=attr) if re.match("_[a-zA-Z]", attr):
                return modules.get(name)
        return None

    found = []
    for path in TESTS:
        nodes_of = list(ast.walk(tree(path)))
        imported = [node for node in nodes_of if isinstance(node, ast.ImportFrom) and node.module is not None]
        modules = {
            alias.asname or alias.name: f"{node.module}.{alias.name}"
            for node in imported
            for alias in node.names
            if node.module.startswith("lowprec_train")
        }
        for node in nodes_of:
            module = private(node, modules)
            if module and path.stem != f"test_{module.rpartition('.')[2]}":
                found.append(f"{relative(path)}:{node.lineno}")
    assert not found


# --- packaging ------------------------------------------------------------------------------------------------------


def distribution(requirement: str) -> str:
    return re.split(r"[\[<>=!~ ]", requirement)[0].lower().replace("_", "-")


def test_every_need_is_pinned():
    pinned = {distribution(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    project = PYPROJECT["project"]
    needs = {distribution(item) for item in [*project["dependencies"], *project["optional-dependencies"]["dev"]]}
    assert needs <= pinned, f"constraints.txt lacks {sorted(needs - pinned)}"


def test_apex_is_no_extra():
    """D4: what the package index calls apex is an unrelated project."""
    extras = PYPROJECT["project"]["optional-dependencies"]
    assert not [item for items in extras.values() for item in items if distribution(item) == "apex"]
    assert "apex" not in extras


@pytest.mark.parametrize("bundle", sorted((ROOT / "configs" / "recipe").glob("*.yaml")), ids=lambda path: path.stem)
def test_recipe_bundles_are_global(bundle):
    """D2: `+recipe=` bundles sit in the global package and are not in the defaults list."""
    assert bundle.read_text().lstrip().startswith("# @package _global_")
    defaults = (ROOT / "configs" / "train.yaml").read_text()
    assert not re.search(r"^\s*- *(optional +)?/?recipe\b", defaults, flags=re.MULTILINE)
