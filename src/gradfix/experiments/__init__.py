"""Every table and figure of the paper, one function each, for any suite of models.

`plan_reproduce(...).run()` answers on the suite "pocket" (embedded, runs anywhere), "encoders" (a folder of sentence
encoders and tasks), "openclip" or "t5" (the paper's checkpoints). The paper's own figures stand beside ours."""

from gradfix.experiments import ablations, encoder_suite, hub_suites, tables
from gradfix.experiments.experiment import EXPERIMENTS
from gradfix.experiments.reproduce import PlannedReproduction, Reproduction, plan_reproduce
from gradfix.experiments.suite import SUITES, Suite

__all__ = ["EXPERIMENTS", "SUITES", "PlannedReproduction", "Reproduction", "Suite", "plan_reproduce"]

_FILL = (ablations, encoder_suite, hub_suites, tables)
