"""The other commands: wrong options, sizes and places."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from tests.bad_inputs.case import SMALL, case
from tests.bad_inputs.models import file
from tests.bad_inputs.runs import cut
from tests.bad_inputs.text import a, lines, manifest, spoiled, without

EVALUATE = "lowprec evaluate runs/good --device cpu"
GENERATE = "lowprec generate runs/good --device cpu --max-tokens 2"
PREPARE = "lowprec prepare-data lines.jsonl --tokenizer tokenizer.model --out new/set --workers 0"
LEARN = "lowprec train-tokenizer lines.jsonl --vocab-size 384 --out new.model"
INSPECT = "lowprec inspect-data sets/lines"
COMPARE = "lowprec compare runs/good runs/fp8"


def no_metrics(place: Path) -> None:
    (place / "runs" / "fp8" / "metrics.jsonl").unlink()


COMMANDS = (
    case("no-command", "lowprec", "COMMAND"),
    case("unknown-command", "lowprec banana", "banana"),
    case("typo-of-a-command", "lowprec evalute runs/good", "evalute", "evaluate"),
    case("command-with-underscores", "lowprec prepare_data lines.jsonl", "prepare_data", "prepare-data"),
    case("unknown-option-before-the-command", "lowprec --banana", "--banana"),
    case("unknown-option-of-evaluate", f"{EVALUATE} --data valid.jsonl --banana", "--banana"),
    case("typo-of-an-option", f"{EVALUATE} --data valid.jsonl --seqlen 32", "--seqlen", "--seq-len"),
)

STUDY = "lowprec study run study.yaml --nproc 1"
ARMS = "arms: {bf16: , fp8: }\nblocks: [{purpose: estimate, seeds: [1, 2]}]\n"


def study(text: str) -> Callable[[Path], object]:
    return file("study.yaml", f"name: mine\noverrides: [{', '.join(SMALL[:-1])}]\n{text}")


STUDIES = (
    case("study-nothing", "lowprec study", "WHAT"),
    case("study-unknown-command", "lowprec study banana", "banana"),
    case("study-absent", "lowprec study run nowhere", "nowhere", "tiny"),
    case("study-garbled", STUDY, "study.yaml", make=file("study.yaml", "}{")),
    case("study-empty", STUDY, "study.yaml", make=file("study.yaml", "")),
    case("study-a-list", STUDY, "study.yaml", make=file("study.yaml", "- 1\n")),
    case("study-typo", STUDY, "contrast", "contrasts", make=study(f"{ARMS}contrast: []\n")),
    case("study-unknown-recipe", STUDY, "fp9", make=study("arms: {fp9: }\nblocks: []\n")),
    case("study-no-blocks", STUDY, "blocks", make=study("arms: {bf16: }\n")),
    case("study-two-purposes", STUDY, "2", make=study(f"{ARMS}".replace("]}]", "]}, {purpose: gate, seeds: [2]}]"))),
    case("study-seed-in-words", STUDY, "one", make=study(ARMS.replace("1, 2", "one"))),
    case("study-typo-of-a-setting", f"{STUDY} --set stepps=3", "stepps", "steps", make=study(ARMS)),
    case("study-wrong-type", f"{STUDY} --set steps=ten", "ten", make=study(ARMS)),
    case("study-no-override", f"{STUDY} --set fast", "fast", make=study(ARMS)),
    case("study-a-seed-of-its-own", f"{STUDY} --set seed=3", "seed", make=study(ARMS)),
    case("study-uneven-batch", f"{STUDY} --set tokens_per_step=65", "65", make=study(ARMS)),
    case("study-unknown-arm", f"{STUDY} --arms banana", "banana", "fp8", make=study(ARMS)),
    case("study-no-run-left", f"{STUDY} --purpose sweep", "sweep", make=study(ARMS)),
    case("study-no-time", f"{STUDY} --minutes 0", "0", make=study(ARMS)),
    case("study-time-in-words", f"{STUDY} --minutes long", "long", make=study(ARMS)),
    case("study-no-processes", "lowprec study run study.yaml --nproc 0", "0", make=study(ARMS)),
    case("study-no-gpu", "lowprec study run study.yaml --gpus 2", "GPU", make=study(ARMS)),
    case("study-out-a-file", f"{STUDY} --out lines.jsonl", "lines.jsonl", make=study(ARMS)),
    case("study-out-unwritable", f"{STUDY} --out /proc/study", "/proc/study", make=study(ARMS)),
    case(
        "study-garbled-seeds",
        f"{STUDY} --out runs",
        "seeds.json",
        make=lambda place: (study(ARMS)(place), file("runs/seeds.json", "}{")(place)),
    ),
    case("study-task-beyond", "lowprec study list study.yaml --task 4", "4", "3", make=study(ARMS)),
    case("study-report-of-nothing", "lowprec study report study.yaml", "mine", make=study(ARMS)),
    case("study-evaluate-absent", "lowprec study evaluate runs/nowhere", "runs/nowhere"),
    case(
        "study-evaluate-garbled",
        "lowprec study evaluate runs/good --device cpu",
        "evaluation.json",
        make=file("runs/good/evaluation.json", "}{"),
    ),
)

COMPARED = (
    case("compare-nothing", "lowprec compare", "RUN"),
    case("compare-one", "lowprec compare runs/good", "runs/good"),
    case("compare-one-twice", "lowprec compare runs/good runs/good", "runs/good"),
    case("compare-an-absent-run", "lowprec compare runs/good runs/nowhere", "runs/nowhere"),
    case("compare-an-absent-run-after-an-option", "lowprec compare runs/good --out x runs/nowhere", "runs/nowhere"),
    case("compare-an-unknown-option-between", "lowprec compare runs/good --banana runs/fp8", "--banana"),
    case("compare-a-file", "lowprec compare runs/good lines.jsonl", "lines.jsonl"),
    case("compare-a-directory-of-text", "lowprec compare runs/good corpus", "corpus"),
    case("compare-other-text", "lowprec compare runs/good runs/text", "text"),
    case("compare-without-metrics", COMPARE, "runs/fp8", "metrics.jsonl", make=no_metrics),
    case("compare-empty-metrics", COMPARE, "runs/fp8", make=file("runs/fp8/metrics.jsonl", "")),
    case("compare-garbled-metrics", COMPARE, "runs/fp8/metrics.jsonl", make=file("runs/fp8/metrics.jsonl", "}{\n}{\n")),
    case(
        "compare-metrics-of-numbers", COMPARE, "runs/fp8/metrics.jsonl", make=file("runs/fp8/metrics.jsonl", "3\n4\n")
    ),
    case(
        "compare-metrics-without-steps",
        COMPARE,
        "runs/fp8/metrics.jsonl",
        make=file("runs/fp8/metrics.jsonl", '{"train/loss": 3}\n'),
    ),
    case(
        "compare-metrics-in-words",
        COMPARE,
        "runs/fp8/metrics.jsonl",
        make=file("runs/fp8/metrics.jsonl", '{"step": "one", "train/loss": "low"}\n'),
    ),
    case(
        "compare-metrics-binary",
        COMPARE,
        "runs/fp8/metrics.jsonl",
        make=file("runs/fp8/metrics.jsonl", b"\xff\xfe\n1\n"),
    ),
    case("compare-garbled-config", COMPARE, "runs/fp8/config.yaml", make=file("runs/fp8/config.yaml", "}{")),
    case("compare-garbled-run-json", COMPARE, "runs/fp8/run.json", make=file("runs/fp8/run.json", "}{")),
    case("compare-absent-baseline", f"{COMPARE} --baseline banana", "banana", "good"),
    case("compare-gap-in-words", f"{COMPARE} --max-gap small", "small"),
    case("compare-gap-negative", f"{COMPARE} --max-gap=-1", "-1"),
    case("compare-gap-nan", f"{COMPARE} --max-gap nan", "nan"),
    case("compare-smooth-zero", f"{COMPARE} --smooth 0", "0"),
    case("compare-smooth-in-words", f"{COMPARE} --smooth much", "much"),
    case("compare-unknown-heatmap", f"{COMPARE} --heatmap banana", "banana", "sqnr_db"),
    case("compare-out-a-file", f"{COMPARE} --out lines.jsonl", "lines.jsonl"),
    case("compare-out-unwritable", f"{COMPARE} --out /proc/report", "/proc/report"),
    case("compare-out-a-run", f"{COMPARE} --out runs/good/metrics.jsonl", "metrics.jsonl"),
)

EVALUATED = (
    case("evaluate-nothing", "lowprec evaluate", "RUN"),
    case("evaluate-an-absent-run", "lowprec evaluate runs/nowhere --data valid.jsonl", "runs/nowhere"),
    case("evaluate-without-data", EVALUATE, "--data"),
    case("evaluate-absent-data", f"{EVALUATE} --data nowhere.jsonl", "nowhere.jsonl"),
    case("evaluate-empty-data", f"{EVALUATE} --data x.jsonl", "x.jsonl", make=a("x.jsonl", "")),
    case("evaluate-data-of-numbers", f"{EVALUATE} --data x.jsonl", "x.jsonl:4", "7", make=lines({"text": 7})),
    case("evaluate-data-of-another-field", f"{EVALUATE} --data valid.jsonl --field body", "body", "valid.jsonl"),
    case("evaluate-data-of-another-kind", f"{EVALUATE} --data x.csv", "x.csv", make=a("x.csv", "a,b")),
    case("evaluate-unknown-recipe", f"{EVALUATE} --data valid.jsonl --recipe fp5", "fp5", "fp4"),
    case("evaluate-typo-of-a-recipe", f"{EVALUATE} --data valid.jsonl --recipe mxpf4", "mxpf4", "mxfp4"),
    case("evaluate-absent-step", f"{EVALUATE} --data valid.jsonl --step 9", "step-9"),
    case("evaluate-step-in-words", f"{EVALUATE} --data valid.jsonl --step last", "last"),
    case("evaluate-seq-len-zero", f"{EVALUATE} --data valid.jsonl --seq-len 0", "0"),
    case("evaluate-seq-len-huge", f"{EVALUATE} --data valid.jsonl --seq-len 999999", "999999", "64"),
    case("evaluate-stride-zero", f"{EVALUATE} --data valid.jsonl --stride 0", "0"),
    case("evaluate-stride-beyond", f"{EVALUATE} --data valid.jsonl --stride 999", "999"),
    case("evaluate-batch-zero", f"{EVALUATE} --data valid.jsonl --batch 0", "0"),
    case("evaluate-limit-zero", f"{EVALUATE} --data valid.jsonl --limit 0", "0"),
    case("evaluate-limit-negative", f"{EVALUATE} --data valid.jsonl --limit=-3", "-3"),
    case("evaluate-start-unknown", f"{EVALUATE} --data valid.jsonl --start banana", "banana"),
    case("evaluate-start-beyond", f"{EVALUATE} --data valid.jsonl --start 99999", "99999"),
    case("evaluate-device-unknown", "lowprec evaluate runs/good --data valid.jsonl --device tpu", "tpu"),
    case("evaluate-on-an-absent-gpu", "lowprec evaluate runs/good --data valid.jsonl --device cuda", "cuda"),
    case("evaluate-absent-tasks", f"{EVALUATE} --tasks nowhere.yaml", "nowhere.yaml"),
    case("evaluate-absent-tokenizer", f"{EVALUATE} --data valid.jsonl --tokenizer nowhere.model", "nowhere.model"),
    case("evaluate-out-a-directory", f"{EVALUATE} --data valid.jsonl --out runs", "runs"),
    case("evaluate-out-unwritable", f"{EVALUATE} --data valid.jsonl --out /proc/x.json", "/proc/x.json"),
    case("evaluate-spoiled-checkpoint", f"{EVALUATE} --data valid.jsonl", "runs/good", make=cut),
    case(
        "evaluate-garbled-run-json", f"{EVALUATE} --data valid.jsonl", "run.json", make=file("runs/good/run.json", "}{")
    ),
    case(
        "evaluate-run-json-a-list", f"{EVALUATE} --data valid.jsonl", "run.json", make=file("runs/good/run.json", "[1]")
    ),
)

GENERATED = (
    case("generate-nothing", "lowprec generate", "RUN"),
    case("generate-from-an-absent-run", "lowprec generate runs/nowhere", "runs/nowhere"),
    case("generate-from-text", "lowprec generate corpus", "corpus"),
    case("generate-absent-step", f"{GENERATE} --step 9", "step-9"),
    case("generate-unknown-recipe", f"{GENERATE} --recipe fp5", "fp5", "fp4"),
    case("generate-temperature-negative", f"{GENERATE} --temperature=-1", "-1"),
    case("generate-temperature-nan", f"{GENERATE} --temperature nan", "nan"),
    case("generate-temperature-infinite", f"{GENERATE} --temperature inf", "inf"),
    case("generate-temperature-in-words", f"{GENERATE} --temperature warm", "warm"),
    case("generate-top-p-zero", f"{GENERATE} --top-p 0", "0"),
    case("generate-top-p-two", f"{GENERATE} --top-p 2", "2"),
    case("generate-top-p-nan", f"{GENERATE} --top-p nan", "nan"),
    case("generate-no-tokens", f"{GENERATE} --max-tokens 0", "0"),
    case("generate-tokens-negative", f"{GENERATE} --max-tokens=-4", "-4"),
    case("generate-too-many-tokens", f"{GENERATE} --max-tokens 99999", "99999", "64"),
    case("generate-prompt-too-long", f"{GENERATE} --prompt '{'def x ' * 60}'", "64"),
    case("generate-seed-in-words", f"{GENERATE} --seed lucky", "lucky"),
    case("generate-seed-huge", f"{GENERATE} --seed 99999999999999999999999", "99999999999999999999999"),
    case("generate-start-unknown", f"{GENERATE} --start banana", "banana"),
    case("generate-start-beyond", f"{GENERATE} --start 99999", "99999"),
    case("generate-start-negative", f"{GENERATE} --start=-5", "-5"),
    case("generate-start-none-without-a-prompt", f"{GENERATE} --start none", "none"),
    case("generate-device-unknown", "lowprec generate runs/good --device tpu", "tpu"),
    case("generate-on-an-absent-gpu", "lowprec generate runs/good --device cuda", "cuda"),
    case("generate-absent-tokenizer", f"{GENERATE} --tokenizer nowhere.model", "nowhere.model"),
    case("generate-garbled-tokenizer", f"{GENERATE} --tokenizer lines.jsonl", "lines.jsonl"),
)

DATA = (
    case("prepare-nothing", "lowprec prepare-data", "INPUT"),
    case("prepare-without-a-tokenizer", "lowprec prepare-data lines.jsonl --out new/set", "--tokenizer"),
    case("prepare-absent-text", PREPARE.replace("lines.jsonl", "nowhere.jsonl"), "nowhere.jsonl"),
    case("prepare-absent-tokenizer", PREPARE.replace("tokenizer.model", "nowhere.model"), "nowhere.model"),
    case("prepare-garbled-tokenizer", PREPARE.replace("tokenizer.model", "lines.jsonl"), "lines.jsonl"),
    case("prepare-empty-text", PREPARE.replace("lines.jsonl", "x.jsonl"), "x.jsonl", make=a("x.jsonl", "")),
    case("prepare-whitespace-text", PREPARE.replace("lines.jsonl", "x.jsonl"), "x.jsonl", make=a("x.jsonl", "\n \n")),
    case(
        "prepare-text-of-numbers", PREPARE.replace("lines.jsonl", "x.jsonl"), "x.jsonl:4", "7", make=lines({"text": 7})
    ),
    case("prepare-bad-json", PREPARE.replace("lines.jsonl", "x.jsonl"), "x.jsonl:4", make=lines('{"text')),
    case(
        "prepare-bad-json-in-workers",
        PREPARE.replace("lines.jsonl", "x.jsonl").replace("--workers 0", "--workers 2"),
        "x.jsonl:4",
        make=lines('{"text'),
    ),
    case("prepare-not-utf8", PREPARE.replace("lines.jsonl", "x.txt"), "x.txt", "UTF-8", make=a("x.txt", b"\xff\xfe a")),
    case("prepare-another-field", f"{PREPARE} --field body", "body", "lines.jsonl:1"),
    case("prepare-unknown-eod", f"{PREPARE} --eod '<|banana|>'", "<|banana|>"),
    case("prepare-workers-negative", PREPARE.replace("--workers 0", "--workers=-1"), "-1"),
    case("prepare-workers-in-words", PREPARE.replace("--workers 0", "--workers many"), "many"),
    case(
        "prepare-over-another-set",
        PREPARE.replace("new/set", "sets/lines").replace("lines.jsonl", "valid.jsonl"),
        "sets/lines",
    ),
    case(
        "prepare-beside-another-tokenizer",
        PREPARE.replace("new/set", "sets/more"),
        "tokenizer.model",
        make=spoiled("sets/tokenizer.model", b"another"),
    ),
    case("prepare-below-a-file", PREPARE.replace("new/set", "lines.jsonl/set"), "lines.jsonl"),
    case("prepare-unwritable", PREPARE.replace("new/set", "/proc/set"), "/proc"),
    case("prepare-out-a-directory", PREPARE.replace("new/set", "corpus/"), "corpus"),
    case("learn-nothing", "lowprec train-tokenizer", "INPUT"),
    case("learn-from-absent-text", LEARN.replace("lines.jsonl", "nowhere.jsonl"), "nowhere.jsonl"),
    case("learn-from-empty-text", LEARN.replace("lines.jsonl", "x.txt"), "x.txt", make=a("x.txt", "")),
    case("learn-from-whitespace", LEARN.replace("lines.jsonl", "x.txt"), "x.txt", make=a("x.txt", " \n\n ")),
    case("learn-from-numbers", LEARN.replace("lines.jsonl", "x.jsonl"), "x.jsonl:4", "7", make=lines({"text": 7})),
    case("learn-from-bad-json", LEARN.replace("lines.jsonl", "x.jsonl"), "x.jsonl:4", make=lines("{")),
    case("learn-too-many-pieces", LEARN.replace("384", "999999"), "999999"),
    case("learn-too-few-pieces", LEARN.replace("384", "200"), "200"),
    case("learn-no-pieces", LEARN.replace("384", "0"), "0"),
    case("learn-pieces-negative", LEARN.replace("-size 384", "-size=-5"), "-5"),
    case("learn-pieces-in-words", LEARN.replace("384", "many"), "many"),
    case("learn-sample-zero", f"{LEARN} --sample 0", "0"),
    case("learn-sample-negative", f"{LEARN} --sample=-5", "-5"),
    case("learn-over-a-file", LEARN.replace("new.model", "lines.jsonl --field text"), "lines.jsonl"),
    case(
        "learn-over-a-tokenizer", LEARN.replace("new.model", "tokenizer.model").replace("384", "385"), "tokenizer.model"
    ),
    case("learn-over-a-directory", LEARN.replace("new.model", "corpus"), "corpus"),
    case("learn-unwritable", LEARN.replace("new.model", "/proc/new.model"), "/proc/new.model"),
    case("inspect-nothing", "lowprec inspect-data", "PREFIX"),
    case("inspect-an-absent-set", "lowprec inspect-data sets/nowhere", "sets/nowhere"),
    case("inspect-a-file", "lowprec inspect-data lines.jsonl", "lines.jsonl"),
    case("inspect-with-its-ending", "lowprec inspect-data sets/lines.bin", "sets/lines.bin"),
    case("inspect-samples-negative", f"{INSPECT} --samples=-1", "-1"),
    case("inspect-an-absent-document", f"{INSPECT} --document 9999", "9999", "40"),
    case("inspect-a-negative-document", f"{INSPECT} --document=-1", "-1"),
    case("inspect-characters-negative", f"{INSPECT} --characters=-1", "-1"),
    case("inspect-absent-tokenizer", f"{INSPECT} --tokenizer nowhere.model", "nowhere.model"),
    case("inspect-without-idx", INSPECT, "lines.idx", make=without("sets/lines.idx")),
    case("inspect-garbled-idx", INSPECT, "lines.idx", make=spoiled("sets/lines.idx", b"nothing" * 20)),
    case("inspect-cut-bin", INSPECT, "lines.bin", make=spoiled("sets/lines.bin", b"\x00")),
    case("inspect-garbled-manifest", INSPECT, "lines.manifest.json", make=spoiled("sets/lines.manifest.json", b"}{")),
    case("inspect-manifest-of-other-values", INSPECT, "lines.manifest.json", make=manifest(tokenizer=7)),
    case(
        "inspect-check-without-tokenizer", f"{INSPECT} --check", "tokenizer.model", make=without("sets/tokenizer.model")
    ),
)

SIZES = "lowprec estimate model=llama_tiny"
PART = '{"bench": "step", "environment": {"gpu": "x"}, "sizes": {}, "tokens_per_step": 1, "rows": [{"name": "fp8"}]}'
OTHERS = (
    case("estimate-unknown-key", "lowprec estimate banana=3", "banana"),
    case("estimate-typo-of-a-key", "lowprec estimate model.hedas=2", "model.hedas", "did you mean model.heads"),
    case("estimate-unknown-model", "lowprec estimate model=bert", "bert", "llama_tiny"),
    case("estimate-recipe-without-a-plus", "lowprec estimate recipe=fp4", "recipe=fp4", "+recipe=fp4"),
    case("estimate-unknown-recipe", "lowprec estimate +recipe=fp5", "fp5", "fp4"),
    case("estimate-a-word", "lowprec estimate llama_7b", "llama_7b"),
    case("estimate-open-bracket", "lowprec estimate 'model.dim=['", "model.dim=["),
    case("estimate-gpus-zero", f"{SIZES} --gpus 0", "0"),
    case("estimate-gpus-negative", f"{SIZES} --gpus=-8", "-8"),
    case("estimate-gpus-in-words", f"{SIZES} --gpus many", "many"),
    case("estimate-gpus-that-do-not-divide", "lowprec estimate --gpus 6 model=llama_tiny parallel.tp=4", "4", "6"),
    case("estimate-gpus-too-many", f"{SIZES} --gpus 1000000007", "1000000007", "1,048,576"),
    case("estimate-grid-too-large", f"{SIZES} parallel.dp_shard=1000000007", "parallel.dp_shard=1000000007"),
    case("estimate-uneven-step", f"{SIZES} tokens_per_step=4097", "tokens_per_step=4097", "4096"),
    case("estimate-uneven-step-of-a-table", "lowprec estimate --table tokens_per_step=4097", "tokens_per_step=4097"),
    case("estimate-unknown-option-between", f"{SIZES} --banana steps=3", "--banana"),
    case(
        "estimate-sums-in-groups",
        f"{SIZES} +optim/moment@optim.grad_accumulation=e4m3_expanded",
        "optim.grad_accumulation=E4M3 expanded",
    ),
    case("estimate-heads-that-do-not-divide", f"{SIZES} model.heads=3", "heads 3"),
    case("estimate-steps-zero", f"{SIZES} steps=0", "steps=0"),
    case("estimate-lr-nan", f"{SIZES} optim.lr=nan", "nan"),
    case("estimate-json-and-table", f"{SIZES} --json --table", "--table"),
    case("estimate-wrong-type", f"{SIZES} steps=many", "many"),
    case("bench-nothing", "lowprec bench", "WHAT"),
    case("bench-unknown", "lowprec bench banana", "banana", "gemm"),
    case("bench-without-a-gpu", "lowprec bench gemm", "CUDA"),
    case("bench-report-of-nothing", "lowprec bench report nowhere.json", "nowhere.json"),
    case("bench-report-of-garbage", "lowprec bench report x.json", "x.json", make=a("x.json", "}{")),
    case("bench-report-of-another-file", "lowprec bench report x.json", "x.json", make=a("x.json", '{"a": 1}')),
    case("bench-report-of-a-list", "lowprec bench report x.json", "x.json", make=a("x.json", "[1, 2]")),
    case("bench-report-of-part", "lowprec bench report x.json", "x.json", "lacks profiles", make=a("x.json", PART)),
    case("bench-step-of-an-unknown-recipe", "lowprec bench step --recipes fp5", "fp5"),
)

HARNESS = (case("evaluate-tasks-of-nothing", f"{EVALUATE} --tasks t.yaml", "t.yaml", make=a("t.yaml", "")),)
"""Needs lm-evaluation-harness, the extra `eval`; without it the error names the package."""

if find_spec("lm_eval") is None:
    HARNESS = (case("evaluate-tasks-without-the-harness", HARNESS[0].command, "lm_eval", make=HARNESS[0].make),)

CASES = (*HARNESS, *COMMANDS, *STUDIES, *COMPARED, *EVALUATED, *GENERATED, *DATA, *OTHERS)
