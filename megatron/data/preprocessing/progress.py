"""Progress of preprocessing: a bar on a terminal, log lines elsewhere."""

import logging
import time

from tqdm import tqdm

from megatron.common.progress import EVERY_S

log = logging.getLogger(__name__)


class Progress:
    """Counts documents, tokens and bytes of input, and shows them with their rates.

    Args:
        total_bytes: size of all inputs; 0: unknown.
        log_interval: documents between two lines, where stderr is not a terminal; after ten seconds
            there is one whatever their number.
    """

    def __init__(self, total_bytes: int, *, log_interval: int):
        self.documents = 0
        self.tokens = 0
        self.bytes = 0
        self._before: tuple[int, ...] = (0, 0, 0)
        self._total_bytes = total_bytes
        self._log_interval = log_interval
        self._started_at = self._shown_at = time.monotonic()
        # disable=None: tqdm's word for "only on a terminal".
        self._bar = tqdm(total=total_bytes or None, unit="B", unit_scale=True, disable=None)

    def add_earlier(self, documents: int, tokens: int, num_bytes: int) -> None:
        """Count the shards of an earlier run; rates leave them out."""
        self.documents += documents
        self.tokens += tokens
        self.bytes += num_bytes
        before = zip(self._before, (documents, tokens, num_bytes), strict=True)
        self._before = tuple(earlier + more for earlier, more in before)
        self._bar.initial = self._before[2]
        self._bar.update(num_bytes)

    def add(self, documents: int, tokens: int, num_bytes: int) -> None:
        """Count one more piece of the input."""
        now = time.monotonic()
        is_due = now - self._shown_at >= EVERY_S or (
            (self.documents + documents) // self._log_interval
            > self.documents // self._log_interval
        )
        self.documents += documents
        self.tokens += tokens
        self.bytes += num_bytes
        if not self._bar.disable:
            documents_per_s, tokens_per_s, _ = self._rates()
            counts = (
                f"{self.documents} documents, {documents_per_s:.0f}/s, {tokens_per_s:.3g} tokens/s"
            )
            self._bar.set_postfix_str(counts, refresh=False)
            self._bar.update(num_bytes)
        elif is_due:
            self._shown_at = now
            log.info(self._line())

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.close()

    def _rates(self) -> tuple[float, float, float]:
        elapsed_s = max(time.monotonic() - self._started_at, 1e-9)
        documents, tokens, num_bytes = self._before
        return (
            (self.documents - documents) / elapsed_s,
            (self.tokens - tokens) / elapsed_s,
            (self.bytes - num_bytes) / elapsed_s,
        )

    def _line(self) -> str:
        documents_per_s, tokens_per_s, bytes_per_s = self._rates()
        line = (
            f"documents: {self.documents} | tokens: {self.tokens} | "
            f"documents/s: {documents_per_s:.0f} | tokens/s: {tokens_per_s:.0f} | "
            f"MB/s: {bytes_per_s / 1e6:.2f}"
        )
        if self._total_bytes:
            left_s = (self._total_bytes - self.bytes) / max(bytes_per_s, 1e-9)
            line += f" | input: {self.bytes / self._total_bytes:.1%} | left: {left_s:.0f} s"
        return line
