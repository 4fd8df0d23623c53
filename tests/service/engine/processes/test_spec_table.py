"""What a worker knows of plans: each is sent once, and the table has a bound."""

from __future__ import annotations

from layertap.models.planner import make_plan
from layertap.models.selection.selectors import parse_selector
from layertap.service.engine.execute.forward_batch import ForwardSpec
from layertap.service.engine.execute.processes.messages import SentSpec
from layertap.service.engine.execute.processes.sent_batch import MAX_SPECS, SpecTable
from tests.conftest import net_spec
from tests.loading import load_model


def make_specs(count: int) -> list[ForwardSpec]:
    catalog = load_model(net_spec("Chain")).catalog
    return [ForwardSpec(make_plan([parse_selector(".")], catalog)) for _ in range(count)]


def test_sent_once() -> None:
    """A plan is new once, whatever object asks for it; what was not used for longest makes room."""
    table, known = SpecTable(), dict[int, SentSpec]()
    specs = make_specs(MAX_SPECS + 1)
    for spec in specs[:MAX_SPECS]:
        (place,), new = table.take_places([spec])
        assert list(new) == [place]
        known |= new
    again = ForwardSpec(specs[0].plan)
    assert table.take_places([again]) == ([0], {})
    (place,), new = table.take_places([specs[-1]])
    assert (place, list(new)) == (1, [1])
    assert len(known | new) == MAX_SPECS
    assert list(table.take_places([specs[1]])[1]) == [2]


def test_large_batch() -> None:
    """All specs of a batch have places at the same time, also where they are more than the table has room for."""
    table, specs = SpecTable(), make_specs(2 * MAX_SPECS)
    table.take_places(specs[:3])
    places, new = table.take_places([*specs, *specs])
    assert places[: len(specs)] == places[len(specs) :]
    assert len(set(places)) == len(specs)
    assert len(new) == len(specs) - 3
    for place, spec in zip(places, specs, strict=False):
        assert place not in new or new[place].spec is spec
