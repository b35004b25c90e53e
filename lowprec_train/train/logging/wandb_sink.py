"""Weights & Biases: one W&B run for one run, however often it is interrupted, online or offline.

    which run    its id travels in the checkpoint; a launch that died before its first one has left it in its directory
    which steps  a resumed launch takes steps again that W&B may have (the earlier one went on after its checkpoint),
                 and W&B may lack steps that were taken (it writes through a buffer, which a kill empties)

So a launch asks for the last step that W&B has, the server online, the files on disk offline. Steps up to it are left
out, as W&B itself does. Steps between it and the checkpoint are filled in from metrics.jsonl. Every step is there once,
in order, also when the directories of several launches are synced later: what a kill has torn is mended before.

Once a launch has begun W&B cannot end it: after its first error it is left alone, with one warning.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from lowprec_train.train.logging import wandb_files
from lowprec_train.train.logging.sinks import RunFacts, read_lines
from lowprec_train.train.packages import missing

log = logging.getLogger(__name__)

REMEMBERED = "wandb_run_id"
TOKENS = "data/tokens"


class WandbSink:
    """Logs to W&B, with tokens as the axis. wandb's environment variables are wandb's own and are honoured by it.

    project, entity, tags: as in `wandb.init`. group: of the runs that are compared; None: `run.comparison`. job_type:
    None: the recipe. mode: "online", "offline", "disabled"; None leaves it to W&B: WANDB_MODE, else online.

    Raises ValueError where the wandb package is missing, or W&B cannot be reached under this mode.
    """

    def __init__(
        self,
        *,
        run: RunFacts,
        project: str = "lowprec_train",
        entity: str | None = None,
        group: str | None = None,
        job_type: str | None = None,
        tags: tuple[str, ...] = (),
        mode: Literal["online", "offline", "disabled"] | None = None,
    ) -> None:
        try:
            import wandb
        except ImportError as error:
            raise missing("wandb", extra="wandb", what="logger=wandb", error=error) from error
        begun = wandb_files.files(run.directory)
        identity = run.remembered.get(REMEMBERED) or (wandb_files.run_id(begun[-1]) if begun else None)
        for file in begun:
            wandb_files.mend(file)
        try:
            self._run: Any = wandb.init(
                project=project,
                entity=entity,
                group=group or run.comparison,
                job_type=job_type or run.recipe or None,
                tags=list(tags),
                mode=mode,
                name=run.name,
                dir=str(run.directory),
                config={**run.config, "recipe": run.recipe, "recipe_text": run.recipe_text()},
                id=identity,
                resume="allow",
            )
        except wandb.Error as error:
            advice = "logger.wandb.mode=offline needs neither network nor account"
            raise ValueError(f"W&B: {' '.join(str(error).split())}; {advice}") from error
        run.remembered[REMEMBERED] = self._run.id
        self._gone = False
        self._last = 0
        with self._spared():
            self._run.define_metric(TOKENS)
            self._run.define_metric("*", step_metric=TOKENS)
            self._save_recipe(run)
            on_server = max(0, self._run.starting_step - 1)
            self._last = wandb_files.last_step(run.directory, self._run.id) if self._run.offline else on_server
        self._fill_in(run)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send one step, unless W&B has it."""
        if step > self._last and not self._gone:
            with self._spared():
                self._run.log(dict(metrics), step=step, commit=True)
                self._last = step

    def close(self) -> None:
        """Send what is left. Within the handling of an error the run is marked as failed."""
        with self._spared():
            self._run.finish(exit_code=int(sys.exc_info()[0] is not None))

    @contextmanager
    def _spared(self) -> Iterator[None]:
        """What W&B raises, and its service's connection raises anything, is one warning for the rest of the launch."""
        try:
            yield
        except Exception as error:
            if not self._gone:
                told = " ".join(str(error).split()) or type(error).__name__
                log.warning("W&B: %s; this launch goes on without it, and metrics.jsonl has every step", told)
            self._gone = True

    def _fill_in(self, run: RunFacts) -> None:
        taken = run.directory / "metrics.jsonl"
        for line in read_lines(taken) if taken.exists() else ():
            if line["step"] <= run.resumed_step:
                self.log(line["step"], {name: value for name, value in line.items() if name != "step"})

    def _save_recipe(self, run: RunFacts) -> None:
        """recipe.yaml and recipe.json among the run's files, where a sync finds them."""
        if self._run.disabled:
            return
        files = Path(self._run.dir)
        texts = {"recipe.yaml": run.recipe_text()}
        if (effective := run.directory / "recipe.json").exists():
            texts["recipe.json"] = effective.read_text(encoding="utf-8")
        for name, text in texts.items():
            (files / name).write_text(text, encoding="utf-8")
            self._run.save(str(files / name), base_path=str(files), policy="now")
