"""The plots of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from layertap.service.load.distribution import Bin, Interval
from layertap.service.load.figures import Figures, Spread
from layertap.service.load.page.drawing import LEFT, TOP, Drawing, Key, Polyline, Rect, Text
from layertap.service.load.page.scales import Scale, choose_log_ticks, choose_ticks, format_value, thin_out
from layertap.service.load.report import Report

PERCENTILES = {"p50": "curve a", "p90": "curve b", "p99": "curve c"}
FAILURES = {"failed": "fill d", "not_sent": "fill e", "refused": "fill b"}
FAILURE_NAMES = {
    "failed": "failed (unexpected or no answer)",
    "not_sent": "not sent (too many under way)",
    "refused": "refused, allowed",
}
STEPS = ("parse", "decode", "queue", "forward", "copy", "encode")
STEP_STYLES = ("fill f", "fill b", "fill e", "fill a", "fill d", "fill c")
ROW = 30.0  # the height of a kind of request
NAMES = 190.0  # the width of their names
MAX_NAME = 28


def make_drawings(report: Report, *, open_loop: bool) -> Iterator[Drawing]:
    """Those that have something to show."""
    if report.timeline:
        yield draw_throughput(report.timeline, open_loop=open_loop)
    if any(each.latency_ms for each in report.timeline):
        yield draw_latency(report.timeline)
    spreads = {name: each.latency_ms for name, each in report.kinds.items() if each.latency_ms}
    if spreads:
        yield draw_kinds(spreads)
    if any(_get_means(each) for each in report.kinds.values()):
        yield draw_steps(report.kinds)
    if report.histogram and report.total.latency_ms:
        yield draw_histogram(report.histogram, report.total.latency_ms)
    if any(each.failed or each.not_sent or each.refused for each in report.timeline):
        yield draw_failures(report.timeline)


def draw_throughput(timeline: Sequence[Interval], *, open_loop: bool) -> Drawing:
    """Good answers a second, and in open loop what was due."""
    drawing = Drawing("Throughput", "Good answers a second over the run")
    good = [each.good / each.seconds for each in timeline]
    due = [each.due / each.seconds for each in timeline] if open_loop else []
    ticks = choose_ticks(max(*good, *due, 1e-6))
    x, y = _add_time_axis(drawing, timeline), drawing.make_y(ticks[-1])
    drawing.add_y_axis(y, ticks)
    middles = [x.place(each.begin_s + each.seconds / 2) for each in timeline]
    if due:
        while due and not due[-1]:  # after the last moment only answers come
            due.pop()
        drawing.add_curve([(at, y.place(value)) for at, value in zip(middles, due, strict=False)], "curve f", "due")
    drawing.add_curve([(at, y.place(value)) for at, value in zip(middles, good, strict=True)], "curve a", "good")
    drawing.title += ", requests a second"
    return drawing


def draw_latency(timeline: Sequence[Interval]) -> Drawing:
    """Percentiles by the moment at which requests were due."""
    drawing = Drawing("Latency over time, ms", "Percentiles of latency by the moment at which requests were due")
    spreads = [(each, each.latency_ms) for each in timeline if each.latency_ms is not None]
    ticks = choose_ticks(max(spread.p99 for _, spread in spreads))
    x, y = _add_time_axis(drawing, timeline), drawing.make_y(ticks[-1])
    drawing.add_y_axis(y, ticks)
    for name, style in reversed(PERCENTILES.items()):
        points = [(x.place(at.begin_s + at.seconds / 2), y.place(getattr(spread, name))) for at, spread in spreads]
        drawing.add_curve(points, style, name)
    return drawing


def draw_histogram(bins: Sequence[Bin], total: Spread) -> Drawing:
    """How many answers took how long, with the percentiles of all."""
    drawing = Drawing("Latency distribution, answers", "How many answers took how long, on a logarithmic scale")
    least, most = bins[0].from_ms, max(bins[-1].to_ms, bins[0].from_ms * 1.05)
    ticks = choose_ticks(max(each.count for each in bins))
    x, y = drawing.make_x(least, most, log=True), drawing.make_y(ticks[-1])
    drawing.add_y_axis(y, ticks)
    drawing.add_x_axis(x, thin_out(choose_log_ticks(least, most), x, 34), "ms")
    for each in bins:
        left, right, top = x.place(each.from_ms), x.place(each.to_ms), y.place(each.count)
        title = f"{format_value(each.from_ms)} to {format_value(each.to_ms)} ms: {each.count}"
        drawing.rects.append(Rect(left, top, max(right - left - 1, 1), drawing.bottom - top, "fill a", title))
    for name, style in PERCENTILES.items():
        at, value = x.place(getattr(total, name)), getattr(total, name)
        drawing.lines.append(Polyline(f"{at},{TOP} {at},{drawing.bottom}", style.replace("curve", "mark")))
        drawing.legend.append(Key(style.replace("curve", "mark"), f"{name} {format_value(value)} ms"))
    return drawing


def draw_failures(timeline: Sequence[Interval]) -> Drawing:
    """What went wrong in each interval, one on top of the other."""
    drawing = Drawing("Failed, not sent, refused: requests", "Requests that gave no good answer, over the run")
    ticks = choose_ticks(max(each.failed + each.not_sent + each.refused for each in timeline))
    x, y = _add_time_axis(drawing, timeline), drawing.make_y(ticks[-1])
    drawing.add_y_axis(y, ticks)
    for each in timeline:
        height, left, right = 0, x.place(each.begin_s), x.place(each.begin_s + each.seconds)
        for name, style in FAILURES.items():
            count: int = getattr(each, name)
            if count:
                below, top = y.place(height), y.place(height + count)
                title = f"{FAILURE_NAMES[name]}: {count}, from {format_value(each.begin_s)} s on"
                drawing.rects.append(Rect(left, top, max(right - left - 1, 1), round(below - top, 1), style, title))
                height += count
    drawing.legend += [
        Key(style, FAILURE_NAMES[name])
        for name, style in FAILURES.items()
        if any(getattr(each, name) for each in timeline)
    ]
    return drawing


def draw_kinds(spreads: Mapping[str, Spread]) -> Drawing:
    """Latency of each kind of request: a bar from the median to p90, a line on to p99."""
    drawing = Drawing("Latency by kind of request", "From the median to p90 and p99, for each kind of request")
    drawing.height = TOP + ROW * len(spreads) + 44
    ticks = choose_ticks(max(spread.p99 for spread in spreads.values()))
    x = drawing.make_x(0.0, ticks[-1], left=NAMES)
    drawing.add_x_axis(x, thin_out(ticks, x, 30), "ms", grid=True)
    for place, (name, spread) in enumerate(spreads.items()):
        top = TOP + ROW * place + 7
        p50, p90, p99 = (x.place(value) for value in (spread.p50, spread.p90, spread.p99))
        title = f"{name}: p50 {spread.p50:.1f}, p90 {spread.p90:.1f}, p99 {spread.p99:.1f}, max {spread.max:.1f} ms"
        drawing.lines.append(Polyline(f"{p90},{top + 8} {p99},{top + 8}", "curve c whole"))
        drawing.lines.append(Polyline(f"{p99},{top + 3} {p99},{top + 13}", "curve c whole"))
        drawing.rects.append(Rect(p50, top, max(p90 - p50, 2), 16, "fill b", title))
        drawing.rects.append(Rect(p50 - 2, top - 2, 4, 20, "fill a", title))
        drawing.texts.append(Text(NAMES - 10, top + 12, _cut(name), "end", "row"))
    drawing.legend += [Key("fill a", "p50"), Key("fill b", "to p90"), Key("curve c whole", "to p99")]
    return drawing


def draw_steps(kinds: Mapping[str, Figures]) -> Drawing:
    """Where the mean time of a request went, by the server's own word."""
    rows = {name: means for name, each in kinds.items() if (means := _get_means(each))}
    drawing = Drawing("Where the time goes, by Server-Timing", "Mean time of each step, for each kind of request")
    drawing.height = TOP + ROW * len(rows) + 44
    ticks = choose_ticks(max(sum(means.values()) for means in rows.values()))
    x = drawing.make_x(0.0, ticks[-1], left=NAMES)
    drawing.add_x_axis(x, thin_out(ticks, x, 30), "mean ms", grid=True)
    for place, (name, means) in enumerate(rows.items()):
        top, passed = TOP + ROW * place + 7, 0.0
        for step, style in zip(STEPS, STEP_STYLES, strict=True):
            mean = means.get(step, 0.0)
            left, right = x.place(passed), x.place(passed + mean)
            passed += mean
            if right > left:
                title = f"{name}, {step}: {mean:.2f} ms"
                drawing.rects.append(Rect(left, top, round(right - left, 1), 16, style, title))
        drawing.texts.append(Text(NAMES - 10, top + 12, _cut(name), "end", "row"))
    seen = {step for means in rows.values() for step in means}
    drawing.legend += [Key(style, step) for step, style in zip(STEPS, STEP_STYLES, strict=True) if step in seen]
    return drawing


def _get_means(figures: Figures) -> dict[str, float]:
    means = {name: figures.steps[name].mean for name in STEPS if name in figures.steps}
    return {name: mean for name, mean in means.items() if mean is not None}


def _add_time_axis(drawing: Drawing, timeline: Sequence[Interval]) -> Scale:
    end = timeline[-1].begin_s + timeline[-1].seconds
    scale = drawing.make_x(0.0, end, left=LEFT)
    ticks = [tick for tick in choose_ticks(end, 8) if tick <= end]
    drawing.add_x_axis(scale, thin_out(ticks, scale, 30), "seconds since the start")
    return scale


def _cut(name: str) -> str:
    return name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 1]}…"
