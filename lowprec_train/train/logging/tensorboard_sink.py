"""TensorBoard: every metric a scalar of its own name, the recipe as text, under `<run directory>/tensorboard`.

Each launch writes a file of its own and begins it by saying from which step on earlier files no longer hold, so a step
that a resumed run takes again is shown once, as it was taken last. Every step is handed to the system at once: what a
killed launch has logged is there.
"""

from __future__ import annotations

from collections.abc import Mapping

from lowprec_train.train.logging.sinks import RunFacts
from lowprec_train.train.packages import missing


class TensorBoardSink:
    """Writes event files that TensorBoard reads, also while the run goes on. ValueError without its package."""

    def __init__(self, *, run: RunFacts) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise missing("tensorboard", extra="tensorboard", what="logger=tensorboard", error=error) from error
        directory = run.directory / "tensorboard"
        begun = any(directory.glob("events.*"))  # by an earlier launch, whose text stays: scalars alone are purged
        self._writer = SummaryWriter(str(directory), purge_step=run.resumed_step + 1)
        if not begun:
            self._writer.add_text("recipe", f"```yaml\n# {run.recipe}\n{run.recipe_text()}```", 0)
            self._writer.flush()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write every metric as a scalar of its own name."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
