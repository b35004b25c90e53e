"""TensorBoard: every metric as a scalar and the recipe as text, under `<run directory>/tensorboard`.

Each launch writes a new file. It begins with the step from which TensorBoard ignores earlier files, so a step that a
resumed run repeats is shown once, with its last values. Every step is flushed: a killed launch loses none.
"""

from __future__ import annotations

from collections.abc import Mapping

from lowprec_train.train.logging.sinks import RunFacts
from lowprec_train.train.packages import missing


class TensorBoardSink:
    """Writes event files, which TensorBoard can read during the run. Raises ValueError without the package."""

    def __init__(self, *, run: RunFacts) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise missing("tensorboard", extra="tensorboard", what="logger=tensorboard", error=error) from error
        directory = run.directory / "tensorboard"
        begun = any(directory.glob("events.*"))  # an earlier launch wrote the text: only scalars are purged
        self._writer = SummaryWriter(str(directory), purge_step=run.resumed_step + 1)
        if not begun:
            self._writer.add_text("recipe", f"```yaml\n# {run.recipe}\n{run.recipe_text()}```", 0)
            self._writer.flush()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write every metric as a scalar."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
