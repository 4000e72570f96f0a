"""One of every claim: the table that the checks, the falsifiers and the mutations run over."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

from entropic_control.controllers import (
    AttentionPruning,
    EntropicPriority,
    EntropicPruning,
    EntropicSelection,
    FixedTemperature,
    NoPruning,
    PITemperature,
    SlidingWindow,
    TopKEntropy,
)
from entropic_control.proofs import Claim
from entropic_control.proofs.attention import dropped_mass
from entropic_control.proofs.bounded import bounded
from entropic_control.proofs.convergence import convergence
from entropic_control.proofs.coupled import coupled
from entropic_control.proofs.fastgain import fast_gain
from entropic_control.proofs.indexorder import index_order
from entropic_control.proofs.linearloop import linear_loop
from entropic_control.proofs.noise import noise_response
from entropic_control.proofs.retention import retention
from entropic_control.proofs.scheduled import scheduled_gain
from entropic_control.proofs.throughput import work_conservation
from entropic_control.proofs.topk import top_k_bounds
from entropic_control.proofs.varentropy import largest
from entropic_control.proofs.waiting import Seating, bounded_waiting

PLAIN = PITemperature(schedule="none", kp=0.05, ki=0.01)
VOCAB = 49_152

_MAKERS: dict[str, Callable[[], Claim]] = {
    "plant gain": partial(largest, VOCAB),
    "linear loop": partial(linear_loop, PITemperature(), (0.1, 30.0)),
    "linear loop, no schedule": partial(linear_loop, PLAIN, (0.1, 30.0)),
    "linear loop, delay 3": partial(linear_loop, PITemperature(), (0.1, 30.0), 3),
    "time-varying gain": partial(fast_gain, PLAIN, 0.1, 20.0),
    "time-varying gain, delay 2": partial(fast_gain, PLAIN, 0.1, 8.0, 2),
    "time-varying gain, fixed": partial(fast_gain, FixedTemperature(), 0.1, 30.0),
    "varentropy schedule": partial(scheduled_gain, PITemperature(), mismatch=(0.8, 1.25)),
    "varentropy schedule, delay 2": partial(scheduled_gain, PITemperature(), 2),
    "varentropy schedule, unfiltered": partial(scheduled_gain, PITemperature(filter=1.0)),
    "boundedness": partial(bounded, PITemperature(), VOCAB),
    "boundedness, no schedule": partial(bounded, PLAIN, VOCAB),
    "spread": partial(noise_response, PITemperature()),
    "mean entropy": partial(convergence, PITemperature(), VOCAB),
    "mean entropy, no schedule": partial(convergence, PLAIN, VOCAB),
    "coupled loops": partial(coupled, PITemperature()),
    "bounded waiting": partial(bounded_waiting, EntropicPriority()),
    "bounded waiting, no swap": partial(
        bounded_waiting, EntropicPriority(), 6, Seating(2, can_swap=False)
    ),
    "work conservation": partial(work_conservation, EntropicPriority()),
    "index order": partial(index_order, EntropicPriority()),
    "retention": partial(retention, EntropicPruning()),
    "retention, window": partial(retention, SlidingWindow(budget=512)),
    "retention, none": partial(retention, NoPruning()),
    "retention, gate that closes": partial(retention, EntropicPruning(budget=0.25, gate=0.5)),
    "retention, between chunks": partial(
        retention, EntropicPruning(budget=0.25, gate=None, during_prefill=True)
    ),
    "retention, following": partial(retention, EntropicPruning(follow=0.5)),
    "retention, selection": partial(retention, EntropicSelection()),
    "retention, attention": partial(retention, AttentionPruning(during_prefill=True)),
    "dropped mass": partial(dropped_mass, AttentionPruning()),
    "dropped mass, lean": partial(dropped_mass, AttentionPruning(budget=0.02)),
    "dropped mass, selection": partial(dropped_mass, EntropicSelection(by="attention", budget=0.3)),
    "top-k bounds": partial(top_k_bounds, TopKEntropy()),
    "top-k bounds, one": partial(top_k_bounds, TopKEntropy(k=1), 100),
}

CLAIMS: dict[str, Callable[[], Claim]] = {name: cache(make) for name, make in _MAKERS.items()}
