"""Every table and figure of the paper, one function each, for any suite of models.

`run_reproduce(config)` answers on the suite "pocket" (embedded, runs anywhere), "openclip" or "t5" (the paper's
checkpoints). The paper's own figures stand beside ours."""

from gradfix.experiments import (
    ablations,
    accounting,
    hub_suites,
    measures,
    merging_table,
    pocket_suite,
    transport_tables,
)
from gradfix.experiments.experiment import EXPERIMENTS
from gradfix.experiments.reproduce import Job, Reproduction, plan_reproduce, run_reproduce
from gradfix.experiments.suite import SUITES, Suite

__all__ = ["EXPERIMENTS", "SUITES", "Job", "Reproduction", "Suite", "plan_reproduce", "run_reproduce"]

_FILL = (ablations, accounting, hub_suites, measures, merging_table, pocket_suite, transport_tables)
