"""A load tester for anyone's deployment: ``python -m bench.load SCENARIOS.yaml --url http://127.0.0.1:8000``.

From Python: ``run(read(Path("SCENARIOS.yaml")), Options(url, connections=64, seconds=10)).total.goodput``.
"""

from bench.load.options import Options
from bench.load.report import Figures, Report, Sample, Spread, Step
from bench.load.runner import Now, run
from bench.load.scenario import Scenario, ScenarioError, read

__all__ = [
    "Figures",
    "Now",
    "Options",
    "Report",
    "Sample",
    "Scenario",
    "ScenarioError",
    "Spread",
    "Step",
    "read",
    "run",
]
