"""A model's statistics as the protocol's clients read them."""

from __future__ import annotations

from layertap.service.http.model_descriptions import Json
from layertap.service.oip.encoding import VERSION
from layertap.service.statistics import Duration, ModelStatistics

STEPS = {"queue": "queue", "compute_input": "decode", "compute_infer": "forward", "compute_output": "copy"}
UNKNOWN = Duration()  # what nobody measures is 0


def describe_statistics(name: str, statistics: ModelStatistics) -> Json:
    """Counts, and durations in nanoseconds; of batches only the forward itself is measured.

    As the protocol says, hits are successes and count in the queue, but are no inferences and no part of what computes.
    """
    batches = sorted(dict(statistics.batches).items())
    return {
        "name": name,
        "version": VERSION,
        "last_inference": round(statistics.last_request * 1000),
        "inference_count": statistics.rows,
        "execution_count": sum(duration.count for _, duration in batches),
        "inference_stats": {
            "success": _describe(statistics.answered),
            "fail": _describe(statistics.failed),
            **{theirs: _describe(statistics.steps[ours]) for theirs, ours in STEPS.items()},
            "cache_hit": _describe(statistics.hits),
            "cache_miss": _describe(statistics.misses),
        },
        "batch_stats": [
            {
                "batch_size": rows,
                "compute_input": _describe(UNKNOWN),
                "compute_infer": _describe(duration),
                "compute_output": _describe(UNKNOWN),
            }
            for rows, duration in batches
        ],
    }


def _describe(duration: Duration) -> Json:
    return {"count": duration.count, "ns": round(duration.seconds * 1e9)}
