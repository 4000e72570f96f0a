"""One of every claim: the table that the checks, the falsifiers and the mutations run over."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

from mutants import Smooth

from entropic_control.backends.vllm.own import GAINS
from entropic_control.controllers import (
    AttentionPruning,
    EntropicPriority,
    EntropicPruning,
    EntropicSelection,
    FixedTemperature,
    Mirostat,
    NoPruning,
    PITemperature,
    SlewLimit,
    SlidingWindow,
    TopKEntropy,
)
from entropic_control.controllers.calibration import CalibratedEntropy
from entropic_control.controllers.truncation import MinP, TopK, TopP
from entropic_control.proofs import Claim
from entropic_control.proofs.anylaw import any_law
from entropic_control.proofs.attention import dropped_mass
from entropic_control.proofs.bounded import bounded
from entropic_control.proofs.conformance import conformance
from entropic_control.proofs.convergence import convergence
from entropic_control.proofs.coupled import coupled
from entropic_control.proofs.cutting import cutting
from entropic_control.proofs.estimates import estimates
from entropic_control.proofs.exactgain import exact_gain
from entropic_control.proofs.fastgain import fast_gain
from entropic_control.proofs.indexorder import index_order
from entropic_control.proofs.linearloop import linear_loop
from entropic_control.proofs.measuredslope import measured_slope
from entropic_control.proofs.noise import noise_response
from entropic_control.proofs.requestgains import request_gains
from entropic_control.proofs.retention import retention
from entropic_control.proofs.scheduled import scheduled_gain
from entropic_control.proofs.throughput import work_conservation
from entropic_control.proofs.topk import top_k_bounds
from entropic_control.proofs.varentropy import largest
from entropic_control.proofs.waiting import Seating, bounded_waiting

PLAIN = PITemperature(schedule="none", kp=0.05, ki=0.01)
VOCAB = 49_152
_SMOOTH = Smooth(kind="smooth")

_MAKERS: dict[str, Callable[[], Claim]] = {
    "plant gain": partial(largest, VOCAB),
    "conformance": partial(conformance, PITemperature()),
    "conformance, wrapped": partial(conformance, SlewLimit(inner=PITemperature())),
    "conformance, mirostat": partial(conformance, Mirostat()),
    "measured slope": partial(measured_slope, MinP(), TopKEntropy(tail="exact")),
    "measured slope, after": partial(measured_slope, TopK(k=40, place="after"), None),
    "linear loop": partial(linear_loop, PITemperature(), (0.1, 30.0)),
    "linear loop, no schedule": partial(linear_loop, PLAIN, (0.1, 30.0)),
    "linear loop, delay 3": partial(linear_loop, PITemperature(kp=0.02, ki=0.005), (0.1, 30.0), 3),
    "time-varying gain": partial(fast_gain, _SMOOTH, 0.1, 8.0),
    "time-varying gain, fixed": partial(fast_gain, FixedTemperature(), 0.1, 30.0),
    "every gain": partial(scheduled_gain, PITemperature()),
    "every gain, unfiltered": partial(scheduled_gain, PITemperature(filter=1.0, kp=0.02, ki=0.01)),
    "exact arithmetic": partial(exact_gain, PITemperature(), VOCAB),
    "every law of gains": partial(any_law, PITemperature(), VOCAB),
    "per-request gains": partial(request_gains, PITemperature(), GAINS),
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
    "truncation": partial(cutting, TopP(p=0.9)),
    "truncation, top_k": partial(cutting, TopK(k=7)),
    "truncation, min_p": partial(cutting, MinP()),
    "estimate": partial(estimates, TopKEntropy()),
    "estimate, lower": partial(estimates, TopKEntropy(k=9, tail="lower", log_sum_exp=False)),
    "estimate, calibrated": partial(estimates, CalibratedEntropy(temperature=1.3)),
    "top-k bounds": partial(top_k_bounds, TopKEntropy()),
    "top-k bounds, one": partial(top_k_bounds, TopKEntropy(k=1), 100),
}

CLAIMS: dict[str, Callable[[], Claim]] = {name: cache(make) for name, make in _MAKERS.items()}
