"""What the server counts, in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from inference.verifier.session import StepCost

if TYPE_CHECKING:
    from inference.serve.written_text import Addition

SECONDS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)


class Metrics:
    """The metrics of one server. Their names begin with ``drafters_``.

    Acceptance length is the ratio of ``generated_tokens_total`` and ``base_forwards_total``, which also counts the
    prefill of each text.
    """

    def __init__(self) -> None:
        disable_created_metrics()  # when each counter was made, which would double the lines
        registry = self._registry = CollectorRegistry()

        def counter(name: str, about: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"drafters_{name}", about, labels, registry=registry)

        self.requests = counter(
            "requests", "Accepted requests: finished, aborted by the client, timed_out or failed.", ("outcome",)
        )
        self.refused = counter("refused_requests", "Requests that were refused, by HTTP status.", ("status",))
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens read.")
        self._generated_tokens = counter("generated_tokens", "Generated tokens.")
        self._accepted_tokens = counter("accepted_draft_tokens", "Draft tokens that were accepted.")
        self._rejected_tokens = counter("rejected_draft_tokens", "Draft tokens that were rejected.")
        self._base_forwards = counter("base_forwards", "Forwards of the base, one per step.")
        self._decoding_seconds = counter("decoding_seconds", "Seconds spent in steps.")
        self.request_seconds = Histogram(
            "drafters_request_seconds", "Seconds from a request to its end.", buckets=SECONDS, registry=registry
        )
        self.first_token_seconds = Histogram(
            "drafters_time_to_first_token_seconds",
            "Seconds from a request to its first tokens.",
            buckets=SECONDS,
            registry=registry,
        )

    def watch_queue(self, num_waiting: Callable[[], int], num_running: Callable[[], int]) -> None:
        """Report the requests that wait and run, which these functions count."""
        waiting = Gauge("drafters_requests_waiting", "Requests in the queue.", registry=self._registry)
        waiting.set_function(num_waiting)
        running = Gauge("drafters_requests_running", "Requests that are being decoded.", registry=self._registry)
        running.set_function(num_running)

    def count_prompt(self, num_tokens: int) -> None:
        """Count the prompt of a text."""
        self._prompt_tokens.inc(num_tokens)

    def count_step(self, addition: Addition, cost: StepCost) -> None:
        """Count a step."""
        self._generated_tokens.inc(addition.num_tokens)
        self._accepted_tokens.inc(addition.num_accepted)
        self._rejected_tokens.inc(addition.num_rejected)
        self._base_forwards.inc()
        self._decoding_seconds.inc(sum(cost.seconds))

    def text(self) -> bytes:
        """The metrics in the text format of Prometheus."""
        return generate_latest(self._registry)
