"""Weights & Biases: one W&B run for one run, however often it is interrupted, online or offline.

    which run    the checkpoint stores the W&B run id; before the first checkpoint it is read from the run directory
    which steps  a resumed launch repeats steps that W&B may have (the earlier launch went on after its checkpoint), and
                 W&B may lack steps that were done (it buffers its writes, and a kill loses them)

So a launch reads the last step that W&B has: from the server online, from the files on disk offline. Steps up to it are
not sent again. Steps between it and the checkpoint are sent from metrics.jsonl. Each step appears once and in order,
also if the directories of several launches are synced later: incomplete files are repaired first.

After a launch has started, W&B cannot end it: its first error disables it, with one warning.
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
    """Logs to W&B, with tokens as the x-axis. The wandb package reads its environment variables itself.

    project, entity, tags: as in `wandb.init`. group: None for `run.comparison`. job_type: None for the recipe. mode:
    "online", "offline", "disabled"; None: WANDB_MODE, else online.

    Raises ValueError if the wandb package is missing, or if W&B cannot be reached in this mode.
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
        except ValueError as error:
            raise ValueError(f"logger.wandb: {' '.join(str(error).split())}") from error
        except wandb.Error as error:
            advice = "logger.wandb.mode=offline needs neither network nor account"
            raise ValueError(f"W&B: {' '.join(str(error).split())}; {advice}") from error
        run.remembered[REMEMBERED] = self._run.id
        self._disabled = False
        self._last = 0
        with self._warn_once():
            self._run.define_metric(TOKENS)
            self._run.define_metric("*", step_metric=TOKENS)
            self._save_recipe(run)
            on_server = max(0, self._run.starting_step - 1)
            self._last = wandb_files.last_step(run.directory, self._run.id) if self._run.offline else on_server
        self._fill_in(run)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send one step, unless W&B already has it."""
        if step > self._last and not self._disabled:
            with self._warn_once():
                self._run.log(dict(metrics), step=step, commit=True)
                self._last = step

    def close(self) -> None:
        """Send the remaining data. If an exception is being handled, the run is marked as failed."""
        with self._warn_once():
            self._run.finish(exit_code=int(sys.exc_info()[0] is not None))

    @contextmanager
    def _warn_once(self) -> Iterator[None]:
        """Turn any exception of W&B into one warning, and disable W&B for the rest of the launch."""
        try:
            yield
        except Exception as error:
            if not self._disabled:
                message = " ".join(str(error).split()) or type(error).__name__
                log.warning("W&B: %s; this launch continues without it, and metrics.jsonl has every step", message)
            self._disabled = True

    def _fill_in(self, run: RunFacts) -> None:
        taken = run.directory / "metrics.jsonl"
        for line in read_lines(taken) if taken.exists() else ():
            if line["step"] <= run.resumed_step:
                self.log(line["step"], {name: value for name, value in line.items() if name != "step"})

    def _save_recipe(self, run: RunFacts) -> None:
        """Save recipe.yaml and recipe.json as files of the W&B run, so that a sync uploads them."""
        if self._run.disabled:
            return
        files = Path(self._run.dir)
        texts = {"recipe.yaml": run.recipe_text()}
        if (effective := run.directory / "recipe.json").exists():
            texts["recipe.json"] = effective.read_text(encoding="utf-8")
        for name, text in texts.items():
            (files / name).write_text(text, encoding="utf-8")
            self._run.save(str(files / name), base_path=str(files), policy="now")
