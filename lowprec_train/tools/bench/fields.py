"""The fields that tables and figures need of a stored result, so that one error names the first that is missing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lowprec_train import json_schema
from lowprec_train.json_schema import FINITE, FLAG, NUMBER, POSITIVE, TEXT, WHOLE, Kind, Listed, Named, Schema

CATEGORIES = ("parameters", "optimizer states", "gradients", "activations", "transient")  # of `bench.memory`


def fault(result: Mapping[str, Any]) -> str:
    """Return what a result of a known benchmark lacks, with its place, e.g. `rows[1] lacks ms`; "" for nothing."""
    return json_schema.fault(result, {"environment": {"gpu": TEXT}, **SCHEMAS[result["bench"]]})


def _measured(mark: str, **measured: Schema) -> Callable[[Any], Schema]:
    """Return the schema of rows with the key `mark` if they were measured, and with an error if not."""

    def of(row: Any) -> Schema:
        failed = isinstance(row, dict) and mark not in row and "error" in row
        return {"name": TEXT, "error?": TEXT} if failed else {"name": TEXT, mark: POSITIVE, **measured}

    return of


def _unless_error(about: dict[str, Any], measured: dict[str, Any]) -> Callable[[Any], Schema]:
    """Return the schema of rows that have either an error or measured values."""

    def of(row: Any) -> Schema:
        failed = isinstance(row, dict) and "error" in row
        return {**about, "error": TEXT} if failed else {**about, **measured}

    return of


def _profile(profile: Any) -> Schema:
    if isinstance(profile, dict) and profile.get("longest") == []:
        return {"timeline?": Named(TEXT)}
    longest = Listed({"kernel": TEXT, "class": TEXT, "ms": FINITE})
    return {"longest": longest, "total_ms": POSITIVE, "ms": Named(FINITE), "timeline?": Named(TEXT)}


FINITE_OR_NULL = Kind("a finite number or null", FINITE.holds, null=True)
ANY = Kind("a value", lambda value: True, null=True)
SIZES, SHAPE = Named(ANY), Listed(WHOLE)

STEPS: dict[str, Schema] = {"sizes": SIZES, "tokens_per_step": FINITE, "profiles": Named(_profile)}
STEP: dict[str, Schema] = {"group": ANY, "tokens_per_s": FINITE, "of_group?": FINITE, "peak_gib?": FINITE}
STEP |= {"loss": Listed(NUMBER, 1), "attention?": TEXT, "host_ms?": Listed(FINITE, 1), "cpu_ms?": Listed(FINITE, 1)}
COMMUNICATION = dict.fromkeys(("of_limit?", "exposed_ms?", "idle_ms?", "estimated_gib?", "sent_gb?"), FINITE)
MEMORY: dict[str, Schema] = {
    **dict.fromkeys(CATEGORIES[:-1], FINITE),
    **dict.fromkeys(("of_baseline", "largest"), FINITE_OR_NULL),
    **dict.fromkeys(("reserved?", "estimated?", "tokens_per_s?"), FINITE),
    "marks?": Listed({"mark": TEXT, **dict.fromkeys(CATEGORIES, FINITE)}),
}
KERNEL = {"op": TEXT, "case": TEXT, "shape": SHAPE, "kernel": TEXT}
EXACT = {"case": TEXT, "k": WHOLE}
REDUCTION = {"sent": FINITE, "ms": FINITE, "gbs": FINITE, "of_library?": FINITE, "sqnr_db": FINITE_OR_NULL}
SCHEMAS: dict[str, dict[str, Schema]] = {
    "kernels": {
        "copy_gbs": FINITE,
        "rows": Listed(_unless_error(KERNEL, dict.fromkeys(("ms", "gbs", "of_copy"), FINITE))),
    },
    "gemm": {
        "rows": Listed({"shape": SHAPE, "tflops": Named(FINITE), "errors": Named(TEXT)}),
        "exactness": Listed(_unless_error(EXACT, dict.fromkeys(("fast", "split", "output"), FINITE))),
    },
    "linear": {
        "tokens": FINITE,
        "rows": Listed({"shape": Listed(WHOLE, 2), "ms": Named(POSITIVE), "errors": Named(TEXT)}),
    },
    "step": {**STEPS, "rows": Listed(_measured("ms", **STEP, **{"of_fastest?": FINITE}))},
    "comm": {
        **dict.fromkeys(("ranks", "elements", "rounds"), FINITE),
        "backend": TEXT,
        "gradients?": TEXT,
        "cuda_graph?": FLAG,
        "rows": Listed(_unless_error({"kind": TEXT, "name": TEXT}, REDUCTION)),
    },
    "parallel": {**STEPS, "gpus": FINITE, "rows": Listed(_measured("ms", **STEP, **COMMUNICATION, baseline=FLAG))},
    "memory": {
        "sizes": SIZES,
        "batches": Listed(FINITE, 1),
        **dict.fromkeys(("seq_len", "limit"), FINITE),
        "rows": Listed(_measured("peak", **MEMORY)),
    },
}
"""Of each benchmark."""
