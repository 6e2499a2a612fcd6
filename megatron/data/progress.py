"""How far a long conversion is: a bar on a terminal, plain lines elsewhere."""

import logging
import time

from tqdm import tqdm

log = logging.getLogger(__name__)


class Progress:
    """Counts documents, tokens and bytes of input, and shows them with their rates.

    Args:
        total_bytes: size of the whole input.
        log_interval: documents between two lines, where stderr is not a terminal.
    """

    def __init__(self, total_bytes: int, *, log_interval: int):
        self.documents = 0
        self.tokens = 0
        self.bytes = 0
        self._total_bytes = total_bytes
        self._log_interval = log_interval
        self._started_at = time.monotonic()
        # disable=None: tqdm's word for "only on a terminal".
        self._bar = tqdm(total=total_bytes, unit="B", unit_scale=True, disable=None)

    def add(self, *, documents: int, tokens: int, num_bytes: int) -> None:
        """Count one more piece of the input."""
        is_due = (self.documents + documents) // self._log_interval > (
            self.documents // self._log_interval
        )
        self.documents += documents
        self.tokens += tokens
        self.bytes += num_bytes
        if not self._bar.disable:
            counts = f"{self.documents} documents, {self.tokens} tokens"
            self._bar.set_postfix_str(counts, refresh=False)
            self._bar.update(num_bytes)
        elif is_due:
            log.info(self._line())

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.close()

    def _line(self) -> str:
        elapsed_s = max(time.monotonic() - self._started_at, 1e-9)
        # The size of a pipe is 0.
        share = f" | input: {self.bytes / self._total_bytes:.1%}" if self._total_bytes else ""
        return (
            f"documents: {self.documents} | tokens: {self.tokens} | "
            f"documents/s: {self.documents / elapsed_s:.0f} | "
            f"MB/s: {self.bytes / elapsed_s / 1e6:.2f}{share}"
        )
