"""Every controller of every family with example parameters: what the contract suite runs over.

Adding a controller means adding a row here; `test_table_is_complete` says which one is missing.
"""

from __future__ import annotations

from entropic_control.controllers import (
    AttentionPruning,
    CalibratedEntropy,
    Controller,
    DynamicTemperature,
    EDTTemperature,
    EntropicPriority,
    EntropicPruning,
    EntropicSelection,
    ExactTemperature,
    FirstCome,
    FixedTemperature,
    FullEntropy,
    MinP,
    Mirostat,
    NgramSpeculation,
    NoPruning,
    NoSpeculation,
    NoTruncation,
    PITemperature,
    RandomPruning,
    RoundRobin,
    ShortestRemaining,
    SlewLimit,
    SlidingWindow,
    TopK,
    TopKEntropy,
    TopP,
    Typical,
)

TEMPERATURES: dict[str, Controller] = {
    "fixed": FixedTemperature(temperature=0.8),
    "pi": PITemperature(target=1.2),
    "pi unscheduled": PITemperature(target=2.0, schedule="none", filter=1.0, start=0.5),
    "exact": ExactTemperature(target=1.5, bounds=(0.2, 3.0)),
    "dynatemp": DynamicTemperature(temperature=0.9, range=0.4, exponent=1.5),
    "edt": EDTTemperature(temperature=1.1, theta=0.7),
    "mirostat": Mirostat(target=2.5, rate=0.2, temperature=0.9),
    "slew of pi": SlewLimit(inner=PITemperature(target=1.2, kp=0.5, ki=0.1), rate=0.05),
    "slew of exact": SlewLimit(inner=ExactTemperature(target=1.5), rate=0.02),
    "slew of mirostat": SlewLimit(inner=Mirostat(), rate=0.5),
    "slew of slew": SlewLimit(inner=SlewLimit(inner=PITemperature(), rate=0.03), rate=0.05),
}
PRIORITIES: dict[str, Controller] = {
    "first_come": FirstCome(),
    "round_robin": RoundRobin(),
    "shortest_remaining": ShortestRemaining(),
    "entropic": EntropicPriority(filter=0.2, patience=8),
}
PRUNINGS: dict[str, Controller] = {
    "none": NoPruning(),
    "sliding_window": SlidingWindow(budget=512, min_tokens=0),
    "random": RandomPruning(budget=0.25, seed=3),
    "entropic": EntropicPruning(budget=0.5, window=0.25, filter=0.2),
    "entropic ungated": EntropicPruning(budget=160, gate=None),
    "attention": AttentionPruning(budget=0.5, surprisal=0.5),
    "selection": EntropicSelection(budget=0.25, by="product"),
}
SPECULATIONS: dict[str, Controller] = {
    "none": NoSpeculation(),
    "ngram": NgramSpeculation(shortest=1, longest=4, draft=5, when="always"),
    "ngram by entropy": NgramSpeculation(entropy=2.5, filter=0.3, prior=0.7),
}
ESTIMATORS: dict[str, Controller] = {
    "full": FullEntropy(),
    "top_k": TopKEntropy(k=8),
    "top_k unnormalised": TopKEntropy(k=8, log_sum_exp=False, tail="lower"),
    "calibrated": CalibratedEntropy(inner=TopKEntropy(k=4), temperature=1.4),
}
TRUNCATIONS: dict[str, Controller] = {
    "none": NoTruncation(),
    "top_k": TopK(k=5),
    "top_p": TopP(p=0.8, place="after"),
    "min_p": MinP(p=0.1),
    "typical": Typical(p=0.9),
}
LOOPS = {
    f"{family} {name}": controller
    for family, members in (
        ("temperature", TEMPERATURES),
        ("priority", PRIORITIES),
        ("pruning", PRUNINGS),
        ("speculation", SPECULATIONS),
    )
    for name, controller in members.items()
}
"""The controllers with state."""

EVERYTHING = {
    **LOOPS,
    **{f"estimator {name}": controller for name, controller in ESTIMATORS.items()},
    **{f"truncation {name}": controller for name, controller in TRUNCATIONS.items()},
}
